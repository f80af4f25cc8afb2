"""Deciding and placing observers, read off the decision log (rules OBS-01 to OBS-15)."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.ao.quantization.quantize_fx as torch_fx
import torch.nn.functional as F
from torch import Tensor, nn
from torch.ao.quantization import backend_config as torch_backend_config

from fx_quant_conformance import refimpl
from fx_quant_conformance.refimpl import (
    BackendConfig,
    BackendPatternConfig,
    DTypeConfig,
    ObservationType,
    QConfigMapping,
)
from fx_quant_conformance.refimpl.prepare.plan import Slot
from tests.refimpl.support import both_flows as flows
from tests.refimpl.support.both_flows import QCONFIG
from tests.refimpl.support.qconfigs import minmax_qconfig
from tests.refimpl.support.small_plans import INPUTS, OURS, S8, U8, Net, groups, plan, prepared
from tests.support.torch_release import need

NARROW = minmax_qconfig(U8, S8, per_channel=False, quant_min=0, quant_max=127)


# ---- where observers go -----------------------------------------------------------------------------------


@pytest.mark.rule("OBS-01")
@pytest.mark.rule("OBS-04")
def test_every_value_is_observed_once_before_and_after_what_is_quantized() -> None:
    found = plan(lambda net, x, y: net.b(net.a(x)) + net.c(x))
    assert groups(found) == [("x", 0), ("a", 1), ("b", 2), ("c", 3), ("add", 4)]
    assert found.slots[0].consumers == ("a", "c"), "one observer on the value that two consumers read"


@pytest.mark.rule("OBS-03")
@pytest.mark.parametrize("kind", list(ObservationType))
def test_a_pattern_that_is_not_observed_has_no_observers(kind: ObservationType) -> None:
    entry = BackendPatternConfig(torch.exp).set_observation_type(kind).add_dtype_config(DTypeConfig(U8, U8))
    config = BackendConfig().set_backend_pattern_config(entry)
    model, mapping = Net(lambda net, x, y: torch.exp(x)).eval(), QConfigMapping().set_global(OURS)
    found = refimpl.explain(refimpl.prepare_fx(model, mapping, backend_config=config)).plan
    expected = {0: [("x", 0), ("exp", 1)], 1: [("x", 0), ("exp", 0)], 2: []}[kind.value]
    assert groups(found) == expected


@pytest.mark.rule("OBS-06")
@pytest.mark.parametrize("keywords", [False, True])
def test_a_weight_argument_is_observed_as_weight_and_a_bias_not_at_all(keywords: bool) -> None:
    def run(net: Any, x: Tensor, y: Tensor) -> Any:
        return F.linear(x, weight=net.weight, bias=net.bias) if keywords else F.linear(x, net.weight, net.bias)

    found = plan(run)
    roles = {slot.value: slot.role for slot in found.slots}
    assert roles == {"x": "input", "weight": "weight", "linear": "output"}
    weight = next(slot for slot in found.slots if slot.role == "weight")
    assert weight.make().dtype == S8


@pytest.mark.rule("OBS-06")
@pytest.mark.rule("DTY-01")
@pytest.mark.parametrize("weight_dtype", [S8, U8])
def test_where_a_weight_stands_says_the_entry_itself_or_that_of_the_function_alone(weight_dtype: torch.dtype) -> None:
    """A pair that names the index has a weight to be compared and observed, as the function alone has."""

    def run(net: Any, x: Tensor, y: Tensor) -> Any:
        return F.relu(F.linear(x, net.weight, net.bias))

    claimed = DTypeConfig(U8, U8, weight_dtype)
    index = {"weight": 1, "bias": 2}
    pair = BackendPatternConfig((F.linear, F.relu)).add_dtype_config(claimed)
    alone = BackendPatternConfig(F.linear).add_dtype_config(DTypeConfig(S8, S8))._set_input_type_to_index(index)
    by_pair = BackendPatternConfig((F.linear, F.relu)).add_dtype_config(claimed)._set_input_type_to_index(index)
    expected = {"x": "input", "weight": "weight", "relu": "output"}
    for entries in ([pair, alone], [by_pair]):
        config = BackendConfig("pairs").set_backend_pattern_configs(entries)
        mapping = QConfigMapping().set_global(OURS)
        found = refimpl.explain(refimpl.prepare_fx(Net(run).eval(), mapping, INPUTS, backend_config=config)).plan
        roles = {slot.value: slot.role for slot in found.slots}
        assert roles == (expected if weight_dtype == S8 else {}), found.decisions[0].reason


@pytest.mark.rule("OBS-06")
def test_torch_does_not_read_the_index_of_a_pair_and_observes_its_weight_as_an_activation() -> None:
    model = Net(lambda net, x, y: F.relu(F.linear(x, net.weight))).eval()
    config = torch_backend_config.BackendConfig("pairs").set_backend_pattern_config(
        torch_backend_config.BackendPatternConfig((F.linear, F.relu))
        .add_dtype_config(torch_backend_config.DTypeConfig(U8, U8, S8))
        ._set_input_type_to_index({"weight": 1})
    )
    theirs = torch_fx.prepare_fx(model, flows.global_mapping(), INPUTS, backend_config=config)
    weight = next(node for node in theirs.graph.nodes if node.op == "get_attr")
    observers = [theirs.get_submodule(str(user.target)) for user in weight.users]
    assert [observer.dtype for observer in observers] == [U8]
    found = refimpl.prepare_fx(model, flows.global_mapping(), INPUTS, backend_config=config)
    roles: Any = {slot.value: (slot.role, slot.make().dtype) for slot in refimpl.explain(found).plan.slots}
    assert roles["weight"] == ("weight", S8)


@pytest.mark.rule("DTY-01")
def test_a_pair_of_functions_without_a_weight_fits_whatever_is_said_of_one() -> None:
    entry = BackendPatternConfig((torch.add, F.relu)).add_dtype_config(DTypeConfig(U8, U8, U8))
    config = BackendConfig("sums").set_backend_pattern_config(entry)
    model = Net(lambda net, x, y: F.relu(torch.add(x, y))).eval()
    found = refimpl.prepare_fx(model, QConfigMapping().set_global(OURS), INPUTS, backend_config=config)
    assert refimpl.explain(found).plan.decisions[0].is_quantized


@pytest.mark.rule("OBS-10")
@pytest.mark.parametrize(
    "run",
    [
        lambda net, x, y: torch.cat(torch.chunk(net.a(x), 2, 1), 1),
        lambda net, x, y: torch.stack(torch.unbind(net.a(x), 1), 1),
    ],
    ids=["chunk", "unbind"],
)
def test_a_tuple_that_is_passed_on_whole_is_not_observed_where_torch_observes_it_and_fails(run: Any) -> None:
    need("traces_lists")
    with pytest.raises(AttributeError, match="'tuple' object has no attribute"):
        flows.torch_flow(Net(run).eval(), flows.global_mapping(), [INPUTS], "qnnpack")
    found = prepared(run)
    assert [slot.value for slot in refimpl.explain(found).plan.slots] == ["x", "a"]
    real = found(*INPUTS)
    assert torch.allclose(refimpl.convert_to_reference_fx(found)(*INPUTS), real, atol=0.1)


PAIRS = {
    "indices of sort": (lambda net, x, y: torch.sort(net.a(x))[1].reshape(-1), []),
    "last of topk": (lambda net, x, y: torch.topk(net.a(x), 2)[-1].reshape(-1), []),
    "indices by name": (lambda net, x, y: torch.topk(net.a(x), 2).indices.reshape(-1), []),
    "values by name": (lambda net, x, y: net.a(x).max(dim=1).values.reshape(-1), ["getattr_1", "reshape"]),
    "a row of a maximum": (lambda net, x, y: torch.max(net.a(x), y)[1].reshape(-1), ["getitem", "reshape"]),
    "a row of a maximum by keyword": (lambda net, x, y: net.a(x).max(other=y)[1].reshape(-1), ["getitem", "reshape"]),
}


@pytest.mark.rule("OBS-10")
@pytest.mark.parametrize("what", PAIRS)
def test_of_a_pair_the_values_are_observed_and_the_indices_are_not(what: str) -> None:
    run, values = PAIRS[what]
    found = prepared(run)
    assert [value for value, _ in groups(refimpl.explain(found).plan)] == ["x", "a", *values]
    assert refimpl.convert_fx(found)(*INPUTS).shape == Net(run)(*INPUTS).shape


@pytest.mark.rule("OBS-10")
@pytest.mark.parametrize("op", [torch.chunk, torch.topk])
def test_an_op_that_returns_a_tuple_is_not_quantized(op: Any) -> None:
    """No shipped config claims one; torch puts an observer on the tuple, which fails when it is called."""
    claimed = DTypeConfig(U8, U8)
    entry = (
        BackendPatternConfig(op)
        .set_observation_type(ObservationType.OUTPUT_SHARE_OBSERVER_WITH_INPUT)
        .add_dtype_config(claimed)
    )
    config = BackendConfig("tuples").set_backend_pattern_config(entry)
    found = refimpl.prepare_fx(
        Net(lambda net, x, y: op(x, 2)[0]).eval(), QConfigMapping().set_global(OURS), INPUTS, backend_config=config
    )
    assert refimpl.explain(found).plan.decisions[0].reason == f"OBS-10: {op.__name__} is not a float tensor"
    assert refimpl.convert_to_reference_fx(found)(*INPUTS).shape == op(INPUTS[0], 2)[0].shape


@pytest.mark.rule("OBS-10")
def test_a_modules_name_is_no_ops_name() -> None:
    """A layer that is called view takes two tensors."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.view = nn.Bilinear(4, 4, 2)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            made: Tensor = self.view(x, y)
            return made

    config = BackendConfig("two").set_backend_pattern_config(
        BackendPatternConfig(nn.Bilinear).add_dtype_config(DTypeConfig(U8, U8))
    )
    found = refimpl.prepare_fx(Two().eval(), QConfigMapping().set_global(OURS), INPUTS, backend_config=config)
    assert [slot.value for slot in refimpl.explain(found).plan.slots] == ["x", "y", "view"]


