"""Backends: the contract with a vendor, how a backend is found, and those that ship (one file each)."""
