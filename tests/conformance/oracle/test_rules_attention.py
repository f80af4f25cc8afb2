"""The oracle's rule of attention: wide enough for float32, in one piece or in blocks, and no wider than a step."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from fx_quant_conformance.backends.base import Capabilities
from fx_quant_conformance.conformance.bounds.error_bounds import NoOracleError, OpCall, Value
from fx_quant_conformance.conformance.ops.attention import UNSAMPLED, bound_attention

ATTENTION: Any = F.scaled_dot_product_attention


def attend(size: int, keys: int, scale: float) -> tuple[OpCall, tuple[Tensor, ...]]:
    """A call on values of float32, with its exact result, and these values."""
    torch.manual_seed(keys)
    inputs = (scale * torch.randn(2, 3, 5, size), scale * torch.randn(2, 3, keys, size), torch.randn(2, 3, keys, size))
    values = tuple(Value(real=each.double()) for each in inputs)
    call = OpCall(function=ATTENTION, args=values, kwargs={}, capabilities=Capabilities())
    result = ATTENTION(*(each.double() for each in inputs))
    return replace(call, result=result), inputs


@pytest.mark.rule("NUM-04")
@pytest.mark.parametrize("kernel", [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION], ids=lambda each: each.name)
@pytest.mark.parametrize(("size", "keys", "scale"), [(4, 3, 1.0), (32, 700, 1.0), (64, 50, 4.0), (8, 1, 30.0)])
def test_float32_is_within_the_bound(kernel: SDPBackend, size: int, keys: int, scale: float) -> None:
    call, inputs = attend(size, keys, scale)
    bound: Tensor = sum(bound_attention(call).values(), torch.zeros(()).double())
    with sdpa_kernel(kernel):
        found = ATTENTION(*inputs).double()
    assert bool(((found - call.result).abs() <= bound).all())
    if scale == 1:
        assert float(bound.max()) < 0.05 * float(call.result.abs().max()), "it excuses no step of 8 bits"


@pytest.mark.rule("NUM-04")
def test_errors_of_the_operands_go_on() -> None:
    call, inputs = attend(4, 6, 1.0)
    query, key, value = call.args
    off = 1e-3
    moved = [
        ATTENTION(*[each.double() + by for each, by in zip(inputs, shifts, strict=True)])
        for shifts in ((off, 0, 0), (0, -off, 0), (0, 0, off), (-off, off, -off))
    ]
    errors = {"upstream": torch.full_like(query.real, off)}, {"upstream": torch.full_like(key.real, off)}
    args = (
        Value(real=query.real, errors=errors[0]),
        Value(real=key.real, errors=errors[1]),
        Value(real=value.real, errors=errors[1]),
    )
    bound: Tensor = sum(bound_attention(replace(call, args=args)).values(), torch.zeros(()).double())
    for result in moved:
        assert bool(((result - call.result).abs() <= bound).all())


@pytest.mark.parametrize("options", [{"is_causal": True}, {"dropout_p": 0.5}, {"scale": 2.0}])
def test_other_kinds_of_attention_have_no_oracle(options: dict[str, Any]) -> None:
    call, _ = attend(4, 6, 1.0)
    with pytest.raises(NoOracleError, match=f"no rule for attention with {next(iter(options))}"):
        UNSAMPLED[ATTENTION].bound(replace(call, kwargs=options))
