"""Dynamic, float16 and weight-only quantization, and all of them in one model (rules OBS-05, OBS-12, CVT-03 to CVT-11).

Torch is the oracle: graphs, names, qparams and output bits of every stage agree.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.ao.quantization.backend_config import native

from fx_quant_conformance import refimpl
from fx_quant_conformance.backends.torch_engines.engine import engine
from fx_quant_conformance.refimpl.config.backend_config import as_backend_config
from tests.refimpl.support import both_flows as flows
from tests.refimpl.support import parity as parity_of
from tests.refimpl.support.both_core import NAMED, REFERENCE, Net, X, assert_parity, calls, case, prepared, spots

DYNAMIC, HALF, HALF_DYNAMIC = NAMED.default_dynamic_qconfig, NAMED.float16_static_qconfig, NAMED.float16_dynamic_qconfig
WEIGHT_ONLY = NAMED.float_qparams_weight_only_qconfig
MODES: Mapping[str, tuple[Any]] = {
    "static": (flows.QCONFIG,),
    "per channel": (flows.PER_CHANNEL,),
    "dynamic": (DYNAMIC,),
    "dynamic per channel": (NAMED.per_channel_dynamic_qconfig,),
    "float16": (HALF,),
    "float16 dynamic": (HALF_DYNAMIC,),
}
Run = Callable[..., Any]
RUNS: Mapping[str, Run] = {
    "layers": lambda net, x: net.b(net.relu(net.a(x))),
    "residual": lambda net, x: net.a(x) + x,
    "F.linear": lambda net, x: F.relu(F.linear(net.a(x), net.weight, net.bias)),
    "F.linear, bias by keyword": lambda net, x: F.linear(net.a(x), net.weight, bias=net.bias),
    "matmul": lambda net, x: torch.matmul(net.a(x), net.b(x).t()),
    "a constant operand": lambda net, x: net.a(x) + net.constant,
    "in place": lambda net, x: torch.relu_(net.a(x).add_(net.b(x))),
    "layer norm": lambda net, x: F.layer_norm(net.a(x), [4], net.constant, net.bias),
    "group norm": lambda net, x: F.group_norm(net.a(x), 2, net.constant, net.bias),
    "softmax": lambda net, x: F.softmax(net.a(x), 1),
}


@cache
def legacy_config() -> Any:
    """Torch's one config that knows static float16."""
    return native.get_test_only_legacy_native_backend_config()


