"""``Capabilities.requantize``: what may be declared, and what an error says."""

from __future__ import annotations

from typing import Any

import pytest

from fx_quant_conformance.backends.base import Capabilities, Requantize, RoundingMode


def test_nothing_declared_is_float32_and_the_nearest() -> None:
    assert Capabilities().requantize == Requantize(multiplier_bits=None, rounds_twice=False)
    assert str(Requantize()) == "float32, nearest"


def test_what_is_declared_is_told_in_words() -> None:
    tflite = Requantize(multiplier_bits=31, rounds_twice=True, rounding=RoundingMode.HALF_AWAY)
    assert str(tflite) == "multiplier of 31 bits, rounded twice, half away"
    assert {tflite: 1}[Requantize(multiplier_bits=31, rounds_twice=True, rounding=RoundingMode.HALF_AWAY)] == 1


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"multiplier_bits": 7}, "multiplier_bits: found 7; give a number from 8 to 62, or None"),
        ({"multiplier_bits": 63}, "multiplier_bits: found 63; give a number from 8 to 62"),
        ({"multiplier_bits": True}, "multiplier_bits: found True; give a number"),
        ({"multiplier_bits": 31.0}, "multiplier_bits: found 31.0; give a number"),
        ({"rounds_twice": True}, r"rounds_twice: found True without multiplier_bits; give these too \(TFLite: 31\)"),
        ({"rounding": "floor"}, "rounding: found 'floor'; give one of RoundingMode.NEAREST, RoundingMode.HALF_EVEN, "),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Requantize(**given)
