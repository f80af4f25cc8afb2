"""The suite as an installed package."""
