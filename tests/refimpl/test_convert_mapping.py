"""Convert's own arguments: its QConfigMapping and _remove_qconfig (rules CVT-05, CVT-08)."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.ao.quantization.quantize_fx as torch_fx
import torch.nn.functional as F
from torch import nn

from fx_quant_conformance import refimpl
from fx_quant_conformance.refimpl import QConfig, QConfigError, QConfigMapping
from tests.refimpl.support import both_flows as flows
from tests.refimpl.support.both_core import CORE, NAMED, Net, X, calls, case, prepared
from tests.refimpl.support.parity import parity

QCONFIG, PER_CHANNEL = flows.QCONFIG, flows.PER_CHANNEL
FORMS: list[Callable[..., Any]] = [refimpl.convert_to_reference_fx, refimpl.convert_to_reference_decomposed_fx]
each_form = pytest.mark.parametrize("convert", FORMS, ids=["quantized tensors", "decomposed"])


def run(net: Any, x: Any) -> Any:
    return net.c(net.b(net.relu(net.a(x)))) + x


def mapping() -> Any:
    """A mapping of prepare with a key of every kind."""
    found = flows.global_mapping().set_module_name("b", PER_CHANNEL).set_module_name_regex("c", QCONFIG)
    return found.set_object_type(nn.Linear, QCONFIG).set_module_name_object_type_order("", nn.Linear, 9, QCONFIG)


def net() -> nn.Module:
    return Net(run).eval()


@pytest.mark.rule("CVT-05")
@pytest.mark.parametrize(
    "change",
    [
        lambda mapping: mapping,
        lambda mapping: mapping.set_module_name("b", None),
        lambda mapping: mapping.set_module_name("a", None),
        lambda mapping: mapping.set_module_name("c", None).set_module_name("b", None),
    ],
    ids=["nothing", "a name", "a name that is new", "neighbours"],
)
def test_what_convert_leaves_in_float_is_torchs(change: Callable[[Any], Any]) -> None:
    """Without object types: torch's fusion refuses those that do not name all parts (QCM-06)."""

    def made() -> Any:
        return flows.global_mapping().set_module_name("b", PER_CHANNEL)

    found = parity(case(net, made, convert_mapping=lambda: change(made())))
    names = [found.pop(f"{form} names", "") for form in CORE]  # torch names qparams after the consumer's input there
    assert not found
    assert all("_input_scale" in text for text in names if text)


@pytest.mark.rule("CVT-05")
@pytest.mark.parametrize(
    ("leave", "quantized"),
    [
        (lambda m: m, {"a", "b", "c"}),
        (lambda m: m.set_module_name("b", None), {"a", "c"}),
        (lambda m: m.set_module_name("a", None), {"b", "c"}),
        (lambda m: m.set_module_name_regex("c", None), {"a", "b"}),
        (lambda m: m.set_object_type(nn.Linear, None), {"b", "c"}),
        (lambda m: m.set_module_name_object_type_order("", nn.Linear, 1, None), {"a", "c"}),
    ],
    ids=["nothing", "a name", "a name that is new", "a regex", "a type", "an order"],
)
def test_none_at_any_level_leaves_that_part_in_float(leave: Any, quantized: set[str]) -> None:
    reference = refimpl.convert_to_reference_fx(prepared(net(), mapping()), qconfig_mapping=leave(mapping()))
    found = {name: reference.get_submodule(name) for name in "abc"}
    found = {name: getattr(module, "0", module) for name, module in found.items()}
    assert {name for name, module in found.items() if type(module) is not nn.Linear} == quantized


@pytest.mark.rule("CVT-05")
@each_form
def test_all_none_leaves_the_float_model(convert: Callable[..., Any]) -> None:
    found = prepared(net())
    reference = convert(found, qconfig_mapping=QConfigMapping())
    assert calls(reference) == ["LinearReLU", "Linear", "Linear", "add"]
    with torch.no_grad():
        assert torch.equal(reference(X), net()(X))
    assert calls(convert(found)) != calls(reference), "and the prepared model can still be converted"


@pytest.mark.rule("CVT-05")
@pytest.mark.rule("QCM-02")
@pytest.mark.parametrize(
    ("key", "forward"),
    [
        (F.linear, lambda net, x: F.linear(x, net.weight, net.bias)),
        ("relu", lambda net, x: net.a(x).unsqueeze(0).relu()),
        (torch.add, lambda net, x: torch.add(net.a(x), net.b(x))),
    ],
    ids=["function", "method", "torch.add"],
)
def test_functions_and_methods_are_named_too(key: Any, forward: Callable[..., Any]) -> None:
    def stripped(none: Any) -> Any:
        found = prepared(Net(forward).eval(), flows.global_mapping().set_object_type(key, QCONFIG))
        return refimpl.convert_to_reference_fx(found, qconfig_mapping=flows.global_mapping().set_object_type(key, none))

    counts = [calls(stripped(value)).count("quantize_per_tensor") for value in (QCONFIG, None)]
    assert counts[1] < counts[0]


