"""The same for exported programs."""
