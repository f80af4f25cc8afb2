"""What comparisons measure beside what is judged: how distances, and the power of results, are spread (reports' plots).

Every element counts, of every comparison of a claim; ``reports.schema.Measured`` says what is kept of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from reports.codec import PlainRow
from reports.schema import BINS

_EDGES = torch.tensor(BINS, dtype=torch.float64)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sample:
    """One comparison: the distances |q - v|, and the exact results v, both in steps, v from the zero point.

    ``is_float``: the output is a float tensor, whose steps are no LSB. (NUM-04)
    """

    distance: Tensor
    exact: Tensor
    is_float: bool = False


def measured(samples: Iterable[Sample]) -> PlainRow:
    """Return what all samples of a claim give together; nothing of no element."""
    found = [sample for sample in samples if sample.distance.numel()]
    if not found:
        return {}
    distance = torch.cat([sample.distance.flatten() for sample in found])
    exact = torch.cat([sample.exact.flatten() for sample in found])
    row: PlainRow = {"sqnr_db": _decibels(float(exact @ exact), float(distance @ distance))}
    on_grid = [sample for sample in found if not sample.is_float]
    if on_grid:
        every = torch.cat([sample.distance.flatten() for sample in on_grid])
        widest = max(on_grid, key=lambda sample: float(sample.distance.max()))
        row["distances"] = torch.bincount(torch.bucketize(every, _EDGES), minlength=len(BINS) + 1).tolist()
        row["span_lsb"] = round(float(widest.exact.max() - widest.exact.min()), 3)
    return row


def _decibels(signal: float, noise: float) -> float | str:
    """10·log10(signal / noise); "inf" where there is no noise, "-inf" where there is nothing else."""
    if not noise or not signal:
        return "inf" if not noise else "-inf"
    return round(10 * math.log10(signal / noise), 3)
