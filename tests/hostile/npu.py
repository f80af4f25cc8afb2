"""A small machine for certificates: one claim that holds, one that is waived, two that vary, a declared limit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule

from backends.base import Capabilities, Execution, UnsupportedPattern
from refimpl import BackendConfig, BackendPatternConfig, DTypeConfig
from tests.conformance.support.fake_backends import fakes


class Npu(fakes.Good):
    """Runs nn.Linear with weights per tensor right, refuses weights per channel, and races in nn.Hardswish."""

    name = "npu"
    waivers = Path(__file__).with_name("npu.waivers.toml")

    def backend_config(self) -> BackendConfig:
        dtypes = DTypeConfig(input_dtype=torch.quint8, output_dtype=torch.quint8)
        hardswish = BackendPatternConfig(nn.Hardswish).add_dtype_config(dtypes)
        return super().backend_config().set_backend_pattern_config(hardswish)

    def capabilities(self) -> Capabilities:
        schemes = ("per_channel_symmetric", "per_tensor_symmetric")  # whole models take the last one
        limits = {"nn.Linear": {"bias": (True,)}}
        return Capabilities(weight_schemes=schemes, limits=limits, float_accumulation=True)

    def lower(self, reference_model: GraphModule, example_inputs: tuple[Any, ...]) -> Callable[..., Any]:
        modules = list(reference_model.modules())
        if any(getattr(module, "weight_qscheme", None) is torch.per_channel_affine for module in modules):
            raise UnsupportedPattern("weights per channel")
        return (
            Racing(reference_model) if any(isinstance(module, nn.Hardswish) for module in modules) else reference_model
        )

    def execution(self, lowered: Callable[..., Any]) -> Execution:
        return Execution(quantized_ops=("npu",), float_fallbacks=())


class Racing:
    """Gives every second result with its elements moved."""

    def __init__(self, model: GraphModule) -> None:
        self._model = model
        self._calls = 0

    def __call__(self, *inputs: Any) -> Any:
        self._calls += 1
        output = self._model(*inputs)
        return output.flatten().roll(1).reshape(output.shape) if self._calls % 2 else output
