"""Text of a vendor reaches neither terminal nor CI log raw: all that the suite prints of a backend that shouts."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.conformance.support.suite_runs import Ran, clean_environment
from tests.hostile.test_processes import VENDORS, run_hostile
from tests.support.warm_python import run_python

BACKEND = "shouts:Shouts"
ENDINGS = ("lower", "declines", "crash", "execution")
"""Places where a claim fails."""


def find_raw(text: str) -> list[str]:
    """Return what would steer a terminal, and the lines that would be commands (as GitHub's runner finds them)."""
    controls = sorted({c for c in text if not c.isprintable() and c not in "\n\t"})
    lines = re.split(r"[\n\r\x0b\x0c\x85\u2028\u2029]", text)
    return [*map(repr, controls), *(line for line in lines if line.strip().startswith("::") or "##[" in line)]


def is_tame(ran: Ran) -> bool:
    assert "owned" in ran.out + ran.err, "it is said"
    assert find_raw(ran.out + ran.err) == []
    return True


@pytest.mark.slow
@pytest.mark.parametrize("place", ENDINGS)
@pytest.mark.parametrize("options", [("-v", "--tb=short", "-rA"), ("-n1",)])
def test_a_run_prints_nothing_raw(tmp_path: Path, place: str, options: tuple[str, ...]) -> None:
    summary = tmp_path / "summary.md"
    ran = run_hostile(tmp_path, BACKEND, "--claim=*", *options, HOSTILE_PLACE=place, GITHUB_STEP_SUMMARY=str(summary))
    assert ran.status == 1 and is_tame(ran) and find_raw(summary.read_text()) == []


@pytest.mark.slow
@pytest.mark.parametrize("options", [("--collect-only",), ("--collect-only", "-q"), ("--list-claims",)])
def test_listing_prints_nothing_raw(tmp_path: Path, options: tuple[str, ...]) -> None:
    ran = run_hostile(tmp_path, BACKEND, "--claim=*", *options)
    assert ran.status == 0 and is_tame(ran)


@pytest.mark.parametrize("place", ["import", "constructor", "unavailable", "capabilities", "waivers"])
def test_an_end_before_the_run_prints_nothing_raw(tmp_path: Path, place: str) -> None:
    ran = run_hostile(tmp_path, BACKEND, HOSTILE_PLACE=place)
    assert ran.status == (5 if place == "unavailable" else 4) and is_tame(ran)


@pytest.mark.slow
def test_commands_on_results_print_nothing_raw(tmp_path: Path) -> None:
    results, others = (
        run_hostile(tmp_path / place, BACKEND, "--claim=*", HOSTILE_PLACE=place).folder / "results.jsonl"
        for place in ("lower", "declines")
    )
    page, file = str(tmp_path / "a.html"), str(results)
    for words in (
        ("reports", "render", file, "-o", page), ("reports", "markdown", file), ("reports", "diff", file, str(others)),
        ("reports", "compare", file, str(others), "-o", page), ("reports", "merge", file, str(others)),
        ("reports", "certify", file, "-o", str(tmp_path / "certificate")), ("conformance", "expect", file),
        ("conformance", "describe", file, "-o", str(tmp_path / "said.json")),
        ("conformance", "export", f"--backend={BACKEND}", "--claim=*", "--profile=quick", "-o", str(tmp_path / "b")),
        ("conformance", "run", str(tmp_path / "b" / "device"), str(tmp_path / "out"), f"--backend={BACKEND}"),
        ("conformance", "claims-of", "shouts:Shouts"),
    ):  # fmt: skip
        done = run_python("-m", *words, cwd=VENDORS, environment=clean_environment() | {"HOSTILE_PLACE": "lower"})
        assert find_raw(done.stdout + done.stderr) == [], words
