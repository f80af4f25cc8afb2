"""The specification: its form, its examples, and that every rule has code and tests, and none is unknown.

``UPDATE_GOLDEN=1 pytest tests/test_spec.py`` writes the cross-reference at its end, and the reports' rules.json, anew.
"""

from __future__ import annotations

import ast
import doctest
import json
import os
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
SPEC = ROOT / "docs" / "spec.md"
TEXTS = ROOT / "reports" / "rules.json"
CODE = ("refimpl", "conformance", "backends")
ID = r"[A-Z]{3}-\d\d"
HEAD = re.compile(
    r"> (?P<text>.+)\n\n\*Source: (?P<source>doc|flow|ours) · \[code and tests\]\(#(?P<trace>[\w-]+)\)\*\n\n"
)
END = "## Cross-reference\n"
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
UPDATE = bool(os.environ.get("UPDATE_GOLDEN"))


@dataclass(frozen=True, slots=True)
class Rule:
    """A section of the specification; ``preamble`` is the code with which each example of its chapter begins."""

    name: str
    text: str
    preamble: str


def blocks(text: str) -> str:
    return "\n".join(re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL))


@cache
def rules() -> dict[str, Rule]:
    """Read the sections, in their order."""
    found: dict[str, Rule] = {}
    for chapter in re.split(r"^(?=## )", SPEC.read_text(encoding="utf-8").partition(END)[0], flags=re.MULTILINE)[1:]:
        start, *sections = re.split(r"^### ", chapter, flags=re.MULTILINE)
        for section in sections:
            name, _, text = section.partition("\n\n")
            assert name not in found, f"{name} has two sections"
            found[name] = Rule(name, text, blocks(start))
    return found


def summaries() -> dict[str, str]:
    return {name: head["text"] for name, rule in rules().items() if (head := HEAD.match(rule.text))}


NAMES = sorted(set(re.findall(rf"^### ({ID})$", SPEC.read_text(encoding="utf-8"), re.MULTILINE)))
each_rule = pytest.mark.parametrize("name", NAMES)


# -- the sections -----------------------------------------------------------------------------------------------------


def test_there_is_a_section_for_each_rule_in_its_chapter() -> None:
    assert sorted(rules()) == NAMES and len(NAMES) >= 94
    for chapter in {name[:3] for name in NAMES}:
        numbers = [int(name[4:]) for name in rules() if name.startswith(chapter)]
        assert numbers == list(range(1, len(numbers) + 1)), f"{chapter}: a gap, or out of order: {numbers}"


@each_rule
def test_a_section_has_wording_rationale_and_an_example_that_shows_something(name: str) -> None:
    text = rules()[name].text
    head = HEAD.match(text)
    assert head and head["trace"] == f"trace-{name.lower()}", f"{name} begins otherwise than the others"
    wording, _, why = text[head.end() :].partition("**Why.** ")
    assert len(wording.split()) >= 15, f"{name} says too little"
    assert len(why.partition("```")[0].split()) >= 8, f"{name} gives no reason"
    examples = doctest.DocTestParser().get_examples(blocks(text))
    assert any(example.want or example.exc_msg for example in examples), f"{name}: its example shows nothing"


@pytest.mark.slow
@each_rule
def test_examples_print_what_the_text_says(name: str) -> None:
    rule = rules()[name]
    source = f"{rule.preamble}\n{blocks(rule.text)}"
    engine, state = torch.backends.quantized.engine, torch.get_rng_state()
    told: list[str] = []
    torch.manual_seed(0)  # what an example draws shall not depend on the tests before it
    try:
        test = doctest.DocTestParser().get_doctest(source, {}, name, str(SPEC), 0)
        results = doctest.DocTestRunner(optionflags=FLAGS).run(test, out=told.append)
    finally:
        torch.backends.quantized.engine = engine
        torch.set_rng_state(state)
    assert results.attempted and not results.failed, "".join(told)


@each_rule
def test_rules_that_a_section_names_are_links_to_what_there_is(name: str) -> None:
    prose = re.sub(r"^```.*?^```", "", rules()[name].text, flags=re.MULTILINE | re.DOTALL)
    for rule, target in re.findall(rf"\[({ID})\]\(#([\w-]+)\)", prose):
        assert rule in NAMES and target == rule.lower()
    bare = re.findall(rf"(?<![\[\w-])({ID})(?![\]\w-])", prose)
    assert not bare, f"{name} names {bare} without a link"


