"""The op samples that fit a value of a given shape, for drawn graphs (`conformance.fuzz.graph`).

Op samples lead from arguments to shapes; here a shape leads to arguments, with the values of the samples.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import cache
from itertools import product
from typing import Any

import torch

from fx_quant_conformance.conformance.ops.calls import Shape
from fx_quant_conformance.conformance.ops.op_model import OneInput
from fx_quant_conformance.conformance.ops.table import RECORDS, WEIGHTED
from fx_quant_conformance.conformance.ops.variants import Arguments, Fixed
from fx_quant_conformance.conformance.ops.weighted import LayerShape
from fx_quant_conformance.refimpl.config.patterns import leaf_name

OptionsFor = Callable[[Any, Shape], list[dict[str, Any]]]

PAIRS = (operator.add, operator.sub, operator.mul, torch.add, torch.sub, torch.mul)
"""Ops of two tensors that are broadcast, or of a tensor and a number."""
JOINS = (torch.cat, torch.concat, torch.concatenate, torch.stack)
"""Ops of a list of tensors."""
_NOT_DRAWN = (
    operator.floordiv,
    torch.matmul,
    operator.matmul,
    "matmul",
    torch.bmm,
    "bmm",
    torch.addmm,
    "view",
    "resize_",
    "size",
    "shape",
)
"""Ops that do not take every value (but integers, matrices that fit, or contiguous memory), or return none."""
_RARE: Arguments = {"inplace": True, "training": True, "_unbatched": True, "_uneven": True}
"""Arguments that are not drawn: in place, an op would change what others read; unbatched, no other op would fit."""


@cache
def options_for(op: Any, shape: Shape) -> tuple[dict[str, Any], ...]:
    """List arguments with which an op takes a value of this shape, the base first; none: it does not take it.

    What depends on other values or is free to choose is left out: the sizes of a second operand, channels.
    """
    if op in _NOT_DRAWN or op not in RECORDS:
        return ()
    unique = {repr(arguments): arguments for arguments in _select_family(op)(op, shape)}
    return tuple(arguments for arguments in unique.values() if all(map(_is_plain, arguments.values())))


def _select_family(op: Any) -> OptionsFor:
    if op in PAIRS:
        return _list_pairs
    if op in JOINS:
        return _list_joins
    if op in WEIGHTED:
        return _list_linear if "linear" in leaf_name(op).lower() else _list_convolutions
    return _list_reshapes if op == "reshape" else _list_variants


def _is_plain(value: Any) -> bool:
    """Tell whether a value can be written as JSON."""
    return all(map(_is_plain, value)) if isinstance(value, tuple) else isinstance(value, (int, float, str, type(None)))


@cache
def _variants_of(op: Any) -> tuple[dict[str, Any], ...]:
    """Return the op's variants without those that are not drawn."""
    variants = (arguments for _, arguments in RECORDS[op].variants(known=False))
    return tuple(each for each in variants if not any(each.get(name) == value for name, value in _RARE.items()))


def _list_variants(op: Any, shape: Shape) -> list[dict[str, Any]]:
    """List the variants of an op of one tensor that run on a value of this shape."""
    samples = RECORDS[op]
    shapes = samples.arguments.get("shape", ())
    ranks = () if isinstance(shapes, Fixed) else {len(each) for each in shapes}
    variants = [{**arguments, "shape": shape} for arguments in _variants_of(op)] if len(shape) in ranks else []
    return [each for each in variants if samples.is_valid(each) and _runs(op, shape, each)]


def _runs(op: Any, shape: Shape, arguments: Arguments) -> bool:
    """Tell whether an op takes a value of this shape, gives finite numbers, and can be trained on it."""
    try:
        with torch.random.fork_rng(devices=[]):
            model = OneInput([RECORDS[op].step(op, arguments)])
            results = [each(torch.ones(shape)) for each in (model.eval(), model.train())]
            if results[1].requires_grad:
                torch.autograd.grad(results[1].sum(), list(model.parameters()), allow_unused=True)
    except (RuntimeError, ValueError):  # what torch raises for a shape that an op does not take
        return False
    return all(each.numel() > 0 and bool(each.isfinite().all()) for each in results)


def _list_pairs(op: Any, shape: Shape) -> list[dict[str, Any]]:
    """List a second tensor, the same one twice, or a number, in either place."""
    values = RECORDS[op].arguments
    names = [name for name in ("other", "alpha", "_number_first") if name in values]
    options = [dict(zip(names, each, strict=True)) for each in product(*(values[name] for name in names))]  # type: ignore[arg-type]
    return [each for each in options if not (each["_number_first"] and isinstance(each["other"], str))]


def _list_joins(op: Any, shape: Shape) -> list[dict[str, Any]]:
    return [{"dim": dim} for dim in (1, 0, -1) if -len(shape) <= dim < len(shape)]


def _list_reshapes(op: Any, shape: Shape) -> list[dict[str, Any]]:
    """List: all in one row, all but the first or the first two axes joined, an axis of one element in front."""
    sizes = dict.fromkeys([(shape[0], -1), (-1,), (*shape[:2], -1), (1, *shape)])
    return [{"_input": shape, "shape": size, "_as_tuple": as_tuple} for size in sizes for as_tuple in (False, True)]


def _list_linear(op: Any, shape: Shape) -> list[dict[str, Any]]:
    biases = (True, False) if len(shape) > 1 else ()
    return [{"_leading": shape[:-1], "bias": bias, "_unbatched": False} for bias in biases]


def _list_convolutions(op: Any, shape: Shape) -> list[dict[str, Any]]:
    """List the geometries whose window fits into the padded image.

    Padding by other values than zeros needs refimpl's modules, which a script of torch and the backend only lacks.
    """
    if len(shape) != int(leaf_name(op)[-2]) + 2:
        return []
    layer = LayerShape(c_in=shape[1], c_out=1, batch=shape[0])
    variants = [{**arguments, "_network": None} for arguments in _variants_of(op)]
    return [
        each
        for each in variants
        if each.get("padding_mode", "zeros") == "zeros"
        and not each.get("output_size")
        and _runs(op, shape, {**each, "shape": layer})
    ]
