"""Resemblance: which rounding a claim's differences look like, by their signs. Told, never judged. (NUM-03)"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fx_quant_conformance.backends.base import Requantize, RoundingMode
from fx_quant_conformance.conformance.oracle.exact import Exact
from fx_quant_conformance.conformance.oracle.requantizing import TIE, bound_first_rounding

FEWEST = 4
"""Results between two integers from which signs say something; by chance all of them agree once in 8 times."""
_ALLOWED = {RoundingMode.DOWN: "1 below, 0 above, + ", RoundingMode.TOWARDS_ZERO: "1 towards zero, 0 away, + "}
_ASK = "declare Capabilities.requantize if the machine does that"
_FACTOR = "factor"
_TEXTS = {
    "nearest": "results are up to {} LSB off: looks like rounding to the nearest, a tie to either side; "
    "Capabilities.requantize says otherwise",
    "floor": f"results lie up to {{}} LSB below the exact one: looks like truncation (floor); {_ASK}",
    "truncation": "results lie up to {} LSB nearer to zero than the exact one: looks like truncation towards zero; "
    f"{_ASK}",
    "up": "results lie up to {} LSB above the exact one: looks like rounding up (ceil)",
    "away": "results lie up to {} LSB further from zero than the exact one: looks like rounding away from zero",
    "twice": f"results are up to {{}} LSB off: looks like rounding twice, before a shift and by it; {_ASK}",
    _FACTOR: "results are up to {} LSB off: looks like a factor that is off by 2^-{}, as a multiplier of so many bits; "
    f"{_ASK}",
}
"""What each kind of rounding is called; the first that fits is told."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resemblance:
    """The kinds of rounding that one output's differences may come from."""

    fits: frozenset[str]
    """The names of these kinds."""
    between: int
    """How many results are between two integers."""
    wrong: int
    """How many results are not right."""
    farthest: float
    """The largest distance, in steps."""
    share: float
    """By what part of the result its distance is beyond a right rounding, at most."""


def format_allowed(exact: Exact) -> str:
    """Say by how much a right integer may differ from the exact result, beside the slack."""
    return _ALLOWED.get(exact.requantize.rounding, "0.5 + ") if exact.has_named_rounding else "0.5 + "


def format_resemblance(resemblances: Sequence[Resemblance]) -> str:
    """Say what all outputs look like that are not right; "" if nothing fits them all, or they are too few."""
    if sum(each.between for each in resemblances) < FEWEST:
        return ""
    farthest, share = (max(getattr(each, name) for each in resemblances) for name in ("farthest", "share"))
    for name, text in _TEXTS.items():
        is_single = name == _FACTOR and sum(each.wrong for each in resemblances) < 2
        if not is_single and all(name in each.fits for each in resemblances):
            return text.format(f"{farthest:.3g}", math.floor(-math.log2(share)) if share > 0 else 0)
    return ""


def find_resemblance(exact: Exact, actual: Tensor) -> Resemblance:
    """Find the kinds of rounding that fit integers which are within a step of the exact results, and not right.

    ``actual``: the backend's integers, float64. Ends of the grid, where results are clamped, say nothing.
    """
    assert exact.grid is not None
    grid, v = exact.grid, exact.integers
    inside = (v > grid.low) & (v < grid.high)
    delta, r = (actual - v)[inside], (v - grid.zero_point)[inside]
    slack, first = exact.slack.expand_as(v)[inside], _bound_twice(exact)[inside]
    beyond = delta.abs() - 0.5 - slack
    fits = frozenset(name for name, holds in _list_kinds(exact, delta, r, slack, first) if holds)
    return Resemblance(
        fits=fits,
        between=int(((v - v.round()).abs()[inside] > slack + TIE).sum()),
        wrong=int((beyond > 0).sum()),
        farthest=float(delta.abs().max()) if delta.numel() else 0.0,
        share=float((beyond / r.abs().clamp(min=1)).max()) if delta.numel() else 0.0,
    )


def _list_kinds(exact: Exact, delta: Tensor, r: Tensor, slack: Tensor, first: Tensor) -> Iterator[tuple[str, bool]]:
    """Yield each kind of rounding, with whether differences (q − v, of results r) may come from it."""
    inwards, beyond = delta * r.sign(), delta.abs() - 0.5 - slack
    yield "nearest", exact.has_named_rounding and bool((beyond <= 0).all())
    yield "floor", bool((delta <= slack).all())
    yield "truncation", bool((inwards <= slack).all())
    yield "up", bool((delta >= -slack).all())
    yield "away", bool((inwards >= -slack).all())
    yield "twice", bool((beyond <= first).all())
    signs = inwards[beyond > 0].sign()
    is_one_way = bool((signs == 1).all()) or bool((signs == -1).all())
    yield _FACTOR, is_one_way and bool((beyond <= 2.0**-6 * r.abs()).all())


def _bound_twice(exact: Exact) -> Tensor:
    """Return the bound on a rounding before a shift, whether one is declared or not; 0 where it is not known."""
    assert exact.grid is not None
    if exact.accumulator is None or exact.accumulator.step is None:
        return torch.zeros_like(exact.real)
    machine = Requantize(multiplier_bits=exact.requantize.multiplier_bits or 31, rounds_twice=True)
    return bound_first_rounding(machine, exact.accumulator, exact.grid.scale).expand_as(exact.real)
