"""Attribution: what kind of difference there is between a backend's integers and the correctly rounded ones (NUM-06).

An integer differs where it is not the exact result rounded half to even. Each one that differs is of one kind: the
first in this order whose condition holds.

* ``outside the range``: below the grid's lowest or above its highest integer.
* ``exact tie``: the exact result lies halfway between two integers, and the other one was taken. (NUM-06)
* one kind per part of the slack (``CAUSES``): beyond 1/2 by no more than this part and those before it. (NUM-04)
* ``saturated one step early``: the exact result is at an end of the range, the integer found is next to that end.
* ``off by one, not explained``: within one step and the slack.
* ``saturated``: further off, and at an end of the range.
* ``wrong``: further off, anywhere else.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from conformance.oracle.grids import Grid

CAUSES: Mapping[str, str] = {
    "final": "rescale in float32",
    "rescale": "rescale of the operands in float32",
    "bias": "bias rounded to int32",
    "accumulation": "accumulation in float32",
    "function": "function evaluated in float32",
    "oracle": "the oracle's own float64",
}
"""What the parts of the slack are called, the ones that every backend has first; others go by their own names."""

TIE = 2.0**-30
"""How near to halfway, in steps, counts as halfway. Scales that make ties are powers of two, or in such a ratio, and
the exact result is then exact in float64 too; elsewhere its own error, 2^-53 of each term, is far below this."""


def attribute(expected: Tensor, found: Tensor, grid: Grid, slack_by_cause: Mapping[str, Tensor]) -> dict[str, int]:
    """Count the integers of each kind among those that differ; kinds that do not occur are left out.

    ``expected``: the exact result v, float64, in output steps from integer 0 (zero point included), clamped or not.
    ``found``: the backend's integers. ``slack_by_cause``: the slack by cause, in steps; shapes broadcast to v's.
    """
    kinds = _kinds(expected.clamp(grid.low, grid.high), found, grid, slack_by_cause)
    left = _differs(expected.clamp(grid.low, grid.high), found)
    counts: dict[str, int] = {}
    for kind, holds in kinds:
        if number := int((left & holds).sum()):
            counts[kind] = number
        left = left & ~holds
    return counts


def worst(expected: Tensor, found: Tensor, grid: Grid, slack_by_cause: Mapping[str, Tensor]) -> str:
    """Describe the integer that is furthest beyond its bound, the first of equals; nothing differs: ``""``."""
    exact = expected.clamp(grid.low, grid.high)
    differs = _differs(exact, found)
    if not bool(differs.any()):
        return ""
    distance, allowed = (found - exact).abs(), 0.5 + _total(exact, slack_by_cause)
    excess = torch.where(differs, distance - allowed, -torch.inf)
    flat = int(excess.argmax())
    kind = next(kind for kind, holds in _kinds(exact, found, grid, slack_by_cause) if bool(holds.flatten()[flat]))
    index = unravelled(flat, exact.shape)
    numbers = (float(values.flatten()[flat]) for values in (found, exact, distance, allowed))
    return "{}: at {} found {:.10g}, exact {:.10g}: distance {:.7g}, allowed {:.7g}".format(kind, index, *numbers)


def _differs(exact: Tensor, found: Tensor) -> Tensor:
    return found != exact.round()


def _kinds(
    exact: Tensor, found: Tensor, grid: Grid, slack_by_cause: Mapping[str, Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """Yield every kind with the elements that meet its condition, in the order in which they are tried."""
    distance = (found - exact).abs()
    yield "outside the range", (found < grid.low) | (found > grid.high)
    is_halfway = (exact - exact.floor() - 0.5).abs() <= TIE
    yield "exact tie", is_halfway & (distance <= 0.5 + TIE)  # rule: NUM-06
    explained = torch.zeros_like(exact)
    for cause, slack in _in_order(slack_by_cause):
        explained = explained + slack
        yield CAUSES.get(cause, cause), distance - 0.5 <= explained
    early_high, early_low = (
        (exact >= grid.high) & (found == grid.high - 1),
        (exact <= grid.low) & (found == grid.low + 1),
    )
    yield "saturated one step early", early_high | early_low
    yield "off by one, not explained", distance <= 1 + explained
    yield "saturated", (found == grid.low) | (found == grid.high)
    yield "wrong", torch.ones_like(found, dtype=torch.bool)


def _in_order(slack_by_cause: Mapping[str, Tensor]) -> list[tuple[str, Tensor]]:
    """The parts in the order of CAUSES, then the others as they come."""
    order = list(CAUSES)
    return sorted(slack_by_cause.items(), key=lambda item: order.index(item[0]) if item[0] in CAUSES else len(order))


def _total(exact: Tensor, slack_by_cause: Mapping[str, Tensor]) -> Tensor:
    return sum(slack_by_cause.values(), torch.zeros_like(exact))


def unravelled(flat: int, shape: Sequence[int]) -> list[int]:
    """Return the index of an element by its number; ``torch.unravel_index`` would load sympy in every process."""
    index = []
    for extent in reversed(shape):
        flat, along = divmod(flat, extent)
        index.append(along)
    return index[::-1]
