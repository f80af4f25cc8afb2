"""Standalone modules: leaves that are prepared and converted on their own (rule STD-01)."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.ao.nn.intrinsic.qat
import torch.ao.nn.qat as nnqat
import torch.ao.quantization.quantize_fx as torch_fx
import torch.nn.functional as F
from torch import nn
from torch.fx import GraphModule

from fx_quant_conformance import refimpl
from fx_quant_conformance.refimpl import ConfigError, QConfigMapping
from tests.refimpl.support import both_flows as flows
from tests.refimpl.support.both_core import REFERENCE, TORCHS, Net, X, assert_parity, calls, case, prepared, spots
from tests.refimpl.support.parity import parity

nniqat: Any = torch.ao.nn.intrinsic.qat
FORMS: list[Callable[..., Any]] = [refimpl.convert_to_reference_fx, refimpl.convert_to_reference_decomposed_fx]


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Any) -> Any:
        return self.second(F.relu(self.first(x)))


class Plain(Inner):
    """Without what could be fused."""

    def forward(self, x: Any) -> Any:
        return self.second(self.first(x))


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.inner, self.last = Inner(), nn.Linear(4, 4)

    def forward(self, x: Any) -> Any:
        return self.last(self.inner(x))


def custom(inputs: tuple[int, ...] = (), outputs: tuple[int, ...] = ()) -> Any:
    found = TORCHS.PrepareCustomConfig().set_input_quantized_indexes(list(inputs))
    return found.set_output_quantized_indexes(list(outputs))


BOUNDARIES: dict[str, Callable[[], Any]] = {
    "none": lambda: None,
    "float": custom,
    "quantized input": lambda: custom((0,)),
    "quantized output": lambda: custom((), (0,)),
    "both": lambda: custom((0,), (0,)),
}
each_boundary = pytest.mark.parametrize("boundary", BOUNDARIES)


def by_class(boundary: str, mapping: Any = None) -> Any:
    parts = (mapping, (X,), BOUNDARIES[boundary](), None)
    return TORCHS.PrepareCustomConfig().set_standalone_module_class(Inner, *parts)


def last(net: Any, x: Any) -> Any:
    return net.inner(net.a(x))


def middle(net: Any, x: Any) -> Any:
    return net.b(net.inner(net.a(x)))


def net(run: Callable[..., Any] = last) -> nn.Module:
    return Net(run, inner=Inner()).eval()


@pytest.mark.slow
@pytest.mark.rule("STD-01")
@pytest.mark.parametrize("boundary", ["float", "quantized input", "both"])
def test_a_standalone_module_at_the_end_is_torchs(boundary: str) -> None:
    assert_parity(net, custom=(lambda: by_class(boundary), lambda: None), converts=(*REFERENCE, "lowered"))


@pytest.mark.slow
@pytest.mark.rule("STD-01")
@pytest.mark.parametrize("boundary", ["quantized output", "both"])
def test_a_standalone_module_in_the_middle_that_returns_integers_is_torchs(boundary: str) -> None:
    def make() -> Any:
        parts = (None, (X,), BOUNDARIES[boundary](), None)
        return TORCHS.PrepareCustomConfig().set_standalone_module_name("inner", *parts)

    assert_parity(lambda: net(middle), custom=(make, lambda: None), converts=(*REFERENCE, "lowered"))


@pytest.mark.rule("STD-01")
@pytest.mark.rule("CVT-07")
@each_boundary
def test_it_is_a_leaf_with_observers_and_boundary_of_its_own_and_gives_the_same_in_both_forms(boundary: str) -> None:
    """In the decomposed form floats cross the boundary: plain integers do not carry their qparams."""
    found = prepared(net(middle), prepare_custom_config=by_class(boundary))
    reference, decomposed = (convert(found) for convert in FORMS)
    inner: Any = reference.get_submodule("inner")
    assert isinstance(found.get_submodule("inner"), GraphModule) and isinstance(inner, GraphModule)
    takes_integers, returns_integers = boundary in ("quantized input", "both"), boundary in ("quantized output", "both")
    assert (calls(inner)[0] == ".dequantize") == takes_integers
    assert (calls(inner)[-1] == "quantize_per_tensor") == returns_integers
    assert [value for _, value, _ in spots(found)] == ["x", "a", *([] if returns_integers else ["inner"]), "b"]
    node = next(node for node in reference.graph.nodes if node.target == "inner")
    assert (node.args[0].name.startswith("quantize")) == takes_integers
    assert "quantize_per_tensor" not in calls(decomposed.get_submodule("inner"))
    assert "quantize_per_tensor.default" in calls(decomposed.get_submodule("inner"))
    with torch.no_grad():
        torch.testing.assert_close(reference(X), net(middle)(X), atol=0.1, rtol=0.1)
        assert torch.equal(reference(X), decomposed(X))
    at_the_end = prepared(net(last), prepare_custom_config=by_class(boundary))
    with torch.no_grad():
        results = [convert(at_the_end)(X) for convert in FORMS]
    assert torch.equal(results[0].dequantize(), results[1])


@pytest.mark.rule("STD-01")
def test_torch_leaves_a_consumer_of_a_standalone_modules_floats_without_quantized_input() -> None:
    """Torch takes the float result for quantized, and the layer after it stays float with a quantized weight."""
    found = parity(case(lambda: net(middle), custom=(lambda: by_class("float"), lambda: None), converts=("lowered",)))
    assert found["prepare"].startswith("only refimpl: 1 ao.quantization.observer.MinMaxObserver")
    assert found["lowered"].startswith("only torch: 1 ao.nn.quantized.reference.modules.linear.Linear")


@pytest.mark.slow
@pytest.mark.rule("STD-01")
def test_torch_converts_a_standalone_module_to_the_other_form() -> None:
    found = parity(case(net, custom=(lambda: by_class("float"), lambda: None), converts=("decomposed",)))
    assert "decomposed" in found and "decomposed output" not in found
    _, torchs, ours = re.split(r"\n[-+]GraphModule", found["decomposed"])
    assert "torch.quantize_per_tensor(" in torchs and "quantized_decomposed" not in torchs
    assert "torch.quantize_per_tensor(" not in ours and "quantized_decomposed.quantize_per_tensor" in ours


@pytest.mark.rule("STD-01")
@pytest.mark.parametrize("key", ["name", "class"])
def test_name_before_class_and_its_own_mapping_before_the_parents(key: str) -> None:
    own = flows.global_mapping(flows.PER_CHANNEL)
    found = TORCHS.PrepareCustomConfig().set_standalone_module_class(Inner, own, (X,), None, None)
    if key == "name":
        found.set_standalone_module_name("inner", None, (X,), None, None)
    reference = refimpl.convert_to_reference_fx(prepared(net(), prepare_custom_config=found))
    inner: Any = reference.get_submodule("inner.second")
    expected = torch.per_tensor_affine if key == "name" else torch.per_channel_affine
    assert inner.weight_qscheme == expected


@pytest.mark.rule("STD-01")
@pytest.mark.rule("QCM-03")
@pytest.mark.parametrize("boundary", ["none", "both"])
def test_its_own_mapping_holds_where_the_parents_says_none(boundary: str) -> None:
    """The parent's None is about the module's place in the parent; what is in it is its own mapping's affair."""
    mapping = flows.global_mapping().set_module_name("inner", None)
    found = prepared(net(), mapping, prepare_custom_config=by_class(boundary, flows.global_mapping()))
    reference = refimpl.convert_to_reference_fx(found)
    assert "quantize_per_tensor" in calls(reference.get_submodule("inner"))
    without = prepared(net(), mapping, prepare_custom_config=by_class(boundary))
    inner = refimpl.convert_to_reference_fx(without).get_submodule("inner")
    assert set(calls(inner)) <= {"Linear", "LinearReLU", "relu", ".dequantize"}, "without its own, None holds inside"
    assert [type(part) for part in inner.children() if "Linear" in type(part).__name__].count(nn.Linear) >= 1


