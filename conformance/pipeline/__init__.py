"""One claim through all stages."""
