"""Backends: the vendor contract, how a backend is found, and the shipped backends."""
