"""Models of several patterns: verified end to end, then pattern by pattern."""
