"""What failing cases share and passing ones do not: said only if it is exact."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
from torch import nn

from fx_quant_conformance.conformance.claims.case import Case, ValueRange
from fx_quant_conformance.conformance.ops.op_model import Input
from fx_quant_conformance.conformance.stages.shared import find_shared
from tests.conformance.support.planning import claim_on, planned

SIGNED = ValueRange(name="signed", ranges=((-1.0, 1.0),))
LARGE_BIAS = ValueRange(name="large_bias", ranges=((-1.0, 1.0),), bias=128.0)


def make_case(name: str, value_range: ValueRange = SIGNED, **arguments: Any) -> Case:
    return Case(
        name=name, build=nn.Identity, inputs=(Input(shape=(2, 3)),), value_range=value_range, arguments=arguments
    )


def product_of(**values: tuple[Any, ...]) -> list[Case]:
    """A case for each choice of these values and each of two value ranges."""
    choices = [dict(zip(values, each, strict=True)) for each in itertools.product(*values.values())]
    return [
        make_case(f"{number} {value_range.name}", value_range, **choice)
        for number, choice in enumerate(choices)
        for value_range in (SIGNED, LARGE_BIAS)
    ]


CASES = product_of(groups=(1, 2, 8), padding=(0, 1, (1, 2), "same"), bias=(True, False), mode=("zeros", "reflect", "x"))


@pytest.mark.parametrize(
    ("fails", "said"),
    [
        (lambda case: case.arguments["groups"] > 1, ["groups > 1"]),
        (lambda case: case.arguments["groups"] == 8, ["groups = 8"]),
        (lambda case: case.arguments["padding"] != 0, ["padding ≠ 0"]),
        (lambda case: case.arguments["padding"] in (1, (1, 2)), ["padding > 0"]),
        (lambda case: case.arguments["mode"] != "reflect", ["mode ≠ reflect"]),
        (lambda case: not case.arguments["bias"], ["bias = False"]),
        (lambda case: case.value_range is LARGE_BIAS, ["value range = large_bias"]),
        (
            lambda case: case.arguments["groups"] > 1 and case.value_range is LARGE_BIAS,
            ["groups > 1 and value range = large_bias"],
        ),
        (lambda case: case.arguments["groups"] > 1 and case.arguments["padding"] != 0, ["groups > 1 and padding ≠ 0"]),
        (lambda case: case.arguments["groups"] > 1 or not case.arguments["bias"], ["groups > 1 or bias = False"]),
        (lambda case: case.arguments["groups"] > 1 or (not case.arguments["bias"] and case.value_range is SIGNED), []),
        (lambda case: True, []),
        (lambda case: False, []),
    ],
)
def test_the_condition_that_separates_is_found(fails: Callable[[Case], bool], said: list[str]) -> None:
    failing = {case.name for case in CASES if fails(case)}
    assert find_shared(CASES, failing) == said


def test_every_condition_that_is_said_separates() -> None:
    """Against each subset of six cases that differ in everything: what is said holds there and nowhere else."""
    cases = [make_case(str(number), groups=number, padding=number % 2) for number in range(6)]
    for size in range(7):
        for failing in map(set, itertools.combinations([case.name for case in cases], size)):
            for text in find_shared(cases, failing):
                python = text.replace(" = ", " == ").replace("≠", "!=")
                assert {case.name for case in cases if eval(python, dict(case.arguments))} == failing, text


def test_few_cases_are_not_explained_nor_what_anything_explains() -> None:
    few = [make_case(str(number), groups=number) for number in range(5)]
    assert find_shared(few, {"4"}) == [], "of five cases"
    for count, said in ((3, ["a0 = 5", "a1 = 5", "a2 = 5"]), (4, [])):
        cases = [make_case(str(n), SIGNED, **{f"a{name}": n for name in range(count)}) for n in range(6)]
        assert find_shared(cases, {"5"}) == said, "what four arguments explain, none of them does"


def test_one_or_two_failing_cases_are_not_explained_by_two_conditions() -> None:
    """Some two conditions single out nearly any two cases: that would be chance."""
    failing = {case.name for case in CASES if case.name.startswith("7 ")}
    assert len(failing) == 2
    assert find_shared(CASES, failing) == []


def test_real_cases_of_a_convolution_are_told_apart() -> None:
    cases = planned(claim_on("nn.Conv2d"))
    for fails, said in (
        (lambda a: a["groups"] > 1, "groups > 1"),
        (lambda a: a["dilation"] != 1, "dilation > 1"),
        (lambda a: a["padding_mode"] == "circular", "padding_mode = circular"),
        (lambda a: a["bias"] is False, "bias = False"),
    ):
        assert said in find_shared(cases, {case.name for case in cases if fails(case.arguments)})
