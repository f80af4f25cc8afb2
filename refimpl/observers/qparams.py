"""qparams: the numbers that quantize, read off any observer, or made from a range (rules NUM-01, NUM-02, CVT-02).

An observer is taken by protocol: a module with ``dtype, qscheme, quant_min, quant_max, eps, is_dynamic`` (and
``ch_axis`` if its scheme is per channel), an identity ``forward`` and ``calculate_qparams() -> (scale, zero_point)``; a
fake quantize holds its own as ``activation_post_process``. Torch's fit.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from fx_quant_conformance.refimpl.errors import QConfigError, RefimplError, warn_user
from fx_quant_conformance.refimpl.legacy import QUANTIZATION
from fx_quant_conformance.refimpl.legacy.dtypes import RANGES

SYMMETRIC = (torch.per_tensor_symmetric, torch.per_channel_symmetric)
_FLOAT_QPARAMS = torch.per_channel_affine_float_qparams
PER_TENSOR = (torch.per_tensor_affine, torch.per_tensor_symmetric)
PER_CHANNEL = (torch.per_channel_affine, torch.per_channel_symmetric, _FLOAT_QPARAMS)


def dtype_range(dtype: torch.dtype) -> tuple[int, int]:
    """Return the smallest and the largest integer of a quantized dtype. Raises QConfigError for another dtype."""
    if dtype not in RANGES:
        dtypes = ", ".join(map(str, RANGES))
        raise QConfigError(f"{dtype} is not a quantized dtype; expected one of {dtypes}")
    return RANGES[dtype]


def fill_range(dtype: torch.dtype, quant_min: Any, quant_max: Any) -> tuple[int, int]:
    """Return the ends of a range of integers; one that is None is the dtype's. Raises QConfigError as dtype_range."""
    low, high = dtype_range(dtype)
    return low if quant_min is None else int(quant_min), high if quant_max is None else int(quant_max)


def is_quantized_dtype(dtype: torch.dtype | None) -> bool:
    """Tell whether a value of this dtype is held as integers."""
    return dtype in RANGES


@dataclass(frozen=True, slots=True, kw_only=True)
class QParams:
    """The numbers of q = clamp(round_half_even(x / scale) + zero_point, quant_min, quant_max). (NUM-01)

    Scale and zero point have one element, or one per channel along `axis`.
    """

    scale: Tensor
    """A positive real (float32)."""
    zero_point: Tensor
    """An integer; a real under the float-qparams scheme of embeddings."""
    dtype: torch.dtype
    quant_min: int
    quant_max: int
    axis: int | None = None

    def weight_dict(self, *, is_decomposed: bool) -> dict[str, Any]:
        """Return the form that ``from_float`` of torch's reference modules takes. (CVT-02)"""
        per_channel = _FLOAT_QPARAMS if self.zero_point.is_floating_point() else torch.per_channel_affine
        parts = {part.name: value for part in fields(self) if (value := getattr(self, part.name)) is not None}
        qscheme = torch.per_tensor_affine if self.axis is None else per_channel
        return parts | {"qscheme": qscheme, "is_decomposed": is_decomposed}


def read_qparams(observer: Any) -> QParams:
    """Read the qparams of any observer or fake quantize, refimpl's or torch's; without data: scale 1, with a warning.

    Raises QConfigError if it does not keep the protocol.
    """
    low, high = fill_range(observer.dtype, getattr(observer, "quant_min", None), getattr(observer, "quant_max", None))
    try:
        scale, zero_point = substitute_qparams(observer) or observer.calculate_qparams()
    except RefimplError:
        raise
    except Exception as error:  # of a foreign observer: torch's ReuseInputObserver raises Exception itself
        raise QConfigError(f"{type(observer).__name__} gives no qparams: {error}") from error
    if not (scale.isfinite().all() and zero_point.isfinite().all()):  # rule: OBS-18
        numbers = f"scale {scale.tolist()}, zero point {zero_point.tolist()}"
        raise QConfigError(f"{type(observer).__name__} gives {numbers}: it has seen values that are NaN or infinite")
    return QParams(
        scale=scale.detach().to(torch.float32),
        zero_point=zero_point.detach(),
        dtype=observer.dtype,
        quant_min=low,
        quant_max=high,
        axis=int(observer.ch_axis) if getattr(observer, "qscheme", None) in PER_CHANNEL else None,
    )


