"""The skeleton of a vendor's package."""
