"""The first pass: what a pattern fuses becomes one module."""
