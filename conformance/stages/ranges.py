"""Ranges: whether the reference model's grids hold the values seen in calibration. (CVT-01)

The oracle takes the reference model as right. A grid in the wrong place, or with qparams that nobody measured, is in
the reference model and in the backend's: comparing these two shows nothing, but comparing with the float model does.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.fx import GraphModule

from fx_quant_conformance.conformance.claims.inputs import Batch
from fx_quant_conformance.conformance.machine.fault import Fault
from fx_quant_conformance.conformance.machine.guard import guard
from fx_quant_conformance.conformance.stages.fixed_grids import find_fixed_grids, grid_fixed_for, slot_of, slots_in
from fx_quant_conformance.refimpl import MinMaxObserver, RefimplError
from fx_quant_conformance.refimpl.observers.qparams import is_quantized_dtype, read_qparams
from fx_quant_conformance.refimpl.prepare.plan import Slot
from fx_quant_conformance.refimpl.quality.walk import LayerEdge, OutputGrid, QualityWalk, Reading, copy_tensors, flatten

Seen: TypeAlias = dict[LayerEdge, tuple[float, float, OutputGrid]]
"""The smallest and the largest value of each observed layer, and its output's grid."""

Slots: TypeAlias = Sequence[tuple[str, Slot]]
"""The slots of activations, each with the prefix of names in its standalone module."""
Group: TypeAlias = tuple[str, int]
"""That prefix, and the number of a group of slots."""

ROUNDING = 2.0**-18
"""Relative float32 error of a range: a few roundings of 2⁻²⁴, and sums of some tens of terms."""


@guard("convert.check_ranges")
def check_ranges(reference: GraphModule, batches: Sequence[Batch]) -> Iterator[Fault]:
    """Check that each grid of a reference model holds the float model's calibration values, and is no wider. (CVT-01)

    For observers of the smallest and the largest value, after calibration on just these batches. Of n + 1 integers in
    steps of s, for values of -a to b:

    - The range holds them, up to s/2: an affine zero point is rounded to an integer, which shifts the range by s/2 at
      most; a symmetric range of 2 max(a, b) = n s ends, if n is odd, s/2 above its largest integer.
    - s <= 2 max(a, b) / n: symmetric ranges are as wide, affine ones, -a to b with 0 in it, no wider; or s is the
      smallest scale that the observer may give. Values that share an observer count together.

    Float32 rounding comes on top (`ROUNDING`). A grid that a claim fixes need not hold what calibration saw: it is
    given (`check_fixed_grids`), and clipping to it is right.

    Of any other observer, such as a vendor's own, a new one of its kind that sees the same values says what is right.
    """
    seen: Seen = {}
    slots = slots_in(reference)
    again = _Observers(slots)

    def measure(layer: LayerEdge, reading: Reading) -> None:
        values = [each for each in flatten(reading.floating) if isinstance(each, Tensor) and each.numel()]
        if reading.grid is None or not values:
            return
        again.show(layer, values)
        low, high, _ = seen.get(layer, (0.0, 0.0, reading.grid))
        ends = [(float(each.min()), float(each.max())) for each in values]
        seen[layer] = min(low, *(end[0] for end in ends)), max(high, *(end[1] for end in ends)), reading.grid

    try:
        walk = QualityWalk(reference, None, "", measure)
        with torch.no_grad():
            for batch in batches:
                walk.run(copy_tensors(batch), copy_tensors(batch))
    except RefimplError:
        return  # numerics will say so
    fixed = find_fixed_grids(reference)
    measured = {layer: ends for layer, ends in seen.items() if grid_fixed_for(layer, fixed) is None}
    yield from _find_misfits(slots, measured, again)


