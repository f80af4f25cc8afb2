"""Custom modules, leaves and preserved attributes through prepare and convert (rules CUS-01 to CUS-04)."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.ao.nn.quantizable as nnqa
import torch.ao.nn.quantized as nnq
from torch import nn
from torch.ao.nn.quantized import dynamic as nnqd

from fx_quant_conformance import refimpl
from fx_quant_conformance.refimpl import ConfigError, ConvertCustomConfig, ModelError, PrepareCustomConfig, QuantType
from tests.refimpl.support import both_flows as flows
from tests.refimpl.support.both_core import (
    NAMED,
    REFERENCE,
    TORCHS,
    Net,
    Net3,
    X,
    assert_parity,
    case,
    prepared,
    spots,
)
from tests.refimpl.support.parity import parity

DYNAMIC = NAMED.default_dynamic_qconfig
WEIGHT_ONLY = NAMED.QConfig(flows.torchs.PlaceholderObserver.with_args(dtype=torch.float), flows.QCONFIG.weight)


class Own(nn.Module):
    """A float custom module."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Any) -> Any:
        return self.layer(x)


class Observed(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Any) -> Any:
        return self.layer(x)

    @classmethod
    def from_float(cls, module: Any) -> Any:
        made: Any = cls(module.layer)
        made.qconfig = module.qconfig
        return made


class Quantized(Observed):
    kind: Any = nnq.Linear

    @classmethod
    def from_observed(cls, module: Any) -> Any:
        layer = copy.deepcopy(module.layer)
        layer.qconfig = module.qconfig
        if hasattr(module, "activation_post_process"):
            layer.activation_post_process = module.activation_post_process
        return cls(cls.kind.from_float(layer))


class DynamicQuantized(Quantized):
    kind = nnqd.Linear


def configs(mode: QuantType = QuantType.STATIC, to: type = Quantized) -> tuple[Callable[[], Any], Callable[[], Any]]:
    return (
        lambda: PrepareCustomConfig().set_float_to_observed_mapping(Own, Observed, mode),
        lambda: ConvertCustomConfig().set_observed_to_quantized_mapping(Observed, to, mode),
    )


RUNS: Mapping[str, Callable[..., Any]] = {
    "in the middle": lambda net, x: net.b(net.own(net.a(x))),
    "first": lambda net, x: net.b(net.own(x)),
    "last": lambda net, x: net.own(net.a(x)),
    "several users": lambda net, x: (lambda y: (net.b(y), net.c(y), y))(net.own(net.a(x))),
    "before a sharing op": lambda net, x: net.b(net.own(x).unsqueeze(0).relu()),
    "between float ops": lambda net, x: torch.exp(net.own(torch.exp(x))),
    "unused": lambda net, x: (net.own(x), net.a(x))[1],
}


def net(run: Callable[..., Any] = RUNS["in the middle"]) -> nn.Module:
    return Net(run, own=Own()).eval()


# ---- CUS-01 -----------------------------------------------------------------------------------------------


class SelfQuantizing(Observed):
    """A quantized class that takes whatever stands for its input, and rounds its own output."""

    scale: float
    zero_point: float

    @classmethod
    def from_observed(cls, module: Any) -> Any:
        made: Any = cls(module.layer)
        made.scale, made.zero_point = map(float, module.activation_post_process.calculate_qparams())
        return made

    def forward(self, x: Any) -> Any:
        made = self.layer(x.dequantize())
        return torch.quantize_per_tensor(made, self.scale, int(self.zero_point), torch.quint8)


def torch_configs(to: type = Quantized) -> tuple[Callable[[], Any], Callable[[], Any]]:
    return (
        lambda: TORCHS.PrepareCustomConfig().set_float_to_observed_mapping(Own, Observed),
        lambda: TORCHS.ConvertCustomConfig().set_observed_to_quantized_mapping(Observed, to),
    )


@pytest.mark.rule("CUS-01")
@pytest.mark.rule("CVT-07")
@pytest.mark.parametrize("run", RUNS)
def test_a_static_custom_module_is_torchs_and_takes_floats_in_the_decomposed_form(run: str) -> None:
    """Plain integers would come without their qparams."""
    assert_parity(lambda: net(RUNS[run]), custom=torch_configs(), converts=REFERENCE)
    assert_parity(lambda: net(RUNS[run]), custom=torch_configs(SelfQuantizing))


