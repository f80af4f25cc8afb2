"""The inner values of a model that a backend returns beside its results."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fx_quant_conformance.conformance.whole_models.context import _tell
from fx_quant_conformance.refimpl import (
    convert_to_reference_decomposed_fx,
    default_backend_config,
    get_default_qconfig_mapping,
    prepare_fx,
)


class Dropping(nn.Module):
    """A layer, a dropout as a module or as a function, and what reads it."""

    def __init__(self, *, is_function: bool) -> None:
        super().__init__()
        self.layer, self.drop, self.is_function = nn.Linear(4, 4), nn.Dropout(), is_function

    def forward(self, x: Tensor) -> Any:
        y = self.layer(x)
        return x + (F.dropout(y, 0.5, False) if self.is_function else self.drop(y))


@pytest.mark.rule("NUM-03")
@pytest.mark.parametrize("is_function", [False, True])
def test_a_value_on_both_sides_of_a_dropout_is_told_once(is_function: bool) -> None:
    """ExecuTorch's delegate leaves the dropout out, and refuses to return its only value twice."""
    torch.manual_seed(0)
    model, x = Dropping(is_function=is_function).eval(), torch.randn(3, 4)
    mapping = get_default_qconfig_mapping("qnnpack")
    prepared = prepare_fx(model, mapping, (x,), backend_config=default_backend_config())
    prepared(x)
    reference = convert_to_reference_decomposed_fx(prepared)
    inner = [node.name for node in reference.graph.nodes if "dequantize" in node.name]
    told, numbers = _tell(reference, inner)
    values = told(x)
    assert len(inner) == 4 and set(numbers) == set(inner)
    before, after = (numbers[name] for name in inner[1:3])
    assert before == after and len(set(numbers.values())) == 3 == len(values)
    assert torch.equal(values[0], reference(x))
