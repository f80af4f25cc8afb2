"""``Capabilities``: every field is held to its annotation when it is made, and what does not fit is one line."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch

from fx_quant_conformance.backends.base import _FITS, Capabilities, Requantize, RoundingMode, Tolerance
from tests.hostile.test_processes import run_hostile

WRONG: dict[str, tuple[Any, ...]] = {
    "weight_schemes": (
        "per_tensor_symmetric",
        ["per_tensor_symmetric"],
        ("per_group",),
        (),
        ([],),
        (torch.ones(2),),
        None,
    ),
    "flows": ("ptq", ["ptq"], ("pt2e",), (), ([],), (torch.ones(2),), None),
    "bool": (1, 0, "no", None, torch.tensor(True)),
    "int": ("many", 1.0, True, -1, None, torch.ones(2, 2)),
    "float": ("small", True, -0.5, float("nan"), float("inf"), None, torch.ones(2, 2)),
    "requantize": (None, Requantize, "half even"),
    "requantize_of": (None, [], "nn.Linear", {"nn.Linear": None}, {1: Requantize()}, {"*": RoundingMode.DOWN}),
    "tolerance": (None, [], 1, {"nn.Linear": 1.0}, {1: Tolerance()}, {"*": None}),
    "where": (None, [], "groups == 1", {"nn.Conv2d": 1}, {1: "groups == 1"}),
    "limits": (None, [], "none", {"nn.Linear": ("bias", True)}, {"nn.Linear": None}, torch.ones(2, 2)),
}
"""Values that do not fit, by the field or its annotation."""
CASES = [
    (item.name, value) for item in fields(Capabilities) for value in WRONG.get(item.name, WRONG.get(str(item.type), ()))
]


def test_every_field_is_checked_and_takes_its_default() -> None:
    Capabilities()
    assert {str(item.type) for item in fields(Capabilities)} == {*_FITS}
    assert {name for name, _ in CASES} == {item.name for item in fields(Capabilities)}


@pytest.mark.parametrize(("name", "value"), CASES)
def test_a_value_that_does_not_fit_is_one_line(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"^Capabilities\.{name}: found .*; give ") as raised:
        Capabilities(**{name: value})
    assert "\n" not in str(raised.value) and len(str(raised.value)) < 400


def test_whole_numbers_are_numbers() -> None:
    assert Capabilities(dynamic_scale_floor=1, tie_steps=2).tie_steps == 2


def test_what_requantize_says_twice_is_a_bool() -> None:
    with pytest.raises(ValueError, match=r"^Requantize\.rounds_twice: found 'no'; give True or False"):
        Requantize(multiplier_bits=31, rounds_twice="no")  # type: ignore[arg-type]


@pytest.mark.slow
def test_the_run_ends_with_the_line(tmp_path: Path) -> None:
    ran = run_hostile(tmp_path, "meddlers:DeclaresOddly")
    assert ran.status == 4 and "Capabilities.tie_steps: found " in ran.err, ran.said
    assert len([line for line in ran.err.splitlines() if line]) == 1