class _Observers:
    """New observers of the kinds in a plan that do not measure the smallest and the largest value, by group."""

    def __init__(self, slots: Slots) -> None:
        kinds = {make for make in {slot.make for _, slot in slots} if not _measures_ends(make())}
        self._others = {(prefix, slot.group): slot.make() for prefix, slot in slots if slot.make in kinds}
        self._slots = defaultdict[str, list[Slot]](list)
        for prefix, slot in slots:
            self._slots[prefix + slot.value].append(slot)

    def _find(self, layer: LayerEdge) -> Any:
        slot = slot_of(layer, self._slots.get(layer.name, ()))
        return None if slot is None else self._others.get((layer.prefix, slot.group))

    def show(self, layer: LayerEdge, values: Sequence[Tensor]) -> None:
        """Show the values of a layer to its observer."""
        if (observer := self._find(layer)) is not None:
            for each in values:
                observer(each)

    def grid_of(self, layer: LayerEdge) -> OutputGrid | None:
        """Return the grid that a layer's observer gives; None: it is one of the smallest and the largest value."""
        if (observer := self._find(layer)) is None:
            return None
        qparams = read_qparams(observer)
        scale, zero_point = float(qparams.scale), int(qparams.zero_point)
        low, high = ((end - zero_point) * scale for end in (qparams.quant_min, qparams.quant_max))
        return OutputGrid(scale, low, high)


def _measures_ends(observer: Any) -> bool:
    """Tell whether an observer's qparams are those of the smallest and the largest value, or none before the run."""
    inner = getattr(observer, "activation_post_process", observer)
    is_static = is_quantized_dtype(getattr(inner, "dtype", None)) and not getattr(inner, "is_dynamic", False)
    return type(inner) is MinMaxObserver or not is_static


def _find_misfits(slots: Slots, seen: Seen, again: _Observers) -> Iterator[Fault]:
    groups = defaultdict[str, set[Group]](set)  # of the observers that see a value, by the value's name (OBS-02)
    for prefix, slot in slots:
        groups[prefix + slot.value].add((prefix, slot.group))
    together = _find_largest_values(groups, seen)
    smallest = max(map(_smallest_scale_of, {slot.make for _, slot in slots}), default=0.0)
    for layer, (low, high, grid) in seen.items():
        right = again.grid_of(layer)
        if right is not None:
            if not _is_same(grid, right):
                yield Fault(rule="CVT-01", message=f"{_describe(layer, grid)}; its observer gives {_spell(right)}")
            continue
        steps = (grid.high - grid.low) / grid.scale
        slack = grid.scale * (0.5 + steps * ROUNDING)
        text = _describe(layer, grid)
        if low < grid.low - slack or high > grid.high + slack:
            yield Fault(rule="CVT-01", message=f"{text}; it is {low:.6g}..{high:.6g} in calibration")
        elif grid.scale > max(2 * together[layer] / steps, smallest) * (1 + ROUNDING):
            reason = f"calibration has at most {together[layer]:.6g} there, which explains no such step"
            yield Fault(rule="CVT-01", message=f"{text}; {reason}")


def _is_same(grid: OutputGrid, right: OutputGrid) -> bool:
    """Tell whether two grids are the same but for float32 rounding of the values that were observed."""
    room = right.scale * (0.5 + (right.high - right.low) / right.scale * ROUNDING)
    is_near = abs(grid.low - right.low) <= room and abs(grid.high - right.high) <= room
    return is_near and abs(grid.scale - right.scale) <= right.scale * ROUNDING


def _describe(layer: LayerEdge, grid: OutputGrid) -> str:
    return f"{layer.name} is quantized to {_spell(grid)}"


def _spell(grid: OutputGrid) -> str:
    return f"{grid.low:.6g}..{grid.high:.6g} in steps of {grid.scale:.6g}"


def _find_largest_values(groups: dict[str, set[Group]], seen: Seen) -> dict[LayerEdge, float]:
    """Return the largest absolute value of each layer and of those that share an observer with it. (OBS-02)"""
    largest = defaultdict[Group, float](float)
    own = {layer: max(-low, high) for layer, (low, high, _) in seen.items()}
    for layer, value in own.items():
        for group in groups[layer.name]:
            largest[group] = max(largest[group], value)
    return {layer: max([value, *(largest[group] for group in groups[layer.name])]) for layer, value in own.items()}


def _smallest_scale_of(make: Callable[..., Any]) -> float:
    """Return the smallest scale that a slot's observer gives."""
    observer = make()
    return float(getattr(getattr(observer, "activation_post_process", observer), "eps", 0.0))
