"""Building a case's float model: its parameters in the case's regime, and the identity that may stand before it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from conformance.cases import Case, Regime
from conformance.draws import calibration_inputs

_DRAWS = 64

PRELUDE = "prelude"
"""The name of the module before the pattern."""


class Preluded(nn.Module):
    """A model behind an identity that is quantized with qparams of its own."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.prelude, self.inner = nn.Identity(), inner

    def forward(self, x: Any) -> Any:
        """Pass the input on."""
        return self.inner(self.prelude(x))


def build_model(case: Case) -> nn.Module:
    """Build a case's model, in eval mode, with parameters under which it gives something else than zeros.

    A single output after a relu is often zero for all inputs, and then there is no range to quantize it to.
    """
    with torch.no_grad():
        for _ in range(_DRAWS):
            model = case.build()
            model.eval()
            _scale_parameters(model, case.regime)
            if any(_is_alive(model(*inputs)) for inputs in calibration_inputs(case)):
                break
    return model


def _is_alive(output: Any) -> bool:
    tensors = output if isinstance(output, (tuple, list)) else (output,)
    return any(bool((each != 0).any()) for each in tensors if isinstance(each, torch.Tensor))


def _scale_parameters(model: nn.Module, regime: Regime) -> None:
    """Scale weights and biases, and the statistics of norms by how far the inputs reach: else these would be all."""
    for name, parameter in model.named_parameters():
        kind = name.rpartition(".")[2].rstrip("0123456789")
        parameter.mul_({"weight": regime.weight, "bias": regime.bias}.get(kind, 1.0))
    reach = max(map(abs, regime.ranges[0]))
    for name, statistic in model.named_buffers():
        statistic.mul_({"running_mean": reach, "running_var": reach**2}.get(name.rpartition(".")[2], 1))