@pytest.mark.rule("CUS-01")
@pytest.mark.parametrize(
    ("mode", "qconfig", "places"),
    [(QuantType.DYNAMIC, DYNAMIC, ["x", "a", "own"]), (QuantType.WEIGHT_ONLY, WEIGHT_ONLY, [])],
    ids=["dynamic", "weight-only"],
)
@pytest.mark.parametrize("run", ["in the middle", "several users"])
def test_other_modes_take_and_return_floats(run: str, mode: QuantType, qconfig: Any, places: list[str]) -> None:
    """Torch's own FX flow refuses these modes; the dict forms of its custom configs name them."""
    prepare_config, convert_config = (make() for make in configs(mode, DynamicQuantized))
    mapping = flows.global_mapping(qconfig)
    found = prepared(net(RUNS[run]), mapping, prepare_custom_config=prepare_config)
    assert type(found.get_submodule("own")) is Observed
    assert [value for _, value, _ in spots(found)][: len(places)] == places
    reference = refimpl.convert_to_reference_fx(found, convert_config)
    assert type(reference.get_submodule("own")) is DynamicQuantized
    result, expected = reference(X), net(RUNS[run])(X)
    torch.testing.assert_close(result, expected, atol=0.1, rtol=0.1)


@pytest.mark.rule("CUS-01")
def test_called_twice_it_has_qparams_per_call() -> None:
    """Torch has one quantized module, with the qparams of one of the calls."""

    def run(net: Any, x: Any) -> Any:
        return net.own(x), net.own(torch.exp(x * 2))

    prepare_config, convert_config = (make() for make in configs())
    found = prepared(net(run), prepare_custom_config=prepare_config)
    reference = refimpl.convert_to_reference_fx(found, convert_config)
    scales = [part.scale for part in reference.modules() if isinstance(part, nnq.Linear)]
    assert len(scales) == 2 and scales[1] > 10 * scales[0]
    for ours, exact in zip(reference(X), net(run)(X), strict=True):
        assert float((ours - exact).abs().max()) < 0.05 * float(exact.abs().max())
    found_differences = parity(case(lambda: net(run), custom=torch_configs(), converts=REFERENCE))
    assert "prepare" not in found_differences and "reference output" in found_differences


@pytest.mark.rule("CUS-01")
@pytest.mark.rule("QCM-03")
def test_without_a_qconfig_it_stays_as_it_is() -> None:
    prepare_config, convert_config = (make() for make in configs())
    mapping = flows.global_mapping().set_module_name("own", None)
    reference = refimpl.convert_to_reference_fx(
        prepared(net(), mapping, prepare_custom_config=prepare_config), convert_config
    )
    assert type(reference.get_submodule("own")) is Own


@pytest.mark.rule("CUS-01")
def test_a_mode_without_a_class_is_an_error_that_names_the_module() -> None:
    prepare_config, convert_config = (make() for make in configs())
    with pytest.raises(ConfigError, match="custom module 'own': float_to_observed_mapping has no class for Own"):
        prepared(net(), flows.global_mapping(DYNAMIC), prepare_custom_config=prepare_config)
    found = prepared(net(), prepare_custom_config=prepare_config)
    for wrong in (None, configs(QuantType.DYNAMIC)[1]()):
        with pytest.raises(ConfigError, match="custom module 'own': observed_to_quantized_mapping has no class for"):
            refimpl.convert_to_reference_fx(found, wrong)
    assert refimpl.convert_to_reference_fx(found, convert_config)(X).shape == X.shape


@pytest.mark.rule("CUS-01")
def test_a_class_that_fails_is_named_with_its_module() -> None:
    class Broken(Observed):
        @classmethod
        def from_float(cls, module: Any) -> Any:
            raise TypeError("no such thing")

    config = PrepareCustomConfig().set_float_to_observed_mapping(Own, Broken)
    with pytest.raises(ConfigError, match=r"'own': Broken.from_float\(Own\) raised TypeError: no such thing"):
        prepared(net(), prepare_custom_config=config)


