"""Traceability: every rule has code that names it and a test; nothing names an unknown rule."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RULES = ROOT / "docs" / "rules.md"
CODE = ("refimpl", "conformance", "backends")
ID = r"[A-Z]{3}-\d\d"
STATUSES = {"built", "partly", "not yet"}
SOURCES = {"doc", "flow", "ours"}


@cache
def rules() -> dict[str, tuple[str, str, str]]:
    """Read the table: ID to (wording, source, status)."""
    found: dict[str, tuple[str, str, str]] = {}
    for line in RULES.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if re.fullmatch(ID, cells[0]):
            assert len(cells) == 4, f"a row has an ID, a wording, a source and a status: {line}"
            assert cells[0] not in found, f"{cells[0]} has two rows"
            found[cells[0]] = (cells[1], cells[2], cells[3])
    return found


def python_files(*folders: str) -> Iterator[Path]:
    for folder in folders:
        yield from sorted((ROOT / folder).rglob("*.py"))


@cache
def named_in_code() -> dict[str, set[str]]:
    """Which files name a rule, in a comment at the line that decides or in a docstring."""
    found: dict[str, set[str]] = defaultdict(set)
    for path in python_files(*CODE):
        for rule in re.findall(rf"\b{ID}\b", path.read_text(encoding="utf-8")):
            found[rule].add(str(path.relative_to(ROOT)))
    return found


@cache
def named_in_tests() -> dict[str, set[str]]:
    """Which files have a test marked with a rule, as pytest.mark.rule("…") or by a helper that takes IDs."""
    found: dict[str, set[str]] = defaultdict(set)
    for path in python_files("tests"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "rule":
                for argument in node.args:
                    if isinstance(argument, ast.Constant):
                        found[str(argument.value)].add(str(path.relative_to(ROOT)))
    return found


def test_the_table_is_well_formed() -> None:
    assert len(rules()) >= 80
    for rule, (wording, source, status) in rules().items():
        assert wording, f"{rule} has no wording"
        assert source in SOURCES, f"{rule}: source {source!r}, expected one of {SOURCES}"
        assert status in STATUSES, f"{rule}: status {status!r}, expected one of {STATUSES}"


def test_no_code_names_an_unknown_rule() -> None:
    unknown = {rule: files for rule, files in named_in_code().items() if rule not in rules()}
    assert not unknown, f"not in docs/rules.md: {unknown}"


def test_no_test_names_an_unknown_rule() -> None:
    unknown = {rule: files for rule, files in named_in_tests().items() if rule not in rules()}
    assert not unknown, f"not in docs/rules.md: {unknown}"


def test_every_rule_is_named_by_code_and_by_a_test() -> None:
    without_code = [rule for rule in rules() if not named_in_code().get(rule)]
    without_test = [rule for rule in rules() if not named_in_tests().get(rule)]
    assert not without_code, f"not named in {', '.join(CODE)}: {without_code}"
    assert not without_test, f"no test is marked with it: {without_test}"
