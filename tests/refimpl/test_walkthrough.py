"""docs/walkthrough.md: its examples print what it says, and it names what there is."""

from __future__ import annotations

import doctest
import re
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "walkthrough.md"
TEXT = PAGE.read_text(encoding="utf-8")


@pytest.mark.slow
def test_its_examples_print_what_it_says() -> None:
    source = "\n".join(re.findall(r"^```pycon\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL))
    told: list[str] = []
    torch.manual_seed(0)
    test = doctest.DocTestParser().get_doctest(source, {}, "walkthrough", str(PAGE), 0)
    results = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE).run(test, out=told.append)
    assert results.attempted > 30 and not results.failed, "".join(told)


def test_its_modules_are_there_and_all_rooms_are_named() -> None:
    named = set(re.findall(r"`(\w+/\w*(?:\.py)?)`", TEXT))
    assert {name for name in named if not (ROOT / "refimpl" / name).exists()} == set()
    rooms = {f"{path.parent.name}/" for path in (ROOT / "refimpl").glob("*/__init__.py")}
    assert rooms <= named
