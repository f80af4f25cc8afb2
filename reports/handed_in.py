"""Outputs that a run did not see computed: by files, or by a command."""

from fx_quant_conformance.reports.schema import Header

BUNDLE = "vector bundle"
"""Name of the digest of the bundle that a device has run."""
HANDED_IN = "outputs handed in"
"""Name of the number and the digest of the files that it has handed in."""
VECTORS, COMMAND = "vectors:", "command:"
"""How ``--backend`` begins where a device hands in files."""


def format_remedy(header: Header) -> str:
    """Say what a vendor does so that a run knows what ran on integers."""
    if str(header.options.get("backend", "")).startswith((VECTORS, COMMAND)):
        return "let the device hand in execution.json for each case, which says what ran (docs/vectors.md)"
    return "implement the backend's execution(), which says what a lowered model runs (docs/vendor-guide.md, section 3)"
