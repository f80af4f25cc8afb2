"""Each kind of difference is told from the others, in the order that the module states."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fx_quant_conformance.conformance.oracle.grids import Grid
from fx_quant_conformance.conformance.stages.attribution import CAUSES, attribute, format_worst

GRID = Grid(scale=0.25, zero_point=100, low=0, high=255, dtype="quint8")
NARROW = Grid(scale=0.25, zero_point=0, low=-127, high=127, dtype="qint8")
BY_CAUSE = {"final": 2.0**-17, "bias": 2.0**-8}


def doubles(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def slacks(**values: float) -> dict[str, Tensor]:
    return {cause: torch.tensor(value, dtype=torch.float64) for cause, value in values.items()}


@pytest.mark.rule("NUM-06")
@pytest.mark.parametrize(
    ("exact", "found", "kind"),
    [
        (12.5, 13, "exact tie"),
        (13.5, 13, "exact tie"),
        (12.5 - 2.0**-18, 13, "rescale in float32"),
        (12.5 + 2.0**-18, 12, "rescale in float32"),
        (12.5 - 2.0**-9, 13, "bias rounded to int32"),
        (12.5 - 2.0**-8 - 2.0**-17, 13, "bias rounded to int32"),
        (12.5 - 2.0**-7, 13, "off by one, not explained"),
        (12.0, 13, "off by one, not explained"),
        (12.0 - 2.0**-9, 13, "off by one, not explained"),
        (12.0, 14, "wrong"),
        (12.5, 14, "wrong"),
        (255.0, 254, "saturated one step early"),
        (300.0, 254, "saturated one step early"),
        (0.0, 1, "saturated one step early"),
        (-20.0, 1, "saturated one step early"),
        (254.4, 255, "off by one, not explained"),
        (100.0, 255, "wrapped around"),
        (150.0, 255, "saturated"),
        (100.0, 0, "saturated"),
        (300.0, 0, "wrapped around"),
        (300.0, 44, "wrong"),
        (255.0, 256, "outside the range"),
    ],
)
def test_one_difference(exact: float, found: int, kind: str) -> None:
    assert attribute(doubles(exact), doubles(found), GRID, slacks(**BY_CAUSE)) == {kind: 1}
    assert format_worst(doubles(exact), doubles(found), GRID, slacks(**BY_CAUSE)).startswith(
        f"{kind}: at [0] found {found}, "
    )


@pytest.mark.parametrize(("exact", "found"), [(12.5, 12), (13.5, 14), (12.4, 12), (300.0, 255), (-3.0, 0)])
def test_what_is_rounded_half_to_even_does_not_differ(exact: float, found: int) -> None:
    assert attribute(doubles(exact), doubles(found), GRID, {}) == {}
    assert format_worst(doubles(exact), doubles(found), GRID, {}) == ""


def test_a_narrow_range_is_left_where_the_dtype_would_allow_it() -> None:
    assert attribute(doubles(-127.0, -130.0), doubles(-128, -128), NARROW, {}) == {"outside the range": 2}


def test_counts_are_over_all_elements_and_parts_are_per_element() -> None:
    exact, found = (
        doubles(12.5, 12.5, 12.25, 12.25, 7.0, 7.0).reshape(3, 2),
        doubles(13, 12, 13, 13, 7, 9).reshape(3, 2),
    )
    slack = {"accumulation": doubles(0.0, 0.0, 0.3, 0.1, 0.0, 0.0).reshape(3, 2)}
    counts = attribute(exact, found, GRID, slack)
    assert counts == {"exact tie": 1, "accumulation in float32": 1, "off by one, not explained": 1, "wrong": 1}
    assert format_worst(exact, found, GRID, slack) == "wrong: at [2, 1] found 9, exact 7: distance 2, allowed 0.5"


def test_the_cheapest_explanation_comes_first_whatever_the_order_given() -> None:
    exact, found = doubles(12.5 - 2.0**-18), doubles(13)
    backwards = slacks(unheard_of=1.0, bias=2.0**-8, final=2.0**-17)
    assert attribute(exact, found, GRID, backwards) == {CAUSES["final"]: 1}
    assert attribute(exact - 0.25, found, GRID, backwards) == {"unheard_of": 1}


def test_the_worst_is_the_one_furthest_beyond_its_own_bound() -> None:
    exact, found = doubles(10.25, 20.45), doubles(11, 21)
    slack = {"bias": doubles(0.3, 0.0)}
    assert format_worst(exact, found, GRID, slack).startswith("off by one, not explained: at [1] found 21, exact 20.45")


def test_no_elements() -> None:
    assert attribute(doubles(), doubles(), GRID, {}) == {}
    assert format_worst(doubles(), doubles(), GRID, {}) == ""
