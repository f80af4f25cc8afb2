"""The waivers that ship: each names a finding, and together they cover what the engines are expected to fail."""

from __future__ import annotations

import re
from datetime import date
from pathlib import Path

import pytest

from backends.discovery import find_backend
from conformance.machine.isa import LEVELS
from conformance.run.expected import FOLDER, read_expected
from conformance.run.findings import describe_missing, read_findings
from conformance.run.waivers import Waivers, load_waivers
from reports.verdicts import PASSING, Verdict

ENGINES = (
    "qnnpack", "fbgemm", "x86", "onednn", "onnxruntime", "onnx-reference", "openvino", "inductor", "executorch",
    "pt2e-x86", "pt2e-xnnpack",
)  # fmt: skip
FINDINGS = (Path(__file__).parents[2] / "docs" / "findings.md").read_text(encoding="utf-8")
UNWRITTEN = "docs/findings.md, 69"
"""What reads memory that nobody wrote fails in some cases now, and in others the next time."""
LAST_LOOKED_AT = date(2026, 11, 22)


def shipped(engine: str, level: str, torch: str = "2.13.0") -> Waivers:
    path = find_backend(engine).waivers
    assert path is not None
    return Waivers(load_waivers(path, level, torch), LAST_LOOKED_AT)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("engine", ENGINES)
def test_every_waiver_names_a_finding(engine: str, level: str) -> None:
    waivers = shipped(engine, level).entries
    assert waivers
    for waiver in waivers:
        named = re.match(r"docs/findings\.md, (\d+)(?: and (\d+))?: ", waiver.reason)
        assert named and f"\n## {named[1]}. " in FINDINGS, waiver
        numbers = [*filter(None, named.groups()), *re.findall(r"; (\d+): ", waiver.reason)]
        assert waiver.findings == tuple(f"../docs/findings.md#{number}" for number in numbers)
    texts = read_findings(waivers)
    assert all(f"\n## {text}\n" in f"{FINDINGS}\n" for text in texts.values()), "whole sections"
    assert describe_missing(waivers, texts) == ""


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.json")), ids=lambda path: path.stem)
def test_what_is_expected_to_fail_is_waived_and_nothing_else(path: Path) -> None:
    expected = read_expected(path)
    waivers, verdicts = shipped(expected.backend, expected.isa, expected.torch), expected.verdicts
    for name, verdict in verdicts.items():
        ruling = waivers.judge(name, verdict, None)
        needs_one = verdict not in (Verdict.VERIFIED, Verdict.UNSHOWN)  # UNSHOWN passes by an option, or not at all
        assert ruling.waived == needs_one, f"{name}: {verdict}; {ruling.problem or 'no waiver'}"
    models = {waiver for waiver in waivers.entries if (waiver.claim or waiver.glob).startswith("model/")}
    for waiver, names in waivers.find_covered(verdicts).items():
        assert names or waiver in models, f"{waiver} is about no claim"


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.json")), ids=lambda path: path.stem)
def test_how_often_it_fails_is_known_of_most_of_what_is_refuted(path: Path) -> None:
    """Not of what crashes, or fails by chance."""
    expected = read_expected(path)
    waivers = shipped(expected.backend, expected.isa, expected.torch)
    named = {name for waiver, names in waivers.find_covered(expected.verdicts).items() for name in names
             if UNWRITTEN in waiver.reason}  # fmt: skip
    refuted = {name for name, verdict in expected.verdicts.items() if verdict is Verdict.REFUTED} - named
    assert len(refuted & expected.failing.keys()) > 0.8 * len(refuted)
    assert all(count > 0 and expected.verdicts[name] not in PASSING for name, count in expected.failing.items())
