"""Ops that quantize their input while they run, lowered on every engine: the range that was asked for (LOW-03, CVT-09).

Torch's modules take 7 bits of it on every engine but qnnpack, which always takes 8.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import both_flows as flows
import pytest
import torch
import torch.ao.quantization.quantize_fx as torch_fx
import torch.nn.functional as F
from torch import Tensor, nn

import refimpl
from backends.torch_engine import engine
from refimpl.lower import NOT_LOWERED

ENGINES = [name for name in flows.ENGINES if name in torch.backends.quantized.supported_engines]
each_engine = pytest.mark.parametrize("name", ENGINES)
WIDTH = 16


class Function(nn.Module):
    """F.linear, with relu."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, WIDTH) / 4)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(F.linear(x, self.weight))


# What is lowered, and the shape of its input: one step of a recurrent module, whose first state quantizes exactly.
MODELS: Mapping[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: nn.Linear(WIDTH, 8), (3, WIDTH)),
    "linear relu": (lambda: nn.Sequential(nn.Linear(WIDTH, 8), nn.ReLU()), (3, WIDTH)),
    "function": (Function, (3, WIDTH)),
    "lstm": (lambda: nn.LSTM(WIDTH, 8), (1, 3, WIDTH)),
    "gru": (lambda: nn.GRU(WIDTH, 8, bidirectional=True), (1, 3, WIDTH)),
    "lstm cell": (lambda: nn.LSTMCell(WIDTH, 8), (3, WIDTH)),
    "gru cell": (lambda: nn.GRUCell(WIDTH, 8), (3, WIDTH)),
    "rnn cell": (lambda: nn.RNNCell(WIDTH, 8), (3, WIDTH)),
}


def qconfig(quant_max: int) -> Any:
    activation = flows.torchs.PlaceholderObserver.with_args(
        dtype=torch.quint8, quant_min=0, quant_max=quant_max, is_dynamic=True
    )
    return flows.torch_qconfigs.QConfig(activation, flows.QCONFIG.weight)


def made(name: str) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    make, shape = MODELS[name]
    return nn.Sequential(make()).eval(), torch.randn(shape) * 3


def outputs(model: Any, x: Tensor) -> Tensor:
    """The model's results, one after the other."""
    with torch.no_grad():
        found = torch.utils._pytree.tree_leaves(model(x))
    return torch.cat([value.reshape(-1) for value in found])


def slack(model: nn.Module, x: Tensor) -> float:
    """How far two float32 evaluations of the same integers may be apart.

    A dot product of n terms is off by n * eps * sum|x * w| at most (its qparams' products included in n + 2); gates
    have slopes of at most 1, and a state is a sum of two products of gates: twice that, for both sides.
    """
    largest = max(float(w.detach().abs().max()) for w in model.parameters() if w.dim() > 1)
    eps = torch.finfo(torch.float32).eps
    return 4 * (WIDTH + 2) * eps * float(x.abs().sum(-1).max()) * largest


@pytest.mark.rule("LOW-03")
@pytest.mark.rule("CVT-09")
@each_engine
@pytest.mark.parametrize("quant_max", [255, 127])
@pytest.mark.parametrize("kind", MODELS)
def test_what_is_lowered_has_the_range_that_the_reference_model_has(kind: str, quant_max: int, name: str) -> None:
    model, x = made(kind)
    with engine(name):
        flow = flows.our_flow(model, flows.global_mapping(qconfig(quant_max)), [(x,)], "native")
        lowered: Any = refimpl.convert_fx(flow.prepared)
        assert (outputs(lowered, x) - outputs(flow.reference, x)).abs().max() <= slack(model, x)
    reasons = [entry.reason for entry in lowered.meta[NOT_LOWERED]]
    if quant_max == 127 and name == "qnnpack":
        assert reasons == ["LOW-03: the range is reduced to 7 bits; qnnpack quantizes to 8 at run time"]
    elif quant_max == 255 and name != "qnnpack" and "cell" in kind:
        assert reasons == ["LOW-03: the quantized cell takes 7 bits of its inputs; all 8 are asked for"]
    else:
        assert not reasons


@pytest.mark.rule("LOW-03")
@pytest.mark.skipif("onednn" not in ENGINES, reason="this build of torch has no engine onednn")
@pytest.mark.parametrize("kind", ["linear", "linear relu", "lstm", "gru", "lstm cell"])
def test_torchs_lowering_on_onednn_takes_another_range_than_its_own_reference_model(kind: str) -> None:
    model, x = made(kind)
    config = flows.torch_config("native")
    with engine("onednn"):
        prepared = torch_fx.prepare_fx(model, flows.global_mapping(qconfig(255)), (x,), backend_config=config)
        reference: Any = torch_fx.convert_to_reference_fx(copy.deepcopy(prepared), backend_config=config)
        lowered = torch_fx.convert_fx(copy.deepcopy(prepared), backend_config=config)
        found = (outputs(lowered, x) - outputs(reference, x)).abs().max()
        assert found > 10 * slack(model, x), "torch is right now: drop this deviation"
        ours = (outputs(refimpl.lower(reference), x) - outputs(reference, x)).abs().max()
        assert ours <= slack(model, x), "ours lowers torch's reference model rightly"


@pytest.mark.rule("LOW-02")
@each_engine
def test_a_module_that_becomes_a_function_keeps_its_weight_in_the_state_dict(name: str) -> None:
    model, x = made("linear relu")
    flow = flows.our_flow(model, flows.global_mapping(qconfig(255)), [(x,)], "native")
    with engine(name):
        lowered = refimpl.convert_fx(flow.prepared)
        again = copy.deepcopy(lowered)
        again.load_state_dict(lowered.state_dict())
        assert torch.equal(outputs(again, x), outputs(lowered, x)), "8 bits after loading too"
