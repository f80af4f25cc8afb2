"""Models that prepare and convert cannot take: made by a pass already, or not float32 (OBS-15, STD-01, CVT-01)."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.ao.quantization.quantize_fx as torch_fx
import torch.nn.functional as F
from torch import nn

from fx_quant_conformance import refimpl
from fx_quant_conformance.refimpl import ModelError, QConfigMapping
from tests.refimpl.support import both_flows as flows
from tests.refimpl.support.both_core import NAMED, Net, X


def net() -> nn.Module:
    return Net(lambda net, x: net.b(net.relu(net.a(x)))).eval()


def prepare(model: nn.Module | None = None, inputs: Any = (X,), **options: Any) -> Any:
    return refimpl.prepare_fx(net() if model is None else model, flows.global_mapping(), inputs, **options)


def made(stage: str) -> Any:
    """A model that a pass has made: of refimpl's, or prepared by torch."""
    if stage == "torch's prepared":
        return torch_fx.prepare_fx(net(), flows.global_mapping(), (X,))
    if stage == "trained":
        qconfig = flows.torch_qconfigs.get_default_qat_qconfig("x86")
        return refimpl.prepare_qat_fx(net().train(), flows.global_mapping(qconfig), (X,))
    prepared = prepare()
    prepared(X)
    passes: Mapping[str, Callable[[Any], Any]] = {
        "prepared": lambda prepared: prepared,
        "reference": refimpl.convert_to_reference_fx,
        "decomposed": refimpl.convert_to_reference_decomposed_fx,
        "lowered": refimpl.convert_fx,
    }
    return passes[stage](prepared)


PREPARED = ("prepared", "trained", "torch's prepared")
CONVERTED = ("reference", "decomposed", "lowered")


@pytest.mark.rule("OBS-15")
@pytest.mark.parametrize("stage", [*PREPARED, *CONVERTED])
def test_torch_prepares_it_once_more_in_silence_and_ours_says_so(stage: str) -> None:
    is_qat, word = stage == "trained", "prepared" if stage in PREPARED else "converted"
    model = made(stage).train(is_qat)
    doors: list[Any] = [flow.prepare_qat_fx if is_qat else flow.prepare_fx for flow in (refimpl, torch_fx)]
    for given in (model, copy.deepcopy(model)):
        name = rf"(GraphModule|{type(model).__name__})"
        with pytest.raises(ModelError, match=rf"prepare: {name} was {word} already; give .* the float"):
            doors[0](given, flows.global_mapping(), (X,))
    if stage in ("trained", *CONVERTED):
        assert doors[1](copy.deepcopy(model), flows.global_mapping(), (X,))(X).shape == X.shape


class Holder(nn.Module):
    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.parts = nn.ModuleList([inner])
        self.last = nn.Linear(4, 4)

    def forward(self, x: Any) -> Any:
        return self.last(self.parts[0](x))


@pytest.mark.rule("OBS-15")
@pytest.mark.parametrize("stage", PREPARED)
def test_a_prepared_model_inside_another_is_named_unless_it_is_not_traced_into(stage: str) -> None:
    model = Holder(made(stage)).eval()
    with pytest.raises(ModelError, match=r"prepare: Holder's submodule 'parts\.0' was prepared already"):
        prepare(model)
    custom = refimpl.PrepareCustomConfig().set_non_traceable_module_names(["parts.0"])
    assert prepare(model, prepare_custom_config=custom)(X).shape == X.shape


@pytest.mark.rule("OBS-15")
@pytest.mark.parametrize("stage", CONVERTED)
def test_a_converted_model_inside_another_is_a_part_of_it_as_in_torch(stage: str) -> None:
    for door in (refimpl.prepare_fx, torch_fx.prepare_fx):
        prepared: Any = door(Holder(made(stage)).eval(), flows.global_mapping(), (X,))
        prepared(X)
        assert type(prepared.get_submodule("last")) is nn.Linear


def standalone(inner: Any) -> Any:
    """A prepared model with that standalone module."""
    custom = refimpl.PrepareCustomConfig().set_standalone_module_name("parts.0", None, (X,), None, None)
    return prepare(Holder(inner).eval(), prepare_custom_config=custom)


@pytest.mark.rule("STD-01")
@pytest.mark.parametrize("stage", CONVERTED)
def test_a_standalone_module_that_was_converted_is_named(stage: str) -> None:
    with pytest.raises(ModelError, match=r"standalone module 'parts\.0': prepare: .* was converted already"):
        standalone(made(stage))
    prepared = standalone(net())
    prepared(X)
    replaced: Any = made(stage)
    prepared.set_submodule("parts.0", replaced)
    with pytest.raises(ModelError, match=r"standalone module 'parts\.0': convert: .* was converted already"):
        refimpl.convert_fx(prepared)
    for other in (nn.Linear(4, 4), torch.jit.script(nn.Linear(4, 4))):
        prepared.set_submodule("parts.0", other)
        with pytest.raises(ModelError, match=r"standalone module 'parts\.0': convert: \w+ was not made by refimpl's"):
            refimpl.convert_fx(prepared)


