"""HistogramObserver: the range that loses least when the values seen are quantized (rule NUM-02). Bit for bit torch's.

The search drops bins from both ends of the histogram, in steps of 1e-5 of all counts. Torch walks every step in
Python; here a binary search jumps to the steps at which a bin is dropped.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from ctypes import c_double, c_float
from functools import cache
from itertools import accumulate, repeat
from typing import Any

import torch
from torch import Tensor

from fx_quant_conformance.refimpl.errors import warn_user
from fx_quant_conformance.refimpl.legacy import quint8
from fx_quant_conformance.refimpl.legacy.dtypes import count_bits
from fx_quant_conformance.refimpl.observers.observers import RangeObserver
from fx_quant_conformance.refimpl.observers.qparams import INFINITE, has_data, is_infinite

_STEP = 1e-5
_STEPS = 100_010  # enough for the shares of both sides to meet
_BATCH = 16  # histograms whose errors are computed at once: as many as fit a processor's cache
_FINER = 16  # parts of a bin when a histogram is put into wider bins


@cache
def _sum_shares() -> tuple[list[float], list[float]]:
    """Return the shares dropped on the left, and minus the shares kept on the right, after k steps, as a loop sums."""
    dropped = list(accumulate(repeat(_STEP, _STEPS), initial=0.0))
    kept = list(accumulate(repeat(_STEP, _STEPS), initial=-1.0))
    return dropped, kept


class HistogramObserver(RangeObserver):
    """Counts values in `bins` of one width; its qparams are of the range with the least squared error. (NUM-02)

    The bins are merged into wider ones as the range grows. Further keywords are those of MinMaxObserver; never dynamic.
    """

    histogram: Tensor
    """A buffer: float32 (bins,)."""

    def __init__(self, bins: int = 2048, dtype: torch.dtype = quint8, **arguments: Any) -> None:
        super().__init__(dtype, **arguments)
        self.bins = bins
        self.dst_nbins = 2 ** count_bits(dtype)
        self.register_buffer("histogram", self.min_val.new_zeros(bins))

    def forward(self, x: Tensor) -> Tensor:
        """Count the values of `x`, of any shape, and return it; NaN and infinite ones are left out, with a warning."""
        values = x.detach() if x.is_floating_point() else x.to(self.min_val.dtype)  # torch.histc counts no integers
        if values.numel() and not _are_finite(bounds := torch.aminmax(values)):
            values = self._leave_out(values)
            bounds = torch.aminmax(values) if values.numel() else bounds
        if values.numel():
            self._count(values, *bounds)
        return x

    def _leave_out(self, x: Tensor) -> Tensor:
        """Return the values that a range of numbers can hold. (OBS-18)"""
        if x.isnan().any():
            self._warn_of_nan(x)
            x = x[~x.isnan()]
        if is_infinite(x):
            warn_user("HistogramObserver: infinite values in the input are ignored")
            self.saw_infinite = True
            x = x[x.abs() < INFINITE]
        return x

    def _count(self, x: Tensor, low: Tensor, high: Tensor) -> None:
        """Add the counts of a batch with these bounds, in bins wide enough for all values seen."""
        has_older = has_data(self.min_val, self.max_val)
        if has_older:
            low, high = self._merge(low, high)
        counts = torch.histc(x, self.bins, min=low.item(), max=high.item())
        self.histogram.copy_(counts + self._rebin(low, high) if has_older else counts)
        self._keep(low, high)

    def _rebin(self, low: Tensor, high: Tensor) -> Tensor:
        """Return the histogram in bins from `low` to `high`, which hold the present range."""
        if low == self.min_val and high == self.max_val:
            return self.histogram
        if self.min_val == self.max_val:  # one value: all in its bin
            place = torch.histc(self.min_val, self.bins, min=low.item(), max=high.item())
            return place * self.histogram.sum()
        parts = self.bins * _FINER
        width = (self.max_val - self.min_val) / parts
        middles = torch.linspace(self.min_val, self.max_val, parts + 1, device=low.device)[:-1] + 0.5 * width
        edges = torch.linspace(low, high, self.bins + 1, device=low.device)
        places = (torch.bucketize(middles, edges, right=True) - 1).clamp(0, self.bins - 1)
        weights = self.histogram.repeat_interleave(_FINER) / _FINER
        return torch.bincount(places, weights=weights, minlength=self.bins)

    def _choose_range(self) -> tuple[Tensor, Tensor]:
        return self.find_ranges([self])[0]

    @staticmethod
    def find_ranges(observers: Sequence[HistogramObserver]) -> list[tuple[Tensor, Tensor]]:
        """Return the range of each observer: bins are dropped from its ends until that makes the error larger.

        All have the same number of bins, dtype and device; one without data gives NaN. The errors of all are computed
        together, with the same bits as separately.
        """
        spans, least = [(0, observer.bins - 1) for observer in observers], [math.inf] * len(observers)
        walks = [observer._find_candidates() for observer in observers]
        narrowed = list(range(len(observers)))
        while narrowed:
            steps = [(index, span) for index in narrowed if (span := next(walks[index], None)) is not None]
            batches = (steps[first : first + _BATCH] for first in range(0, len(steps), _BATCH))
            errors = [e for batch in batches for e in _compute_errors([(observers[i], *span) for i, span in batch])]
            narrowed = []
            for (index, span), error in zip(steps, errors, strict=True):
                if not error > least[index]:
                    spans[index], least[index] = span, error
                    narrowed.append(index)
        low, high = (torch.stack([getattr(o, name).reshape(()) for o in observers]) for name in ("min_val", "max_val"))
        starts, lasts = (torch.tensor(ends, device=low.device) for ends in zip(*spans, strict=True))
        width = (high - low) / observers[0].bins
        return list(zip(low + width * starts, low + width * (lasts + 1), strict=True))

    def _find_candidates(self) -> Iterator[tuple[int, int]]:
        """Yield the ranges of bins to try, each narrower than the last.

        The side that drops more bins by one step more takes it; the right side if both drop equally many. A bin is
        dropped at the first step whose share, in the histogram's dtype, exceeds the counts up to it.
        """
        dropped, kept = _sum_shares()
        counted, total = self.histogram.cumsum(0).tolist(), float(self.histogram.sum())
        number = c_float if self.histogram.dtype == torch.float32 else c_double

        def to_share(of_one: float) -> float:
            return number(of_one * total).value

        start, end, steps_left, steps_right = 0, self.bins - 1, 0, 0
        while start < end and dropped[steps_left] < -kept[steps_right]:
            low = min(max(start, bisect_left(counted, to_share(dropped[steps_left + 1]))), end)
            high = max(min(end, bisect_right(counted, -to_share(kept[steps_right + 1])) - 1), start)
            if low - start > end - high:
                start, steps_left = low, steps_left + 1
            elif high < end:
                end, steps_right = high, steps_right + 1
            else:  # no bin is dropped before this step
                steps_right = min(bisect_right(kept, -counted[end], key=to_share) - 1, _STEPS)
                continue
            yield start, end


def _are_finite(bounds: Iterable[Tensor]) -> bool:
    return all(abs(float(bound)) < INFINITE for bound in bounds)


def _compute_errors(ranges: Sequence[tuple[HistogramObserver, int, int]]) -> list[float]:
    """Return the squared error, for each observer, of quantizing the values it counted to a range of its bins.

    The values of a bin are taken as spread evenly; an integer stands for the middle of its interval. (float32)
    """
    like = ranges[0][0]
    bins, levels, device = like.bins, like.dst_nbins, like.histogram.device
    widths = [(observer.max_val.item() - observer.min_val.item()) / bins for observer, *_ in ranges]
    intervals = [width * (end - start + 1) / levels for width, (_, start, end) in zip(widths, ranges, strict=True)]

    def column(values: Iterable[float]) -> Tensor:
        return torch.tensor(list(values), device=device).unsqueeze(1)

    width, interval, half = column(widths), column(i or 1.0 for i in intervals), column(i / 2 for i in intervals)
    counts = torch.stack([observer.histogram for observer, *_ in ranges])
    density = counts / width.to(counts.dtype)

    def integrate(low: Tensor, high: Tensor) -> Tensor:
        return density * ((high * high * high - low * low * low) / 3)

    left = (torch.arange(bins, device=device) - column(start for _, start, _ in ranges)) * width
    right = left + width
    places = (torch.div(edge, interval, rounding_mode="floor") for edge in (left, right))
    first, last = (place.clamp(0, levels - 1) for place in places)
    error = integrate(left - (first + 0.5) * interval, half)
    error += (last - first - 1) * integrate(-half, half)
    error += integrate(-half, right - (last * interval + half))
    return [float(row.sum()) if interval else 0.0 for row, interval in zip(error, intervals, strict=True)]