LSTM_RUNS: Mapping[str, Callable[..., Any]] = {
    "its output": lambda net, x, h, c: net.b(net.lstm(net.a(x), (h, c))[0]),
    "output and state": lambda net, x, h, c: (lambda o: (net.b(o[0]), o[1][0]))(net.lstm(x, (h, c))),
    "two users": lambda net, x, h, c: (lambda y: (net.b(y), net.c(y)))(net.lstm(x, (h, c))[0]),
    "a slice": lambda net, x, h, c: net.b(net.lstm(x, (h, c))[0][-1]),
    "the state alone": lambda net, x, h, c: net.b(net.lstm(x, (h, c))[1][0][0]),
    "a float op": lambda net, x, h, c: torch.exp(net.lstm(x, (h, c))[0]),
    "unused": lambda net, x, h, c: (net.lstm(x, (h, c)), net.a(x))[1],
}
SEQUENCE = (torch.randn(3, 2, 4, generator=torch.Generator().manual_seed(1)), torch.ones(1, 2, 4), torch.zeros(1, 2, 4))


def lstm_configs() -> tuple[Callable[[], Any], Callable[[], Any]]:
    return (
        lambda: TORCHS.PrepareCustomConfig().set_float_to_observed_mapping(nn.LSTM, nnqa.LSTM),
        lambda: TORCHS.ConvertCustomConfig().set_observed_to_quantized_mapping(nnqa.LSTM, nnq.LSTM),
    )


def recurrent(run: Callable[..., Any]) -> nn.Module:
    torch.manual_seed(4)
    return Net3(run, lstm=nn.LSTM(4, 4)).eval()


@pytest.mark.slow
@pytest.mark.rule("CUS-01")
@pytest.mark.parametrize("run", LSTM_RUNS)
def test_an_lstm_is_torchs(run: str) -> None:
    """The prepared graphs differ: torch takes the tuple apart with stubs, and puts it together again."""
    found = parity(
        case(lambda: recurrent(LSTM_RUNS[run]), batches=[SEQUENCE], custom=lstm_configs(), converts=REFERENCE)
    )
    assert found.keys() <= {"prepare", "prepare names", "calibrated"}
    assert all("DeQuantStub" in text or "dequant_stub" in text for text in found.values())


@pytest.mark.slow
@pytest.mark.rule("CUS-01")
@pytest.mark.rule("OBS-11")
def test_an_lstm_returned_whole_and_one_without_a_given_state() -> None:
    """Torch raises without a state, and ignores output_quantized_indexes for a tuple."""
    prepare_config, convert_config = (make() for make in lstm_configs())
    whole = recurrent(lambda net, x, h, c: net.lstm(x, (h, c)))
    for indexes, expected in (([], False), ([0], True)):
        found = prepared(
            whole, None, *SEQUENCE, prepare_custom_config=prepare_config.set_output_quantized_indexes(indexes)
        )
        y, (h, c) = refimpl.convert_to_reference_fx(found, convert_config)(*SEQUENCE)
        assert [part.is_quantized for part in (y, h, c)] == [expected] * 3
    torch.manual_seed(4)
    alone = Net(lambda net, x: net.b(net.lstm(net.a(x))[0]), lstm=nn.LSTM(4, 4)).eval()
    found = prepared(alone, None, SEQUENCE[0], prepare_custom_config=lstm_configs()[0]())
    with torch.no_grad():
        result = refimpl.convert_to_reference_fx(found, convert_config)(SEQUENCE[0])
        torch.testing.assert_close(result, alone(SEQUENCE[0]), atol=0.1, rtol=0.1)
    differences = parity(case(lambda: alone, batches=[SEQUENCE[:1]], custom=lstm_configs(), converts=REFERENCE))
    assert differences["reference"].startswith("torch raises AssertionError: ")


