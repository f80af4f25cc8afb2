"""Attribution: of what kind a difference between a backend's integer and the correctly rounded one is (NUM-06).

An integer differs where it is not the exact result rounded half to even. It is of the first kind in this order whose
condition holds:

* ``outside the range``: below the grid's lowest or above its highest integer.
* ``rounded as declared``: where ``Capabilities.requantize`` names a rounding, what it gives.
* ``exact tie``: the exact result lies halfway between two integers, and the other one was taken. (NUM-06)
* one kind per part of the slack (``CAUSES``): beyond 1/2 by no more than this part and the earlier ones. (NUM-04)
* ``saturated one step early``: the exact result is at an end of the range, the integer found is next to that end.
* ``off by one, not explained``: within one step and the slack.
* ``saturated``: further off, and at the end of the range that is nearer to the exact result.
* ``wrapped around``: further off, and at the other end, as where a sum of 16 bits overflows.
* ``wrong``: further off, anywhere else.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from fx_quant_conformance.conformance.oracle.grids import Grid
from fx_quant_conformance.conformance.oracle.requantizing import TIE, Target

CAUSES: Mapping[str, str] = {
    "final": "rescale in float32",
    "first rounding": "rounding before the shift",
    "rescale": "rescale of the operands in float32",
    "bias": "bias rounded to int32",
    "accumulation": "accumulation in float32",
    "function": "function evaluated in float32",
    "oracle": "the oracle's own float64",
}
"""Names of the parts of the slack, the ones that every backend has first; others keep their own names."""


def attribute(
    expected: Tensor, actual: Tensor, grid: Grid, slack_by_cause: Mapping[str, Tensor], target: Target | None = None
) -> dict[str, int]:
    """Count the integers of each kind among those that differ; kinds that do not occur are left out.

    ``expected``: the exact result v, float64, in output steps from integer 0 (zero point included), clamped or not.
    ``actual``: the backend's integers. ``slack_by_cause``: the slack by cause, in steps; shapes broadcast to v's.
    ``target``: the integers that the declared rounding gives; None: the nearest ones.
    """
    exact = expected.clamp(grid.low, grid.high)
    remaining, counts = _find_differing(exact, actual, target), dict[str, int]()
    for kind, holds in _list_kinds(exact, actual, grid, slack_by_cause, target):
        if number := int((remaining & holds).sum()):
            counts[kind] = number
        remaining = remaining & ~holds
    return counts


def format_worst(
    expected: Tensor, actual: Tensor, grid: Grid, slack_by_cause: Mapping[str, Tensor], target: Target | None = None
) -> str:
    """Describe the integer that is furthest beyond its bound, the first of equals; "" if nothing differs."""
    exact = expected.clamp(grid.low, grid.high)
    differs = _find_differing(exact, actual, target)
    if not bool(differs.any()):
        return ""
    right = target or Target(centre=exact, half=0.5)
    slack = sum(slack_by_cause.values(), torch.zeros_like(exact))
    flat = int(torch.where(differs, right.measure_excess(actual, slack), -torch.inf).argmax())
    kinds = _list_kinds(exact, actual, grid, slack_by_cause, target)
    kind = next(kind for kind, holds in kinds if bool(holds.flatten()[flat]))
    index = unravel_index(flat, exact.shape)
    distance, allowed = (actual - right.centre).abs(), right.half + slack
    numbers = (float(values.flatten()[flat]) for values in (actual, right.centre, distance, allowed))
    return "{}: at {} found {:.10g}, exact {:.10g}: distance {:.7g}, allowed {:.7g}".format(kind, index, *numbers)


def _find_differing(exact: Tensor, actual: Tensor, target: Target | None) -> Tensor:
    """Find the integers that are not the nearest, or not what the declared rounding gives."""
    differs = actual != exact.round()
    return differs if target is None else differs | (target.measure_excess(actual, torch.zeros_like(exact)) > 0)


def _list_kinds(
    exact: Tensor, actual: Tensor, grid: Grid, slack_by_cause: Mapping[str, Tensor], target: Target | None
) -> Iterator[tuple[str, Tensor]]:
    """Yield every kind with the elements that meet its condition, in the order in which they are tried."""
    distance = (actual - exact).abs()
    beyond = distance - 0.5 if target is None else target.measure_excess(actual, torch.zeros_like(exact))
    yield "outside the range", (actual < grid.low) | (actual > grid.high)
    if target is not None:
        yield "rounded as declared", beyond <= 0
    is_halfway = (exact - exact.floor() - 0.5).abs() <= TIE
    yield "exact tie", is_halfway & (distance <= 0.5 + TIE)  # rule: NUM-06
    explained = torch.zeros_like(exact)
    for cause, slack in _sort_causes(slack_by_cause):
        explained = explained + slack
        yield CAUSES.get(cause, cause), beyond <= explained
    is_early_high = (exact >= grid.high) & (actual == grid.high - 1)
    yield "saturated one step early", is_early_high | ((exact <= grid.low) & (actual == grid.low + 1))
    yield "off by one, not explained", distance <= 1 + explained
    is_above = exact > (grid.low + grid.high) / 2
    yield "saturated", torch.where(is_above, actual == grid.high, actual == grid.low)
    yield "wrapped around", (actual == grid.low) | (actual == grid.high)
    yield "wrong", torch.ones_like(actual, dtype=torch.bool)


def _sort_causes(slack_by_cause: Mapping[str, Tensor]) -> list[tuple[str, Tensor]]:
    """Return the parts in the order of CAUSES, then the others as they come."""
    order = list(CAUSES)
    return sorted(slack_by_cause.items(), key=lambda item: order.index(item[0]) if item[0] in CAUSES else len(order))


def unravel_index(flat: int, shape: Sequence[int]) -> list[int]:
    """Return the index of an element by its number; ``torch.unravel_index`` would load sympy in every process."""
    index = []
    for extent in reversed(shape):
        flat, along = divmod(flat, extent)
        index.append(along)
    return index[::-1]
