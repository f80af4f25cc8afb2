"""Our definitions of the quantized_decomposed operators give torch's bits (rules CVT-03, CVT-04, CVT-07, NUM-02)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fx_quant_conformance.refimpl.errors import RefimplError
from fx_quant_conformance.refimpl.observers.decomposed import (
    OPERATORS,
    OPS,
    REGISTRAR,
    TORCHS_MODULE,
    Operator,
    choose_qparams,
    dequantize_per_channel,
    dequantize_per_tensor,
    quantize_per_channel,
    quantize_per_tensor,
)

INTEGERS = (torch.uint8, torch.int8, torch.uint16, torch.int16, torch.int32)
FLOATS = (torch.float32, torch.float16, torch.bfloat16)
BY_NAME = {operator.name: operator for operator in OPERATORS}


def torchs(operator: Operator) -> Any:
    name, _, overload = operator.name.partition(".")
    return getattr(getattr(OPS, name), overload or "default")


def same(ours: Any, theirs: Any) -> bool:
    """Tell whether two results are equal in dtype, shape and every bit."""
    if isinstance(ours, tuple):
        return len(ours) == len(theirs) and all(map(same, ours, theirs))
    if ours.dtype != theirs.dtype or ours.shape != theirs.shape:
        return False
    return torch.equal(*(each.flatten().clone().view(torch.uint8) for each in (ours, theirs)))


@st.composite
def arguments_of(draw: st.DrawFn, name: str) -> tuple[Any, ...]:
    """Draw the arguments of an operator: values on and beside ties, beyond both ends, and a narrowed range."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))
    refused = [torch.uint16] if name == "dequantize_per_channel" else []  # by torch, which cannot take a difference
    dtype = draw(st.sampled_from([each for each in INTEGERS if each not in refused]))
    shape = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    held = torch.iinfo(dtype)
    ranges = [(held.min, held.max), (held.min // 2, held.max // 2), (min(held.min + 1, 0), held.max)]
    low, high = draw(st.sampled_from(ranges))
    axis = draw(st.integers(0, len(shape) - 1))
    scales = 2.0 ** torch.randint(-9, 3, (shape[axis],), generator=generator)
    if draw(st.booleans()):
        scales = scales * torch.rand(shape[axis], generator=generator).clamp(min=0.1)
    zeros = torch.randint(max(low, -300), min(high, 300) + 1, (shape[axis],), generator=generator)
    steps = torch.randint(-800, 800, shape, generator=generator) / 2
    floats = (steps * scales[0]).to(draw(st.sampled_from(FLOATS)))
    integers = torch.randint(low, min(high, 2**30) + 1, shape, generator=generator).to(dtype)
    if name.startswith("choose_qparams"):
        return floats, low, high, draw(st.sampled_from([2.0**-23, 1e-3])), dtype
    if name.startswith("convert_element_type"):
        return floats, draw(st.sampled_from(FLOATS))
    value = floats if name.startswith("quantize") else integers
    if "per_channel" in name:
        return value, scales, zeros, axis, low, high, dtype
    if name.endswith(".tensor"):
        scale = scales[:1].to(draw(st.sampled_from([torch.float32, torch.float64])))
        return value, scale, zeros[:1], low, high, dtype
    return value, float(scales[0]), int(zeros[0]), low, high, dtype


@pytest.mark.slow
@pytest.mark.rule("CVT-07")
@pytest.mark.parametrize("name", BY_NAME)
@given(data=st.data())
def test_every_operator_gives_torchs_bits_and_knows_shapes_without_numbers(name: str, data: st.DataObject) -> None:
    """An exporter traces with tensors that hold no numbers: shapes and dtypes must follow."""
    operator, arguments = BY_NAME[name], data.draw(arguments_of(name))
    ours, theirs = operator.kernel(*arguments), torchs(operator)(*arguments)
    assert same(ours, theirs), f"{arguments}: {ours}, torch: {theirs}"
    shape = operator.shapes or operator.kernel
    empty = shape(*(each.to("meta") if isinstance(each, Tensor) else each for each in arguments))
    pairs = zip(ours, empty, strict=True) if isinstance(ours, tuple) else [(ours, empty)]
    assert all(one.shape == two.shape and one.dtype == two.dtype for one, two in pairs)


@pytest.mark.slow
@pytest.mark.rule("CVT-07")
@pytest.mark.parametrize("name", [name for name in BY_NAME if name.startswith("dequantize")])
@given(data=st.data())
def test_dequantize_computes_in_the_dtype_asked_for(name: str, data: st.DataObject) -> None:
    arguments, out_dtype = data.draw(arguments_of(name)), data.draw(st.sampled_from(FLOATS))
    ours, theirs = (call(*arguments, out_dtype=out_dtype) for call in (BY_NAME[name].kernel, torchs(BY_NAME[name])))
    assert ours.dtype == out_dtype
    assert same(ours, theirs)


@pytest.mark.rule("CVT-07")
def test_a_weight_may_have_no_zero_points_and_a_negative_axis() -> None:
    q, scales = torch.arange(-6, 6, dtype=torch.int8).reshape(3, 4), torch.tensor([0.5, 0.25, 2.0, 1.0])
    zeros = torch.tensor([1, 0, -1, 3])
    unsigned = (q + 6).to(torch.uint16)  # torch's operator fails on it
    of_uint16 = dequantize_per_channel(unsigned, scales, zeros, 1, 0, 65535, torch.uint16)
    assert torch.equal(of_uint16, (q + 6 - zeros) * scales)
    assert same(
        dequantize_per_channel(q, scales, None, 1, -128, 127, torch.int8),
        OPS.dequantize_per_channel.default(q, scales, None, 1, -128, 127, torch.int8),
    )
    numbers = (scales, zeros, -1, -128, 127, torch.int8)
    assert same(dequantize_per_channel(q, *numbers), OPS.dequantize_per_channel.default(q, *numbers))
    assert same(quantize_per_channel(q.float(), *numbers), OPS.quantize_per_channel.default(q.float(), *numbers))


@pytest.mark.parametrize(
    ("call", "complaint"),
    [
        (lambda: quantize_per_tensor(torch.ones(2).int(), 1.0, 0, 0, 255, torch.uint8), "the input is torch.int32"),
        (lambda: quantize_per_tensor(torch.ones(2), 1.0, 0, -1, 255, torch.uint8), r"range \[-1, 255\] is not within"),
        (lambda: quantize_per_tensor(torch.ones(2), 1.0, 0, 0, 1, torch.float16), "float16 holds no quantized values"),
        (
            lambda: dequantize_per_tensor(torch.ones(2).int(), 1.0, 0, 0, 255, torch.uint8),
            "the input is torch.int32; expected torch.uint8",
        ),
        (
            lambda: quantize_per_channel(torch.ones(2), torch.ones(2), torch.zeros(2), 1, 0, 255, torch.uint8),
            "axis 1 of a tensor of 1 dimensions; expected -1 to 0",
        ),
        (lambda: choose_qparams(torch.ones(0), 0, 255, 1e-7, torch.uint8), r"torch.float32 of shape \(0,\)"),
        (lambda: choose_qparams(torch.ones(1), 7, 7, 1e-7, torch.uint8), r"in \[7, 7\]; expected"),
        (lambda: choose_qparams(torch.tensor([1.0, float("nan")]), 0, 255, 1e-7, torch.uint8), "holds NaN"),
    ],
)
def test_bad_arguments_are_named(call: Any, complaint: str) -> None:
    with pytest.raises(RefimplError, match=complaint):
        call()


def test_torchs_operators_are_used_where_torch_has_them() -> None:
    """This torch has them all, which is what makes the tests above comparisons."""
    assert REGISTRAR == TORCHS_MODULE
