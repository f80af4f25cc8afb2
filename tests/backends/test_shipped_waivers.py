"""The waivers that ship: each names a finding, and together they cover what the engines are expected to fail."""

from __future__ import annotations

from datetime import date
from functools import cache
from pathlib import Path

import pytest

from fx_quant_conformance.backends.discovery import find_backend
from fx_quant_conformance.conformance.claims.claim import config_digest, enumerate_claims
from fx_quant_conformance.conformance.machine.isa import LEVELS
from fx_quant_conformance.conformance.run.findings import format_missing, read_findings
from fx_quant_conformance.conformance.run.judging import find_baselines
from fx_quant_conformance.conformance.run.waivers import Waivers, load_waivers
from fx_quant_conformance.reports.baseline import Baseline, Deviation, read_baseline_file
from fx_quant_conformance.reports.verdicts import Verdict

ENGINES = (
    "qnnpack",
    "fbgemm",
    "x86",
    "onednn",
    "onnxruntime",
    "onnx-reference",
    "openvino",
    "inductor",
    "executorch",
    "litert",
    "ncnn",
    "pt2e-x86",
    "pt2e-xnnpack",
)
FINDINGS = (Path(__file__).parents[2] / "docs" / "findings.md").read_text(encoding="utf-8")
UNWRITTEN = "docs/findings.md#69"
"""What reads memory that nobody wrote fails in some cases now, and in others the next time."""
PATHS = sorted(path for folder in {*map(find_baselines, ENGINES)} for path in folder.glob("*.txt"))
LAST_LOOKED_AT = date(2026, 11, 22)


def shipped(engine: str, level: str, torch: str = "2.13.0") -> Waivers:
    path = find_backend(engine).waivers
    assert path is not None
    return Waivers(load_waivers(path, level, torch), LAST_LOOKED_AT)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("engine", ENGINES)
def test_every_waiver_names_a_finding(engine: str, level: str) -> None:
    waivers = shipped(engine, level).entries
    assert waivers and all(waiver.findings for waiver in waivers)
    texts = read_findings(waivers)
    assert all(f"\n## {text}\n" in f"{FINDINGS}\n" for text in texts.values()), "whole sections"
    assert format_missing(waivers, texts) == ""


@cache
def claims_of_backend(name: str) -> list[str]:
    backend = find_backend(name)
    return [claim.id for claim in enumerate_claims(backend.backend_config(), backend.capabilities())]


def claims_of(baseline: Baseline) -> list[str]:
    claims = claims_of_backend(baseline.basis.backend)
    assert len(claims) == baseline.basis.claims and baseline.deviations.keys() <= set(claims)
    return claims


@pytest.mark.slow
@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_what_is_known_to_fail_is_waived_and_nothing_else(path: Path) -> None:
    baseline = read_baseline_file(path)
    waivers = shipped(baseline.basis.backend, baseline.basis.isa, baseline.basis.torch)
    for name in (names := claims_of(baseline)):
        verdict, rule, _ = baseline.deviations.get(name, Deviation(Verdict.VERIFIED))
        assert rule is not None or "torch-2.12" in path.name, f"{name}: the rule is known"
        ruling = waivers.judge(name, verdict, {rule} if rule else set(), None)
        needs_one = verdict not in (Verdict.VERIFIED, Verdict.UNSHOWN)  # UNSHOWN passes by an option, or not at all
        is_of_cases = ruling.entry is not None and ruling.entry.where  # which cases fail, no baseline says
        assert bool(ruling.waived or is_of_cases) == needs_one, f"{name}: {verdict}; {ruling.problem or 'no waiver'}"
    models = {waiver for waiver in waivers.entries if (waiver.claim or waiver.glob).startswith("model/")}
    for waiver, covered in waivers.find_covered(names).items():
        assert covered or waiver in models, f"{waiver} is about no claim"
        assert baseline.deviations.keys() >= set(covered), f"{waiver} covers what is verified"


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_how_often_it_fails_is_known_of_most_of_what_is_refuted(path: Path) -> None:
    """Not of what crashes, or fails by chance."""
    baseline = read_baseline_file(path)
    waivers = shipped(baseline.basis.backend, baseline.basis.isa, baseline.basis.torch)
    named = {
        name
        for waiver, names in waivers.find_covered(baseline.deviations).items()
        for name in names
        if any(finding.endswith(UNWRITTEN) for finding in waiver.findings)
    }
    failing = {
        name: known.failing
        for name, known in baseline.deviations.items()
        if known.verdict is Verdict.REFUTED and name not in named
    }
    assert sum(count is not None for count in failing.values()) > 0.8 * len(failing)
    assert all(count is None or count > 0 for count in failing.values())


@pytest.mark.parametrize("engine", ENGINES)
def test_its_config_is_the_one_that_its_baselines_are_of(engine: str) -> None:
    """Wherever the suite's own fuser methods lie: their place is no setting."""
    backend = find_backend(engine)
    digest = config_digest(enumerate_claims(backend.backend_config(), backend.capabilities()))
    found = {read_baseline_file(path).basis.config_sha256 for path in PATHS if path.name.startswith(f"{engine}.")}
    assert found == {digest} or (engine == "qnnpack" and digest in found), (
        "a baseline of torch 2.12 is of its own claims"
    )