@pytest.mark.slow
@pytest.mark.rule("CUS-01")
@pytest.mark.rule("OBS-11")
def test_what_shares_with_an_lstms_result_is_on_its_grid_where_torch_shares_with_the_lstms_input() -> None:
    """An input of a hundred times the result's size shows whose range torch's relu has."""
    batch = (100 * SEQUENCE[0], *SEQUENCE[1:])
    run = lambda net, x, h, c: net.lstm(x, (h, c))[0].relu()  # noqa: E731
    found = parity(case(lambda: recurrent(run), batches=[batch], custom=lstm_configs(), converts=REFERENCE))
    assert "reference output" in found
    prepare_config, convert_config = (make() for make in lstm_configs())
    model = refimpl.convert_to_reference_fx(
        prepared(recurrent(run), None, *batch, prepare_custom_config=prepare_config), convert_config
    )
    lstm: Any = recurrent(lambda net, x, h, c: net.lstm(x, (h, c))[0])
    whole = refimpl.convert_to_reference_fx(
        prepared(lstm, None, *batch, prepare_custom_config=prepare_config), convert_config
    )
    assert torch.equal(model(*batch), whole(*batch).relu()), "no rounding of its own"


@pytest.mark.rule("CUS-01")
def test_an_lstm_called_twice_is_converted_and_torch_cannot() -> None:
    prepare_config, convert_config = (make() for make in lstm_configs())
    model = recurrent(lambda net, x, h, c: net.lstm(net.lstm(x, (h, c))[0], (h, c))[0])
    found = prepared(model, None, *SEQUENCE, prepare_custom_config=prepare_config)
    with torch.no_grad():
        result = refimpl.convert_to_reference_fx(found, convert_config)(*SEQUENCE)
        torch.testing.assert_close(result, model(*SEQUENCE), atol=0.1, rtol=0.1)
    differences = parity(case(lambda: model, batches=[SEQUENCE], custom=lstm_configs(), converts=REFERENCE))
    assert differences["calibrated"].startswith("torch raises AttributeError: 'tuple' object")


# ---- CUS-02 -----------------------------------------------------------------------------------------------


class Untraceable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(6)
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Any) -> Any:
        return self.layer(x) if x.sum() > 0 else self.layer(-x)


@pytest.mark.rule("CUS-02")
@pytest.mark.parametrize("key", ["name", "class"])
def test_what_cannot_be_traced_is_a_leaf_and_stays_float(key: str) -> None:
    def build() -> nn.Module:
        return Net(lambda net, x: net.b(net.loose(net.a(x))), loose=Untraceable()).eval()

    def config() -> Any:
        found = TORCHS.PrepareCustomConfig()
        if key == "name":
            return found.set_non_traceable_module_names(["loose"])
        return found.set_non_traceable_module_classes([Untraceable])

    assert_parity(build, custom=(config, lambda: None))
    reference = refimpl.convert_to_reference_fx(prepared(build(), prepare_custom_config=config()))
    assert type(reference.get_submodule("loose")) is Untraceable
    with pytest.raises(ModelError, match=r"cannot be traced by torch.fx: .*Make the untraceable part a leaf"):
        prepared(build())


# ---- CUS-03 -----------------------------------------------------------------------------------------------


@pytest.mark.rule("CUS-03")
@pytest.mark.parametrize("convert", [refimpl.convert_to_reference_fx, refimpl.convert_to_reference_decomposed_fx])
def test_preserved_attributes_survive_every_pass_and_deepcopy(convert: Callable[..., Any]) -> None:
    model: Any = net(lambda net, x: net.a(x))
    model.labels, model.other, model.scaler = ["cat", "dog"], 3, nn.Linear(1, 1)
    names = ["labels", "scaler", "not there"]
    config = PrepareCustomConfig()
    config.set_preserved_attributes(names)
    found = prepared(model, prepare_custom_config=config)
    to_convert = ConvertCustomConfig()
    to_convert.set_preserved_attributes(names)
    reference = convert(found, to_convert)
    fuse_config = refimpl.FuseCustomConfig()
    fuse_config.set_preserved_attributes(names)
    for made in (refimpl.fuse_fx(model, fuse_config), found, reference, copy.deepcopy(found), copy.deepcopy(reference)):
        assert made.labels == ["cat", "dog"] and isinstance(made.scaler, nn.Linear)
        assert not hasattr(made, "other"), "what was not named goes, as before"


# ---- CUS-04 -----------------------------------------------------------------------------------------------