@pytest.fixture
def config_with_float16(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let both sides have that config."""
    ours = as_backend_config(legacy_config())
    monkeypatch.setattr(flows, "our_config", lambda name: ours)
    monkeypatch.setattr(parity_of, "TORCH", replace(parity_of.TORCH, config=lambda name: legacy_config()))
    monkeypatch.setattr(parity_of, "REFIMPL", replace(parity_of.REFIMPL, config=lambda name: ours))


def mapped(qconfig: Any) -> Callable[[], Any]:
    return lambda: flows.global_mapping(qconfig)


@pytest.mark.slow
@pytest.mark.rule("CVT-01")
@pytest.mark.rule("CVT-04")
@pytest.mark.rule("OBS-06")
@pytest.mark.usefixtures("config_with_float16")
@pytest.mark.parametrize("run", RUNS)
def test_static_float16_is_torchs(run: str) -> None:
    """The other modes are those of the zoo's recipes (test_parity), whose configs do not know this one."""
    assert_parity(lambda: Net(RUNS[run]).eval(), mapped(HALF))


@pytest.mark.rule("CVT-06")
@pytest.mark.parametrize("mode", MODES)
def test_a_model_without_a_quantizable_op_stays_as_it_is(mode: str) -> None:
    for run, expected in ((lambda net, x: torch.exp(x), ["exp"]), (lambda net, x: x, [])):
        found = prepared(Net(run).eval(), flows.global_mapping(*MODES[mode]))
        assert calls(found) == calls(refimpl.convert_to_reference_fx(found)) == expected


# ---- dynamic ----------------------------------------------------------------------------------------------


@pytest.mark.rule("OBS-05")
def test_dynamic_observes_the_first_tensor_input_alone_and_no_output() -> None:
    def run(net: Any, x: Any) -> Any:
        y, _ = net.lstm(net.a(x), (x[:1], x[:1]))
        return F.linear(y, net.weight, net.bias)

    model = Net(run, lstm=nn.LSTM(4, 4)).eval()
    found = prepared(model, flows.global_mapping(DYNAMIC), X.reshape(3, 1, 4))
    assert spots(found) == [
        ("input", "x", "OBS-05"),
        ("input", "a", "OBS-05"),
        ("input", "getitem_2", "OBS-05"),
        ("weight", "weight", "OBS-06"),
    ]


@pytest.mark.rule("CVT-03")
@pytest.mark.parametrize("name", ["qnnpack", "x86", "fbgemm", "onednn"])
def test_a_dynamic_value_has_the_bits_of_the_engine_as_in_torch_unless_its_observer_says(name: str) -> None:
    model = Net(lambda net, x: net.a(x)).eval()
    placeholder: dict[str, Any] = {"dtype": torch.quint8, "is_dynamic": True}
    half, whole = {"quant_min": 0, "quant_max": 127}, {"quant_min": 0, "quant_max": 255}
    does_saturate = name in ("x86", "fbgemm")
    for of, arguments, is_reduced in (
        (flows.torchs, whole, does_saturate),
        (flows.torchs, half, True),  # torch drops that range on the other engines
        (refimpl, {}, does_saturate),
        (refimpl, {"reduce_range": False}, False),
        (refimpl, {"reduce_range": True}, True),
    ):
        activation = of.PlaceholderObserver.with_args(**placeholder, **arguments)
        mapping = flows.global_mapping(NAMED.QConfig(activation, flows.QCONFIG.weight))
        with engine(name):
            ours = flows.our_flow(model, mapping, [(X,)], "native")
        assert calls(ours.reference) == ["quantize_per_tensor_dynamic", ".dequantize", "Linear"]
        quantize = next(node for node in ours.reference.graph.nodes if node.op == "call_function")
        assert quantize.args[1:] == (torch.quint8, is_reduced), (of.__name__, arguments)
        if arguments is whole:
            with engine(name):
                theirs = flows.torch_flow(model, mapping, [(X,)], "native")
            found = next(node for node in theirs.reference.graph.nodes if node.op == "call_function")
            assert found.args[1:] == quantize.args[1:]


@pytest.mark.rule("CVT-03")
@pytest.mark.rule("CVT-04")
def test_dynamic_float16_casts_in_the_decomposed_form_where_torch_raises() -> None:
    model = Net(lambda net, x: net.a(x)).eval()
    found = prepared(model, flows.global_mapping(HALF_DYNAMIC))
    decomposed = refimpl.convert_to_reference_decomposed_fx(found)
    assert calls(decomposed) == [*["convert_element_type.no_fuse"] * 2, "Linear"]
    with torch.no_grad():
        assert torch.equal(decomposed(X), refimpl.convert_to_reference_fx(found)(X)), "the two forms have one meaning"
    both = parity_of.parity(case(lambda: model, mapped(HALF_DYNAMIC), converts=("decomposed",)))
    assert list(both) == ["decomposed"] and both["decomposed"].startswith("torch raises"), both


# ---- float16 ----------------------------------------------------------------------------------------------


@pytest.mark.rule("CVT-04")
@pytest.mark.usefixtures("config_with_float16")
def test_static_float16_casts_there_and_back_in_both_forms() -> None:
    found = prepared(Net(lambda net, x: net.a(x)).eval(), flows.global_mapping(HALF))
    assert calls(refimpl.convert_to_reference_fx(found)) == [".to", ".dequantize", "Linear", ".to", ".dequantize"]
    decomposed = refimpl.convert_to_reference_decomposed_fx(found)
    assert calls(decomposed) == [*["convert_element_type.no_fuse"] * 2, "Linear", *["convert_element_type.no_fuse"] * 2]
    with torch.no_grad():
        result = decomposed(X)
    assert torch.equal(result, result.half().float()), "the result is on float16's grid"
    assert not torch.equal(result, found(X)), "and was not without the cast"


@pytest.mark.rule("DTY-08")
@pytest.mark.rule("OBS-06")
@pytest.mark.usefixtures("config_with_float16")
@pytest.mark.parametrize(("qconfig", "roles"), [(HALF, ["weight", "bias"]), (flows.QCONFIG, ["weight"])])
def test_a_bias_argument_is_observed_for_static_float16_only(qconfig: Any, roles: list[str]) -> None:
    model = Net(lambda net, x: F.linear(x, net.weight, net.bias)).eval()
    found = spots(prepared(model, flows.global_mapping(qconfig)))
    assert [role for role, *_ in found if role not in ("input", "output")] == roles


# ---- weight-only ------------------------------------------------------------------------------------------


INDICES = torch.tensor([[1, 2, 3], [4, 5, 0]])


def table_mapping(qconfig: Any, rest: Any = None) -> Any:
    mapping = flows.global_mapping(rest)
    return mapping.set_object_type(nn.Embedding, qconfig).set_object_type(nn.EmbeddingBag, qconfig)


@pytest.mark.rule("CVT-11")
@pytest.mark.rule("DTY-01")
def test_an_embedding_with_a_static_qconfig_stays_float_and_says_why() -> None:
    found = prepared(Net(lambda net, x: net.table(x), table=nn.Embedding(8, 4)).eval(), None, INDICES)
    (decision,) = refimpl.explain(found).plan.decisions
    assert decision.dtype_config is None and "DTY-01: input dtype is torch.quint8" in decision.reason
    assert type(refimpl.convert_to_reference_fx(found).get_submodule("table")) is nn.Embedding


# ---- mixed, and QConfigs of their own kind ----------------------------------------------------------------


def mixed_mapping() -> Any:
    mapping = table_mapping(WEIGHT_ONLY, flows.QCONFIG)
    mapping.set_module_name("b", DYNAMIC).set_module_name("c", HALF).set_module_name("d", None)
    return mapping.set_object_type(F.linear, HALF_DYNAMIC)


@pytest.mark.rule("QCM-02")
@pytest.mark.rule("CVT-03")
@pytest.mark.rule("CVT-04")
@pytest.mark.rule("CVT-11")
@pytest.mark.usefixtures("config_with_float16")
def test_all_modes_in_one_model_float16_too() -> None:
    def run(net: Any, x: Any) -> Any:
        y = net.relu(net.a(net.table(x)))
        return F.linear(net.d(net.c(net.b(y))), net.weight, net.bias)

    def build() -> nn.Module:
        torch.manual_seed(0)
        return Net(run, table=nn.Embedding(8, 4), d=nn.Linear(4, 4)).eval()

    assert_parity(build, mixed_mapping, batches=[(INDICES,)], converts=REFERENCE)
    reference = refimpl.convert_to_reference_fx(prepared(build(), mixed_mapping(), INDICES))
    found = calls(reference)
    assert {"quantize_per_tensor", "quantize_per_tensor_dynamic", ".to", "linear"} <= set(found)
    classes = [type(reference.get_submodule(name)).__module__ for name in ("table", "b", "c", "d")]
    assert [name.startswith("torch.ao.nn.quantized.reference") for name in classes] == [True, True, True, False]


@pytest.mark.rule("OBS-12")
@pytest.mark.parametrize(
    "run",
    [
        lambda net, x: net.b(net.six(net.a(x))),
        lambda net, x: net.six(net.a(x).reshape(-1, 2)),
        lambda net, x: net.six(net.six(net.a(x))),
    ],
    ids=["one", "looking through", "two"],
)
def test_an_op_that_reuses_its_inputs_observer_is_torchs(run: Run) -> None:
    def mapping() -> Any:
        return flows.global_mapping().set_object_type(nn.ReLU6, NAMED.default_reuse_input_qconfig)

    assert_parity(lambda: Net(run, six=nn.ReLU6()).eval(), mapping)
    found = prepared(Net(run, six=nn.ReLU6()).eval(), mapping())
    instances = {slot.value: slot.group for slot in refimpl.explain(found).plan.slots}
    assert instances["six"] == instances["a"]


@pytest.mark.rule("OBS-12")
@pytest.mark.rule("PAT-08")
def test_the_first_input_is_reused_by_position_and_by_keyword() -> None:
    for run in (lambda net, x: torch.cat([net.a(x)]), lambda net, x: torch.cat(tensors=[net.a(x)])):
        mapping = flows.global_mapping().set_object_type(torch.cat, NAMED.default_reuse_input_qconfig)
        found = prepared(Net(run).eval(), mapping)
        instances = {slot.value: slot.group for slot in refimpl.explain(found).plan.slots}
        assert instances["cat"] == instances["a"]


@pytest.mark.rule("OBS-12")
def test_with_nothing_observed_upstream_there_is_nothing_to_reuse() -> None:
    mapping = flows.global_mapping(None).set_object_type(nn.ReLU6, NAMED.default_reuse_input_qconfig)
    found = prepared(Net(lambda net, x: net.six(net.a(x)), six=nn.ReLU6()).eval(), mapping)
    assert spots(found) == [] and calls(refimpl.convert_to_reference_fx(found)) == ["Linear", "ReLU6"]


@pytest.mark.rule("OBS-13")
@pytest.mark.rule("CVT-10")
def test_activations_alone_cannot_be_quantized_where_the_config_names_a_weight_dtype() -> None:
    """A weight that nn.Identity observes has no dtype."""
    qconfig = NAMED.default_activation_only_qconfig
    model = Net(lambda net, x: net.a(x).reshape(-1)).eval()
    found = prepared(model, flows.global_mapping(qconfig))
    decisions = {decision.pattern: decision for decision in refimpl.explain(found).plan.decisions}
    linear = decisions["nn.Linear"]
    assert linear.dtype_config is None and "DTY-01: weight dtype is None" in linear.reason
    assert type(refimpl.convert_to_reference_fx(found).get_submodule("a")) is nn.Linear