@pytest.mark.rule("STD-01")
def test_the_parents_mapping_does_not_reach_inside() -> None:
    mapping = flows.global_mapping().set_module_name("inner.second", None).set_object_type(nn.Linear, None)
    own = QConfigMapping().set_global(flows.QCONFIG).set_module_name("first", None)
    found = prepared(net(), mapping, prepare_custom_config=by_class("none", own))
    rows = {row["node"]: row["dtype config"] for row in refimpl.explain(found.get_submodule("inner")).rows()}
    assert rows == {"first": "float", "second": "in=quint8, w=qint8, out=quint8"}
    assert {row["node"]: row["dtype config"] for row in refimpl.explain(found).rows()}["a"] == "float"


@pytest.mark.rule("STD-01")
@each_boundary
def test_called_twice_it_is_one_module_and_torch_cannot(boundary: str) -> None:
    def run(net: Any, x: Any) -> Any:
        return net.inner(net.inner(net.a(x))) + x

    found = prepared(net(run), prepare_custom_config=by_class(boundary))
    for convert in FORMS:
        reference = convert(found)
        nodes = [node.target for node in reference.graph.nodes if node.op == "call_module"]
        assert nodes == ["a", "inner", "inner"]
        with torch.no_grad():
            torch.testing.assert_close(reference(X), net(run)(X), atol=0.1, rtol=0.1)
    if boundary == "both":
        differences = parity(case(lambda: net(run), custom=(lambda: by_class(boundary), lambda: None)))
        assert differences["prepare"].startswith("torch raises TraceError")


