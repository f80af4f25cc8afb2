"""Meaning: whether two models compute the same function. Both run in float64, so that only rounding may differ."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from conformance.oracle.error_bounds import flatten

SWITCHES = ("fake_quant_enabled", "observer_enabled")
"""Attributes that turn a fake quantize, and its observer, on and off."""


def describe_difference(model: nn.Module, derived: nn.Module, inputs: tuple[Tensor, ...]) -> str:
    """Say how far a derived model is from computing the float model's function; "" where it does.

    They may differ by the float32 rounding of folded weights: 2⁻¹⁹ of the largest value on the way, for at most some
    hundred terms.
    """
    largest = [0.0]

    def note(_module: Any, _inputs: Any, output: Any) -> None:
        largest.extend(float(each.abs().max()) for each in tensors_of(output) if each.numel())

    expected = run_in_float64(model, inputs)
    hooks = [module.register_forward_hook(note) for module in derived.modules()]
    outputs = run_in_float64(derived, inputs)
    for hook in hooks:
        hook.remove()
    for right, left in zip(expected, outputs, strict=True):
        difference = float((left - right).abs().max()) if right.numel() else 0.0
        allowed = 2.0**-19 * max(largest)
        if not difference <= allowed < math.inf:  # NaN and infinities are no function's results
            return f"by {difference:.3g}; rounding explains {allowed:.3g}"
    return ""


def run_in_float64(model: nn.Module, inputs: tuple[Tensor, ...]) -> list[Tensor]:
    """Return the outputs of a model in eval mode in float64, with its fake quantizes passing values through.

    The model is float32 again afterwards, which saves a copy: that would cost more than all else here.
    """
    switches = [getattr(module, name) for module in model.modules() for name in SWITCHES if hasattr(module, name)]
    states = [switch.clone() for switch in switches]
    default = torch.get_default_dtype()
    try:
        for switch in switches:
            switch.zero_()
        torch.set_default_dtype(torch.float64)  # of tensors that a module makes
        doubles = [each.double() if each.is_floating_point() else each for each in inputs]
        with torch.no_grad():
            return tensors_of(model.double()(*doubles))
    finally:
        torch.set_default_dtype(default)
        model.float()
        for switch, state in zip(switches, states, strict=True):
            switch.copy_(state)


def tensors_of(output: Any) -> list[Tensor]:
    """Return the tensors of a model's output, in order."""
    return [each for each in flatten(output) if isinstance(each, Tensor)]
