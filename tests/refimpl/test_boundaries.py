"""Graph inputs that come quantized and outputs that are asked for quantized (rule OBS-11)."""

from __future__ import annotations

import copy
from collections import namedtuple
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.ao.quantization.quantize_fx as torch_fx
import torch.nn.functional as F
from torch import Tensor, nn

from fx_quant_conformance import refimpl
from tests.refimpl.support import both_flows as flows
from tests.refimpl.support.both_core import REFERENCE, TORCHS, Net, Net3, X, assert_parity, calls, case, prepared, spots
from tests.refimpl.support.canonical import canonical, difference
from tests.refimpl.support.parity import parity

GIVEN = torch.quantize_per_tensor(1.125 * X, 0.05, 100, torch.quint8)  # no mean of a row is a tie
Pair = namedtuple("Pair", ["first", "second"])


def indexes(inputs: list[int], outputs: list[int]) -> Any:
    return TORCHS.PrepareCustomConfig().set_input_quantized_indexes(inputs).set_output_quantized_indexes(outputs)


OUTPUTS: Mapping[str, Callable[..., Any]] = {
    "a tensor": lambda net, x: net.a(x),
    "two tensors": lambda net, x: (net.a(x), net.b(x)),
    "nested": lambda net, x: [(net.a(x), net.b(x)), net.c(x)],
    "a dict": lambda net, x: {"u": net.a(x), "v": net.b(x)},
    "a dict in a list": lambda net, x: [{"u": net.a(x)}, net.b(x)],
    "a shared observer": lambda net, x: net.a(x).relu(),
    "a reshaped value": lambda net, x: net.a(x).reshape(-1),
    "an input": lambda net, x: x,
    "a float op": lambda net, x: torch.exp(net.a(x)),
    "a value and its successor": lambda net, x: (lambda y: (y, net.b(y)))(net.a(x)),
    "addition": lambda net, x: x + net.a(x),
}


def quantized(value: Any) -> list[bool]:
    """Tell which tensors of a result are quantized."""
    if isinstance(value, Tensor):
        return [value.is_quantized]
    return [found for part in (value.values() if isinstance(value, dict) else value) for found in quantized(part)]


@pytest.mark.slow
@pytest.mark.rule("OBS-11")
@pytest.mark.parametrize("index", [[1], [0, 1]], ids=str)
@pytest.mark.parametrize("output", OUTPUTS)
def test_quantized_outputs_are_torchs(output: str, index: list[int]) -> None:
    assert_parity(
        lambda: Net(OUTPUTS[output]).eval(), custom=(lambda: indexes([], index), lambda: None), config="qnnpack"
    )


@pytest.mark.rule("OBS-11")
def test_one_value_at_two_outputs_is_quantized_where_it_was_asked_for() -> None:
    """Torch returns it quantized at both."""

    def run(net: Any, x: Any) -> Any:
        y = net.a(x)
        return y, y

    found = prepared(Net(run).eval(), prepare_custom_config=indexes([], [1]))
    assert quantized(refimpl.convert_to_reference_fx(found)(X)) == [False, True]
    options: dict[str, Any] = {"custom": (lambda: indexes([], [1]), lambda: None), "converts": REFERENCE}
    assert parity(case(lambda: Net(run).eval(), **options))["reference"].startswith("only refimpl: 1 .dequantize")


@pytest.mark.rule("OBS-11")
def test_a_named_tuple_is_made_of_floats() -> None:
    """Fx makes a call of it, so it is one value that nothing quantized, for torch too."""

    def build() -> nn.Module:
        return Net(lambda net, x: Pair(net.a(x), net.b(x))).eval()

    assert_parity(build, custom=(lambda: indexes([], [0, 1]), lambda: None), converts=REFERENCE)
    result = refimpl.convert_to_reference_fx(prepared(build(), prepare_custom_config=indexes([], [0, 1])))(X)
    assert type(result) is Pair and quantized(result) == [False, False]