@pytest.mark.rule("STD-01")
@pytest.mark.parametrize("boundary", ["none", "both"])
def test_nested_standalone_modules(boundary: str) -> None:
    within = BOUNDARIES[boundary]() or TORCHS.PrepareCustomConfig()
    within.set_standalone_module_class(Inner, None, (X,), BOUNDARIES[boundary](), None)
    custom_config = TORCHS.PrepareCustomConfig().set_standalone_module_class(Outer, None, (X,), within, None)
    model = Net(lambda net, x: net.b(net.outer(net.a(x))), outer=Outer()).eval()
    found = prepared(model, prepare_custom_config=custom_config)
    for convert in FORMS:
        reference = convert(found)
        assert isinstance(reference.get_submodule("outer"), GraphModule)
        assert isinstance(reference.get_submodule("outer.inner"), GraphModule)
        with torch.no_grad():
            torch.testing.assert_close(reference(X), model(X), atol=0.1, rtol=0.1)


@pytest.mark.slow
@pytest.mark.rule("STD-01")
@pytest.mark.rule("QAT-01")
def test_in_training_it_is_prepared_for_training() -> None:
    qat = flows.torch_qconfigs.get_default_qat_qconfig("qnnpack")

    def custom_config() -> Any:
        return TORCHS.PrepareCustomConfig().set_standalone_module_class(Plain, None, (X,), custom((0,), (0,)), None)

    def build() -> nn.Module:
        return Net(last, inner=Plain()).train()

    trained = {"is_qat": True, "converts": REFERENCE}
    mapping = flows.global_mapping(qat)
    assert_parity(build, lambda: mapping, custom=(custom_config, lambda: None), **trained)
    model = refimpl.prepare_qat_fx(build(), mapping, (X,), custom_config())
    assert type(model.get_submodule("inner.second")) is nnqat.Linear


@pytest.mark.slow
@pytest.mark.rule("STD-01")
@pytest.mark.rule("QAT-01")
def test_in_training_torchs_parent_reaches_into_it_and_it_is_not_fused() -> None:
    mapping = flows.global_mapping(flows.torch_qconfigs.get_default_qat_qconfig("qnnpack"))
    torchs, ours = (
        prepare(net().train(), mapping, (X,), by_class("both"), backend_config=flows.torch_config("native"))
        for prepare in (torch_fx.prepare_qat_fx, refimpl.prepare_qat_fx)
    )
    kinds = [type(side.get_submodule("inner.first")) for side in (torchs, ours)]
    assert kinds == [nnqat.Linear, nniqat.LinearReLU]


@pytest.mark.rule("STD-01")
def test_it_has_a_backend_config_of_its_own() -> None:
    own = refimpl.BackendConfig("knows nothing")
    parts = (None, (X,), None, own)
    found = prepared(
        net(), prepare_custom_config=refimpl.PrepareCustomConfig().set_standalone_module_name("inner", *parts)
    )
    reference = refimpl.convert_to_reference_fx(found)
    assert calls(reference.get_submodule("inner")) == ["Linear", "relu", "Linear"]
    assert "quantize_per_tensor" in calls(reference)


@pytest.mark.rule("STD-01")
@pytest.mark.rule("CVT-05")
def test_converts_none_leaves_all_of_it_in_float() -> None:
    found = prepared(net(), prepare_custom_config=by_class("both"))
    mapping = flows.global_mapping().set_module_name("inner", None)
    reference = refimpl.convert_to_reference_fx(found, qconfig_mapping=mapping)
    inner = reference.get_submodule("inner")
    assert set(calls(inner)) == {".dequantize", "LinearReLU", "Linear"}
    assert not [name for name, _ in inner.named_modules() if "activation_post_process" in name]
    with torch.no_grad():
        expected = Inner()(net(lambda net, x: net.a(x))(X))
        torch.testing.assert_close(reference(X), expected, atol=0.1, rtol=0.1)


@pytest.mark.rule("STD-01")
def test_only_one_tensor_can_be_returned_quantized() -> None:
    class Pair(Inner):
        def forward(self, x: Any) -> Any:
            return self.first(x), self.second(x)

    def config(outputs: tuple[int, ...]) -> Any:
        found = refimpl.PrepareCustomConfig()
        return found.set_standalone_module_class(Pair, None, (X,), custom((), outputs), None)

    model = Net(lambda net, x: net.pair(x)[1], pair=Pair()).eval()
    with pytest.raises(ConfigError, match=r"standalone module 'pair': has output_quantized_indexes \[0\]"):
        prepared(model, prepare_custom_config=config((0,)))
    assert prepared(model, prepare_custom_config=config(()))(X).shape == X.shape
