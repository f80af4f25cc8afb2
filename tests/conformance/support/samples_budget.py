"""How many variants an op may have: what a claim of it costs in the profile full, some 20 ms each."""

MOST_VARIANTS = 80
MOST_IN_PATTERNS = 26
"""Of an op with a weight within larger patterns, of which there are some thirty for each convolution."""
