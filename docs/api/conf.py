"""Sphinx's settings for the API reference: python -m sphinx -W --keep-going -b html docs/api build/api"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

project = "FX Quantization Conformance Suite"
extensions = ["sphinx.ext.autodoc"]
html_theme = "alabaster"
html_theme_options = {"page_width": "1100px", "sidebar_width": "240px"}
html_copy_source = False
html_show_sphinx = False

default_role = "literal"  # an argument stands in single backticks
autodoc_default_options = {
    "members": True,
    "member-order": "bysource",
    "exclude-members": "extra_repr, resized",  # for torch, and for loading states
}
autodoc_inherit_docstrings = False  # torch's docstrings are torch's
autodoc_typehints_format = "short"
maximum_signature_line_length = 140
python_display_short_literal_types = True

nitpicky = True  # a reference to an object of ours that is not in the reference is a mistake
nitpick_ignore_regex = [
    (r"py:.*", r"(torch|nn|collections|pathlib|enum|os|typing|abc)\..*"),  # they have references of their own
    (r"py:class", r"refimpl\.(plan\.Plan|observers\.Constructor)"),  # internal; what to do with one is said beside it
]


def readable(_app: object, _what: str, _name: str, _found: object, _options: object, *texts: str | None) -> Any:
    """Write defaults that are no Python, such as ``<class 'torch.nn.Identity'>``, so that the types are links."""
    return tuple(t and re.sub(r"<class '(?:\w+\.)*(\w+)'>", r"\1", t).replace("<factory>", "...") for t in texts)


def setup(app: Any) -> None:
    """Connect what changes signatures."""
    app.connect("autodoc-process-signature", readable)