INPUTS: Mapping[str, Callable[..., Any]] = {
    "a layer": lambda net, x: net.a(x),
    "a residual": lambda net, x: x + net.a(x),
    "a float op": lambda net, x: torch.exp(x),
    "two layers": lambda net, x: (net.a(x), net.b(x)),
    "nothing": lambda net, x: x,
    "an addition to itself": lambda net, x: x + x,
    "a scalar": lambda net, x: x * 2,
}


def both_given(run: Callable[..., Any], custom: Any) -> tuple[list[Any], list[Any]]:
    """(prepared, reference) of torch and of refimpl: calibrated on floats, run on a quantized input."""
    found: list[list[Any]] = []
    for side in (torch_fx, refimpl):
        model = Net(run).eval()
        options = {"backend_config": flows.torch_config("native")}
        made: Any = side.prepare_fx(model, flows.global_mapping(), (X,), prepare_custom_config=custom, **options)
        flows.calibrate(made, [(X,)])
        found.append([made, side.convert_to_reference_fx(copy.deepcopy(made), **options)])
    return found[0], found[1]


@pytest.mark.rule("OBS-11")
@pytest.mark.parametrize("outputs", [[], [0]], ids=str)
@pytest.mark.parametrize("run", INPUTS)
def test_quantized_inputs_are_torchs(run: str, outputs: list[int]) -> None:
    torchs, ours = both_given(INPUTS[run], indexes([0], outputs))
    for theirs, own in zip(torchs, ours, strict=True):
        assert difference(canonical(theirs), canonical(own)) == ""
    with torch.no_grad():
        assert str(ours[1](GIVEN)) == str(torchs[1](GIVEN))


@pytest.mark.rule("OBS-11")
def test_a_quantized_input_has_no_observer_and_is_dequantized_for_who_takes_floats() -> None:
    model = Net3(lambda net, x, y, z: (net.a(x) + net.b(y), torch.exp(x))).eval()
    found = prepared(model, None, X, X, X, prepare_custom_config=indexes([0], []))
    assert [value for _, value, _ in spots(found)] == ["a", "y", "b", "add"]
    reference = refimpl.convert_to_reference_fx(found)
    node = next(node for node in reference.graph.nodes if node.name == "x")
    assert {user.target for user in node.users} == {"dequantize"}
    with torch.no_grad():
        summed, exponential = reference(GIVEN, X, X)
        assert torch.equal(exponential, torch.exp(GIVEN.dequantize()))
        assert torch.equal(summed, reference(GIVEN.dequantize(), X, X)[0]), "values on the grid give the same"


@pytest.mark.rule("OBS-11")
@pytest.mark.rule("OBS-14")
def test_a_given_dtype_that_a_consumer_cannot_take_is_quantized_again() -> None:
    signed = flows.torchs.MinMaxObserver.with_args(dtype=torch.qint8)
    mapping = flows.global_mapping(flows.torch_qconfigs.QConfig(signed, flows.QCONFIG.weight))
    config = refimpl.BackendConfig("signed").set_backend_pattern_config(
        copy.deepcopy(next(e for e in flows.our_config("native").configs if e.pattern is nn.Linear)).set_dtype_configs(
            [refimpl.DTypeConfig(torch.qint8, torch.qint8, torch.qint8, torch.float)]
        )
    )
    model = Net(lambda net, x: net.a(x)).eval()
    found = prepared(model, mapping, prepare_custom_config=indexes([0], []), backend_config=config)
    assert spots(found) == [("input", "x", "OBS-01"), ("output", "a", "OBS-01")]


@pytest.mark.rule("OBS-11")
@pytest.mark.rule("OBS-02")
def test_a_list_with_a_given_tensor_cannot_share_and_has_an_output_observer_of_its_own() -> None:
    """Torch observes no output there, and returns a float where quantized was asked for."""
    torchs, ours = both_given(lambda net, x: torch.cat([x, net.a(x)], 1), indexes([0], [0]))
    with torch.no_grad():
        assert [quantized(side[1](GIVEN)) for side in (torchs, ours)] == [[False], [True]]
    assert calls(ours[1])[-2:] == ["cat", "quantize_per_tensor"]