@pytest.mark.rule("CVT-05")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m.module_name_qconfigs.clear(), "lacks prepare's module_name_qconfigs key 'b'"),
        (lambda m: m.object_type_qconfigs.clear(), "lacks prepare's object_type_qconfigs key 'nn.Linear'"),
        (lambda m: m.module_name_regex_qconfigs.clear(), "lacks prepare's module_name_regex_qconfigs key 'c'"),
        (lambda m: m.set_module_name("b", QCONFIG), "module_name_qconfigs 'b' is .* must be prepare's"),
        (lambda m: m.set_global(PER_CHANNEL), "global_qconfig '' is .* must be prepare's"),
        (lambda m: m.set_module_name("a", PER_CHANNEL), "a was prepared with .* must be the same or None"),
    ],
)
def test_a_key_that_is_missing_or_says_something_else_is_an_error(change: Callable[[Any], Any], message: str) -> None:
    found, other = prepared(net(), mapping()), mapping()
    change(other)
    for convert in FORMS:
        with pytest.raises(QConfigError, match=message):
            convert(found, qconfig_mapping=other)


@pytest.mark.rule("CVT-05")
def test_equal_qconfigs_made_twice_are_the_same() -> None:
    def made(quant_max: int = 255) -> QConfigMapping:
        activation = refimpl.MinMaxObserver.with_args(dtype=torch.quint8, quant_min=0, quant_max=quant_max)
        weight = refimpl.MinMaxObserver.with_args(dtype=torch.qint8, qscheme=torch.per_tensor_symmetric)
        return QConfigMapping().set_global(QConfig(activation, weight))

    found = prepared(net(), made())
    expected = refimpl.convert_to_reference_fx(found)
    again = refimpl.convert_to_reference_fx(found, qconfig_mapping=made())
    assert calls(again) == calls(expected) and flows.qparams(again) == flows.qparams(expected)
    with pytest.raises(QConfigError, match="must be prepare's"):
        refimpl.convert_to_reference_fx(found, qconfig_mapping=made(127))
    with pytest.raises(QConfigError, match="expected a QConfigMapping"):
        refimpl.convert_to_reference_fx(found, qconfig_mapping=3)


@pytest.mark.rule("CVT-05")
@pytest.mark.rule("QAT-02")
def test_a_trained_part_that_is_left_comes_back_as_its_float_module() -> None:
    qat = NAMED.get_default_qat_qconfig("qnnpack")
    found = refimpl.prepare_qat_fx(net().train(), flows.global_mapping(qat), (X,))
    found(X)
    with_none = flows.global_mapping(qat).set_module_name("b", None)
    reference = refimpl.convert_to_reference_fx(found.eval(), qconfig_mapping=with_none)
    assert type(reference.get_submodule("b")) is nn.Linear
    assert type(reference.get_submodule("c")) is not nn.Linear


# ---- _remove_qconfig --------------------------------------------------------------------------------------


def with_qconfigs(model: nn.Module) -> list[str]:
    return [name for name, part in model.named_modules() if hasattr(part, "qconfig")]


@pytest.mark.rule("CVT-08")
@pytest.mark.parametrize("remove", [True, False])
def test_qconfig_attributes_go_unless_they_shall_stay(remove: bool) -> None:
    found = prepared(net())
    assert {"a", "b", "c"} <= set(with_qconfigs(found))
    ours = refimpl.convert_to_reference_fx(found, _remove_qconfig=remove)
    assert {"a", "b", "c"} <= set(with_qconfigs(found)), "the prepared model keeps its own"
    options = {"backend_config": flows.torch_config("native")}
    made: Any = torch_fx.prepare_fx(net(), flows.global_mapping(), (X,), **options)
    torchs = torch_fx.convert_to_reference_fx(copy.deepcopy(made), _remove_qconfig=remove, **options)
    assert bool(with_qconfigs(ours)) == bool(with_qconfigs(torchs)) == (not remove)
    decomposed = [
        with_qconfigs(refimpl.convert_to_reference_decomposed_fx(found)),
        with_qconfigs(torch_fx._convert_to_reference_decomposed_fx(copy.deepcopy(made), **options)),
    ]
    assert all(decomposed), "torch keeps them in the decomposed form"