# Observers whose qparams are `compute_qparams` of their ranges, so that a whole model's can be computed at once.
_RANGE_OBSERVERS = frozenset(
    f"{module}.{average}{kind}"
    for module in (f"{QUANTIZATION}.observer", "fx_quant_conformance.refimpl.observers.observers")
    for average in ("", "MovingAverage")
    for kind in ("MinMaxObserver", "PerChannelMinMaxObserver")
) | {"fx_quant_conformance.refimpl.observers.histogram.HistogramObserver"}


def is_plain(observer: Any) -> bool:
    """Tell whether an observer's qparams are those of its float32 ranges: see `compute_ranges_qparams`."""
    kind = type(observer)
    if f"{kind.__module__}.{kind.__qualname__}" not in _RANGE_OBSERVERS or observer.is_dynamic:
        return False
    lowest = RANGES.get(observer.dtype, (0, 0))[0]
    is_affine = observer.qscheme in (torch.per_tensor_affine, torch.per_channel_affine)
    is_known = is_affine or (lowest < 0 and observer.qscheme in SYMMETRIC)
    return is_known and observer.dtype in RANGES and observer.min_val.dtype == torch.float32


def compute_ranges_qparams(like: Any, ranges: Mapping[int, tuple[Tensor, Tensor]]) -> dict[int, QParams]:
    """Compute at once what `read_qparams` gives, bit for bit, for plain observers like this one with these ranges.

    The keys stay. The two ends of a range are scalars, or one value per channel. A range without data is left out.
    """
    if not ranges:
        return {}
    low, high = fill_range(like.dtype, like.quant_min, like.quant_max)
    lows, highs = (torch.cat([bounds[end].reshape(-1) for bounds in ranges.values()]) for end in (0, 1))
    eps, sizes = like.eps.to(lows.device), [bounds[0].numel() for bounds in ranges.values()]
    scales, zeros = compute_qparams(lows, highs, low, high, qscheme=like.qscheme, eps=eps, middle=0)
    axis = int(like.ch_axis) if like.qscheme in PER_CHANNEL else None
    common: dict[str, Any] = {"dtype": like.dtype, "quant_min": low, "quant_max": high, "axis": axis}
    is_seen = iter(((lows <= highs) & (highs - lows).isfinite()).tolist())
    parts = zip(ranges, sizes, scales.split_with_sizes(sizes), zeros.split_with_sizes(sizes), strict=True)
    return {
        key: QParams(scale=scale, zero_point=zero, **common)
        for key, size, scale, zero in parts
        if sum(islice(is_seen, size)) == size
    }


def measure_channels(x: Tensor, axis: int) -> tuple[Tensor, Tensor]:
    """Return the smallest and the largest value of each slice along an axis, two tensors (channels,).

    Raises QConfigError for an axis that `x` has not.
    """
    check_axis(x, axis)
    rows = x.movedim(axis, 0).reshape(x.shape[axis], -1)
    return torch.amin(rows, 1), torch.amax(rows, 1)  # many times as fast as aminmax along an axis


def check_axis(x: Tensor, axis: Any) -> None:
    """Raise QConfigError for what is no axis of a tensor; negative ones count from the last."""
    if type(axis) is not int or not -x.dim() <= axis < x.dim():
        raise QConfigError(f"ch_axis {axis!r} is no axis of a tensor of shape {tuple(x.shape)}")


def read_plain_observers(observers: Iterable[Any]) -> dict[int, QParams]:
    """Read the qparams of all plain per-tensor observers among these that have data, keyed by ``id``."""
    kinds: dict[tuple[Any, ...], dict[int, Any]] = defaultdict(dict)
    for observer in filter(is_plain, observers):
        if observer.qscheme in PER_TENSOR:
            numbers = (observer.quant_min, observer.quant_max, float(observer.eps), getattr(observer, "bins", None))
            kind = (observer.dtype, observer.qscheme, observer.min_val.device, *numbers)
            kinds[kind][id(observer)] = observer
    qparams: dict[int, QParams] = {}
    for alike in kinds.values():
        like = next(iter(alike.values()))
        find = getattr(like, "find_ranges", None)  # a histogram's are searched for, those of all at once
        ranges = [(o.min_val, o.max_val) for o in alike.values()] if find is None else find([*alike.values()])
        qparams |= compute_ranges_qparams(like, dict(zip(alike, ranges, strict=True)))
    return qparams


