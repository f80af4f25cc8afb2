"""Fake quantizes: observe a value, then quantize and dequantize it, in float (rules QAT-01, QAT-03, NUM-01).

Names, keywords and state-dict keys are torch's. Gradients pass straight through where the value was not clamped.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fx_quant_conformance.refimpl.errors import QConfigError
from fx_quant_conformance.refimpl.legacy import QUANTIZATION
from fx_quant_conformance.refimpl.observers.observers import Constructible, MovingAverageMinMaxObserver, Observer
from fx_quant_conformance.refimpl.observers.qparams import PER_CHANNEL, SYMMETRIC, saw_infinite
from fx_quant_conformance.refimpl.releases import find_torchs


class FakeQuantize(Constructible):
    """Observes values, and rounds them to the grid of the observed qparams: training sees the error. (QAT-01)

    `observer`: a class or constructor, refimpl's or torch's, called once with the other keywords, and with `quant_min`
    and `quant_max` if both are given; its result is ``activation_post_process``. Gradients pass where nothing was
    clamped. Raises QConfigError if the observer has no range of integers.
    """

    resized = ("scale", "zero_point")
    flag_dtype = torch.uint8
    fake_quant_enabled: Tensor
    observer_enabled: Tensor
    scale: Tensor
    """A buffer: (1,), or (channels,) along ``ch_axis``; a disabled observer leaves it as it is."""
    zero_point: Tensor
    """A buffer of the same shape; a disabled observer leaves it as it is."""

    def __init__(
        self,
        observer: Callable[..., Any] = MovingAverageMinMaxObserver,
        quant_min: int | None = None,
        quant_max: int | None = None,
        is_dynamic: bool = False,
        **observer_kwargs: Any,
    ) -> None:
        super().__init__()
        for name in ("fake_quant_enabled", "observer_enabled"):
            self.register_buffer(name, torch.ones(1, dtype=self.flag_dtype))
        if quant_min is not None and quant_max is not None:
            observer_kwargs |= {"quant_min": quant_min, "quant_max": quant_max}
        inner = observer(is_dynamic=is_dynamic, **observer_kwargs)
        if getattr(inner, "quant_min", None) is None or getattr(inner, "quant_max", None) is None:
            raise QConfigError(f"{type(self).__name__}: {type(inner).__name__} has no range of integers to quantize to")
        self.activation_post_process = inner
        self.quant_min, self.quant_max = inner.quant_min, inner.quant_max
        self.dtype, self.qscheme, self.is_dynamic = inner.dtype, inner.qscheme, inner.is_dynamic
        self.is_per_channel = inner.qscheme in PER_CHANNEL
        self.ch_axis = getattr(inner, "ch_axis", -1)
        is_real = inner.qscheme == torch.per_channel_affine_float_qparams
        self.register_buffer("scale", torch.ones(1))
        self.register_buffer("zero_point", torch.zeros(1, dtype=torch.float32 if is_real else torch.int32))

    def enable_fake_quant(self, enabled: bool = True) -> None:
        """Quantize from now on; if False, pass values through."""
        self.fake_quant_enabled[0] = int(enabled)

    def disable_fake_quant(self) -> None:
        """Pass values through from now on; the observer continues."""
        self.enable_fake_quant(False)

    def enable_observer(self, enabled: bool = True) -> None:
        """Observe from now on; if False, keep the qparams."""
        self.observer_enabled[0] = int(enabled)

    def disable_observer(self) -> None:
        """Keep the qparams from now on."""
        self.enable_observer(False)

    def extra_repr(self) -> str:
        """Return the switches and the qparams, as printed models show them."""
        switches = f"observer_enabled={self.observer_enabled}, fake_quant_enabled={self.fake_quant_enabled}"
        return f"{switches}, scale={self.scale}, zero_point={self.zero_point}"

    def calculate_qparams(self) -> tuple[Tensor, Tensor]:
        """Return the inner observer's (scale, zero point); the buffers are the last observed batch's."""
        return self.activation_post_process.calculate_qparams()  # type: ignore[no-any-return]

    def forward(self, x: Tensor) -> Tensor:
        """Return `x`, of any shape: observed if that is enabled, then rounded to the grid if that is. (NUM-01)"""
        if self.observer_enabled[0]:
            self.activation_post_process(x.detach())
            if saw_infinite(self):
                return x  # rule: OBS-18
            for buffer, new in zip((self.scale, self.zero_point), self.calculate_qparams(), strict=True):
                buffer.resize_(new.shape).copy_(new)
        return self._quantize(x) if self.fake_quant_enabled[0] else x

    def _quantize(self, x: Tensor) -> Tensor:
        bounds = (self.quant_min, self.quant_max)  # rule: NUM-01
        if self.is_per_channel:
            return torch.fake_quantize_per_channel_affine(x, self.scale, self.zero_point, self.ch_axis, *bounds)
        return torch.fake_quantize_per_tensor_affine(x, self.scale, self.zero_point, *bounds)


class FixedQParamsFakeQuantize(FakeQuantize):
    """Rounds to the grid of its observer's fixed qparams, whatever it sees. (DTY-05)

    Raises QConfigError if `observer` makes one whose qparams are not fixed.
    """

    def __init__(self, observer: Callable[..., Any]) -> None:
        super().__init__(observer=observer)
        inner = self.activation_post_process
        if not hasattr(inner, "scale"):
            raise QConfigError(f"FixedQParamsFakeQuantize: {type(inner).__name__} has no fixed scale and zero_point")
        self.scale, self.zero_point = inner.scale, inner.zero_point


class FusedMovingAvgObsFakeQuantize(FakeQuantize):
    """FakeQuantize with a moving-average observer, in one native op that updates range and buffers.

    In a symmetric scheme the op rounds to other qparams than the observer's formula, which ``calculate_qparams`` and so
    convert use (NUM-02): a range of -1..0.5 is trained with a scale of 1/128, and converted with 1/127.5. Raises
    QConfigError if `observer` makes another kind.
    """

    flag_dtype = torch.int64

    def __init__(
        self,
        observer: Callable[..., Any] = MovingAverageMinMaxObserver,
        quant_min: int = 0,
        quant_max: int = 255,
        **observer_kwargs: Any,
    ) -> None:
        super().__init__(observer, quant_min, quant_max, **observer_kwargs)
        if not hasattr(self.activation_post_process, "averaging_constant"):
            name = type(self.activation_post_process).__name__
            raise QConfigError(f"FusedMovingAvgObsFakeQuantize: needs a moving-average observer, found {name}")
        self.is_symmetric_quant = self.qscheme in SYMMETRIC

    def forward(self, x: Tensor) -> Tensor:
        """Return FakeQuantize's result; the op itself updates ranges and qparams."""
        if not self.observer_enabled[0]:
            return self._observe_and_round(x)
        inner = self.activation_post_process
        buffers = (inner.min_val, inner.max_val, self.scale, self.zero_point)
        before = [buffer.clone() for buffer in buffers]
        try:
            rounded = self._observe_and_round(x)
            if (inner.min_val.isfinite() & inner.max_val.isfinite()).all():
                return rounded
        except RuntimeError:  # of qparams that are NaN
            if x.isfinite().all():
                raise
        for buffer, numbers in zip(buffers, before, strict=True):
            buffer.resize_(numbers.shape).copy_(numbers)
        return super().forward(x)  # rule: OBS-18

    def _observe_and_round(self, x: Tensor) -> Tensor:
        inner = self.activation_post_process
        return torch.fused_moving_avg_obs_fake_quant(
            x,
            self.observer_enabled,
            self.fake_quant_enabled,
            inner.min_val,
            inner.max_val,
            self.scale,
            self.zero_point,
            inner.averaging_constant,
            self.quant_min,
            self.quant_max,
            self.ch_axis,
            self.is_per_channel,
            self.is_symmetric_quant,
        )


def _make_switch(method: str) -> Callable[[nn.Module], None]:
    def apply(module: nn.Module) -> None:
        if hasattr(module, "fake_quant_enabled"):  # ours, torch's, or a user's
            getattr(module, method)()

    apply.__name__ = apply.__qualname__ = method
    apply.__doc__ = f"Call ``{method}`` of a fake quantize, and skip any other module: for ``model.apply``."
    return apply


enable_observer = _make_switch("enable_observer")
disable_observer = _make_switch("disable_observer")
enable_fake_quant = _make_switch("enable_fake_quant")
disable_fake_quant = _make_switch("disable_fake_quant")


def _register_with_torch() -> None:
    """Let torch's tools, which ask for their base classes, take ours: its switches, for instance. (CFG-14)"""
    torchs = find_torchs(QUANTIZATION)
    if torchs is not None:
        torchs.ObserverBase.register(Observer)  # rule: CFG-14
        torchs.FakeQuantizeBase.register(FakeQuantize)


_register_with_torch()
