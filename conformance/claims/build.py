"""Building a case's float model: its parameters in its value range, and the identity that may stand before it."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from fx_quant_conformance.conformance.claims.case import Case, ValueRange
from fx_quant_conformance.conformance.claims.inputs import draw_calibration_inputs

PRELUDE = "prelude"
"""Name of the module before the pattern."""
_DRAWS = 64
_NEARLY_ALL = 2.0**30.9
_MAGNITUDES = 2.0**4  # by how much the weights of channels differ in op samples, and a little more


class Preluded(nn.Module):
    """A model after an identity that is quantized with its own qparams."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.prelude, self.inner = nn.Identity(), inner

    def forward(self, x: Any) -> Any:
        """Pass the input on."""
        return self.inner(self.prelude(x))


def build_model(case: Case) -> nn.Module:
    """Build a case's model, in eval mode, with parameters under which it gives something else than zeros.

    A single output after a relu is often zero for all inputs, and then no range exists to quantize it to.
    """
    with torch.no_grad():
        for _ in range(_DRAWS):
            model = case.build()
            model.eval()
            _scale_parameters(model, case.value_range)
            if any(_is_alive(model(*inputs)) for inputs in draw_calibration_inputs(case)):
                break
    return model


def _is_alive(output: Any) -> bool:
    tensors = output if isinstance(output, (tuple, list)) else (output,)
    return any(bool((each != 0).any()) for each in tensors if isinstance(each, torch.Tensor))


def _scale_parameters(model: nn.Module, value_range: ValueRange) -> None:
    """Scale weights, biases and norm statistics to the input range; otherwise the statistics would dominate."""
    bias = value_range.bias if value_range.bias < math.inf else 1.0
    for name, parameter in model.named_parameters():
        kind = name.rpartition(".")[2].rstrip("0123456789")
        parameter.mul_({"weight": value_range.weight, "bias": bias}.get(kind, 1.0))
    if value_range.bias == math.inf:
        _fill_int32(model, value_range)
    reach = max(map(abs, value_range.ranges[0]))
    for name, statistic in model.named_buffers():
        statistic.mul_({"running_mean": reach, "running_var": reach**2}.get(name.rpartition(".")[2], 1))


def _fill_int32(model: nn.Module, value_range: ValueRange) -> None:
    """Make each layer's bias nearly as large as int32 holds with scale s_x·s_w; what is added to it must fit too."""
    low, high = value_range.ranges[0]
    named = dict(model.named_parameters())
    for name, bias in named.items():
        place, _, kind = name.rpartition(".")
        weight = named.get(f"{place}.{kind.replace('bias', 'weight')}".lstrip("."))
        if not kind.startswith("bias") or weight is None or weight.dim() < 2:
            continue
        axis = 0 if len(weight) == len(bias) else 1
        if weight.shape[axis] == len(bias):
            largest = weight.abs().transpose(0, axis).flatten(1).amax(1)
        else:  # transposed, in groups: no axis holds the output's channels
            largest = weight.abs().amax().expand(len(bias)) / _MAGNITUDES
        steps = float((bias.abs() / largest).max()) / ((high - low) / 255 / 127.5)
        bias.mul_(_NEARLY_ALL / steps)
