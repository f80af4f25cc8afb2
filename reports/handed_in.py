"""Outputs that a run did not see computed: their names among the versions of its header."""

BUNDLE = "vector bundle"
"""Name of the digest of the bundle that a device has run."""
HANDED_IN = "outputs handed in"
"""Name of the number and the digest of the files that it has handed in."""