# -- code and tests ---------------------------------------------------------------------------------------------------


def python_files(*folders: str) -> Iterator[Path]:
    for folder in folders:
        yield from sorted((ROOT / folder).rglob("*.py"))


@cache
def named_in_code() -> dict[str, list[str]]:
    """Rule to the places that name it: where there are some, the lines of code that decide, else docstrings."""
    decides, says = defaultdict[str, list[str]](list), defaultdict[str, list[str]](list)
    for path in python_files(*CODE):
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
            place = f"{path.relative_to(ROOT).as_posix()}#L{number}"
            for rule in re.findall(rf"\b{ID}\b", line):
                (decides if "# rule: " in line else says)[rule].append(place)
    return {rule: decides.get(rule) or says[rule] for rule in {*decides, *says}}


@cache
def named_in_tests() -> dict[str, list[str]]:
    """Rule to the tests marked with it, by pytest.mark.rule("…") or by a helper that takes IDs, as file::test."""
    found: dict[str, list[str]] = defaultdict(list)
    for path in python_files("tests"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for outer in tree.body:
            within = f"::{outer.name}" if isinstance(outer, ast.FunctionDef) and outer.name.startswith("test_") else ""
            place = f"{path.relative_to(ROOT).as_posix()}{within}"
            for node in ast.walk(outer):
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "rule":
                    for given in node.args:
                        if isinstance(given, ast.Constant) and place not in found[str(given.value)]:
                            found[str(given.value)].append(place)
    return found


@pytest.mark.slow
def test_no_code_names_an_unknown_rule() -> None:
    unknown = {rule: places for rule, places in named_in_code().items() if rule not in NAMES}
    assert not unknown, f"not in docs/spec.md: {unknown}"


@pytest.mark.slow
def test_no_test_names_an_unknown_rule() -> None:
    unknown = {rule: places for rule, places in named_in_tests().items() if rule not in NAMES}
    assert not unknown, f"not in docs/spec.md: {unknown}"


@each_rule
def test_a_rule_is_named_by_code_and_by_a_test(name: str) -> None:
    assert named_in_code().get(name), f"not named in {', '.join(CODE)}"
    assert named_in_tests().get(name), "no test is marked with it"


def cross_reference() -> str:
    """Write the table: a rule, the lines that decide, the tests that are marked with it."""
    rows = [
        f'| <a id="trace-{name.lower()}"></a>[{name}](#{name.lower()}) | {_code(name)} | {_tests(name)} |'
        for name in rules()
    ]
    return "\n".join(["| rule | code | tests |", "|---|---|---|", *rows, ""])


def _code(name: str) -> str:
    return "<br>".join(f"[{place.replace('#L', ':')}](../{place})" for place in named_in_code().get(name, []))


def _tests(name: str) -> str:
    by_file: dict[str, list[str]] = defaultdict(list)
    for place in named_in_tests().get(name, []):
        file, _, test = place.partition("::")
        by_file[file] += [test] * bool(test)
    texts = [
        f"[{Path(file).name}](../{file})" + ": " * bool(tests) + ", ".join(tests) for file, tests in by_file.items()
    ]
    return "<br>".join(texts)


def test_the_cross_reference_is_that_of_the_code() -> None:
    text = SPEC.read_text(encoding="utf-8")
    head, end, tail = text.partition(END)
    assert end, f"docs/spec.md has no section {END!r}"
    intro, mark, found = tail.partition("| rule |")
    made = cross_reference()
    if UPDATE:
        SPEC.write_text(f"{head}{end}{intro}{made}", encoding="utf-8")
        return
    assert mark + found == made, "UPDATE_GOLDEN=1 pytest tests/test_spec.py writes it anew"


def test_reports_have_the_wording_of_each_rule() -> None:
    if UPDATE:
        TEXTS.write_text(json.dumps(summaries(), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    assert json.loads(TEXTS.read_text(encoding="utf-8")) == summaries()
