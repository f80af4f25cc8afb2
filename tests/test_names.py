"""What names may be: no class is defined twice, and nothing that the project composed is parsed back."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = ("refimpl", "conformance", "backends", "reports", "fx_quant_conformance")

PARSES = {
    "backends/executorch.py": "the runtime's profile, whose JSON has no infinity",
    "backends/inductor.py": "the code that the compiler writes",
    "conformance/machine/environment.py": "the flags of /proc/cpuinfo",
    "conformance/machine/messages.py": "addresses in what torch prints, which differ from run to run",
    "conformance/reproducers/script.py": "Python code that is written for a reader",
    "conformance/run/options.py": "a user's option, and a user's name as the name of a folder",
    "conformance/stages/float_ops.py": "what a backend reports of an op in float",
    "conformance/run/findings.py": "the headings of a vendor's Markdown",
    "conformance/vectors/outputs.py": "names of a device's files",
    "refimpl/pt2e_changes.py": "the stack traces that torch.export notes",
    "refimpl/qconfig.py": "a user's regular expressions",
    "reports/causes.py": "the numbers in any message: what faults of one cause have in common is the text around them",
    "reports/findings.py": "the paragraphs of a vendor's Markdown",
    "reports/page.py": "the separators of an ID, which may be a vendor's",
    "reports/schema.py": "any name as the name of a file",
    "reports/text.py": "what a CI would take for its own commands in a vendor's text",
}
"""Modules that use regular expressions, and on what."""


def modules() -> Iterator[tuple[str, ast.Module]]:
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            yield path.relative_to(ROOT).as_posix(), ast.parse(path.read_text(encoding="utf-8"))


def test_no_class_name_is_defined_twice() -> None:
    places = defaultdict(list)
    for path, tree in modules():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(path)
    assert len(places) > 250
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


def test_regular_expressions_read_what_others_wrote() -> None:
    users = [
        path
        for path, tree in modules()
        for node in ast.walk(tree)
        if (isinstance(node, ast.Import) and any(name.name == "re" for name in node.names))
        or (isinstance(node, ast.ImportFrom) and node.module == "re")
    ]
    assert sorted(users) == sorted(PARSES)
