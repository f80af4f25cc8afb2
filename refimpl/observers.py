"""Observers: modules that watch a value and turn what they saw into qparams (rules NUM-02, DTY-05, CVT-09).

An observer is taken by protocol: a module with ``dtype, qscheme, quant_min, quant_max, eps, is_dynamic``, an identity
``forward`` and ``calculate_qparams() -> (scale, zero_point)``. Torch's own observers fit it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from refimpl.errors import QConfigError, RefimplError

_DTYPE_RANGES = {
    torch.quint8: (0, 255),
    torch.uint8: (0, 255),
    torch.qint8: (-128, 127),
    torch.int8: (-128, 127),
    torch.qint32: (-(2**31), 2**31 - 1),
    torch.int32: (-(2**31), 2**31 - 1),
    torch.quint4x2: (0, 15),
}
_SIGNED = (torch.qint8, torch.int8, torch.qint32, torch.int32)
_SYMMETRIC = (torch.per_tensor_symmetric, torch.per_channel_symmetric)
PER_CHANNEL = (torch.per_channel_symmetric, torch.per_channel_affine)


def dtype_range(dtype: torch.dtype) -> tuple[int, int]:
    """Return the smallest and the largest integer of a quantized dtype. Raises QConfigError for another dtype."""
    try:
        return _DTYPE_RANGES[dtype]
    except KeyError:
        known = ", ".join(map(str, _DTYPE_RANGES))
        raise QConfigError(f"{dtype} is not a quantized dtype; expected one of {known}") from None


def is_quantized_dtype(dtype: torch.dtype | None) -> bool:
    """Tell whether a value of this dtype is held as integers."""
    return dtype in _DTYPE_RANGES


class Constructor:
    """A class (or function) with keyword arguments bound, to be called once per observer instance. (QCM-01)

    Equal constructors make equal observers, so that decisions can be cached by them.
    """

    def __init__(self, make: Any, **arguments: Any) -> None:
        self.make = make
        self.arguments = arguments

    def __call__(self, **more: Any) -> nn.Module:
        made: nn.Module = self.make(**{**self.arguments, **more})
        return made

    def __repr__(self) -> str:
        bound = ", ".join(f"{name}={value}" for name, value in self.arguments.items())
        return f"{getattr(self.make, '__name__', self.make)}({bound})"

    def with_args(self, **arguments: Any) -> Constructor:
        """Return a constructor with further arguments bound."""
        return Constructor(self.make, **{**self.arguments, **arguments})


@dataclass(frozen=True, slots=True, kw_only=True)
class QParams:
    """What is needed to quantize: q = clamp(round_half_even(x / scale) + zero_point, quant_min, quant_max). (NUM-01)

    ``scale`` is a positive real (float32), ``zero_point`` an integer; both have one element, or one per channel along
    ``axis``.
    """

    scale: Tensor
    zero_point: Tensor
    dtype: torch.dtype
    quant_min: int
    quant_max: int
    axis: int | None = None

    def weight_dict(self, *, is_decomposed: bool) -> dict[str, Any]:
        """Return the form that ``from_float`` of torch's reference modules takes. (CVT-02)"""
        scheme = torch.per_tensor_affine if self.axis is None else torch.per_channel_affine
        found: dict[str, Any] = {
            "qscheme": scheme,
            "dtype": self.dtype,
            "scale": self.scale,
            "zero_point": self.zero_point,
            "quant_min": self.quant_min,
            "quant_max": self.quant_max,
            "is_decomposed": is_decomposed,
        }
        return found if self.axis is None else found | {"axis": self.axis}


def read_qparams(observer: Any) -> QParams:
    """Read the qparams of any observer, ours or torch's.

    Raises QConfigError if it does not keep the protocol.
    """
    dtype = observer.dtype
    low, high = dtype_range(dtype)
    _reject_unused(observer)
    try:
        scale, zero_point = observer.calculate_qparams()
    except RefimplError:
        raise
    except Exception as error:  # what a foreign observer raises: torch's ReuseInputObserver raises Exception itself
        raise QConfigError(f"{type(observer).__name__} gives no qparams: {error}") from error
    is_per_channel = getattr(observer, "qscheme", None) in PER_CHANNEL
    quant_min, quant_max = getattr(observer, "quant_min", None), getattr(observer, "quant_max", None)
    return QParams(
        scale=scale.detach().to(torch.float32),
        zero_point=zero_point.detach(),
        dtype=dtype,
        quant_min=low if quant_min is None else int(quant_min),
        quant_max=high if quant_max is None else int(quant_max),
        axis=int(observer.ch_axis) if is_per_channel else None,
    )


def _reject_unused(observer: Any) -> None:
    """Raise QConfigError for an observer of ranges without data: torch's would make a scale of 1 up, with a warning."""
    inner = getattr(observer, "activation_post_process", observer)
    low, high = getattr(inner, "min_val", None), getattr(inner, "max_val", None)
    if isinstance(low, Tensor) and isinstance(high, Tensor) and (not low.numel() or bool((low > high).any())):
        raise QConfigError(
            f"{type(inner).__name__} has seen no data: run the prepared model on calibration inputs before convert"
        )