@pytest.mark.rule("OBS-10")
@pytest.mark.rule("PAT-08")
def test_the_first_argument_is_the_input_in_whatever_order_keywords_are_written() -> None:
    for run in (
        lambda net, x, y: torch.mean(input=net.a(x), dim=1),
        lambda net, x, y: torch.mean(dim=1, input=net.a(x)),
    ):
        assert [value for value, _ in groups(plan(run))] == ["x", "a", "mean"]


@pytest.mark.rule("OBS-14")
def test_a_consumer_that_cannot_take_the_producers_range_gets_its_own() -> None:
    """Torch keeps the first observer, and the second's range of 0..127 is lost."""

    def run(net: Any, x: Tensor, y: Tensor) -> Any:
        z = net.a(x)
        return net.b(z), net.c(z)

    mapping = QConfigMapping().set_global(OURS).set_module_name("c", NARROW)
    found = plan(run, mapping)
    own: list[Slot] = [slot for slot in found.slots if slot.rule == "OBS-14"]
    assert [(slot.value, slot.consumers) for slot in own] == [("a", ("c",))]
    assert own[0].make().quant_max == 127
    theirs = flows.torch_mappings.QConfigMapping().set_global(QCONFIG)
    narrow = flows.torchs.MinMaxObserver.with_args(quant_min=0, quant_max=127)
    theirs.set_module_name("c", flows.torch_qconfigs.QConfig(narrow, QCONFIG.weight))
    torchs = flows.torch_flow(Net(run).eval(), theirs, [INPUTS])
    assert [o.quant_max for o in torchs.prepared.modules() if isinstance(o, flows.torchs.MinMaxObserver)].count(
        127
    ) == 1


