"""Graphs drawn from claimed patterns, shrunk where they fail."""
