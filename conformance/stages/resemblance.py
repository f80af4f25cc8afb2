"""Resemblance: which rounding an output's differences look like, by their signs and sizes. Told, never judged. (NUM-03)"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from backends.base import Requantize, RoundingMode
from conformance.oracle.evaluate import Exact
from conformance.oracle.requantizing import TIE, bound_first_rounding

FEWEST = 8
"""Results between two integers from which signs say something: by chance all of them agree once in 128 times."""
_ALLOWED = {RoundingMode.DOWN: "1 below, 0 above, + ", RoundingMode.TOWARDS_ZERO: "1 towards zero, 0 away, + "}
_ASK = "declare Capabilities.requantize if the machine does that"


def spell_allowed(exact: Exact) -> str:
    """Say by how much a right integer may differ from the exact result, beside the slack."""
    return _ALLOWED.get(exact.requantize.rounding, "0.5 + ") if exact.has_named_rounding else "0.5 + "


def describe_rounding(exact: Exact, actual: Tensor) -> str:
    """Say what integers look like that are within a step of the exact results, and not right; "" if nothing fits.

    ``actual``: the backend's integers, float64. Ends of the grid, where results are clamped, say nothing.
    """
    differences = _read_differences(exact, actual)
    if exact.is_function or int(differences.is_between.sum()) < FEWEST:
        return ""
    worst = f"{float(differences.delta.abs().max()):.3g}"
    for text, holds in _list_resemblances(exact, differences):
        if holds:
            return text.format(worst)
    return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Differences:
    """Differences from exact results that are not at an end of the grid, in steps, all of one shape.

    ``delta``: q − v. ``r``: v − z. ``slack``: of each. ``is_between``: v is between two integers. ``first``: the bound
    on a rounding before a shift, if there is one.
    """

    delta: Tensor
    r: Tensor
    slack: Tensor
    is_between: Tensor
    first: Tensor


def _read_differences(exact: Exact, actual: Tensor) -> _Differences:
    assert exact.grid is not None
    grid, v = exact.grid, exact.integers
    inside = (v > grid.low) & (v < grid.high)
    twice = torch.zeros_like(v)
    bits = exact.requantize.multiplier_bits or 31
    if exact.accumulator is not None and exact.accumulator.step is not None:
        machine = Requantize(multiplier_bits=bits, rounds_twice=True)
        twice = bound_first_rounding(machine, exact.accumulator, grid.scale).expand_as(v)
    slack = exact.slack.expand_as(v)
    return _Differences(
        delta=(actual - v)[inside], r=(v - grid.zero_point)[inside], slack=slack[inside], first=twice[inside],
        is_between=((v - v.round()).abs() > slack + TIE)[inside],
    )  # fmt: skip


def _list_resemblances(exact: Exact, found: _Differences) -> Iterator[tuple[str, bool]]:
    """Yield each text, with whether it fits; the first that fits is told. A place for the largest distance is in it."""
    delta, inwards, slack = found.delta, found.delta * found.r.sign(), found.slack
    declared = exact.requantize.rounding
    if exact.has_named_rounding:
        beyond = delta.abs() - 0.5 - slack
        text = f"rounding to the nearest, a tie to either side; Capabilities.requantize says {declared.value}"
        yield f"results are up to {{}} LSB off: looks like {text}", bool((beyond <= 0).all())
    below, above = bool((delta <= slack).all()), bool((delta >= -slack).all())
    yield f"results lie up to {{}} LSB below the exact one: looks like truncation (floor); {_ASK}", below
    towards = "results lie up to {} LSB nearer to zero than the exact one: looks like truncation towards zero"
    yield f"{towards}; {_ASK}", bool((inwards <= slack).all())
    yield "results lie up to {} LSB above the exact one: looks like rounding up (ceil)", above
    yield "results lie up to {} LSB further from zero: looks like rounding away from zero", bool(
        (inwards >= -slack).all()
    )
    is_twice = bool((delta.abs() <= 0.5 + slack + found.first).all())
    yield f"results are up to {{}} LSB off: looks like rounding twice, before a shift and by it; {_ASK}", is_twice
    beyond = delta.abs() - 0.5 - slack
    signs = inwards[beyond > 0].sign()
    share = float((beyond / found.r.abs().clamp(min=1)).max())
    if len(signs) > 1 and bool((signs == signs[0]).all()) and share < 2.0**-6:
        bits = math.floor(-math.log2(share))
        text = f"a factor that is off by 2^-{bits}, as a multiplier of {bits} bits"
        yield f"results are up to {{}} LSB off: looks like {text}; {_ASK}", True
