"""Conditions on cases: what they mean, and what is no condition."""

from __future__ import annotations

from typing import Any

import pytest

from fx_quant_conformance.conformance.machine.conditions import ConditionError, read_condition

CASE: dict[str, Any] = {
    "groups": 1,
    "in_channels": 3,
    "stride": (2, 1),
    "shape": (1, 3, 8, 8),
    "shapes": ((1, 3, 8, 8), (1, 3, 1, 1)),
    "rank": 4,
    "dim": None,
    "bias": True,
    "padding_mode": "zeros",
    "s_in": (0.5, 2.0),
    "s_w": (0.25, 1.0),
}


@pytest.mark.parametrize(
    ("text", "holds"),
    [
        ("groups == in_channels or groups == 1", True),
        ("groups in (2, in_channels)", False),
        ("groups not in (2, in_channels)", True),
        ("stride <= 2", True),  # of each axis
        ("stride < 2", False),
        ("stride in (1, 2)", True),
        ("stride == (2, 1)", True),
        ("stride != (2, 1)", False),
        ("max(stride) * 2 == 4", True),
        ("shape[1] % 3 == 0 and shape[-1] // 3 == 2", True),
        ("prod(shape) == 192 and len(shapes) == 2", True),
        ("rank - 1 == 3", True),
        ("-rank < abs(-3) <= 3", True),
        ("bias and not groups != 1", True),
        ("padding_mode == 'zeros'", True),
        ("dim < 3", False),  # nothing can be said of None
        ("dim == None", True),
        ("padding_mode < 3", False),
        ("shape[9] == 1", False),
        ("1 / (groups - 1) > 0", False),
        ("'a' * 3 == 'aaa'", False),  # arithmetic is of numbers
        ("s_in / s_w < 16", True),
        ("s_in / 0.01 < 128", False),
        ("s_in / s_out < 128", None),  # not known before the case is converted
        ("not s_in / s_out < 128", None),
        ("s_in / s_out < 128 or groups == 1", True),
        ("s_in / s_out < 128 or groups == 2", None),
        ("s_in / s_out < 128 and groups == 2", False),
    ],
)
def test_what_it_means(text: str, holds: bool | None) -> None:
    assert read_condition(text).holds(CASE) is holds


@pytest.mark.parametrize(
    "text",
    [
        "",
        "a b",
        "groups = 1",
        "__import__('os').system('true')",
        "shape.count(1)",
        "[1, 2]",
        "lambda: 1",
        "f'{groups}'",
        "len(shape, key=1)",
        "open('x')",
        "1 if groups else 2",
        "2 ** 99",
        "(" * 300,
        "1" * 500,
        "groups := 1",
        "shape[1:2] == (3,)",
        "\x00",
    ],
)
def test_what_is_no_condition(text: str) -> None:
    with pytest.raises(ConditionError) as caught:
        read_condition(text)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 1000


def test_a_name_that_no_case_has_is_told_with_those_that_are_known() -> None:
    with pytest.raises(ConditionError, match=r"^'group == 1' names 'group'; known are groups, shape$"):
        read_condition("group == 1").check_names({"shape", "groups"})
