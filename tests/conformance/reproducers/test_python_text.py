"""Python as text: plain data are spelled as they are, and a module imports what it names, and no more."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fx_quant_conformance.conformance.reproducers.python_text import compose, spell

WRITTEN = '''"""What it is about."""

import base64
from functools import partial

import vendor.ops  # registers the ops
from fx_quant_conformance.refimpl import nni
from torch import nn
from vendor.home import a, b

layer = partial(nn.Linear, a=a)
names = {
    b: [nni.LinearReLU, "it's", base64.b85decode],
    "F": "found in a text alone",
}
'''


@pytest.mark.parametrize(
    "value",
    [None, True, 0.1, float("-inf"), "it's", (), (1,), [(2, "a")], {"a": [1], 2: None}, (slice(None, 3),)],
)
def test_plain_data_are_spelled_as_they_are(value: Any) -> None:
    assert eval(spell(value, repr)) == value


def test_what_is_no_plain_data_is_spelled_in_its_place() -> None:
    assert spell({"a": (len, [1])}, lambda other: f"<{other.__name__}>") == "{'a': (<len>, [1])}"


def test_a_dtype_that_torch_is_about_to_remove_has_its_own_name() -> None:
    assert [spell(dtype, repr) for dtype in (torch.int8, torch.quint4x2)] == ["torch.int8", "quint4x2"]
    assert "\nfrom fx_quant_conformance.refimpl import qint8\n" in compose("It.", "dtype = qint8", {})


def test_a_text_is_laid_out_with_what_it_has_to_import() -> None:
    body = """layer=partial(nn.Linear,a=a)
names = {b: [nni.LinearReLU, 'it\\'s', base64.b85decode], 'F': 'found in a text alone'}"""
    homes = {"partial": "functools", "b": "vendor.home", "a": "vendor.home", "unused": "vendor.home"}
    assert compose("What it is about.", body, homes, registrar="vendor.ops", width=60) == WRITTEN
