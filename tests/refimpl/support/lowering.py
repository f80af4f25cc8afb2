"""What the tests of lowering share: an engine, a calibrated flow, torch's lowered model, a small network."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.ao.quantization.quantize_fx as torch_fx
from torch import Tensor, nn

from fx_quant_conformance.backends.torch_engines.engine import engine as set_engine
from fx_quant_conformance.refimpl.graph.invariants import is_dequantize
from tests.refimpl.support import both_flows as flows

ENGINES = ("qnnpack", "fbgemm")


each_engine = pytest.mark.parametrize("engine", ENGINES, indirect=True)  # others say the same on every engine


@pytest.fixture(name="engine", params=ENGINES[:1])
def an_engine(request: pytest.FixtureRequest) -> Iterator[str]:
    """Set the quantized engine for one test, and put the old one back."""
    if request.param not in torch.backends.quantized.supported_engines:
        pytest.skip(f"this build of torch has no engine {request.param}")
    with set_engine(request.param):
        yield request.param


SMALL_WEIGHT = flows.torchs.MinMaxObserver.with_args(**flows.SIGNED_WEIGHT, quant_min=-63, quant_max=63)
"""Sums of two products stay below 2**15, where kernels saturate: fbgemm's, and others without VNNI (14, 15)."""


def small(model: nn.Module, batches: Any) -> Any:
    """Calibrate with a QConfig whose integers cannot overflow fbgemm's 16-bit intermediate sums."""
    qconfig = flows.torch_qconfigs.QConfig(flows.QCONFIG.activation, SMALL_WEIGHT)
    return flows.our_flow(model, flows.global_mapping(qconfig), batches), qconfig


def float_ops(model: Any) -> list[str]:
    """What reads a dequantized value, the graph's output aside: an op that was not lowered."""
    return [
        node.name for node in model.graph.nodes if node.op != "output" and any(map(is_dequantize, node.all_input_nodes))
    ]


def torch_lowered(model: nn.Module, mapping: Any, batches: Any) -> Any:
    """Torch's convert_fx of the same model."""
    config = flows.torch_config("qnnpack")
    prepared = torch_fx.prepare_fx(copy.deepcopy(model), mapping, batches[0], backend_config=config)
    flows.calibrate(prepared, batches)
    return torch_fx.convert_fx(prepared, backend_config=config)


class Net(nn.Module):
    """Layers for the forward function that a test gives."""

    def __init__(self, run: Callable[..., Any]) -> None:
        super().__init__()
        torch.default_generator.manual_seed(0)
        self.conv, self.other, self.run = nn.Conv2d(2, 2, 1), nn.Conv2d(2, 2, 1), run
        self.same = nn.Conv2d(2, 2, 2, padding="same")
        self.circular = nn.Conv2d(2, 2, 3, padding=1, padding_mode="circular")
        self.up = nn.ConvTranspose2d(2, 2, 3, stride=2, padding=1)
        self.inplace, self.norm = nn.ReLU(inplace=True), nn.InstanceNorm2d(2, track_running_stats=True)
        self.register_buffer("offset", torch.ones(2, 1, 1, dtype=torch.int64))

    def forward(self, x: Tensor) -> Any:
        return self.run(self, x)


X = torch.randn(2, 2, 4, 4, generator=torch.Generator().manual_seed(0))
