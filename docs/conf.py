"""Sphinx's settings for the documentation site: python -m sphinx -W --keep-going -b html docs build/site"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.addnodes import pending_xref
from sphinx.transforms.post_transforms import SphinxPostTransform

DOCS = Path(__file__).parent
sys.path.insert(0, str(DOCS.parent))

from fx_quant_conformance.reports.compare import render_board  # noqa: E402  # of this checkout
from fx_quant_conformance.reports.results import read_results  # noqa: E402

project = "FX Quantization Conformance Suite"
extensions = ["sphinx.ext.autodoc", "myst_parser"]
myst_enable_extensions = ["deflist"]
myst_heading_anchors = 4
exclude_patterns = ["findings/*", "results/*"]
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
    # internal: the text next to each says what to do with it
    (
        r"py:class",
        r"fx_quant_conformance\.(refimpl\.(prepare\.plan\.Plan|observers\.observers\.Constructor)|reports\.codec\.Message)",
    ),
]


def readable(_app: object, _what: str, _name: str, _found: object, _options: object, *texts: str | None) -> Any:
    """Write defaults that are no Python, such as ``<class 'torch.nn.Identity'>``, so that the types are links."""
    return tuple(t and re.sub(r"<class '(?:\w+\.)*(\w+)'>", r"\1", t).replace("<factory>", "...") for t in texts)


PAGES = {"README": "index", "CONTRIBUTING": "contributing", "CHANGELOG": "changelog"}
"""Documents at the root of the checkout, and the pages that include them."""


class Links(SphinxPostTransform):
    """Lead links of Markdown documents to the pages and anchors that only this site has."""

    default_priority = 8  # before myst's own resolver

    def run(self, **_: Any) -> None:
        """Resolve the links of one page that lead to the root, to folders, and to anchors in HTML."""
        for link in list(self.document.findall(pending_xref)):
            target = str(link["reftarget"])
            if link["reftype"] != "myst":
                continue
            if (name := Path(target).name.removesuffix(".md")) in PAGES:
                link.attributes.update(refdomain="doc", reftarget=PAGES[name], reftargetid=link.get("reftargetid"))
            elif target.startswith("trace-"):  # rows of the specification's cross-reference
                link.replace_self(nodes.reference("", link.astext(), internal=True, refuri=f"#{target}"))
            elif any((folder / target).exists() for folder in (DOCS, DOCS.parent)):  # a folder, a script
                link.replace_self(link.children)


def write_scoreboard(app: Any, error: Exception | None) -> None:
    """Write the scoreboard of the committed results into the site."""
    if error is None:
        runs = [read_results(path) for path in sorted((DOCS / "results").glob("*.xz"))]
        (Path(app.outdir) / "scoreboard.html").write_text(render_board(runs), encoding="utf-8")


def setup(app: Any) -> None:
    """Connect what changes signatures and links, and what is made of results."""
    app.connect("autodoc-process-signature", readable)
    app.connect("build-finished", write_scoreboard)
    app.add_post_transform(Links)
