"""Layers whose weight something computes: parametrizations are trained, hooks are named (rules QAT-01, FUS-06)."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.ao.quantization.quantize_fx as torch_fx
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize
from torch.nn.utils import prune as torch_prune
from torch.nn.utils import spectral_norm as hooked_spectral_norm
from torch.nn.utils import weight_norm as hooked_weight_norm

from fx_quant_conformance import refimpl
from tests.refimpl.support import both_flows as flows

prune: Any = torch_prune  # not annotated
QAT = flows.torch_qconfigs.get_default_qat_qconfig("x86")
BATCH = torch.randn(8, 4, 3, generator=torch.Generator().manual_seed(0))
ROWS = BATCH[..., 0]


class Symmetric(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight.triu() + weight.triu(1).mT


def parametrized_by(*names: str) -> Callable[[nn.Module], nn.Module]:
    def make(layer: nn.Module) -> nn.Module:
        for name in names:
            parametrize.register_parametrization(layer, name, Symmetric() if name == "weight" else nn.Tanh())
        return layer

    return make


PARAMETRIZATIONS: Mapping[str, Callable[[Any], Any]] = {
    "weight_norm": parametrizations.weight_norm,
    "spectral_norm": parametrizations.spectral_norm,
    "orthogonal": parametrizations.orthogonal,
    "bias": parametrized_by("bias"),
    "both": parametrized_by("weight", "bias"),
}
LAYERS: Mapping[str, tuple[Callable[[Callable[[Any], Any]], list[nn.Module]], Tensor]] = {
    "Linear": (lambda make: [make(nn.Linear(4, 4))], ROWS),
    "Linear+ReLU": (lambda make: [make(nn.Linear(4, 4)), nn.ReLU()], ROWS),
    "Linear+BatchNorm1d": (lambda make: [make(nn.Linear(4, 4)), nn.BatchNorm1d(4)], ROWS),
    "Conv1d": (lambda make: [make(nn.Conv1d(4, 4, 1))], BATCH),
    "Conv1d+BatchNorm1d+ReLU": (lambda make: [make(nn.Conv1d(4, 4, 1)), nn.BatchNorm1d(4), nn.ReLU()], BATCH),
}


def build(layers: str, make: Callable[[Any], Any]) -> tuple[Any, Tensor]:
    """A model in train mode with one such layer, and its inputs."""
    torch.manual_seed(0)
    parts, x = LAYERS[layers]
    return nn.Sequential(*parts(make)).train(), x


def prepare_qat(flow: Any, model: nn.Module, x: Tensor) -> Any:
    return flow.prepare_qat_fx(model, flows.global_mapping(QAT), (x,))


def run_float(prepared: Any, x: Tensor) -> Any:
    """Run a prepared model in eval mode that neither observes nor quantizes."""
    floating = copy.deepcopy(prepared).eval()
    for switch in (refimpl.disable_observer, refimpl.disable_fake_quant):
        floating.apply(switch)
    return floating(x)


@pytest.mark.rule("QAT-01")
@pytest.mark.parametrize(
    ("layers", "what"),
    [
        *(("Linear", what) for what in PARAMETRIZATIONS),
        *((layers, "weight_norm") for layers in LAYERS if layers != "Linear"),
    ],
)
def test_training_trains_the_parametrization_and_convert_takes_its_weight(layers: str, what: str) -> None:
    model, x = build(layers, PARAMETRIZATIONS[what])
    names = [name for name, _ in model.named_parameters()]
    before = copy.deepcopy(model).eval()(x)
    prepared = prepare_qat(refimpl, model, x)
    torch.testing.assert_close(run_float(prepared, x), before)  # a folded norm scales the weight, and back
    layer = prepared.get_submodule("0")
    assert {id(value) for value in model.parameters()} <= {id(value) for value in prepared.parameters()}
    optimizer = torch.optim.SGD(prepared.parameters(), lr=0.1)
    prepared(x).square().sum().backward()
    optimizer.step()
    torch.testing.assert_close(run_float(prepared, x), copy.deepcopy(model).eval()(x))
    assert [name for name, _ in model.named_parameters()] == names and not hasattr(model[0], "weight_fake_quant")
    reference = refimpl.convert_to_reference_fx(prepared.eval()).get_submodule("0")
    if "BatchNorm" not in layers:
        found: Any = reference[0] if isinstance(reference, nn.Sequential) else reference
        assert torch.equal(found.weight, layer.weight) and torch.equal(found.bias, layer.bias)


@pytest.mark.rule("QAT-01")
def test_torch_registers_it_again_and_changes_the_users_weight_where_ours_is_the_same() -> None:
    seen = {}
    for flow in (torch_fx, refimpl):
        model, x = build("Linear", parametrizations.orthogonal)
        weight, before = model[0].weight.detach().clone(), copy.deepcopy(model).eval()(x)
        found = run_float(prepare_qat(flow, model, x), x)
        seen[flow] = (
            float((found - before).detach().abs().max()),
            float((model[0].weight - weight).detach().abs().max()),
        )
    assert min(seen[torch_fx]) > 0.5, "prepared model, and the user's own"
    assert seen[refimpl] == (0, 0)


@pytest.mark.rule("QAT-01")
def test_a_convolution_and_norm_are_trained_where_torch_cannot_fuse_them() -> None:
    model, x = build("Conv1d+BatchNorm1d+ReLU", parametrizations.weight_norm)
    with pytest.raises(NotImplementedError, match="Cannot fuse train modules"):
        prepare_qat(torch_fx, model, x)
    assert type(prepare_qat(refimpl, model, x).get_submodule("0")).__name__ == "ParametrizedConvBnReLU1d"


def pruned(*names: str) -> Callable[[Any], Any]:
    def make(layer: Any) -> Any:
        for name in names:
            prune.l1_unstructured(layer, name, 0.5)
        return layer

    return make


def pruned_twice(layer: Any) -> Any:
    return prune.random_unstructured(pruned("weight")(layer), "weight", 0.5)


HOOKED: Mapping[str, tuple[Callable[[Any], Any], str]] = {
    "weight_norm": (hooked_weight_norm, r"WeightNorm computes its weight.*remove_weight_norm\(module, 'weight'\)"),
    "spectral_norm": (
        hooked_spectral_norm,
        r"SpectralNorm computes its weight.*remove_spectral_norm\(module, 'w",
    ),
    "pruned": (
        pruned("weight"),
        r"L1Unstructured computes its weight.*utils\.prune\.remove\(module, 'weight'\)",
    ),
    "a pruned bias": (pruned("bias"), r"L1Unstructured computes its bias.*prune\.remove\(module, 'bias'\)"),
    "pruned twice": (pruned_twice, r"PruningContainer computes its weight.*prune\.remove\(module, 'weight'\)"),
}


@pytest.mark.filterwarnings("ignore:.torch.nn.utils.weight_norm. is deprecated:FutureWarning")
@pytest.mark.rule("QAT-01")
@pytest.mark.parametrize(
    ("layers", "what"), [*(("Linear", what) for what in HOOKED), ("Conv1d+BatchNorm1d+ReLU", "weight_norm")]
)
def test_in_training_a_weight_that_a_hook_computes_is_an_error_that_names_it(layers: str, what: str) -> None:
    make, message = HOOKED[what]
    model, x = build(layers, make)
    with pytest.raises(refimpl.ModelError, match=f"'0': {message}.*before prepare_qat_fx.*torch.nn.utils.parametrize"):
        prepare_qat(refimpl, model, x)
    kept = flows.global_mapping(QAT).set_module_name("0", None)
    refimpl.prepare_qat_fx(model, kept, (x,))  # what stays float needs no QAT class


@pytest.mark.filterwarnings("ignore:.torch.nn.utils.weight_norm. is deprecated:FutureWarning")
@pytest.mark.rule("FUS-06")
@pytest.mark.parametrize(
    ("layers", "what"), [*(("Linear+BatchNorm1d", what) for what in HOOKED), ("Conv1d+BatchNorm1d+ReLU", "pruned")]
)
def test_a_norm_is_folded_into_the_weight_that_a_hook_computes_where_torch_fails(layers: str, what: str) -> None:
    model, x = build(layers, HOOKED[what][0])
    model(x), model.eval()
    with torch.no_grad():
        for parameter in model[0].parameters():  # as after load_state_dict: the weight is computed at the next call
            parameter.mul_(1.5)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    fused: Any = refimpl.fuse_fx(model)
    folded = fused.get_submodule("0")
    assert not any(isinstance(part, nn.BatchNorm1d) for part in fused.modules())
    assert {name.rpartition(".")[2] for name, _ in folded.named_parameters()} == {"weight", "bias"}
    torch.testing.assert_close(fused(x), model(x))
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items()), "the user's is kept"
    other, _ = build(layers, HOOKED[what][0])
    other(x)
    with pytest.raises((TypeError, RuntimeError), match=r"cannot assign|deepcopy protocol"):
        torch_fx.fuse_fx(other.eval())


@pytest.mark.filterwarnings("ignore:.torch.nn.utils.weight_norm. is deprecated:FutureWarning")
@pytest.mark.rule("CVT-02")
@pytest.mark.parametrize("hook", [hooked_weight_norm, hooked_spectral_norm])
def test_a_recurrent_weight_that_a_hook_computes_is_converted(hook: Callable[..., Any]) -> None:
    model: Any = nn.Sequential(hook(nn.LSTM(3, 3), "weight_hh_l0")).eval()
    with torch.no_grad():
        model(BATCH)
        mapping = flows.global_mapping(flows.torch_qconfigs.default_dynamic_qconfig)
        prepared = refimpl.prepare_fx(model, mapping, (BATCH,))
        converted: Any = refimpl.convert_to_reference_fx(prepared).get_submodule("0")
    assert type(converted) is not nn.LSTM and torch.equal(converted.weight_hh_l0, model[0].weight_hh_l0)
