"""Whatever a front door is given, what comes out is an error of refimpl's that says so, or a result (CFG-14)."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
import torch.ao.quantization as torch_quantization
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from fx_quant_conformance import refimpl
from fx_quant_conformance.refimpl import (
    BackendConfig,
    BackendPatternConfig,
    DTypeWithConstraints,
    PrepareCustomConfig,
    QConfigMapping,
    RefimplError,
)
from tests.refimpl.support import both_flows as flows
from tests.refimpl.support.both_core import X
from tests.refimpl.support.odd_values import fuzz, net, some_of


def only_ours(call: Callable[[], Any]) -> Any:
    """Return what a call gives, or None after an error of refimpl's; any other error is the test's."""
    with warnings.catch_warnings(), suppress(RefimplError):
        warnings.simplefilter("ignore")
        return call()


def prepare() -> Any:
    return refimpl.prepare_fx(net(), flows.global_mapping(), (X,))


DOORS: Mapping[str, Callable[..., Any]] = {
    door.__name__: door
    for door in (
        refimpl.prepare_fx,
        refimpl.prepare_qat_fx,
        refimpl.fuse_fx,
        refimpl.convert_fx,
        refimpl.lower,
        refimpl.explain,
        refimpl.convert_to_reference_fx,
        refimpl.get_default_qat_qconfig,
        refimpl.get_default_qconfig_mapping,
    )
}


def right(name: str) -> dict[str, Any]:
    """The arguments without which a door cannot be called."""
    if name.startswith("prepare"):
        return {"model": net(), "qconfig_mapping": flows.global_mapping(), "example_inputs": (X,)}
    if name.startswith("convert"):
        return {"graph_module": prepare()}
    models: dict[str, Any] = {"lower": lambda: ("reference_model", refimpl.convert_to_reference_fx(prepare()))}
    models |= {"fuse_fx": lambda: ("model", net()), "explain": lambda: ("model", prepare())}
    return dict([models[name]()]) if name in models else {}


@pytest.mark.slow
@pytest.mark.rule("CFG-14")
@pytest.mark.parametrize("name", DOORS)
@fuzz
@given(data=st.data())
def test_arguments_of_the_passes(name: str, data: st.DataObject) -> None:
    door = DOORS[name]
    given = data.draw(some_of(inspect.signature(door).parameters))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        arguments = right(name) | given
    made = only_ours(lambda: door(**arguments))
    if name.startswith("prepare") and made is not None:
        only_ours(lambda: refimpl.convert_to_reference_fx(made))


CUSTOM: Any = PrepareCustomConfig
MAPPING: Any = QConfigMapping
ENTRY: Any = BackendPatternConfig
ANY: Any = refimpl
SAID: Mapping[str, tuple[Callable[[], Any], str]] = {
    "names": (
        lambda: CUSTOM().set_non_traceable_module_names([nn.ReLU()]),
        r"_names: expected a list of strings, found",
    ),
    "indexes": (lambda: CUSTOM(input_quantized_indexes=3), "indexes: expected a list of integers, found 3"),
    "rows": (
        lambda: CUSTOM.from_dict({"standalone_module_name": None}),
        "expected a list of rows of 5 items, found None",
    ),
    "modes": (
        lambda: CUSTOM(float_to_observed_mapping=[1]),
        r"expected a dict of mode to a dict of a class to a class",
    ),
    "a dict form": (lambda: CUSTOM.from_dict(3), r"PrepareCustomConfig.from_dict: expected a dict, found 3"),
    "a class": (lambda: CUSTOM().set_standalone_module_class("a", None, (), None, None), "expected a class, found 'a'"),
    "an entry's class": (lambda: ENTRY().set_qat_module("a"), "qat_module: expected a class or None, found 'a'"),
    "a fused class": (lambda: ENTRY().set_fused_module(3), "fused_module: expected a class or None, found 3"),
    "a getter": (lambda: ENTRY()._set_root_node_getter(3), "_root_node_getter: expected .* called or None, found 3"),
    "classes": (lambda: CUSTOM().set_non_traceable_module_classes(["a"]), "expected a list of classes, found"),
    "a pair": (lambda: CUSTOM().set_float_to_observed_mapping("a", nn.ReLU), "set_float_to_observed_mapping: expected"),
    "an entry's attribute": (lambda: setattr(ENTRY(), "fuser_method", 3), "that can be called or None, found 3"),
    "a bound": (
        lambda: DTypeWithConstraints(None, ANY),
        r"quant_min_lower_bound: expected a number or None, found <mod",
    ),
    "a key": (lambda: MAPPING().set_object_type([], None), r"set_object_type: expected .* key of a dict, found \[\]"),
    "an expression": (lambda: MAPPING().set_module_name_regex(3, None), "expected a regular expression, found 3"),
    "a table of keys": (lambda: MAPPING(module_name_qconfigs=3), "module_name_qconfigs: expected a dict of .* found 3"),
    "a model": (lambda: ANY.prepare_fx(nn.Linear, MAPPING()), r"prepare: expected a torch.nn.Module, found <class"),
    "a model to fuse": (lambda: ANY.fuse_fx(3), "fuse_fx: expected a torch.nn.Module, found 3"),
    "a flag": (lambda: ANY.convert_fx(prepare(), None, X), r"_remove_qconfig: expected True or False, found tensor"),
}


@pytest.mark.rule("CFG-14")
@pytest.mark.parametrize("what", SAID)
def test_the_error_says_where_what_was_expected_and_what_was_found(what: str) -> None:
    call, message = SAID[what]
    with pytest.raises(RefimplError, match=message):
        call()


@pytest.mark.rule("CFG-14")
def test_getters_of_a_config_that_fail_or_give_no_nodes_are_named_with_their_pattern() -> None:
    for name, what in (("_set_root_node_getter", "root node getter"), ("_set_extra_inputs_getter", "extra inputs")):
        for getter, message in ((lambda nested: 3, "expected a .*node.*, found 3"), (lambda: 3, "it raised TypeError")):
            entry: Any = BackendPatternConfig((nn.Linear, nn.ReLU)).set_fuser_method(
                lambda is_qat, *parts: nn.Sequential()
            )
            config = BackendConfig().set_backend_pattern_config(getattr(entry, name)(getter))
            with pytest.raises(refimpl.ConfigError, match=rf"{what}.* of nn.Linear\+nn.ReLU: {message}"):
                refimpl.fuse_fx(net(), backend_config=config)


@pytest.mark.rule("CFG-14")
def test_keys_that_can_match_nothing_are_taken_as_torch_takes_them() -> None:
    theirs: Any = torch_quantization.QConfigMapping()
    for mapping in (MAPPING(), theirs):
        mapping.set_global(flows.QCONFIG).set_object_type(3, None).set_module_name(("a", 1), None)
        assert only_ours(partial(refimpl.prepare_fx, net(), mapping, (X,))) is not None
