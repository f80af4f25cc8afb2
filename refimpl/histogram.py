"""HistogramObserver: the range that loses least when what was seen is quantized (rule NUM-02). Bit for bit torch's.

The search drops bins from both ends of the histogram, in steps of 1e-5 of what was counted: torch walks every step in
Python, here a binary search jumps to the steps at which a bin is dropped.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator
from functools import cache, lru_cache
from itertools import accumulate, repeat
from typing import Any

import torch
from torch import Tensor

from refimpl.errors import warn_user
from refimpl.observers import RangeObserver
from refimpl.qparams import has_data

_STEP = 1e-5
_STEPS = 100_010  # enough for the shares of both sides to meet
_FINER = 16  # parts of a bin when a histogram is put into wider bins


@cache
def _shares() -> tuple[Tensor, Tensor]:
    """Return what is dropped on the left, and minus what is kept on the right, after k steps, as a loop sums it."""
    dropped = list(accumulate(repeat(_STEP, _STEPS), initial=0.0))
    kept = list(accumulate(repeat(_STEP, _STEPS), initial=-1.0))
    return torch.tensor(dropped, dtype=torch.float64), torch.tensor(kept, dtype=torch.float64)


@lru_cache(maxsize=8)  # observers often count equally many values; 800 kB each
def _limits(total: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    dropped, kept = _shares()
    return (dropped * total).to(dtype), (kept * total).to(dtype)


class HistogramObserver(RangeObserver):
    """Counts values in `bins` of one width; its qparams are of the range with the least squared error. (NUM-02)

    The bins are merged into wider ones as the range grows. Further keywords are those of MinMaxObserver; never dynamic.
    The buffer ``histogram`` is float32 (bins,).
    """

    histogram: Tensor

    def __init__(self, bins: int = 2048, dtype: torch.dtype = torch.quint8, **arguments: Any) -> None:
        super().__init__(dtype, **arguments)
        self.bins = bins
        self.dst_nbins = 2 ** torch.iinfo(dtype).bits
        self.register_buffer("histogram", self.min_val.new_zeros(bins))

    def forward(self, x: Tensor) -> Tensor:
        """Count the values of `x`, of any shape, and return it; infinite ones are left out, with a warning."""
        seen = x.detach() if x.is_floating_point() else x.to(self.min_val.dtype)  # torch.histc counts no integers
        if seen.numel() and any(bound.isinf() for bound in torch.aminmax(seen)):
            warn_user("HistogramObserver: infinite values in the input are ignored")
            seen = seen[~seen.isinf()]
        if seen.numel():
            self._count(seen, *torch.aminmax(seen))
        return x

    def _count(self, x: Tensor, low: Tensor, high: Tensor) -> None:
        """Add the counts of a batch with these bounds, in bins wide enough for all that was seen."""
        has_older = has_data(self.min_val, self.max_val)
        if has_older:
            low, high = self._merge(low, high)
        counts = torch.histc(x, self.bins, min=low.item(), max=high.item())
        self.histogram.copy_(counts + self._rebinned(low, high) if has_older else counts)
        self._keep(low, high)

    def _rebinned(self, low: Tensor, high: Tensor) -> Tensor:
        """Return the histogram as it is in bins from `low` to `high`, which hold the present range."""
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

    def _range(self) -> tuple[Tensor, Tensor]:
        """Drop bins until that makes the error larger; return the bounds of what is left."""
        start, end, least = 0, self.bins - 1, math.inf
        for candidate in self._candidates():
            error = self._error(*candidate)
            if error > least:
                break
            (start, end), least = candidate, error
        width = (self.max_val - self.min_val) / self.bins
        return self.min_val + width * start, self.min_val + width * (end + 1)

    def _candidates(self) -> Iterator[tuple[int, int]]:
        """Yield the ranges of bins to try, each narrower than the last.

        One step more is granted to the side that drops more bins by it; the right side if both drop as many. A bin is
        dropped at the first step whose share exceeds what is counted up to it, so `left[b]` (`right[b]` from the other
        end) is that step of the b-th bin, and grows with b.
        """
        dropped, kept = _shares()
        counted = self.histogram.cumsum(0).cpu()
        below, above = _limits(float(self.histogram.sum()), counted.dtype)
        left = torch.searchsorted(below, counted, right=True).tolist()
        right = torch.searchsorted(above, -counted.flip(0), right=True).tolist()
        start, end, steps_left, steps_right = 0, self.bins - 1, 0, 0
        while start < end and dropped[steps_left] < -kept[steps_right]:
            low = min(max(start, bisect_right(left, steps_left + 1)), end)
            high = max(min(end, self.bins - 1 - bisect_right(right, steps_right + 1)), start)
            if low - start > end - high:
                start, steps_left = low, steps_left + 1
            elif high < end:
                end, steps_right = high, steps_right + 1
            else:  # no bin is dropped before this step
                steps_right = min(right[self.bins - 1 - end] - 1, _STEPS)
                continue
            yield start, end

    def _error(self, start: int, end: int) -> float:
        """Return the squared error of quantizing all that was counted to the range of these bins.

        The values of a bin are taken as spread evenly; an integer stands for the middle of its own interval. (float32)
        """
        width = (self.max_val.item() - self.min_val.item()) / self.bins
        interval = width * (end - start + 1) / self.dst_nbins
        if interval == 0.0:
            return 0.0
        density, half = self.histogram / width, torch.tensor(interval / 2)

        def integral(low: Tensor, high: Tensor) -> Tensor:
            return density * ((high * high * high - low * low * low) / 3)

        left = (torch.arange(self.bins, device=density.device) - start) * width
        right = left + width
        places = (torch.div(edge, interval, rounding_mode="floor") for edge in (left, right))
        first, last = (place.clamp(0, self.dst_nbins - 1) for place in places)
        error = integral(left - (first + 0.5) * interval, half)
        error += (last - first - 1) * integral(-half, half)
        error += integral(-half, right - (last * interval + interval / 2))
        return float(error.sum())
