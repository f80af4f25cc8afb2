"""The ``torch.ops.quantized_decomposed`` operators: torch's own, or ours, which give the same bits. (CVT-07)

Torch registers its own when a module of its own flow is imported, a package that is to be removed. Where
it is missing, those that no other package has registered are registered from here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.library import Library

from fx_quant_conformance.refimpl.errors import RefimplError
from fx_quant_conformance.refimpl.legacy import QUANTIZATION
from fx_quant_conformance.refimpl.legacy.channels import lay_along
from fx_quant_conformance.refimpl.legacy.dtypes import PLAIN_DTYPE
from fx_quant_conformance.refimpl.observers.qparams import compute_qparams
from fx_quant_conformance.refimpl.releases import find_torchs

NAMESPACE = "quantized_decomposed"
OPS = getattr(torch.ops, NAMESPACE)
TORCHS_MODULE = f"{QUANTIZATION}.fx._decomposed"

_FLOATS = (torch.float32, torch.float16, torch.bfloat16)
_INTEGERS = tuple(dict.fromkeys(PLAIN_DTYPE.values()))


class Operator(NamedTuple):
    """One operator: its schema, what it computes, and, if that reads a tensor's numbers, the shapes that it gives."""

    schema: str
    kernel: Callable[..., Any]
    shapes: Callable[..., Any] | None = None

    @property
    def name(self) -> str:
        """The name with its overload, such as ``quantize_per_tensor.tensor``."""
        return self.schema.partition("(")[0]


def quantize_per_tensor(
    x: Tensor, scale: float, zero_point: int, quant_min: int, quant_max: int, dtype: torch.dtype
) -> Tensor:
    """Return the integers clamp(round_half_even(x · (1 / scale)) + zero_point), of x's shape. (CVT-07)

    ``x`` is float32, or float16 or bfloat16, which are widened first. ``1 / scale`` is computed in float64 and rounded
    to float32. Raises RefimplError for another dtype of ``x``, and for a range that ``dtype`` does not hold.
    """
    return _round(_widen(x), 1.0 / scale, zero_point, quant_min, quant_max, dtype)