SHARING: Mapping[str, Callable[..., Any]] = {
    "pool": lambda net, x: F.max_pool1d(x.unsqueeze(0), 2),
    "relu and flatten": lambda net, x: torch.flatten(F.relu(x)),
    "mean": lambda net, x: x.mean(1),
    "then a layer": lambda net, x: net.a(F.relu(x)),
    "then a float op": lambda net, x: torch.exp(F.relu(x)),
    "beside a layer": lambda net, x: (F.relu(x), net.a(x)),
}


@pytest.mark.rule("OBS-11")
@pytest.mark.rule("OBS-02")
@pytest.mark.parametrize("outputs", [[], [0]], ids=str)
@pytest.mark.parametrize("run", SHARING)
def test_what_shares_with_a_given_value_is_on_its_grid_as_in_torchs_lowered_model(run: str, outputs: list[int]) -> None:
    """Torch observes the results, which its reference model quantizes anew; only lowering drops these grids."""
    torchs, ours = both_given(SHARING[run], indexes([0], outputs))
    assert not [value for _, value, _ in spots(ours[0]) if value in ("max_pool1d", "relu", "flatten", "mean")]
    assert len(calls(ours[0])) < len(calls(torchs[0]))
    lowered = refimpl.convert_fx(ours[0])
    with torch.no_grad():
        expected = torch_fx.convert_fx(torchs[0], backend_config=flows.torch_config("native"))(GIVEN)
        assert str(lowered(GIVEN)) == str(expected)
        assert str(ours[1](GIVEN)) == str(expected)
    assert lowered.meta["not_lowered"] == ()


@pytest.mark.rule("OBS-11")
@pytest.mark.rule("OBS-02")
def test_what_shares_one_given_grid_shares_it_twice() -> None:
    found = prepared(
        Net(lambda net, x: torch.cat([F.relu(x), x.unsqueeze(0).squeeze(0)])).eval(),
        prepare_custom_config=indexes([0], [0]),
    )
    assert spots(found) == []
    lowered = refimpl.convert_fx(found)
    assert lowered.meta["not_lowered"] == () and "quantize_per_tensor" not in calls(lowered)
    result = lowered(GIVEN)
    assert torch.equal(result.int_repr()[3:], GIVEN.int_repr())
    assert torch.equal(result.int_repr()[:3], GIVEN.int_repr().clamp(min=GIVEN.q_zero_point()))


@pytest.mark.rule("OBS-11")
@pytest.mark.rule("OBS-02")
def test_two_given_grids_are_not_shared() -> None:
    model = Net3(lambda net, x, y, z: torch.cat([F.relu(x), y])).eval()
    found = prepared(model, None, X, X, X, prepare_custom_config=indexes([0, 1], [0]))
    assert spots(found) == [("output", "cat", "OBS-01")]


@pytest.mark.rule("OBS-11")
def test_the_decomposed_form_carries_floats_of_a_given_grid() -> None:
    found = prepared(Net(lambda net, x: torch.flatten(F.relu(x))).eval(), prepare_custom_config=indexes([0], [0]))
    decomposed = refimpl.convert_to_reference_decomposed_fx(found)
    assert calls(decomposed) == [".dequantize", "relu", "flatten"]
    assert torch.equal(decomposed(GIVEN), GIVEN.dequantize().relu().flatten())


@pytest.mark.rule("OBS-11")
@pytest.mark.rule("CVT-05")
@pytest.mark.parametrize(("kept", "quantizes"), [("relu", 1), ("relu and a", 0)])
def test_a_sharing_op_left_in_float_is_quantized_for_its_users_alone(kept: str, quantizes: int) -> None:
    found = prepared(Net(lambda net, x: net.a(F.relu(x))).eval(), prepare_custom_config=indexes([0], []))
    mapping = flows.global_mapping().set_object_type(F.relu, None)
    if kept == "relu and a":
        mapping.set_module_name("a", None)
    reference = refimpl.convert_to_reference_fx(found, qconfig_mapping=mapping)
    before = calls(reference)[: calls(reference).index("Linear")]
    assert before.count("quantize_per_tensor") == quantizes
    reference(GIVEN)
