"""Limits of time: what a timer of the system takes."""

from __future__ import annotations

import argparse
import threading

import pytest

from fx_quant_conformance.conformance.machine.seconds import LONGEST, parse_seconds


@pytest.mark.parametrize("text", ["0", "-1", "nan", "inf", "", "soon", "1e300", "604801"])
def test_a_limit_is_a_positive_number_of_seconds_up_to_a_week(text: str) -> None:
    assert parse_seconds("0.5") == 0.5 and parse_seconds("604800") == LONGEST < threading.TIMEOUT_MAX
    with pytest.raises(argparse.ArgumentTypeError, match="expected a positive number of seconds, found"):
        parse_seconds(text)