@pytest.mark.rule("CVT-01")
@pytest.mark.parametrize("stage", CONVERTED)
def test_converting_what_was_converted_says_so(stage: str) -> None:
    with pytest.raises(ModelError, match="was converted already, and convert takes a prepared one"):
        refimpl.convert_fx(made(stage))


def embedding_net() -> nn.Module:
    return Net(lambda net, x: net.e(x.to(torch.int64).clamp(0, 3)), e=nn.Embedding(4, 4)).eval()


def function_net() -> nn.Module:
    return Net(lambda net, x: F.linear(x, net.weight)).eval()


DTYPES_OF_FLOATS = (torch.float64, torch.bfloat16)
EMBEDDING = flows.torch_qconfigs.float_qparams_weight_only_qconfig
DYNAMIC = flows.torch_qconfigs.default_dynamic_qconfig
DECOMPOSED = torch_fx._convert_to_reference_decomposed_fx
MODELS: Mapping[str, tuple[Callable[[], nn.Module], Any, str]] = {
    "layers": (net, flows.QCONFIG, r"the weight of 'a' is torch\.\w+, and \d more"),
    "dynamic": (net, DYNAMIC, r"the weight of 'a' is torch\.\w+, and \d more"),
    "per channel": (net, flows.PER_CHANNEL, r"the weight of 'a' is torch\.\w+, and \d more"),
    "a function": (function_net, flows.QCONFIG, r"the weight 'weight' is torch\.\w+|'x', with .*torch\.\w+"),
    "an embedding": (embedding_net, EMBEDDING, r"the weight of 'e' is torch\.\w+"),
}
WITHOUT_BIAS = ("a function", "an embedding")


@pytest.mark.rule("OBS-15")
@pytest.mark.parametrize("dtype", DTYPES_OF_FLOATS, ids=str)
@pytest.mark.parametrize("what", MODELS)
def test_a_weight_that_torch_cannot_quantize_is_an_error_where_no_form_of_torchs_runs(
    what: str, dtype: torch.dtype
) -> None:
    make, qconfig, message = MODELS[what]
    mapping, x = flows.global_mapping(qconfig), X.to(dtype)
    runs = what in WITHOUT_BIAS and dtype is not torch.float64
    for is_qat in (False, True):
        door: Any = refimpl.prepare_qat_fx if is_qat else refimpl.prepare_fx
        expected = f"prepare: ({message}).*float32 alone.*"
        with pytest.warns(UserWarning, match=expected) if runs else pytest.raises(ModelError, match=expected):
            door(make().to(dtype).train(is_qat), mapping, (x,))
    kept = refimpl.prepare_fx(make().to(dtype), QConfigMapping(), (x,))
    assert refimpl.convert_fx(kept)(x).dtype is dtype, "what stays float may be of any dtype"
    theirs: Any = torch_fx.prepare_fx(make().to(dtype), mapping, (x,))
    theirs(x)
    for convert in (torch_fx.convert_to_reference_fx, DECOMPOSED):
        if runs and convert is DECOMPOSED:
            assert convert(copy.deepcopy(theirs))(x).shape == kept(x).shape
        else:
            with pytest.raises((RuntimeError, AssertionError)):
                convert(copy.deepcopy(theirs))(x)


@pytest.mark.rule("OBS-15")
@pytest.mark.parametrize("dtype", DTYPES_OF_FLOATS, ids=str)
def test_a_value_that_torch_cannot_quantize_is_a_warning_as_the_inputs_are_an_example(dtype: torch.dtype) -> None:
    model = Net(lambda net, x: torch.add(x, x)).eval()
    said = rf"'x', with these example_inputs, is {dtype}"
    with pytest.warns(UserWarning, match=rf"{said}, and 1 more .* float32 alone"):
        prepared = prepare(model, inputs=(X.to(dtype),))
    prepared(X)
    assert refimpl.convert_fx(prepared)(X).dtype is torch.float32
    with pytest.warns(UserWarning, match=said):
        refimpl.prepare_qat_fx(net().train(), flows.global_mapping(), (X.to(dtype),))


QUIET: Mapping[str, Callable[[Any, Any], Any]] = {
    "a cast before": lambda net, x: net.a(x.float()),
    "a buffer": lambda net, x: net.a(x.float()) * net.odd.float(),
    "a cast behind": lambda net, x: net.a(x.float()).double(),
}


@pytest.mark.rule("OBS-15")
@pytest.mark.filterwarnings("error:prepare:UserWarning")
@pytest.mark.parametrize("dtype", DTYPES_OF_FLOATS, ids=str)
@pytest.mark.parametrize("what", QUIET)
def test_other_dtypes_where_nothing_is_quantized_are_no_matter(what: str, dtype: torch.dtype) -> None:
    model, x = Net(QUIET[what]).eval(), X.to(dtype)
    model.register_buffer("odd", torch.ones(1, dtype=dtype))
    prepared = prepare(model, inputs=(x,))
    prepared(x)
    assert refimpl.convert_fx(prepared)(x).shape == x.shape
    half = refimpl.prepare_fx(net().to(dtype), flows.global_mapping(NAMED.float16_static_qconfig), (x,))
    assert half(x).dtype is dtype, "nothing becomes integers"
