"""Text of a vendor reaches neither terminal nor CI log raw: all that the suite prints of a backend that shouts."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from tests.conformance.support.suite_runs import Ran, clean_environment
from tests.hostile.test_processes import VENDORS, run_hostile
from tests.support.warm_python import run_python

BACKEND = "shouts:Shouts"
ENDINGS = ("lower", "declines", "execution")
"""Places where a claim fails, apart from a crash."""


def find_raw(text: str) -> list[str]:
    """Return what would steer a terminal, and the lines that would be commands (as GitHub's runner finds them)."""
    controls = sorted({c for c in text if not c.isprintable() and c not in "\n\t"})
    lines = re.split(r"[\n\r\x0b\x0c\x85\u2028\u2029]", text)
    return [*map(repr, controls), *(line for line in lines if line.strip().startswith("::") or "##[" in line)]


def is_tame(ran: Ran) -> bool:
    assert "owned" in ran.out + ran.err, "it is said"
    assert find_raw(ran.out + ran.err) == []
    return True


def shout(folder: Path, place: str, *options: str) -> Ran:
    """Run the suite on what fails at this place, with a summary beside the report."""
    summary = folder / "summary.md"
    return run_hostile(folder, BACKEND, "--claim=*", *options, HOSTILE_PLACE=place, GITHUB_STEP_SUMMARY=str(summary))


@pytest.fixture(scope="module")
def shouted(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Ran]:
    """Runs in which all is shown, one for each place."""
    return cache(lambda place: shout(tmp_path_factory.mktemp(place), place, "-v", "--tb=short", "-rA"))


@pytest.mark.slow
@pytest.mark.parametrize("place", ENDINGS)
def test_a_run_prints_nothing_raw(shouted: Callable[[str], Ran], place: str) -> None:
    ran = shouted(place)
    assert ran.status == 1 and is_tame(ran) and find_raw((ran.folder.parent / "summary.md").read_text()) == []


@pytest.mark.slow
def test_a_run_with_workers_prints_nothing_raw(tmp_path: Path) -> None:
    ran = shout(tmp_path, "crash", "-n1")
    assert ran.status == 1 and is_tame(ran)


@pytest.mark.slow
@pytest.mark.parametrize("option", ["--collect-only", "--list-claims"])
def test_listing_prints_nothing_raw(tmp_path: Path, option: str) -> None:
    ran = run_hostile(tmp_path, BACKEND, "--claim=*", option)
    assert ran.status == 0 and is_tame(ran)


@pytest.mark.parametrize("place", ["import", "unavailable", "capabilities"])
def test_an_end_before_the_run_prints_nothing_raw(tmp_path: Path, place: str) -> None:
    ran = run_hostile(tmp_path, BACKEND, HOSTILE_PLACE=place)
    assert ran.status == (5 if place == "unavailable" else 4) and is_tame(ran)


@pytest.mark.slow
def test_commands_on_results_print_nothing_raw(tmp_path: Path, shouted: Callable[[str], Ran]) -> None:
    results, others = (shouted(place).folder / "results.jsonl" for place in ("lower", "declines"))
    page, file = str(tmp_path / "a.html"), str(results)
    for words in (
        ("reports", "render", file, "-o", page),
        ("reports", "markdown", file),
        ("reports", "diff", file, str(others)),
        ("reports", "compare", file, str(others), "-o", page),
        ("reports", "merge", file, str(others)),
        ("reports", "certify", file, "-o", str(tmp_path / "certificate")),
        ("conformance", "expect", file),
        ("conformance", "describe", file, "-o", str(tmp_path / "said.json")),
        ("conformance", "export", f"--backend={BACKEND}", "--claim=*", "--profile=quick", "-o", str(tmp_path / "b")),
        ("conformance", "run", str(tmp_path / "b" / "device"), str(tmp_path / "out"), f"--backend={BACKEND}"),
        ("conformance", "claims-of", "shouts:Shouts"),
    ):
        done = run_python("-m", *words, cwd=VENDORS, environment=clean_environment() | {"HOSTILE_PLACE": "lower"})
        assert find_raw(done.stdout + done.stderr) == [], words
