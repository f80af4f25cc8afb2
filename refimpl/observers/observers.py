"""Observers: modules that watch a value and turn its range into qparams (rules NUM-02, DTY-05, OBS-12, QCM-01).

They have torch's names, keywords and state-dict keys, so that a user swaps one import. Their protocol stands in
`qparams`, HistogramObserver in `histogram`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fx_quant_conformance.refimpl.config.forms import WHOLE, Form, coerce, optional
from fx_quant_conformance.refimpl.errors import QConfigError, warn_user
from fx_quant_conformance.refimpl.legacy import qint8, quint8
from fx_quant_conformance.refimpl.observers.qparams import (
    PER_CHANNEL,
    PER_TENSOR,
    SYMMETRIC,
    compute_qparams,
    has_data,
    measure_channels,
    substitute_qparams,
)
from fx_quant_conformance.refimpl.observers.qparams import dtype_range as dtype_range
from fx_quant_conformance.refimpl.observers.qparams import is_quantized_dtype as is_quantized_dtype

_EPS = torch.finfo(torch.float32).eps
_EIGHT_BITS = (quint8, torch.uint8, qint8, torch.int8)


class Constructor(partial[nn.Module]):
    """A class (or function) with keyword arguments bound, to be called once per observer instance. (QCM-01)

    Equal constructors make equal observers, so that decisions can be cached by them.
    """

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Constructor) and (self.func, self.keywords) == (other.func, other.keywords)

    def __hash__(self) -> int:
        return hash(self.func)

    def __repr__(self) -> str:
        bound = ", ".join(f"{name}={value}" for name, value in self.keywords.items())
        return f"{getattr(self.func, '__name__', self.func)}({bound})"

    def with_args(self, **arguments: Any) -> Constructor:
        """Return a constructor with further arguments bound."""
        return Constructor(self.func, **{**self.keywords, **arguments})


class Constructible(nn.Module):
    """Base of the modules that a QConfig may name. (QCM-01)"""

    resized: ClassVar[tuple[str, ...]] = ()  # buffers of one element, or one per channel after data

    @classmethod
    def with_args(cls, **arguments: Any) -> Constructor:
        """Return a constructor of this class with arguments bound, for a QConfig; it has ``with_args`` as well."""
        return Constructor(cls, **arguments)

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *arguments: Any) -> None:
        for name in self.resized:  # rule: CVT-12
            if prefix + name in state_dict:
                getattr(self, name).resize_(state_dict[prefix + name].shape)
        super()._load_from_state_dict(state_dict, prefix, *arguments)


class Observer(Constructible):
    """Base of refimpl's observers: ``forward`` is the identity, nothing is measured.

    ``observes``: the value's name, which prepare sets. ``saw_infinite``: whether an infinite value was left out of what
    is measured (OBS-18).
    """

    observes = ""
    saw_infinite = False
    has_warned = False

    def __init__(
        self,
        dtype: torch.dtype = quint8,
        *,
        qscheme: Any = None,
        quant_min: int | None = None,
        quant_max: int | None = None,
        is_dynamic: bool = False,
        reduce_range: bool | None = None,
    ) -> None:
        super().__init__()
        self.dtype, self.qscheme, self.is_dynamic = dtype, qscheme, is_dynamic
        self.asks_whole_range = reduce_range is False
        self.quant_min: Any = self._coerce("quant_min", optional(WHOLE), quant_min)
        self.quant_max: Any = self._coerce("quant_max", optional(WHOLE), quant_max)

    def extra_repr(self) -> str:
        """Return dtype, scheme and range of integers, as printed models show them."""
        return f"dtype={self.dtype}, qscheme={self.qscheme}, range={self.quant_min}..{self.quant_max}"

    def forward(self, x: Tensor) -> Tensor:
        """Return `x` as it is."""
        return x

    def calculate_qparams(self) -> tuple[Tensor, Tensor]:
        """Return (scale, zero point) in subclasses that have them; raise QConfigError in others."""
        raise QConfigError(f"{type(self).__name__} has no qparams")

    def _coerce(self, name: str, form: Form, value: object) -> Any:
        return coerce(QConfigError, f"{type(self).__name__}.{name}", form, value)  # rule: CFG-14

    def _fill_range(self) -> None:
        """Set an end of the range that was not given to the dtype's. Raises QConfigError if the range does not fit."""
        low, high = dtype_range(self.dtype)
        self.quant_min = low if self.quant_min is None else self.quant_min
        self.quant_max = high if self.quant_max is None else self.quant_max
        if not low <= self.quant_min < self.quant_max <= high:
            ends = f"{self.quant_min}..{self.quant_max}"
            message = f"quant range {ends} is empty or outside {low}..{high} of {self.dtype}"
            raise QConfigError(f"{type(self).__name__}: {message}")


def asks_whole_range(observer: Any) -> bool:
    """Tell whether a refimpl observer was made with ``reduce_range=False``: 8 bits on every engine. (CVT-03)"""
    inner = getattr(observer, "activation_post_process", observer)
    return isinstance(inner, Observer) and inner.asks_whole_range