def minmax_qparams(
    low: Tensor, high: Tensor, *, quant_min: int, quant_max: int, symmetric: bool, eps: float, middle: int
) -> tuple[Tensor, Tensor]:
    """Turn a range of reals into (scale, zero point); 0 is always representable. (NUM-02)

    `middle` is the zero point where `symmetric`. Shapes: `low`, `high`, and both results alike. All arithmetic in
    float32, so that results agree bit for bit with every other implementation of the published formula.
    """
    low, high = low.clamp(max=0.0), high.clamp(min=0.0)  # rule: NUM-02
    steps = float(quant_max - quant_min)
    floor = torch.tensor(eps, dtype=torch.float32)
    if symmetric:
        scale = torch.maximum(torch.maximum(-low, high) / (steps / 2), floor)
        return scale, torch.full_like(scale, middle, dtype=torch.int32)
    scale = torch.maximum((high - low) / steps, floor)
    zero_point = quant_min - torch.round(low / scale).to(torch.int32)
    return scale, zero_point.clamp(quant_min, quant_max)


class Observer(nn.Module):
    """Base of refimpl's observers: dtype, range and scheme; the identity as ``forward``."""

    def __init__(
        self,
        *,
        dtype: torch.dtype = torch.quint8,
        qscheme: torch.qscheme = torch.per_tensor_affine,
        quant_min: int | None = None,
        quant_max: int | None = None,
        eps: float = torch.finfo(torch.float32).eps,
        is_dynamic: bool = False,
    ) -> None:
        super().__init__()
        self.dtype = dtype
        self.qscheme = qscheme
        self.is_dynamic = is_dynamic
        self.eps = float(eps)
        self.has_custom_range = quant_min is not None and quant_max is not None
        if is_quantized_dtype(dtype):
            low, high = dtype_range(dtype)
            self.quant_min = low if quant_min is None else quant_min
            self.quant_max = high if quant_max is None else quant_max
            if not low <= self.quant_min < self.quant_max <= high:
                raise QConfigError(
                    f"{type(self).__name__}: quant range {self.quant_min}..{self.quant_max} is empty or outside "
                    f"{low}..{high} of {dtype}"
                )

    @classmethod
    def with_args(cls, **arguments: Any) -> Constructor:
        """Return a constructor of this class with arguments bound. (QCM-01)"""
        return Constructor(cls, **arguments)

    def extra_repr(self) -> str:
        return f"dtype={self.dtype}, qscheme={self.qscheme}, range={getattr(self, 'quant_min', None)}.." + str(
            getattr(self, "quant_max", None)
        )

    def forward(self, x: Tensor) -> Tensor:
        return x

    def calculate_qparams(self) -> tuple[Tensor, Tensor]:
        """Return (scale, zero point). Raises QConfigError when there is nothing to calculate them from."""
        raise QConfigError(f"{type(self).__name__} has no qparams")


class MinMaxObserver(Observer):
    """Keeps the smallest and largest value seen; one pair of qparams for the tensor. (NUM-02)"""

    min_val: Tensor
    max_val: Tensor

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.register_buffer("min_val", torch.tensor(float("inf")))
        self.register_buffer("max_val", torch.tensor(float("-inf")))

    def forward(self, x: Tensor) -> Tensor:
        if x.numel():
            low, high = self._range(x.detach().to(self.min_val.dtype))
            self.min_val = torch.minimum(self.min_val, low)
            self.max_val = torch.maximum(self.max_val, high)
        return x

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *rest: Any) -> None:
        for name in ("min_val", "max_val"):  # rule: CVT-12
            if prefix + name in state_dict:  # one value, or one per channel once there was data
                setattr(self, name, torch.empty_like(state_dict[prefix + name]))
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def _range(self, x: Tensor) -> tuple[Tensor, Tensor]:
        low, high = torch.aminmax(x)
        return low, high

    def calculate_qparams(self) -> tuple[Tensor, Tensor]:
        """Return (scale, zero point), each of one element (per tensor) or one per channel. (NUM-02)

        Raises QConfigError when the observer has seen nothing.
        """
        _reject_unused(self)
        return minmax_qparams(
            self.min_val,
            self.max_val,
            quant_min=self.quant_min,
            quant_max=self.quant_max,
            symmetric=self.qscheme in _SYMMETRIC,
            eps=self.eps,
            middle=self._middle(),
        )

    def _middle(self) -> int:
        """The zero point of a symmetric scheme: 0 if signed, else mid-range; rounded down in a range that was given."""
        if self.dtype in _SIGNED:  # rule: NUM-02
            return 0
        return (self.quant_min + self.quant_max + (0 if self.has_custom_range else 1)) // 2


class PerChannelMinMaxObserver(MinMaxObserver):
    """Keeps one range per slice along ``ch_axis``. (NUM-02)"""

    def __init__(
        self, *, ch_axis: int = 0, qscheme: torch.qscheme = torch.per_channel_affine, **arguments: Any
    ) -> None:
        super().__init__(qscheme=qscheme, **arguments)
        self.ch_axis = ch_axis

    def _range(self, x: Tensor) -> tuple[Tensor, Tensor]:
        slices = x.movedim(self.ch_axis, 0).flatten(1) if x.dim() > 1 else x.reshape(-1, 1)
        low, high = torch.aminmax(slices, dim=1)
        return low, high


class FixedQParamsObserver(Observer):
    """Gives the qparams that it was made with, whatever it sees. (DTY-05)"""

    scale: Tensor
    zero_point: Tensor

    def __init__(self, *, scale: float, zero_point: int, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.register_buffer("scale", torch.tensor(scale, dtype=torch.float32))
        self.register_buffer("zero_point", torch.tensor(zero_point, dtype=torch.int32))

    def calculate_qparams(self) -> tuple[Tensor, Tensor]:
        """Return the fixed (scale, zero point)."""
        return self.scale, self.zero_point


class PlaceholderObserver(Observer):
    """Says which dtype is wanted and measures nothing (dynamic and float16 quantization)."""
