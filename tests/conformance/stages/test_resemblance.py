"""Roundings that are declared, and what others look like (rule NUM-03)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from fx_quant_conformance.backends.base import Requantize, RoundingMode
from fx_quant_conformance.conformance.bounds.error_bounds import Accumulator
from fx_quant_conformance.conformance.oracle.exact import Exact
from fx_quant_conformance.reports.verdicts import Verdict
from tests.conformance.stages.test_numerics import exact, judged, of, verdict


def floored(*integers: float) -> Exact:
    """The exact result of a machine that declares that it rounds down."""
    down = Requantize(rounding=RoundingMode.DOWN)
    return replace(exact(*integers), accumulator=Accumulator(step=None), requantize=down)


SPREAD = [40.1, 60.3, 45.6, 77.7, 52.9, 90.2, 33.4, 61.8, 20.45, 5.65]
"""Exact results between the integers, above the zero point 11 and one below."""


@pytest.mark.rule("NUM-03")
@pytest.mark.parametrize(
    ("machine", "looks_like"),
    [
        (
            torch.floor,
            "results lie up to 0.9 LSB below the exact one: looks like truncation (floor); declare "
            "Capabilities.requantize if the machine does that",
        ),
        (lambda v: (v - 11).trunc() + 11, "nearer to zero than the exact one: looks like truncation towards zero"),
        (torch.ceil, "above the exact one: looks like rounding up (ceil)"),
        (lambda v: (v * 1.005).round(), "looks like a factor that is off by 2^-"),
    ],
    ids=("floor", "truncation", "ceil", "factor"),
)
def test_what_is_not_declared_is_refuted_and_told_by_its_signs(machine: Any, looks_like: str) -> None:
    v = exact(*SPREAD)
    check = judged(of(v, *machine(v.integers).tolist()))
    assert check.verdict is Verdict.REFUTED and looks_like in check.message
    few = exact(*SPREAD[:3])
    compared_few = of(few, *machine(few.integers).tolist())
    assert "looks like" not in judged(compared_few).message, "signs of a few say nothing"
    assert looks_like in judged(of(v, *machine(v.integers).tolist()), compared_few).message, "all of a claim count"


@pytest.mark.rule("NUM-03")
def test_what_is_far_off_or_explained_by_no_rounding_looks_like_nothing() -> None:
    v = exact(*SPREAD)
    far, odd = v.integers.floor(), v.integers.round()
    far[0] -= 30
    odd[0] += 1  # 41 for 40.1, and all others as they should be
    for integers in (far, odd):
        assert "looks like" not in judged(of(v, *integers.tolist())).message
    down, up = (of(v, *each.tolist()) for each in (v.integers.floor(), v.integers.ceil()))
    assert "looks like" not in judged(down, up).message, "not the same of all"


@pytest.mark.rule("NUM-03")
def test_a_floor_that_is_declared_is_verified_and_the_nearest_is_not() -> None:
    v = floored(*SPREAD)
    assert verdict(of(v, *v.integers.floor().tolist())) is Verdict.VERIFIED
    check = judged(of(v, *v.integers.round().tolist()))
    assert check.verdict is Verdict.REFUTED
    assert "allowed 1 below, 0 above, + " in check.message
    assert "looks like rounding to the nearest, a tie to either side; Capabilities.requantize says" in check.message
    assert str(check.evidence["attribution"]).endswith("off by one, not explained")
    wrong = v.integers.floor()
    wrong[3] -= 2
    evidence: Any = judged(of(v, *wrong.tolist())).evidence
    assert evidence["index"][0] == [3] and evidence["attribution"] == "4 rounded as declared, 1 wrong"
    assert evidence["worst"].startswith("wrong: at [3] found 75, exact 77.2: distance 2.2, allowed 0.5")
