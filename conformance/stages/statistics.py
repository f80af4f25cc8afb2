"""Statistics of all comparisons of a claim, for the report's plots; nothing here is judged.

Every element of every comparison counts; ``reports.schema.Statistics`` says what is kept of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from fx_quant_conformance.reports.numbers import BINS, Number
from fx_quant_conformance.reports.schema import Statistics

_EDGES = torch.tensor(BINS, dtype=torch.float64)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sample:
    """One comparison: the distances |q - v|, and the exact results v, both in steps, v from the zero point."""

    distance: Tensor
    exact: Tensor
    is_float_output: bool = False
    """Whether the output is a float tensor, whose steps are no LSB. (NUM-04)"""


def summarize(samples: Iterable[Sample]) -> Statistics | None:
    """Return the statistics of all samples of a claim; None if they have no element."""
    nonempty = [sample for sample in samples if sample.distance.numel()]
    if not nonempty:
        return None
    distance = torch.cat([sample.distance.flatten() for sample in nonempty])
    exact = torch.cat([sample.exact.flatten() for sample in nonempty])
    ratio = compute_decibels(float(exact @ exact), float(distance @ distance))
    on_grid = [sample for sample in nonempty if not sample.is_float_output]
    if not on_grid:
        return Statistics(sqnr_db=ratio)
    distances = torch.cat([sample.distance.flatten() for sample in on_grid])
    return Statistics(
        distances=torch.bincount(torch.bucketize(distances, _EDGES), minlength=len(BINS) + 1).tolist(),
        sqnr_db=ratio,
    )


def compute_decibels(signal: float, noise: float) -> Number:
    """Return 10·log10(signal / noise); "inf" where there is no noise, "-inf" where there is nothing else.

    "nan": one of them is not finite.
    """
    if not math.isfinite(signal + noise):
        return "nan"
    if not noise or not signal:
        return "inf" if not noise else "-inf"
    return round(10 * math.log10(signal / noise), 3)


def measure_decibels(expected: Iterable[Tensor], found: Iterable[Tensor]) -> list[Number]:
    """Return for each output that is a float tensor the ratio of its expected power to that of the error, in dB."""
    pairs = zip(expected, found, strict=True)
    floats = [(right.double(), value.double()) for right, value in pairs if right.is_floating_point() and right.numel()]
    return [compute_decibels(*(float(x.square().sum()) for x in (right, value - right))) for right, value in floats]
