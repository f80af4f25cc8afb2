"""What makes torch's flow faster where it is the oracle, and changes nothing of what it gives."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch.fx.proxy
from torch import Tensor
from torch.ao.quantization.observer import HistogramObserver


class NoTraceback:
    """In place of torch's: where a node was made is symbolized in C++, a fifth of the time, and not compared."""

    @classmethod
    def extract(cls) -> NoTraceback:
        return cls()

    def summary(self) -> list[Any]:
        return []

    format = summary  # as releases before 2.9 ask


@pytest.fixture(autouse=True, scope="package")
def faster_torch() -> Iterator[None]:
    """Record no tracebacks, and search a histogram's range once for all conversions of a prepared model."""
    search: Any = HistogramObserver._non_linear_param_search
    ranges: dict[tuple[Any, ...], tuple[Tensor, Tensor]] = {}

    def search_once(observer: Any) -> tuple[Tensor, Tensor]:
        ends = (observer.bins, observer.dst_nbins, float(observer.min_val), float(observer.max_val))
        key = (*ends, observer.histogram.numpy().tobytes())
        if key not in ranges:
            ranges[key] = search(observer)
        return ranges[key][0].clone(), ranges[key][1].clone()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.fx.proxy, "CapturedTraceback", NoTraceback)
        patch.setattr(HistogramObserver, "_non_linear_param_search", search_once)
        yield
