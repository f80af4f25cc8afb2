"""Python as text: how plain values are spelled, what a text has to import, and how it is laid out, by black."""

from __future__ import annotations

import ast
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

from fx_quant_conformance.refimpl.legacy.dtypes import QUANTIZED_DTYPES, is_dtype

WIDTH = 120
MODULES = {
    **{name: name for name in ("base64", "builtins", "faulthandler", "operator", "pickle", "torch")},
    **{name: name for name in ("json", "os", "pathlib", "shutil", "subprocess", "tempfile")},
    "F": "torch.nn.functional",
}
"""The modules that texts use, by the names that they give them."""
HOMES = {
    "nn": "torch",
    **dict.fromkeys(("nni", "nniqat", "nnqat", "nnqr", *QUANTIZED_DTYPES), "fx_quant_conformance.refimpl"),
}
"""The modules that texts take names from, by the name."""


def spell(value: Any, spell_other: Callable[[Any], str]) -> str:
    """Spell plain data and dtypes; ``spell_other`` spells what is none, in any place of it."""

    def inner(several: Any) -> str:
        return ", ".join(spell(each, spell_other) for each in several)

    if isinstance(value, (tuple, list)):
        return f"[{inner(value)}]" if isinstance(value, list) else f"({inner(value)}{',' * (len(value) == 1)})"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{inner([key])}: {inner([each])}' for key, each in value.items())}}}"
    if isinstance(value, slice):
        return f"slice({inner((value.start, value.stop, value.step))})"
    if isinstance(value, float) and value in (float("inf"), float("-inf")):
        return f'float("{value}")'
    if is_dtype(value):
        name = str(value).removeprefix("torch.")
        return name if name in QUANTIZED_DTYPES else f"torch.{name}"
    return repr(value) if value is None or isinstance(value, (bool, int, float, str)) else spell_other(value)


def compose(heading: str, body: str, homes: Mapping[str, str], *, registrar: str = "", width: int = WIDTH) -> str:
    """Return a module's text: a docstring, imports of what the body names, and the body, in lines of a width.

    ``homes``: the module of each name that the body may take from one, beside those of `HOMES`. ``registrar``: a module
    that is imported for what it registers.
    """
    from black import format_str  # here, as it takes a while, and most runs write nothing
    from black.mode import Mode, TargetVersion

    taken, lines = defaultdict[str, list[str]](list), [f"import {registrar}  # registers the ops"] * bool(registrar)
    for name in sorted({node.id for node in ast.walk(ast.parse(body)) if isinstance(node, ast.Name)}):
        if name in MODULES:
            lines.append(f"import {MODULES[name]}" + f" as {name}" * (name != MODULES[name]))
        elif home := {**HOMES, **homes}.get(name):
            taken[home].append(name)
    lines += (f"from {home} import {', '.join(names)}" for home, names in taken.items())
    lines.sort(key=lambda line: (line.startswith("from"), line.split()[1]))
    of_python = [line for line in lines if line.split()[1] in sys.stdlib_module_names]
    others = [line for line in lines if line not in of_python]
    text = "\n".join([f'"""{heading}"""', "", *of_python, "", *others, "", body])
    return format_str(text, mode=Mode({TargetVersion.PY310}, line_length=width))
