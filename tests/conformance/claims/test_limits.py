"""Limits of arguments: one that would be without effect is an error, all others keep cases out."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
from torch import nn

from fx_quant_conformance.backends.base import Capabilities
from fx_quant_conformance.backends.discovery import find_backend
from fx_quant_conformance.backends.names import SHIPPED
from fx_quant_conformance.conformance.claims.limits import (
    OWN_ARGUMENTS,
    LimitsError,
    check_globs,
    check_limits,
    list_arguments,
)
from fx_quant_conformance.conformance.claims.plan import plan_cases
from fx_quant_conformance.conformance.ops.table import RECORDS
from fx_quant_conformance.refimpl import BackendConfig
from tests.conformance.support.planning import claim_on, planned


@pytest.mark.parametrize("name", SHIPPED)
def test_the_limits_of_shipped_backends_have_an_effect(name: str) -> None:
    check_limits(find_backend(name).capabilities().limits)


@pytest.mark.parametrize(
    ("limits", "said"),
    [
        ({"Conv2d": {"stride": (1,)}}, "'Conv2d' is no op whose arguments the suite varies; did you mean 'nn.Conv2d'?"),
        ({"F.conv2d": {"stride": (1,)}}, "did you mean 'torch.conv2d'?"),
        ({"nni.ConvReLU2d": {}}, "did you mean 'nn.Conv2d'?"),
        ({"view": {}}, "did you mean '.view'?"),
        ({"nn.Conv2d": {"group": (1,)}}, "limits['nn.Conv2d']: 'group' is not varied, so that a limit of it is"),
        ({"nn.Conv2d": {"group": (1,)}}, "did you mean 'groups'?"),
        ({"nn.Linear": {"unbatched": (False,)}}, "did you mean '_unbatched'?"),
        ({"nn.Conv2d": {"device": ("cpu",)}}, "'device' is not varied (the suite runs on the CPU, in float32), so"),
        ({"nn.Conv2d": {"stride": 1}}, "limits['nn.Conv2d']['stride']: found 1; give a tuple of the values"),
        ({"nn.Conv2d": {"padding_mode": "zeros"}}, "['padding_mode']: found 'zeros'; give a tuple"),
    ],
)
def test_a_limit_without_effect_is_told_with_the_nearest(limits: Any, said: str) -> None:
    """Before, each was ignored, or failed in the middle of the run."""
    with pytest.raises(LimitsError) as caught:
        check_limits(limits)
    assert said in str(caught.value)


CONVOLUTION = "nn.Conv2d"


def geometry_of(limits: dict[str, Any], name: str) -> set[Any]:
    return {case.arguments[name] for case in planned(claim_on(CONVOLUTION), limits={CONVOLUTION: limits})}


def test_groups_are_held_to_their_limit_though_varied_under_shape() -> None:
    """Before, ``groups`` was ignored, and the report said that others than 1 were not tried."""
    assert geometry_of({}, "groups") > {1, 2, 8}
    limits = {CONVOLUTION: {"groups": (1,)}}
    cases = planned(claim_on(CONVOLUTION), limits=limits)
    assert {module.groups for case in cases for module in case.build().modules() if isinstance(module, nn.Conv2d)} == {
        1
    }
    assert len(cases) > 20


def test_layers_of_known_networks_are_held_to_the_limits_too() -> None:
    """Before, a layer of stride 2 was tried where the limit was 1: the stride was read from another argument."""
    cases = planned(claim_on(CONVOLUTION), limits={CONVOLUTION: {"stride": (1,)}})
    strides = {module.stride for case in cases for module in case.build().modules() if isinstance(module, nn.Conv2d)}
    assert strides == {(1, 1)}
    assert any("_network" in case.varied for case in cases), "layers of stride 1 are still tried"


def test_features_are_held_to_their_limit() -> None:
    cases = planned(claim_on("nn.Linear"), limits={"nn.Linear": {"in_features": lambda count: count % 8 == 0}})
    assert {case.inputs[0].shape[-1] for case in cases} == {8, 16, 64}, "not 1, 63, 65, 257, 1025, 2049"


def test_limits_that_leave_no_case_are_told() -> None:
    """Before, they were an internal error: IndexError."""
    found = plan_cases(claim_on(CONVOLUTION), Capabilities(limits={CONVOLUTION: {"stride": (5,)}}))
    assert found == "no case is within the limits that the backend declares of nn.Conv2d"


def parameters_of(op: Any) -> set[str]:
    """The names of an op's parameters; none where Python does not know them: builtins, methods, dispatchers."""
    try:
        names = set(inspect.signature(op).parameters)
    except (TypeError, ValueError):
        return set()
    return set() if names == {"args", "kwargs"} else names


def test_what_is_no_argument_of_torchs_op_is_explained() -> None:
    """``docs/limits.md`` explains each."""
    for op, samples in RECORDS.items():
        for name in list_arguments(samples):
            own = parameters_of(op)
            assert name in OWN_ARGUMENTS or (name in own if own else not name.startswith("_")), f"{name} of {op}"


def test_a_case_has_its_arguments_as_the_op_gets_them() -> None:
    for case in planned(claim_on(CONVOLUTION)):
        module = next(each for each in case.build().modules() if isinstance(each, nn.Conv2d))
        for name in ("groups", "in_channels", "out_channels", "padding_mode"):
            assert case.arguments[name] == getattr(module, name), case.name
        for name in ("stride", "padding", "kernel_size", "dilation"):
            value = case.arguments[name]
            assert ((value, value) if isinstance(value, int) else value) == getattr(module, name), (case.name, name)


# -- conditions -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("where", "said"),
    [
        ({"nn.Conv9d": "groups == 1"}, "Capabilities.where: 'nn.Conv9d' fits no op that a pattern names"),
        ({"nn.Conv2d": "group == 1"}, "where['nn.Conv2d']: 'group == 1' names 'group'; known are "),
        ({"nn.Conv2d": "groups = 1"}, "where['nn.Conv2d']: 'groups = 1' is no expression"),
        ({"nn.Linear": "groups == 1"}, "where['nn.Linear']: 'groups == 1' names 'groups'"),
    ],
)
def test_a_condition_without_effect_is_told(where: dict[str, str], said: str) -> None:
    with pytest.raises(LimitsError) as caught:
        check_globs(Capabilities(where=where), BackendConfig("npu"))
    assert said in str(caught.value)


def test_a_condition_keeps_cases_out_by_several_arguments_and_shapes() -> None:
    def groups(**capabilities: Any) -> set[tuple[int, int]]:
        cases = plan_cases(claim_on(CONVOLUTION), Capabilities(**capabilities))
        assert not isinstance(cases, str)
        return {(case.arguments["groups"], case.arguments["in_channels"]) for case in cases}

    assert any(1 < count < channels for count, channels in groups())
    held = groups(where={"nn.Conv?d": "groups in (1, in_channels) and shape[1] < 60"})
    assert held and all(count in (1, channels) and channels < 60 for count, channels in held)
    assert groups(where={"nn.Linear": "in_features == 1"}) == groups(), "that of another op"
    nothing = plan_cases(claim_on(CONVOLUTION), Capabilities(where={"*": "rank == 9"}))
    assert nothing == "no case is within the limits that the backend declares of nn.Conv2d"