class RangeObserver(Observer):
    """Base of the observers that keep a range of reals: one, or one per channel. Arguments as in MinMaxObserver.

    A `reduce_range` of dynamic observers is explained in PlaceholderObserver.
    """

    _version = 3  # the state dict's, as torch counts
    resized = ("min_val", "max_val")
    schemes: ClassVar[tuple[Any, ...]] = PER_TENSOR
    unseen: ClassVar[tuple[Any, Any]] = (math.inf, -math.inf)
    can_be_dynamic = False
    eps: Tensor
    min_val: Tensor
    max_val: Tensor

    def __init__(
        self,
        dtype: torch.dtype = quint8,
        *,
        reduce_range: bool | None = None,
        factory_kwargs: dict[str, Any] | None = None,
        eps: float = _EPS,
        **arguments: Any,
    ) -> None:
        super().__init__(dtype, reduce_range=reduce_range, **{"qscheme": self.schemes[0]} | arguments)
        self.reduce_range = bool(reduce_range)
        self.has_customized_qrange = self.quant_min is not None and self.quant_max is not None
        self._fill_range()
        if misfit := self._format_misfit():
            raise QConfigError(f"{type(self).__name__}: {misfit}")
        if self.reduce_range and (self.has_customized_qrange or dtype in _EIGHT_BITS):
            self.quant_min, self.quant_max = self.quant_min // 2, self.quant_max // 2
        for name, value in (("eps", [eps]), *zip(("min_val", "max_val"), self.unseen, strict=True)):
            self.register_buffer(name, torch.tensor(value, **(factory_kwargs or {})))

    def _format_misfit(self) -> str:
        """Return which arguments do not go together; "" if all do."""
        if self.qscheme not in self.schemes:
            return f"qscheme is {self.qscheme}, must be one of {self.schemes}"
        if self.is_dynamic and not self.can_be_dynamic:
            return "is_dynamic, but the qparams depend on earlier batches, or are per channel"
        if self.reduce_range and self.qscheme in SYMMETRIC and dtype_range(self.dtype) == (0, 255):
            return f"reduce_range leaves no middle of symmetric {self.dtype}"
        return ""

    def forward(self, x: Tensor) -> Tensor:
        """Take the values of `x`, of any shape, into the range; return `x`. An empty batch changes nothing."""
        if x.numel():
            values = x.detach().to(self.min_val.dtype)
            low, high = self._measure_bounds(values)
            if low.isnan().any():
                low, high = self._measure_without_nan(values)
            if (low <= high).all():
                self._keep(*(self._merge(low, high) if has_data(self.min_val, self.max_val) else (low, high)))
        return x

    def _measure_without_nan(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the bounds of the values that are numbers, with a warning; (inf, -inf) if there are none. (OBS-18)"""
        self._warn_of_nan(x)
        low = self._measure_bounds(x.nan_to_num(math.inf, math.inf, -math.inf))[0]
        high = self._measure_bounds(x.nan_to_num(-math.inf, math.inf, -math.inf))[1]
        is_empty = low > high
        if is_empty.all():
            return low, high
        return low.where(~is_empty, 0.0), high.where(~is_empty, 0.0)

    def _warn_of_nan(self, x: Tensor) -> None:
        """Warn once of values that are no numbers. (OBS-18)"""
        if not self.has_warned:
            self.has_warned = True
            value = f" of {self.observes!r}" if self.observes else ""
            share = f"{int(x.isnan().sum())} of {x.numel()} values are NaN, and are left out"
            warn_user(f"{type(self).__name__}{value}: {share}")  # rule: OBS-18

    def _measure_bounds(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return torch.aminmax(x)

    def _merge(self, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
        return torch.minimum(self.min_val, low), torch.maximum(self.max_val, high)

    def _keep(self, low: Tensor, high: Tensor) -> None:
        self.min_val.resize_(low.shape).copy_(low)
        self.max_val.resize_(high.shape).copy_(high)

    def reset_min_max_vals(self) -> None:
        """Forget all values: the range is as in a new observer."""
        self._keep(*map(torch.tensor, self.unseen))

    def calculate_qparams(self) -> tuple[Tensor, Tensor]:
        """Return (scale, zero point), two tensors (1,), or (channels,) per channel. (NUM-02)

        The scale is float32, the zero point int32 (affine), int64 (symmetric) or float32 (float qparams). Without data
        they are 1 and 0, with a warning.
        """
        return substitute_qparams(self) or self._compute_qparams(*self._choose_range())

    def _choose_range(self) -> tuple[Tensor, Tensor]:
        return self.min_val, self.max_val

    def _compute_qparams(self, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
        """Compute qparams; a symmetric zero point is 0 if signed, else mid-range, rounded down in a given range."""
        ends = (self.quant_min, self.quant_max)
        middle = 0 if dtype_range(self.dtype)[0] < 0 else (sum(ends) + (not self.has_customized_qrange)) // 2
        return compute_qparams(low, high, *ends, qscheme=self.qscheme, eps=self.eps, middle=middle)  # rule: NUM-02


class MinMaxObserver(RangeObserver):
    """Keeps the smallest and the largest value seen; one scale and zero point for the tensor. (NUM-02)

    `dtype`: the integers to quantize to. `reduce_range`: halve their range, 8 bits to 7. `eps`: the smallest scale.
    `factory_kwargs`: device and dtype of the buffers ``min_val`` and ``max_val``. Further keywords: `qscheme`,
    ``torch.per_tensor_affine`` (default) or ``per_tensor_symmetric``; `quant_min` and `quant_max`, by default the
    dtype's ends; `is_dynamic`, by default False. Raises QConfigError for arguments that do not go together.
    """

    can_be_dynamic = True


class PerChannelMinMaxObserver(RangeObserver):
    """Keeps one range per slice along `ch_axis`: a scale and zero point for each. (NUM-02)

    Further keywords are those of MinMaxObserver; `qscheme` is ``torch.per_channel_affine`` (default),
    ``per_channel_symmetric`` or ``per_channel_affine_float_qparams``. Never dynamic.
    """

    schemes = PER_CHANNEL
    unseen = ([], [])

    def __init__(self, ch_axis: int = 0, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.ch_axis = self._coerce("ch_axis", WHOLE, ch_axis)

    def _measure_bounds(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return measure_channels(x, self.ch_axis)


class _MovingAverage(RangeObserver):
    def __init__(self, averaging_constant: float = 0.01, **arguments: Any) -> None:
        self.averaging_constant = averaging_constant
        self.can_be_dynamic &= averaging_constant == 1
        super().__init__(**arguments)

    def _merge(self, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
        return self._move(self.min_val, low), self._move(self.max_val, high)

    def _move(self, end: Tensor, new: Tensor) -> Tensor:
        """Move an end of the range towards a batch's; an infinite one stays where it is."""
        return torch.where(end.isinf(), end, end + self.averaging_constant * (new - end))


class MovingAverageMinMaxObserver(_MovingAverage, MinMaxObserver):
    """Moves each end of the range by `averaging_constant` of its distance to the batch's. (NUM-02)

    With 1 only the last batch counts, and it may be dynamic. Further keywords are those of MinMaxObserver.
    """


class MovingAveragePerChannelMinMaxObserver(_MovingAverage, PerChannelMinMaxObserver):
    """Moves each end of every range by `averaging_constant` of its distance to the batch's. (NUM-02)

    Further keywords are those of PerChannelMinMaxObserver.
    """


class FixedQParamsObserver(Observer):
    """Returns the qparams of its constructor, whatever it sees: for ops whose result has a known range. (DTY-05)

    `dtype`: by default quint8. Raises QConfigError for a dtype that is no quantized one.
    """

    scale: Tensor
    zero_point: Tensor

    def __init__(self, scale: float, zero_point: int, **arguments: Any) -> None:
        super().__init__(**{"qscheme": torch.per_tensor_affine} | arguments)
        self._fill_range()
        self.register_buffer("scale", torch.tensor([scale], dtype=torch.float32))
        self.register_buffer("zero_point", torch.tensor([zero_point], dtype=torch.int32))

    def calculate_qparams(self) -> tuple[Tensor, Tensor]:
        """Return the fixed scale, float32 (1,), and zero point, int32 (1,)."""
        return self.scale, self.zero_point


class PlaceholderObserver(Observer):
    """Names a dtype and measures nothing: for dynamic, float16 and weight-only quantization.

    With `is_dynamic` (a keyword) qparams are chosen while running, no smaller than `eps` where the form can say so.
    `reduce_range` gives their bits: True 7, False 8, None as many as torch's ops take on the engine that is set while
    converting. (CVT-03) `custom_op_name` is kept as ``custom_op``, and read by nothing here.
    """

    def __init__(
        self,
        dtype: torch.dtype = torch.float32,
        custom_op_name: str = "",
        *,
        reduce_range: bool | None = None,
        eps: float = _EPS,
        **arguments: Any,
    ) -> None:
        super().__init__(dtype, reduce_range=reduce_range, **{"qscheme": torch.per_tensor_affine} | arguments)
        self.custom_op, self.eps = custom_op_name, eps
        if reduce_range:
            self._fill_range()
            self.quant_min, self.quant_max = self.quant_min // 2, self.quant_max // 2


class NoopObserver(Observer):
    """Names a dtype and nothing else: by default float16."""

    def __init__(self, dtype: torch.dtype = torch.float16, custom_op_name: str = "") -> None:
        super().__init__(dtype)
        self.custom_op = custom_op_name


class ReuseInputObserver(Observer):
    """Asks for the observer of the op's input at its output, as an op like reshape may. (OBS-12)

    Give it as a QConfig's activation for such ops. It has no own qparams.
    """


def note_infinite(self: Any, input: tuple[Tensor]) -> None:
    """Note, as a hook before forward, that an observer of torch's sees an infinite value. (OBS-18)

    It can be traced, and compiled by TorchScript, which knows no constants of modules: the number is
    `qparams.INFINITE`.
    """
    self.saw_infinite.logical_or_((input[0].abs() >= 1.7014117331926443e38).any())