def dequantize_per_tensor(
    q: Tensor,
    scale: float,
    zero_point: int,
    quant_min: int,
    quant_max: int,
    dtype: torch.dtype,
    *,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Return the reals (q − zero_point) · scale, computed in ``out_dtype`` (default: float32), of q's shape. (CVT-07)

    Raises RefimplError if ``q`` is not of ``dtype``, or the range is not one of it.
    """
    _check_held(q, quant_min, quant_max, dtype)
    return (q.to(out_dtype or torch.float32) - zero_point) * scale


def quantize_per_channel(
    x: Tensor, scales: Tensor, zero_points: Tensor, axis: int, quant_min: int, quant_max: int, dtype: torch.dtype
) -> Tensor:
    """Return integers as `quantize_per_tensor`, with a scale and zero point for each slice along ``axis``. (CVT-07)

    Raises RefimplError as it does, and for an axis that ``x`` does not have.
    """
    inverse, zeros = (_along(x, axis, numbers) for numbers in (1.0 / scales, zero_points))
    return _round(_widen(x), inverse, zeros, quant_min, quant_max, dtype)


def dequantize_per_channel(
    q: Tensor,
    scales: Tensor,
    zero_points: Tensor | None,
    axis: int,
    quant_min: int,
    quant_max: int,
    dtype: torch.dtype,
    *,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Return reals as `dequantize_per_tensor`, with a scale and zero point for each slice along ``axis``. (CVT-07)

    Without zero points they are 0. Raises RefimplError as it does, and for an axis that ``q`` does not have.
    """
    _check_held(q, quant_min, quant_max, dtype)
    whole = q.to(torch.int64)  # which torch does not add to uint16
    distance = whole if zero_points is None else whole - _along(q, axis, zero_points)
    return (distance * _along(q, axis, scales)).to(out_dtype or torch.float32)


def choose_qparams(x: Tensor, quant_min: int, quant_max: int, eps: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the affine scale (float64) and zero point (int64), both of shape (1,), of x's range. (NUM-02, CVT-03)

    Raises RefimplError for an empty ``x``, NaN, an empty range, or another dtype than `quantize_per_tensor` takes.
    """
    return _choose(x, quant_min, quant_max, eps, dtype, torch.per_tensor_affine)


def choose_qparams_symmetric(
    x: Tensor, quant_min: int, quant_max: int, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return scale and zero point as `choose_qparams`, symmetric: the zero point is 0, of uint8 128. (NUM-02)"""
    return _choose(x, quant_min, quant_max, eps, dtype, torch.per_tensor_symmetric)


def convert_element_type(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return x in another dtype. (CVT-04)"""
    return x.to(dtype)


def _round(x: Tensor, inverse: Any, zero_point: Any, low: int, high: int, dtype: torch.dtype) -> Tensor:
    _check_range(low, high, dtype)
    return torch.clamp(torch.round(x * inverse) + zero_point, low, high).to(dtype)


def _choose(
    x: Tensor, low: int, high: int, eps: float, dtype: torch.dtype, qscheme: torch.qscheme
) -> tuple[Tensor, Tensor]:
    if x.dtype not in _FLOATS or dtype not in _INTEGERS or low >= high or not x.numel():
        raise RefimplError(
            f"choose_qparams: {x.dtype} of shape {tuple(x.shape)} as {dtype} in [{low}, {high}]; expected elements of "
            f"{_list(_FLOATS)}, one of {_list(_INTEGERS)}, and a range of two integers or more"
        )
    ends = torch.aminmax(x)
    if math.isnan(float(ends.min)):
        raise RefimplError("choose_qparams: the input holds NaN, which has no range; look for what made it")
    middle = 128 if dtype is torch.uint8 else 0
    chosen = compute_qparams(*ends, low, high, qscheme=qscheme, eps=torch.tensor([eps]), middle=middle)
    return chosen[0].reshape(1).to(torch.float64), chosen[1].reshape(1).to(torch.int64)


def _along(x: Tensor, axis: int, numbers: Tensor) -> Tensor:
    """Return one number per slice of ``x`` along ``axis`` in a shape that broadcasts with it."""
    if not -x.dim() <= axis < x.dim():
        raise RefimplError(f"axis {axis} of a tensor of {x.dim()} dimensions; expected {-x.dim()} to {x.dim() - 1}")
    return lay_along(numbers, axis, x.dim())


def _widen(x: Tensor) -> Tensor:
    if x.dtype not in _FLOATS:
        raise RefimplError(f"quantize: the input is {x.dtype}; expected one of {_list(_FLOATS)}")
    return x.to(torch.float32)


def _check_held(q: Tensor, low: int, high: int, dtype: torch.dtype) -> None:
    if q.dtype != dtype:
        raise RefimplError(f"dequantize: the input is {q.dtype}; expected {dtype}, the dtype of the arguments")
    _check_range(low, high, dtype)


def _check_range(low: int, high: int, dtype: torch.dtype) -> None:
    if dtype not in _INTEGERS:
        raise RefimplError(f"{dtype} holds no quantized values; expected one of {_list(_INTEGERS)}")
    held = torch.iinfo(dtype)
    if low < held.min or high > held.max:
        raise RefimplError(f"the range [{low}, {high}] is not within {dtype}: [{held.min}, {held.max}]")


def _list(dtypes: tuple[torch.dtype, ...]) -> str:
    return ", ".join(map(str, dtypes))


# -- operators whose qparams are tensors of one element ----------------------------------------------------------------


def _quantize_by_tensors(x: Tensor, scale: Tensor, zero_point: Tensor, *rest: Any) -> Tensor:
    return quantize_per_tensor(x, scale.item(), int(zero_point.item()), *rest)


def _dequantize_by_tensors(q: Tensor, scale: Tensor, zero_point: Tensor, *rest: Any, **named: Any) -> Tensor:
    return dequantize_per_tensor(q, scale.item(), int(zero_point.item()), *rest, **named)


def _shape_quantized(x: Tensor, *arguments: Any) -> Tensor:
    return torch.empty_like(x, dtype=arguments[-1])


def _shape_dequantized(q: Tensor, *arguments: Any, out_dtype: torch.dtype | None = None) -> Tensor:
    return torch.empty_like(q, dtype=out_dtype or torch.float32)


def _shape_chosen(x: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    return x.new_empty(1, dtype=torch.float64), x.new_empty(1, dtype=torch.int64)


_RANGE = "int quant_min, int quant_max, ScalarType dtype"
_NUMBERS, _TENSORS = f"float scale, int zero_point, {_RANGE}", f"Tensor scale, Tensor zero_point, {_RANGE}"
_OUT = "*, ScalarType? out_dtype=None"
_CHOOSE = "(Tensor input, int quant_min, int quant_max, float eps, ScalarType dtype) -> (Tensor, Tensor)"
OPERATORS = (
    Operator(f"quantize_per_tensor(Tensor input, {_NUMBERS}) -> Tensor", quantize_per_tensor),
    Operator(f"quantize_per_tensor.tensor(Tensor input, {_TENSORS}) -> Tensor", _quantize_by_tensors, _shape_quantized),
    Operator(f"dequantize_per_tensor(Tensor input, {_NUMBERS}, {_OUT}) -> Tensor", dequantize_per_tensor),
    Operator(
        f"dequantize_per_tensor.tensor(Tensor input, {_TENSORS}, {_OUT}) -> Tensor",
        _dequantize_by_tensors,
        _shape_dequantized,
    ),
    Operator(
        f"quantize_per_channel(Tensor input, Tensor scales, Tensor zero_points, int axis, {_RANGE}) -> Tensor",
        quantize_per_channel,
    ),
    Operator(
        f"dequantize_per_channel(Tensor input, Tensor scales, Tensor? zero_points, int axis, {_RANGE}, {_OUT})"
        " -> Tensor",
        dequantize_per_channel,
    ),
    Operator(f"choose_qparams.tensor{_CHOOSE}", choose_qparams, _shape_chosen),
    Operator(f"choose_qparams_symmetric.tensor{_CHOOSE}", choose_qparams_symmetric, _shape_chosen),
    Operator("convert_element_type.no_fuse(Tensor input, ScalarType dtype) -> Tensor", convert_element_type),
)
"""The operators that refimpl writes, as torch's schemas have them."""


def _list_missing() -> Iterator[Operator]:
    """Yield the operators that are not registered."""
    for operator in OPERATORS:
        name, _, overload = operator.name.partition(".")
        if not hasattr(OPS, name) or (overload or "default") not in getattr(OPS, name).overloads():
            yield operator


def _register() -> str:
    """Register torch's operators, or ours where this torch has none; name the module whose import does so."""
    if find_torchs(TORCHS_MODULE) is not None:
        return TORCHS_MODULE
    for operator in _list_missing():
        _LIBRARY.define(operator.schema)
        _LIBRARY.impl(operator.name, operator.kernel, "CompositeExplicitAutograd")
        if operator.shapes is not None:
            _LIBRARY.impl(operator.name, operator.shapes, "Meta")
    return __name__


_LIBRARY: Any = Library(NAMESPACE, "FRAGMENT")  # type: ignore[no-untyped-call]  # it unregisters what it holds when it is collected
REGISTRAR = _register()
"""The module whose import registers all of them here: torch's, or this one."""
