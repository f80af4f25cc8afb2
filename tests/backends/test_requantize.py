"""``Capabilities.requantize`` and ``tolerance``: what may be declared, and what an error says."""

from __future__ import annotations

from typing import Any

import pytest

from fx_quant_conformance.backends.base import Capabilities, Requantize, RoundingMode, Tolerance


def test_nothing_declared_is_float32_and_the_nearest() -> None:
    assert Capabilities().requantize == Requantize(multiplier_bits=None, rounds_twice=False)
    assert str(Requantize()) == "float32, nearest"


def test_what_is_declared_is_told_in_words() -> None:
    tflite = Requantize(multiplier_bits=31, rounds_twice=True, rounding=RoundingMode.HALF_AWAY)
    assert str(tflite) == "multiplier of 31 bits, rounded twice, half away"
    mean = Requantize(multiplier_bits=29, rounds_twice=True, spare_bits=1)
    assert str(mean) == "multiplier of 29 bits, 1 spare, rounded twice, nearest"
    assert str(Requantize(fraction_bits=8)) == "factor of 8 fraction bits, nearest"
    assert {tflite: 1}[Requantize(multiplier_bits=31, rounds_twice=True, rounding=RoundingMode.HALF_AWAY)] == 1


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"multiplier_bits": 7}, "multiplier_bits: found 7; give a number from 8 to 62, or None"),
        ({"multiplier_bits": 63}, "multiplier_bits: found 63; give a number from 8 to 62"),
        ({"multiplier_bits": True}, "multiplier_bits: found True; give a number"),
        ({"multiplier_bits": 31.0}, "multiplier_bits: found 31.0; give a number"),
        ({"rounds_twice": True}, r"rounds_twice: found True without multiplier_bits; give these too \(TFLite: 31\)"),
        ({"fraction_bits": 7}, "fraction_bits: found 7; give a number from 8 to 62, or None"),
        ({"fraction_bits": 8, "multiplier_bits": 8}, "fraction_bits: found beside multiplier_bits; .* give one"),
        ({"spare_bits": 1, "multiplier_bits": 31}, "spare_bits: found 1 without rounds_twice; give both, or none"),
        ({"spare_bits": -1}, "spare_bits: found -1; give a whole number, 0 or more"),
        ({"rounding": "floor"}, "rounding: found 'floor'; give one of RoundingMode.NEAREST, RoundingMode.HALF_EVEN, "),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Requantize(**given)


@pytest.mark.parametrize("lsb", (0, 0.5, 1.001, -1.0, float("nan"), float("inf"), True, "1"), ids=str)
def test_a_tolerance_is_above_half_a_step_and_one_at_most(lsb: Any) -> None:
    with pytest.raises(ValueError, match=r"^Tolerance\.lsb: found .*; give a number"):
        Tolerance(lsb=lsb)


def test_the_first_glob_that_fits_gives_the_tolerance() -> None:
    declared = Capabilities(tolerance={"nn.Softmax": Tolerance(lsb=0.75), "nn.S*": Tolerance()})
    found = [declared.tolerance_for(name) for name in ("nn.Softmax", "nn.Sigmoid", "nn.Linear")]
    assert found == [0.75, 1.0, 0.0] and str(Tolerance(lsb=0.75)) == "0.75 LSB"
