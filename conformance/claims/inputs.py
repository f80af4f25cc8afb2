"""Inputs: the tensors that a case is calibrated with and run on (directed at common kernel faults, then random)."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fx_quant_conformance.conformance.claims.case import Case
from fx_quant_conformance.conformance.claims.claim import Claim
from fx_quant_conformance.conformance.claims.effort import Effort
from fx_quant_conformance.conformance.claims.kinds import INTEGERS
from fx_quant_conformance.conformance.ops.op_model import Input, Role
from fx_quant_conformance.conformance.oracle.grids import Grid

Batch = tuple[Tensor, ...]
"""A tensor for each input of a model."""
STATE_RANGE = (-1.0, 0.75)
"""A range of states in which the zero point of dynamic quantization is at no tie."""
Directed = Callable[[tuple[int, ...], Grid], Tensor]
"""Draws integers of a shape on a grid."""


class NamedInputs(NamedTuple):
    """The tensors of one run, and their name in the report."""

    name: str
    tensors: Batch


def draw_calibration_inputs(case: Case) -> tuple[Batch, ...]:
    """Draw two batches of calibration inputs; each activation reaches both ends of its range.

    A single element is at the high end first, then at the low one.
    """
    return tuple(
        tuple(_draw_calibrating(each, case, position, number) for position, each in enumerate(case.inputs))
        for number in range(2)
    )


def _draw_calibrating(spec: Input, case: Case, position: int, number: int) -> Tensor:
    if spec.role in (Role.INDEX, Role.OFFSETS):
        return _draw_indices(spec)
    low, high = (
        case.value_range.ranges[position % len(case.value_range.ranges)]
        if spec.role is Role.ACTIVATION
        else STATE_RANGE
    )
    values = torch.empty(spec.shape).uniform_(low, high)
    flat = values.view(-1)
    if flat.numel():
        flat[0], flat[-1] = (low, high) if number == 0 else (high, low)
    return values


def _draw_indices(spec: Input) -> Tensor:
    """Draw indices that name the first and the last row, or offsets with empty first and last bags."""
    indices = torch.randint(0, max(1, spec.high), spec.shape, dtype=torch.int32 if spec.is_int32 else torch.int64)
    flat = indices.view(-1)
    if spec.role is Role.OFFSETS:
        indices = indices.sort().values
        indices[:2], indices[2:][-1:] = 0, spec.high
    elif flat.numel() > 1:
        flat[0], flat[-1] = 0, spec.high - 1
    return indices


def _alternate(shape: tuple[int, ...], grid: Grid) -> Tensor:
    number = torch.arange(int(torch.Size(shape).numel())) % 2
    return torch.where(number == 0, grid.low, grid.high).reshape(shape)


def _draw_any(shape: tuple[int, ...], grid: Grid) -> Tensor:
    return torch.randint(grid.low, grid.high + 1, shape)


def _draw_near_zero(shape: tuple[int, ...], grid: Grid) -> Tensor:
    """Draw within a few steps of the zero point: small sums, where a rescaled result is near a tie."""
    return (grid.zero_point + torch.randint(-3, 4, shape)).clamp(grid.low, grid.high)


def _draw_close_to_high(shape: tuple[int, ...], grid: Grid) -> Tensor:
    """Draw a few steps below the high end: products that saturate in pairs, a large mean with a small variance."""
    return (grid.high - torch.randint(0, 4, shape)).clamp(grid.low, grid.high)


def _draw_single(shape: tuple[int, ...], grid: Grid) -> Tensor:
    """Put one element away from the zero point, so that a wrong index or padding shows."""
    integers = torch.full(shape, grid.zero_point)
    flat = integers.view(-1)
    if flat.numel():
        flat[int(torch.randint(0, flat.numel(), ()))] = grid.high if grid.high != grid.zero_point else grid.low
    return integers


def _draw_off_grid(shape: tuple[int, ...], grid: Grid) -> Tensor:
    """Draw positions up to a range beyond the ends, one far beyond, none near a tie: quantizing itself. (NUM-01)"""
    span = grid.high - grid.low
    positions = _draw_any(shape, grid) * 3.0 - grid.low - grid.high + torch.empty(shape).uniform_(-0.375, 0.375)
    flat = positions.view(-1)
    flat[1:2], flat[2:3] = grid.high + 2.0**20 * span, grid.low - 2.0**20 * span
    return positions


def _draw_coarse(shape: tuple[int, ...], grid: Grid) -> Tensor:
    """Draw multiples of 32 steps from the zero point: more of their sums are half-way between two integers."""
    low, high = (grid.low - grid.zero_point) // 32, (grid.high - grid.zero_point) // 32
    return grid.zero_point + 32 * torch.randint(low + 1, high + 1, shape)


BEYOND: tuple[str, Directed] = ("between steps and beyond the ends", _draw_off_grid)
AT_REST: tuple[str, Directed] = ("all at the zero point", lambda shape, grid: torch.full(shape, grid.zero_point))
DIRECTED: tuple[tuple[str, Directed], ...] = (
    ("random", _draw_any),
    ("alternating ends", _alternate),
    ("close to the high end", _draw_close_to_high),
    ("near the zero point", _draw_near_zero),
    ("one away from the zero point", _draw_single),
    ("all at the high end", lambda shape, grid: torch.full(shape, grid.high)),
    ("all at the low end", lambda shape, grid: torch.full(shape, grid.low)),
    AT_REST,
    BEYOND,
)
"""The directed inputs, by name; the first ones find most."""


def draw_inputs(
    claim: Claim, case: Case, grids: Sequence[Grid | None], *, effort: Effort, seed: int
) -> list[NamedInputs]:
    """Draw the inputs of a case from their own seed, and leave torch's generator as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        if claim.kind not in INTEGERS:
            return draw_float_inputs(case, random=max(1, effort.random))
        directed = effort.directed if case.is_first else effort.further
        return draw_static_inputs(case, grids, directed=directed, random=effort.random)


