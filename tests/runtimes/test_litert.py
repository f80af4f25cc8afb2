"""Reference models on LiteRT: what is prepared for its converter, what is computed, and what is said of it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from fx_quant_conformance.backends.discovery import find_backend
from fx_quant_conformance.backends.litert import LiteRTBackend, lay_weights
from fx_quant_conformance.backends.lowering import lower_reference
from fx_quant_conformance.refimpl import (
    MinMaxObserver,
    PerChannelMinMaxObserver,
    QConfig,
    QConfigMapping,
    convert_to_reference_decomposed_fx,
    export_reference,
    prepare_fx,
    qint8,
)
from tests.runtimes.references import image

WEIGHT = {"dtype": qint8, "quant_min": -127, "quant_max": 127}
SCHEMES = {
    "per tensor": MinMaxObserver.with_args(**WEIGHT, qscheme=torch.per_tensor_symmetric),
    "per channel": PerChannelMinMaxObserver.with_args(**WEIGHT, qscheme=torch.per_channel_symmetric),
}


def reference_of(model: nn.Module, x: Tensor, scheme: str = "per channel") -> GraphModule:
    qconfig = QConfig(activation=MinMaxObserver.with_args(dtype=qint8), weight=SCHEMES[scheme])
    config = LiteRTBackend().backend_config()
    prepared = prepare_fx(model.eval(), QConfigMapping().set_global(qconfig), (x,), backend_config=config)
    prepared(x)
    return convert_to_reference_decomposed_fx(prepared, backend_config=config)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_weights_are_laid_on_their_grid_and_the_program_computes_the_same(scheme: str) -> None:
    """A weight of 2.5 steps, which is rounded to 2, would be 3 for the converter."""
    layer = nn.Linear(4, 2)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([[127.0, 2.5, -0.5, 1.3], [-127.0, 3.5, 0.4, 64.0]]) / 64)
    reference = reference_of(nn.Sequential(layer), x := image(3, 4), scheme)
    program = export_reference(reference, (x,), fold_weights=False, dynamic_batch=False)
    before = program.module()(x)
    lay_weights(program)
    (weight,) = (value for value in program.state_dict.values() if value.shape == (2, 4))
    assert (weight * 64).tolist() == [[127, 2, 0, 1], [-127, 4, 0, 64]]
    assert torch.equal(program.module()(x), before)


def lowered(model: nn.Module, x: Tensor) -> tuple[float, tuple[str, ...], tuple[str, ...]]:
    """Return how far the results are off, and what is said to be quantized, and float."""
    backend = find_backend("litert")
    reference = reference_of(model, x)
    result = lower_reference(backend, reference, (x,))
    execution = backend.execution(result)
    assert execution is not None
    return (result(x) - reference(x)).abs().max().item(), execution.quantized_ops, execution.float_fallbacks


class Net(nn.Module):
    """Layers, a sum with relu, and what only moves."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 1), nn.Linear(64, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.last(torch.flatten(torch.relu(self.second(x) + x), 1))  # type: ignore[no-any-return]


@pytest.mark.slow
def test_a_network_runs_on_integers_and_each_op_is_named() -> None:
    pytest.importorskip("litert_torch")
    off, quantized, floating = lowered(Net(), image(2, 3, 4, 4))
    assert off < 1e-6 and not floating
    assert [line.partition(" (")[0] for line in quantized] == ["first", "second", "add", "relu", "flatten", "last"]


@pytest.mark.slow
def test_what_is_left_in_float_is_named() -> None:
    pytest.importorskip("litert_torch")
    off, quantized, floating = lowered(nn.Sequential(nn.MaxPool2d(2, dilation=2)), image(2, 3, 5, 5))
    assert off == 0 and not quantized
    assert floating == ("_0 (STABLEHLO_REDUCE_WINDOW)",)