def substitute_qparams(observer: Any) -> tuple[Tensor, Tensor] | None:
    """Return scale 1 and zero point 0, with a warning, for an observer of ranges that saw no data; else None."""
    inner = getattr(observer, "activation_post_process", observer)
    low, high = getattr(inner, "min_val", None), getattr(inner, "max_val", None)
    if not (isinstance(low, Tensor) and isinstance(high, Tensor)) or has_data(low, high):
        return None
    advice = "run the prepared model on calibration inputs before convert"
    warn_user(f"{type(inner).__name__} has seen no data: {advice}; its scale is 1, its zero point 0")
    return torch.ones(1, device=low.device), torch.zeros(1, dtype=torch.int64, device=low.device)


INFINITE = torch.finfo(torch.float32).max / 2
"""From here on a value stands for infinity, as -inf and the smallest float32 do in masks. (OBS-18)"""


def is_infinite(values: Tensor) -> bool:
    """Tell whether a value is infinite, or stands for infinity. (OBS-18)"""
    return bool((values.abs() >= INFINITE).any())


def saw_infinite(observer: Any) -> bool:
    """Tell whether an observer or fake quantize has seen an infinite value. (OBS-18)"""
    inner = getattr(observer, "activation_post_process", observer)
    if _noted_infinite(observer, inner):
        return True
    low, high = getattr(inner, "min_val", None), getattr(inner, "max_val", None)
    if not (isinstance(low, Tensor) and isinstance(high, Tensor)) or not has_data(low, high):
        return False
    return is_infinite(low) or is_infinite(high)


def _noted_infinite(*parts: Any) -> bool:
    return any(bool(getattr(each, "saw_infinite", False)) for each in parts)


def may_have_seen_infinite(observers: Iterable[Any]) -> bool:
    """Tell whether one of many observers may have seen an infinite value; to ask each costs more. (OBS-18)"""
    ends: list[Tensor] = []
    for observer in observers:
        inner = observer._modules.get("activation_post_process", observer)
        if _noted_infinite(observer, inner):
            return True
        if not hasattr(type(inner), "find_ranges"):  # a histogram leaves infinite values out, and notes that
            ends += (inner._buffers[name] for name in ("min_val", "max_val") if name in inner._buffers)
    if len({(end.device, end.shape) for end in ends}) == 1:
        ends = [torch.stack(ends)]
    return any(map(is_infinite, ends))


def has_data(low: Tensor, high: Tensor) -> bool:
    """Tell whether these are bounds of data: an observer starts with none, or with inf and -inf."""
    return low.numel() > 1 or (low.numel() == 1 and not (low.item() == math.inf and high.item() == -math.inf))


def compute_qparams(
    low: Tensor, high: Tensor, quant_min: int, quant_max: int, *, qscheme: torch.qscheme, eps: Tensor, middle: int
) -> tuple[Tensor, Tensor]:
    """Turn a range of reals into (scale, zero point), both of its shape; 0 is always representable. (NUM-02)

    `middle` is the zero point of symmetric schemes, `eps` (one element) the smallest scale. All arithmetic is in the
    dtype of the bounds, float32: results agree bit for bit with others' of the published formula.
    """
    steps = float(quant_max - quant_min)
    if qscheme == _FLOAT_QPARAMS:  # the range as it was seen, and a real zero point
        scale = (high - low) / steps
        scale = torch.where(scale > eps, scale, torch.ones_like(scale))
        return scale, quant_min - low / scale  # rule: NUM-02
    low, high = low.clamp(max=0.0), high.clamp(min=0.0)  # rule: NUM-02
    if qscheme in SYMMETRIC:
        scale = torch.maximum(torch.maximum(-low, high) / (steps / 2), eps)
        return scale, torch.full_like(scale, middle, dtype=torch.int64)
    scale = torch.maximum((high - low) / steps, eps)
    zero_point = quant_min - torch.round(low / scale).to(torch.int32)
    return scale, zero_point.clamp(quant_min, quant_max)