def draw_static_inputs(
    case: Case, grids: Sequence[Grid | None], *, directed: int | None, random: int
) -> list[NamedInputs]:
    """Draw inputs that lie on the inputs' grids: the first `directed` ones of DIRECTED (None: all), then `random` ones.

    In a value range of ties, one is in coarse steps; in one that goes beyond, one is between steps and beyond the ends;
    in one that rests, one is all at the zero point. Inputs without a grid are drawn as for calibration.
    """
    chosen = DIRECTED[:directed]
    tied = (("in coarse steps", _draw_coarse),) * case.value_range.has_ties
    asked = ((BEYOND, case.value_range.goes_beyond), (AT_REST, case.value_range.rests))
    more = tuple(each for each, is_asked in asked if is_asked and each not in chosen)
    kinds = itertools.chain(chosen, tied, more, ((f"random {n + 2}", _draw_any) for n in range(random)))
    return [NamedInputs(name, tuple(_draw_each(case, grids, draw))) for name, draw in kinds]


def _draw_each(case: Case, grids: Sequence[Grid | None], draw: Directed) -> Iterator[Tensor]:
    for position, (spec, grid) in enumerate(zip(case.inputs, grids, strict=True)):
        if grid is None:
            yield _draw_calibrating(spec, case, position, 0)
        else:
            yield grid.values(draw(spec.shape, grid).roll(position))  # so that ends meet other ends


def draw_float_inputs(case: Case, *, random: int) -> list[NamedInputs]:
    """Draw inputs of a model that takes floats: dynamic, float16, weight-only.

    Activations are first on a grid of 255 steps of a power of two, both ends present, so that the qparams of dynamic
    quantization are exact and no input is at a tie; then directed, at signs and at magnitudes; then random.
    """
    kinds: list[tuple[str, Callable[[tuple[int, ...]], Tensor]]] = [
        ("on a grid", _draw_on_grid),
        ("zeros", torch.zeros),
        ("only positive", lambda shape: torch.rand(shape) + 0.125),
        ("only negative", lambda shape: -torch.rand(shape) - 0.125),
        ("all the same", lambda shape: torch.full(shape, 0.75)),
        ("tiny", lambda shape: torch.randn(shape) * 2.0**-20),
        ("huge", lambda shape: torch.randn(shape) * 2.0**12),  # within what half precision holds
        ("one far out", _draw_far_out),
        *((f"random {n + 1}", torch.randn) for n in range(random)),
    ]
    return [
        NamedInputs(
            name,
            tuple(
                draw(spec.shape) if spec.role is Role.ACTIVATION else _draw_calibrating(spec, case, position, 0)
                for position, spec in enumerate(case.inputs)
            ),
        )
        for name, draw in kinds
    ]


def _draw_far_out(shape: tuple[int, ...]) -> Tensor:
    values = torch.randn(shape)
    values.view(-1)[-1:] = 2.0**12
    return values


def _draw_on_grid(shape: tuple[int, ...]) -> Tensor:
    integers = torch.randint(0, 256, shape)
    flat = integers.view(-1)
    if flat.numel() > 1:
        flat[0], flat[-1] = 0, 255
    return (integers - 96) * 2.0**-6
