"""Meaning: do two models compute the same function? Both are run in float64, so that only rounding may differ."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

SWITCHES = ("fake_quant_enabled", "observer_enabled")
"""Attributes that turn a fake quantize, and its observer, on and off."""


def difference_of(model: nn.Module, other: nn.Module, inputs: tuple[Tensor, ...]) -> str:
    """Say how far a model is from computing the float model's function; "" where it does.

    Both run in float64, so that they may differ only by the float32 rounding of folded weights: 2⁻¹⁹ of the largest
    value on the way, for at most some hundred terms.
    """
    largest = [0.0]

    def note(_module: Any, _inputs: Any, output: Any) -> None:
        largest.extend(float(each.abs().max()) for each in tensors(output) if each.numel())

    expected = evaluated(model, inputs)
    hooks = [module.register_forward_hook(note) for module in other.modules()]
    outputs = evaluated(other, inputs)
    for hook in hooks:
        hook.remove()
    for right, left in zip(expected, outputs, strict=True):
        difference = float((left - right).abs().max()) if right.numel() else 0.0
        allowed = 2.0**-19 * max(largest)
        if not difference <= allowed < math.inf:  # NaN and infinities are no function's results
            return f"by {difference:.3g}; rounding explains {allowed:.3g}"
    return ""


def evaluated(model: nn.Module, inputs: tuple[Tensor, ...]) -> list[Tensor]:
    """Return the outputs of a model in eval mode in float64, with its fake quantizes passing values through.

    The model is float32 again after that, as it was: that makes a copy, which costs more than all else here, needless.
    """
    switches = [getattr(module, name) for module in model.modules() for name in SWITCHES if hasattr(module, name)]
    states = [switch.clone() for switch in switches]
    default = torch.get_default_dtype()
    try:
        for switch in switches:
            switch.zero_()
        torch.set_default_dtype(torch.float64)  # of tensors that a module makes by itself
        with torch.no_grad():
            return tensors(model.double()(*(each.double() if each.is_floating_point() else each for each in inputs)))
    finally:
        torch.set_default_dtype(default)
        model.float()
        for switch, state in zip(switches, states, strict=True):
            switch.copy_(state)


def tensors(output: Any) -> list[Tensor]:
    """List the tensors of a model's output, in order."""
    if isinstance(output, Tensor):
        return [output]
    return [each for item in output for each in tensors(item)] if isinstance(output, (tuple, list)) else []
