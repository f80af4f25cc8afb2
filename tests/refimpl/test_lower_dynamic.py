"""Ops that quantize their input while they run, lowered on every engine (LOW-02, LOW-03, CVT-03).

Torch's modules take 7 bits of it on every engine but qnnpack, which always takes 8.
"""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.ao.nn.quantized.dynamic as nnqd
import torch.ao.quantization.quantize_fx as torch_fx
import torch.nn.functional as F
from torch import Tensor, nn

from fx_quant_conformance import refimpl
from fx_quant_conformance.backends.torch_engines.engine import engine
from fx_quant_conformance.refimpl.graph.tracing import NOT_LOWERED
from tests.refimpl.support import both_flows as flows
from tests.refimpl.support.lowering import SMALL_WEIGHT

# One that takes 8 bits, one whose sums saturate, and one whose reference models differ from its modules.
ENGINES = [name for name in ("qnnpack", "x86", "onednn") if name in torch.backends.quantized.supported_engines]
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
    "gru cell": (lambda: nn.GRUCell(WIDTH, 8), (3, WIDTH)),
}


def qconfig(bits: int) -> Any:
    """A dynamic QConfig whose observer says how many bits."""
    activation = refimpl.PlaceholderObserver.with_args(
        dtype=torch.quint8, is_dynamic=True, reduce_range={7: True, 8: False}[bits]
    )
    return flows.torch_qconfigs.QConfig(activation, SMALL_WEIGHT)


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


@pytest.mark.rule("LOW-02")
@pytest.mark.rule("CVT-03")
@each_engine
@pytest.mark.parametrize(
    ("kind", "default"),
    [*((kind, "default_dynamic_qconfig") for kind in MODELS), ("linear", "per_channel_dynamic_qconfig")],
)
def test_the_default_is_torchs_module_and_torchs_bits(kind: str, default: str, name: str) -> None:
    model, x = made(kind)
    mapping, config = flows.global_mapping(getattr(flows.torch_qconfigs, default)), flows.torch_config("native")
    with engine(name):
        flow = flows.our_flow(model, mapping, [(x,)], "native")
        lowered: Any = refimpl.convert_fx(flow.prepared)
        prepared = torch_fx.prepare_fx(copy.deepcopy(model), mapping, (x,), backend_config=config)
        torchs: Any = torch_fx.convert_fx(prepared, backend_config=config)
        assert torch.equal(outputs(lowered, x), outputs(torchs, x))
    assert [type(part) for part in lowered.modules()][1:] == [type(part) for part in torchs.modules()][1:]
    if kind != "function":  # torch forgets a packed weight whose name begins with a digit
        assert list(lowered.state_dict()) == list(torchs.state_dict())
    assert lowered.meta[NOT_LOWERED] == ()


@pytest.mark.rule("LOW-03")
@pytest.mark.rule("CVT-03")
@each_engine
@pytest.mark.parametrize("bits", [8, 7])
@pytest.mark.parametrize("kind", MODELS)
def test_bits_that_an_observer_asks_for_are_those_of_the_reference_model(kind: str, bits: int, name: str) -> None:
    model, x = made(kind)
    with engine(name):
        flow = flows.our_flow(model, flows.global_mapping(qconfig(bits)), [(x,)], "native")
        lowered: Any = refimpl.convert_fx(flow.prepared)
        assert (outputs(lowered, x) - outputs(flow.reference, x)).abs().max() <= slack(model, x)
    reasons = [entry.reason for entry in lowered.meta[NOT_LOWERED]]
    if bits == 7 and name == "qnnpack":
        assert reasons == ["LOW-03: the range is reduced to 7 bits; qnnpack quantizes to 8 at run time"]
    elif bits == 8 and name != "qnnpack" and "cell" in kind:
        assert reasons == ["LOW-03: the quantized cell takes 7 bits of its inputs; all 8 are asked for"]
    else:
        assert not reasons


@pytest.mark.rule("LOW-03")
@pytest.mark.skipif("onednn" not in ENGINES, reason="this build of torch has no engine onednn")
@pytest.mark.parametrize("kind", ["linear", "lstm", "gru cell"])
def test_torchs_lowering_on_onednn_takes_another_range_than_its_own_reference_model(kind: str) -> None:
    model, x = made(kind)
    asked = flows.torch_qconfigs.QConfig(flows.torch_qconfigs.default_dynamic_qconfig.activation, SMALL_WEIGHT)
    config, mapping = flows.torch_config("native"), flows.global_mapping(asked)
    with engine("onednn"):
        prepared = torch_fx.prepare_fx(model, mapping, (x,), backend_config=config)
        reference: Any = torch_fx.convert_to_reference_fx(copy.deepcopy(prepared), backend_config=config)
        lowered = torch_fx.convert_fx(copy.deepcopy(prepared), backend_config=config)
        found = (outputs(lowered, x) - outputs(reference, x)).abs().max()
        assert found > 10 * slack(model, x), "torch is right now: drop this deviation"
        ours = (outputs(refimpl.lower(reference), x) - outputs(reference, x)).abs().max()
        assert ours <= slack(model, x), "a reference model without a decision log is lowered as it is"


@pytest.mark.rule("LOW-02")
@pytest.mark.rule("CVT-12")
@each_engine
@pytest.mark.parametrize("kind", ["linear", "linear relu"])
def test_a_lowered_dynamic_linear_survives_save_and_load(kind: str, name: str) -> None:
    model, x = made(kind)
    asked = qconfig(8)
    with engine(name):
        flow = flows.our_flow(model, flows.global_mapping(asked), [(x,)], "native")
        lowered: Any = refimpl.convert_fx(flow.prepared)
        state, whole = io.BytesIO(), io.BytesIO()
        torch.save(lowered.state_dict(), state)
        torch.save(lowered, whole)
        state.seek(0)
        whole.seek(0)
        other = copy.deepcopy(model)
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.zero_()  # so that only what is loaded is right
        again: Any = refimpl.convert_fx(flows.our_flow(other, flows.global_mapping(asked), [(x,)], "native").prepared)
        again.load_state_dict(torch.load(state))  # weights_only, which is the default
        loaded = torch.load(whole, weights_only=False)
        assert torch.equal(outputs(again, x), outputs(lowered, x))
        assert torch.equal(outputs(loaded, x), outputs(lowered, x))
    linear: Any
    (linear,) = (part for part in lowered.modules() if isinstance(part, nnqd.Linear))
    assert linear.weight().dtype == torch.qint8 and "DynamicQuantizedLinear" in str(lowered)