@pytest.mark.rule("OBS-15")
def test_observers_follow_the_plan_one_call_per_slot_and_one_instance_per_group() -> None:
    found = prepared(lambda net, x, y: net.b(net.relu(net.a(x)).unsqueeze(0)) + y)
    calls = {str(node.target) for node in found.graph.nodes if "activation_post" in str(node.target)}
    slots = refimpl.explain(found).plan.slots
    assert {slot.name for slot in slots} == calls and len(calls) == len(slots) == 6
    for one in slots:
        for other in slots:
            is_same = found.get_submodule(one.name) is found.get_submodule(other.name)
            assert is_same == (one.group == other.group), f"{one.name}, {other.name}"


@pytest.mark.rule("OBS-15")
def test_work_is_bounded_per_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each fact about a node is asked a bounded number of times, however many patterns a config has."""
    from fx_quant_conformance.refimpl.graph.tracing import Places

    asked = {}
    original = Places.object_type_of
    for length in (10, 40):
        asked[length] = 0

        def counted(self: Places, node: Any, length: int = length) -> Any:
            asked[length] += 1
            return original(self, node)

        monkeypatch.setattr(Places, "object_type_of", counted)
        model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(length))).eval()
        refimpl.prepare_fx(model, QConfigMapping().set_global(OURS), backend_config=flows.our_config("qnnpack"))
    assert asked[40] <= 4.5 * asked[10], f"questions for 10 and 40 layers: {asked}"


# ---- what is left alone -----------------------------------------------------------------------------------


@pytest.mark.rule("OBS-15")
def test_the_float_model_is_not_changed() -> None:
    model = Net(lambda net, x, y: net.relu(net.a(x)) + net.b(y)).eval()
    model.b.train()
    before = copy.deepcopy(model.state_dict())
    modes = {name: module.training for name, module in model.named_modules()}
    classes = {name: type(module) for name, module in model.named_modules()}
    found = refimpl.prepare_fx(model, flows.global_mapping(), INPUTS, backend_config=flows.our_config("qnnpack"))
    found(*INPUTS)
    refimpl.convert_to_reference_fx(found)
    assert {name: module.training for name, module in model.named_modules()} == modes
    assert {name: type(module) for name, module in model.named_modules()} == classes
    assert flows.same(dict(model.state_dict()), dict(before))
    assert found.get_parameter("a.0.weight") is model.a.weight, "parameters are shared, not copied"
