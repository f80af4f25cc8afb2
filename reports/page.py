"""Pages: templates, and what holds for every page made of them.

A page forbids itself any request and any script but its own. Each text in it is escaped, has a largest length, and has
no character that steers how it is shown: a finalizer sees to it for every expression of every template.
"""

from __future__ import annotations

import base64
import functools
import hashlib
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from reports.coverage import rule_texts
from reports.evidence import details, in_order, outputs, qparams, spelled, table
from reports.text import commit, cut, duration, lsb, tame

LONGEST = 4000
"""Characters of a text; a script, which is to be run, may be LONGEST_SCRIPT long."""
LONGEST_SCRIPT = 40_000
ID_WIDTH = 400


def render_page(template: str, **values: object) -> str:
    """A template with these values; the same values give the same page."""
    return _environment().get_template(template).render(values)


def anchor(claim_id: str) -> str:
    """The fragment under which a claim or model is found in every report."""
    return "c-" + hashlib.sha256(claim_id.encode(errors="surrogatepass")).hexdigest()[:12]


@functools.cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("reports"), autoescape=True, undefined=StrictUndefined, finalize=_tamed,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    environment.filters |= {
        "lsb": lsb,
        "duration": duration,
        "value": spelled,
        "anchor": anchor,
        "cut": cut,
        "commit": commit,
    }
    environment.filters |= {"id": _id, "script": _script}
    environment.filters |= {
        "outputs": outputs,
        "qparams": qparams,
        "details": details,
        "table": table,
        "in_order": in_order,
    }
    style, script = (environment.get_template(f"page.{kind}.j2").render() for kind in ("css", "js"))
    environment.globals |= {
        "page_style": Markup(style), "page_script": Markup(script), "rule_texts": rule_texts(),
        "policy": f"default-src 'none'; img-src data:; style-src {_csp_hash(style)}; script-src {_csp_hash(script)}",
    }  # fmt: skip
    return environment


def _tamed(value: Any) -> Any:
    """What an expression of a template gives to the page."""
    return cut(tame(value), LONGEST) if isinstance(value, str) and not isinstance(value, Markup) else value


def _id(name: str) -> str:
    return cut(name, ID_WIDTH)


def _script(text: str) -> Markup:
    """A script whole, as far as a page can have it."""
    return Markup(escape(cut(tame(text), LONGEST_SCRIPT)))


def _csp_hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
