"""Pages from templates, and what holds for every page.

A page forbids itself any request and any script except its own. A finalizer handles every expression of every
template: each text is escaped, has a largest length, and has no character that steers how it is shown.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import re
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from fx_quant_conformance.reports.coverage import read_rule_texts
from fx_quant_conformance.reports.decision import (
    count_verified,
    format_decision,
    format_waived,
    format_work,
    passes_by_leave,
)
from fx_quant_conformance.reports.evidence import (
    format_decided,
    format_value,
    make_table,
    order_graphs,
    select_details,
    tabulate_outputs,
    tabulate_qparams,
)
from fx_quant_conformance.reports.plots import SHAPES
from fx_quant_conformance.reports.text import (
    cut,
    format_count,
    format_db,
    format_duration,
    format_lsb,
    shorten_commit,
    tame,
)
from fx_quant_conformance.reports.verdicts import VERDICT_TEXTS

LONGEST = 4000
"""Largest number of characters of a text; a script, which is to be run, may have LONGEST_SCRIPT."""
LONGEST_SCRIPT = 40_000
ID_WIDTH = 400
TERMS = {
    "pairs": "a pattern with one of its dtype configs; claims of several flows and weight schemes share it",
    "level": "the instruction sets that the kernels ran at",
    "scheme": "how the weight is quantized: per tensor or per channel, symmetric or affine; no_weight without one",
}
"""Terms that a page explains where they stand; docs/glossary.md has all."""


def render_page(template: str, **values: object) -> str:
    """Render a template with these values; the same values give the same page."""
    return _make_environment().get_template(template).render(values)


def anchor(claim_id: str) -> str:
    """Return the URL fragment of a claim or model, the same in every report."""
    return "c-" + hashlib.sha256(claim_id.encode(errors="surrogatepass")).hexdigest()[:12]


@functools.cache
def _make_environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("fx_quant_conformance.reports"),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_tame_value,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "lsb": format_lsb,
        "db": format_db,
        "duration": format_duration,
        "number": format_count,
        "value": format_value,
        "anchor": anchor,
        "cut": cut,
        "breaks": _break_id,
        "commit": shorten_commit,
        "waived": format_waived,
        "decision": format_decision,
        "work": format_work,
        "passes_by_leave": passes_by_leave,
        "share": count_verified,
    }
    environment.filters |= {"id": functools.partial(cut, width=ID_WIDTH), "script": _escape_script}
    environment.filters |= {
        "outputs": tabulate_outputs,
        "qparams": tabulate_qparams,
        "details": select_details,
        "decided": format_decided,
        "table": make_table,
        "in_order": order_graphs,
    }
    style, script = (environment.get_template(f"page.{kind}.j2").render() for kind in ("css", "js"))
    environment.globals |= {
        "page_style": Markup(style),
        "page_script": Markup(script),
        "rule_texts": read_rule_texts(),
        "verdict_texts": VERDICT_TEXTS,
        "terms": TERMS,
        "shapes": SHAPES,
        "policy": f"default-src 'none'; img-src data:; style-src {_hash_csp(style)}; script-src {_hash_csp(script)}",
    }
    return environment


def _tame_value(value: Any) -> Any:
    """Return the value of a template's expression as the page shows it."""
    return cut(tame(value), LONGEST) if isinstance(value, str) and not isinstance(value, Markup) else value


def _escape_script(text: str) -> Markup:
    """Return a script, cut only at LONGEST_SCRIPT."""
    return Markup(escape(cut(tame(text), LONGEST_SCRIPT)))


def _break_id(text: str) -> Markup:
    """Return an ID that a line may end in behind each separator; what is copied is the ID as it was."""
    pieces = re.split(r"(?<=[/.,_+:])", cut(tame(text), ID_WIDTH))
    return Markup("<wbr>").join(filter(None, pieces))


def _hash_csp(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
