"""A model that the flow has changed is found, whatever the backend does with it; one that it rounds is left alone."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import GraphModule

from fx_quant_conformance.backends.discovery import find_backend
from fx_quant_conformance.backends.torch_engines.engine import engine
from fx_quant_conformance.conformance.claims.claim import enumerate_claims
from fx_quant_conformance.conformance.machine.fault import Fault, FaultFound
from fx_quant_conformance.conformance.stages.bench import Bench
from fx_quant_conformance.conformance.stages.unrounded import without_observers, without_roundings
from fx_quant_conformance.conformance.whole_models import units
from fx_quant_conformance.conformance.whole_models.architectures import ARCHITECTURES, settle
from fx_quant_conformance.conformance.whole_models.flow_checks import check_prepared, check_reference, check_roundings
from fx_quant_conformance.conformance.whole_models.jobs import unit_of
from fx_quant_conformance.conformance.whole_models.setups import ModelSetup
from fx_quant_conformance.conformance.whole_models.units import ModelUnit, quantize_model
from fx_quant_conformance.refimpl import (
    ConvertCustomConfig,
    MinMaxObserver,
    PrepareCustomConfig,
    QConfig,
    QConfigMapping,
    convert_to_reference_decomposed_fx,
    get_default_qat_qconfig_mapping,
    get_default_qconfig_mapping,
    prepare_fx,
    prepare_qat_fx,
)
from fx_quant_conformance.refimpl.graph.invariants import is_dequantize, is_quantize
from fx_quant_conformance.refimpl.graph.tracing import layer_of
from fx_quant_conformance.reports.verdicts import Verdict
from tests.conformance.support.dynamic_flows import BYTES, FLOAT16, NIBBLES, PER_CHANNEL, dynamic
from tests.mutants.custom_modules import Bend, ObservedBend, QuantizedBend, QuantizedWeighed, Weighed

IMAGES = torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(0))
ROWS = torch.randn(5, 8, generator=torch.Generator().manual_seed(0))
STATIC = get_default_qconfig_mapping("qnnpack")
SEVEN_BITS = get_default_qconfig_mapping("fbgemm")


class Model(nn.Module):
    """A module whose forward is a function of it and the inputs."""

    def __init__(self, compute: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        self.compute = compute
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x: Tensor) -> Any:
        return self.compute(self, x)


def convolutions() -> nn.Module:
    def compute(m: Any, x: Tensor) -> Any:
        y = F.relu(m.norm(m.conv(x)))
        return m.last(torch.flatten(F.avg_pool2d(y + m.skip(x) * m.gain, 2), 1))

    parts = {"conv": nn.Conv2d(3, 4, 3, padding=1), "norm": nn.BatchNorm2d(4), "skip": nn.Conv2d(3, 4, 1)}
    return settle(Model(compute, **parts, last=nn.Linear(36, 8), gain=nn.Parameter(torch.tensor(0.75))))


def functional() -> nn.Module:
    return Model(
        lambda m, x: F.linear(torch.sigmoid(F.linear(x, m.first, m.bias)), m.first),
        first=nn.Parameter(torch.randn(8, 8)),
        bias=nn.Parameter(torch.randn(8)),
    )


def layers() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))


def recurrent() -> nn.Module:
    return Model(lambda m, x: m.last(m.lstm(x.unsqueeze(0))[0][0]), lstm=nn.LSTM(8, 8, 2), last=nn.Linear(8, 4))


def cell() -> nn.Module:
    return Model(lambda m, x: m.cell(x), cell=nn.GRUCell(8, 4))


def embedding() -> nn.Module:
    return Model(lambda m, x: m.table(x.long().abs()), table=nn.Embedding(8, 6))


def whole() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8), nn.ReLU()), nn.Linear(8, 8))


def bent() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), Bend(), nn.Linear(8, 8))


def weighed() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), Weighed(8))


def every(qconfig: QConfig) -> QConfigMapping:
    return QConfigMapping().set_global(qconfig)


INNER = PrepareCustomConfig().set_input_quantized_indexes([0]).set_output_quantized_indexes([0])
CUSTOM: dict[Any, Any] = {
    whole: PrepareCustomConfig().set_standalone_module_name("1", None, (ROWS,), INNER, None),
    bent: PrepareCustomConfig().set_float_to_observed_mapping(Bend, ObservedBend),
    weighed: PrepareCustomConfig().set_float_to_observed_mapping(Weighed, ObservedBend),
}
AFTER: dict[Any, Any] = {
    bent: ConvertCustomConfig().set_observed_to_quantized_mapping(ObservedBend, QuantizedBend),
    weighed: ConvertCustomConfig().set_observed_to_quantized_mapping(ObservedBend, QuantizedWeighed),
}
KINDS: dict[str, tuple[Callable[[], nn.Module], QConfigMapping, Tensor]] = {
    "static": (convolutions, STATIC, IMAGES),
    "seven bits": (convolutions, SEVEN_BITS, IMAGES),
    "functions": (functional, STATIC, ROWS),
    "dynamic": (layers, every(dynamic()), ROWS),
    "dynamic, per channel": (layers, every(PER_CHANNEL), ROWS),
    "float16": (layers, every(FLOAT16), ROWS),
    "recurrent": (recurrent, every(dynamic()), ROWS),
    "cell": (cell, every(dynamic()), ROWS),
    "embedding": (embedding, every(BYTES), ROWS),
    "embedding of four bits": (embedding, every(NIBBLES), ROWS),
    "standalone": (whole, STATIC, ROWS),
    "custom module": (bent, STATIC, ROWS),
    "custom module with a weight": (weighed, STATIC, ROWS),
    "in float": (convolutions, QConfigMapping(), IMAGES),
}


ROUNDED = (
    "static",
    "dynamic",
    "float16",
    "recurrent",
    "embedding of four bits",
    "standalone",
    "custom module with a weight",
)
"""Kinds that differ in what rounds."""


def prepared(make: Callable[[], nn.Module], mapping: QConfigMapping, x: Tensor) -> tuple[nn.Module, GraphModule]:
    """The float model and the prepared one, calibrated."""
    torch.manual_seed(1)
    model = make().eval()
    found = prepare_fx(copy.deepcopy(model), mapping, (x,), CUSTOM.get(make))
    with torch.no_grad():
        found(x.clone())
    return model, found


def flowed(
    make: Callable[[], nn.Module], convert: Any, mapping: Any = STATIC, x: Tensor = ROWS
) -> tuple[Any, Any, Any]:
    """The float model, the prepared one without observers, the reference model."""
    model, found = prepared(make, mapping, x)
    with engine("qnnpack"):
        return model, without_observers(found), convert(found, AFTER.get(make))


def found(faults: Iterator[Fault], rule: str, node: str) -> str:
    fault = next(faults)
    assert (fault.rule, fault.evidence, fault.verdict) == (rule, {"node": node}, Verdict.UNEXERCISED), fault
    return fault.message


def are_equal(state: dict[str, Any], other: dict[str, Any]) -> bool:
    tensors = {name: value for name, value in state.items() if isinstance(value, Tensor)}
    return state.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in tensors.items())


# -- honest flows -----------------------------------------------------------------------------------------------------


@pytest.mark.rule("OBS-15", "CVT-01", "CVT-02", "CVT-06")
@pytest.mark.parametrize("kind", KINDS)
def test_what_an_honest_flow_makes_of_any_kind_is_the_model(kind: str) -> None:
    make, mapping, x = KINDS[kind]
    model, floating, reference = flowed(make, convert_to_reference_decomposed_fx, mapping, x)
    assert list(check_prepared(model, floating, (x,), is_qat=False)) == []
    assert list(check_reference(floating, reference, (x,))) == []
    assert list(check_roundings(floating, reference, can_clip=False)) == []


@pytest.mark.parametrize("kind", ROUNDED)
def test_a_reference_model_without_its_roundings_has_the_bits_of_the_prepared_one(kind: str) -> None:
    make, mapping, x = KINDS[kind]
    _, floating, reference = flowed(make, convert_to_reference_decomposed_fx, mapping, x)
    kept = copy.deepcopy(reference.state_dict())
    plain = without_roundings(reference, floating)
    with torch.no_grad():
        quantized = reference(x)
        assert torch.equal(plain(x), floating(x)) and not torch.equal(quantized, floating(x))
    left = [node for node in plain.graph.nodes if is_quantize(node) or is_dequantize(node) or "qparams" in node.name]
    assert not left, "nor is a range measured as it runs"
    assert are_equal(kept, reference.state_dict()), "that one is as it was"


@pytest.mark.rule("OBS-15")
def test_a_prepared_model_without_observers_sees_nothing_and_the_given_one_goes_on() -> None:
    _, given = prepared(convolutions, STATIC, IMAGES)
    kept = copy.deepcopy(given.state_dict())
    floating = without_observers(given)
    with torch.no_grad():
        floating(100 * IMAGES)
    assert are_equal(kept, given.state_dict())
    assert not any(type(each).__name__.endswith("Observer") for each in floating.modules())


@pytest.mark.rule("QAT-01", "QAT-02")
def test_a_trained_model_is_held_to_what_it_has_learned() -> None:
    torch.manual_seed(1)
    model = convolutions()
    trained = prepare_qat_fx(copy.deepcopy(model).train(), get_default_qat_qconfig_mapping("qnnpack"), (IMAGES,))
    assert list(check_prepared(model, without_observers(trained), (IMAGES,), is_qat=True)) == []
    assert trained.training
    with torch.no_grad():
        for parameter in trained.parameters():
            parameter.mul_(1.25)
        trained(IMAGES)
    floating = without_observers(trained.eval())
    reference = convert_to_reference_decomposed_fx(trained)
    assert list(check_reference(floating, reference, (IMAGES,))) == []
    assert list(check_roundings(floating, reference, can_clip=True)) == []
    found(check_prepared(model, floating, (IMAGES,), is_qat=True), "QAT-01", "skip")


# -- faults of convert ------------------------------------------------------------------------------------------------


def changed(change: Callable[[Any], object]) -> Any:
    """A conversion whose result is changed."""

    def converted(*arguments: Any) -> Any:
        made = convert_to_reference_decomposed_fx(*arguments)
        change(made)
        made.recompile()
        return made

    return converted


def other_stride(model: Any) -> None:
    layer_of(model.skip).padding = (1, 1)


def other_number(model: Any) -> None:
    [node] = [node for node in model.graph.nodes if node.target is F.avg_pool2d]
    node.args = (node.args[0], 2, 2, 1)


@pytest.mark.parametrize(
    ("change", "node", "told"),
    [
        (other_stride, "skip", "of shape (2, 4, 8, 8), not (2, 4, 6, 6)"),
        (other_number, "avg_pool2d", "of shape (2, 4, 4, 4), not (2, 4, 3, 3)"),
        (
            lambda model: setattr(layer_of(model.conv), "bias", nn.Parameter(layer_of(model.conv).bias + 1)),
            "conv",
            "rounding explains",
        ),
    ],
)
def test_what_convert_changes_beside_rounding_is_found(change: Any, node: str, told: str) -> None:
    _, floating, reference = flowed(convolutions, changed(change), STATIC, IMAGES)
    message = found(check_reference(floating, reference, (IMAGES,)), "CVT-01", node)
    assert message.startswith(
        f"convert changed what the model computes, beside rounding it: the first node that differs is {node}"
    )
    assert told in message


def take_integers(model: Any) -> None:
    [node] = [node for node in model.graph.nodes if node.name == "add"]
    dequantize = next(filter(is_dequantize, node.all_input_nodes))
    node.replace_input_with(dequantize, dequantize.args[0])


def test_a_reader_of_integers_is_found() -> None:
    _, floating, reference = flowed(convolutions, changed(take_integers), STATIC, IMAGES)
    message = found(check_roundings(floating, reference, can_clip=False), "CVT-06", "add")
    assert message == "add reads the integers of conv, and not the numbers that they stand for"


def dequantize_otherwise(model: Any) -> None:
    node = next(filter(is_dequantize, model.graph.nodes))
    node.args = (node.args[0], 2 * node.args[1], *node.args[2:])


def test_a_dequantize_by_another_scale_is_found() -> None:
    _, floating, reference = flowed(convolutions, changed(dequantize_otherwise), STATIC, IMAGES)
    assert "x is quantized by (" in found(check_roundings(floating, reference, can_clip=False), "CVT-01", "x")


@pytest.mark.rule("CVT-03")
def test_another_range_of_a_dynamic_input_is_found() -> None:
    def reduce(model: Any) -> None:
        for node in model.graph.nodes:
            node.args = tuple(127 if argument == 255 else argument for argument in node.args)

    _, floating, reference = flowed(layers, changed(reduce), every(dynamic()), ROWS)
    message = found(check_roundings(floating, reference, can_clip=False), "CVT-03", "input_1")
    assert message == "input_1 is quantized to (0, 127) as the model runs; the QConfigs ask for [(0, 255)]"


@pytest.mark.parametrize(
    ("kind", "target", "name"),
    [
        ("static", "skip", "weight"),
        ("dynamic, per channel", "2", "weight"),
        ("float16", "2", "weight"),
        ("recurrent", "lstm", "weight_hh_l1"),
        ("cell", "cell", "weight_ih"),
        ("embedding", "table", "weight"),
        ("embedding of four bits", "table", "weight"),
    ],
)
def test_a_weight_that_is_not_the_float_models_is_found(kind: str, target: str, name: str) -> None:
    """One element, two steps away: within the range that is left to it."""
    make, mapping, x = KINDS[kind]

    def move(model: Any) -> None:
        layer = layer_of(model.get_submodule(target))
        weight = getattr(layer, name).detach().clone()
        weight.view(-1)[int(weight.abs().argmin())] += float(weight.abs().max()) / 3
        setattr(layer, name, nn.Parameter(weight))

    _, floating, reference = flowed(make, changed(move), mapping, x)
    for can_clip in (False, True):
        message = found(check_roundings(floating, reference, can_clip=can_clip), "CVT-02", target)
        assert message == f"{target}'s {name} is not that of the float model, rounded by half a step at most"


def test_weights_that_an_observer_clips_are_left_to_those_who_chose_it() -> None:
    def halve(model: Any) -> None:
        layer_of(model.skip).weight_scale.mul_(0.5)

    _, floating, reference = flowed(convolutions, changed(halve), STATIC, IMAGES)
    found(check_roundings(floating, reference, can_clip=False), "CVT-02", "skip")
    assert list(check_roundings(floating, reference, can_clip=True)) == []


# -- in the flow of whole models --------------------------------------------------------------------------------------


def quantized(monkeypatch: pytest.MonkeyPatch, name: str = "", change: Callable[[Any], object] | None = None) -> Any:
    """A network of the suite through the flow, of which one step is changed."""
    bench = Bench(find_backend("reference"), seed=0, profile="quick")
    if change is not None:
        owner = bench if name == "convert" else units
        honest = getattr(owner, name)

        def step(*arguments: Any, **keywords: Any) -> Any:
            made = honest(*arguments, **keywords)
            change(made)
            return made

        monkeypatch.setattr(owner, name, step)
    case = next(each for each in ARCHITECTURES if each.name == "residual").case()
    torch.manual_seed(0)
    setup = ModelSetup(flow="ptq", activation=torch.quint8, scheme="per_channel_symmetric")
    claims = enumerate_claims(bench.config, bench.capabilities)
    return quantize_model(bench, unit_of("a model", case.build(), case, claims, setup))


def enlarge(model: Any) -> None:
    with torch.no_grad():
        layer_of(model.after).bias.add_(1)


def replace_weight(model: Any) -> None:
    layer_of(model.after).weight = nn.Parameter(layer_of(model.conv).weight.detach().clone())


@pytest.mark.rule("OBS-15", "CVT-01", "CVT-02")
@pytest.mark.parametrize(
    ("name", "change", "rule", "node"),
    [
        ("prepare_fx", enlarge, "OBS-15", "after"),
        ("convert", enlarge, "CVT-01", "after"),
        ("convert", replace_weight, "CVT-02", "after"),
    ],
)
def test_a_network_that_the_flow_changes_is_unexercised(
    monkeypatch: pytest.MonkeyPatch, name: str, change: Any, rule: str, node: str
) -> None:
    with pytest.raises(FaultFound) as raised:
        quantized(monkeypatch, name, change)
    fault = raised.value.fault
    assert (fault.rule, fault.verdict) == (rule, Verdict.UNEXERCISED)
    assert fault.evidence["node"] == node and "def forward" in str(fault.evidence["graph"])


def test_a_network_has_the_ratio_of_the_float_model_to_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    [ratio] = quantized(monkeypatch).float_db
    assert 30 < ratio < 60  # eight bits


def test_few_bits_are_a_small_ratio_and_no_fault() -> None:
    """Of two bits little is left; each rounding is explained by its step."""
    two = MinMaxObserver.with_args(dtype=torch.quint8, quant_min=0, quant_max=3)
    weight = MinMaxObserver.with_args(dtype=torch.qint8, quant_min=-2, quant_max=1, qscheme=torch.per_tensor_symmetric)
    bench = Bench(find_backend("reference"), seed=0, profile="quick")
    claims = enumerate_claims(bench.config, bench.capabilities)
    setup = ModelSetup(flow="ptq", activation=torch.quint8, scheme="per_tensor_symmetric")
    torch.manual_seed(1)
    unit = ModelUnit(
        id="a model",
        model=convolutions(),
        claims=claims,
        setup=setup,
        calibration=[(IMAGES,)],
        mapping=every(QConfig(two, weight)),
        draw=lambda _: [(IMAGES,)],
    )
    made = quantize_model(bench, unit)
    [ratio] = made.float_db
    assert isinstance(ratio, float) and ratio < 12
