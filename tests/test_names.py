"""What names may be: no class is defined twice, and nothing that the project composed is parsed back."""

from __future__ import annotations

import ast
import fnmatch
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import list_exhaustive

ROOT = Path(__file__).parents[1]
PACKAGES = ("refimpl", "conformance", "backends", "reports", "fx_quant_conformance")

PARSES = {
    "backends/executorch.py": "the runtime's profile, whose JSON has no infinity",
    "backends/inductor.py": "the code that the compiler writes",
    "conformance/machine/environment.py": "the flags of /proc/cpuinfo",
    "conformance/machine/messages.py": "addresses in what torch prints, which differ from run to run",
    "conformance/reproducers/script.py": "a backend's message, which is to be a docstring",
    "conformance/reproducers/standalone.py": "Python code that is written for a reader",
    "conformance/run/options.py": "a user's option, and a user's name as the name of a folder",
    "conformance/stages/float_ops.py": "what a backend reports of an op in float",
    "conformance/run/findings.py": "the headings of a vendor's Markdown",
    "conformance/vectors/outputs.py": "names of a device's files",
    "refimpl/exported/pt2e_changes.py": "the stack traces that torch.export notes",
    "refimpl/config/qconfig.py": "a user's regular expressions",
    "reports/causes.py": "the numbers in any message: what faults of one cause have in common is the text around them",
    "reports/findings.py": "the paragraphs of a vendor's Markdown",
    "reports/page.py": "the separators of an ID, which may be a vendor's",
    "reports/schema.py": "any name as the name of a file",
    "reports/text.py": "what a CI would take for its own commands in a vendor's text",
}
"""Modules that use regular expressions, and on what."""


TORCHS_NAMES = [f"refimpl/legacy/{name}.py" for name in ("fused", "qat", "qat_dynamic", "fused_qat", "reference")]
"""Modules whose classes have the names of torch's, in whose place they come: a name stands for several there too."""


def modules() -> Iterator[tuple[str, ast.Module]]:
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            yield path.relative_to(ROOT).as_posix(), ast.parse(path.read_text(encoding="utf-8"))


@pytest.mark.slow
def test_no_class_name_is_defined_twice() -> None:
    places = defaultdict(list)
    for path, tree in modules():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and path not in TORCHS_NAMES:
                places[node.name].append(path)
    assert len(places) > 250
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


@pytest.mark.slow
def test_regular_expressions_read_what_others_wrote() -> None:
    users = [
        path
        for path, tree in modules()
        for node in ast.walk(tree)
        if (isinstance(node, ast.Import) and any(name.name == "re" for name in node.names))
        or (isinstance(node, ast.ImportFrom) and node.module == "re")
    ]
    assert sorted(users) == sorted(PARSES)


def test_exhaustive_tests_and_the_cheaper_ones_exist() -> None:
    """The globs match functions that there are, and so do the tests that are named as failing for the same fault."""
    names = {
        f"{path.relative_to(ROOT / 'tests').as_posix()}::{node.name}"
        for path in (ROOT / "tests").rglob("test_*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }
    pairs = list_exhaustive()
    globs = [glob.partition("[")[0] for glob, _ in pairs]
    assert len(pairs) > 20 and [glob for glob in globs if not fnmatch.filter(names, glob)] == []
    cheaper = {word for _, text in pairs for word in re.findall(r"\btest_\w+(?!\w*\.py)\*?", text)}
    short = {name.partition("::")[2] for name in names} | {Path(name.partition("::")[0]).stem for name in names}
    assert len(cheaper) > 5 and [name for name in cheaper if not fnmatch.filter(short, name)] == []
    assert all(text for _, text in pairs)
