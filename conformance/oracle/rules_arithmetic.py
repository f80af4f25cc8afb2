"""Rules of the oracle's table: ops that move, select, add, multiply, average or interpolate values."""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fx_quant_conformance.conformance.oracle import error_bounds as bounds
from fx_quant_conformance.conformance.oracle import error_bounds_arithmetic as arithmetic
from fx_quant_conformance.conformance.oracle.error_bounds import (
    DOT_PRODUCT,
    FUNCTION,
    MOVES,
    RESCALE,
    ErrorBound,
    OpCall,
    OpRule,
)


def _make_rules(
    kind: str, bound: ErrorBound, source: str, *ops: Any, step: Callable[[OpCall], Tensor | None] | None = None
) -> dict[Any, OpRule]:
    return dict.fromkeys(ops, OpRule(arithmetic=kind, bound=bound, source=source, accumulator_step=step))


def _move_copy(method: str) -> OpRule:
    """An op in place moves a copy: it cannot change a view, and of an expanded tensor reach beyond what is stored."""

    def exact(x: Tensor, *arguments: Any, **options: Any) -> Any:
        return getattr(x.clone(), method)(*arguments, **options)

    return OpRule(arithmetic=MOVES, bound=bounds.bound_moves, source=f"torch.Tensor.{method}; NUM-05", exact=exact)


def view_in_any_layout(x: Tensor, *shape: Any) -> Tensor:
    """Return the values of x in another shape: in float64 they may lie in memory as the model's do not."""
    return x.view(*shape) if len(shape) == 1 and isinstance(shape[0], torch.dtype) else x.reshape(*shape)


def _make_average_rules(rank: int, *ops: Any) -> dict[Any, OpRule]:
    source = f"torch.nn.functional.avg_pool{rank}d; NUM-04"
    return _make_rules(RESCALE, partial(arithmetic.bound_windows, rank), source, *ops)


OP_RULES: dict[Any, OpRule] = {
    **_make_rules(
        RESCALE,
        bounds.bound_sums,
        "NUM-04",
        operator.add,
        torch.add,
        "add",
        operator.sub,
        torch.sub,
        "sub",
        step=lambda call: torch.zeros((), dtype=torch.float64),
    ),
    **_make_rules(
        RESCALE,
        arithmetic.bound_products,
        "NUM-04",
        operator.mul,
        torch.mul,
        "mul",
        step=arithmetic.find_step_of_product,
    ),
    **_make_rules(RESCALE, arithmetic.bound_quotients, "torch.div; NUM-04", operator.truediv, torch.div, "div"),
    **_make_rules(
        DOT_PRODUCT,
        bounds.bound_matrix_products,
        "torch.matmul; NUM-03",
        torch.matmul,
        operator.matmul,
        torch.bmm,
        "matmul",
        "bmm",
    ),
    **_make_rules(DOT_PRODUCT, arithmetic.bound_affine_products, "torch.addmm; NUM-03", torch.addmm),
    **_make_average_rules(1, F.avg_pool1d, F.adaptive_avg_pool1d, nn.AvgPool1d, nn.AdaptiveAvgPool1d),
    **_make_average_rules(2, F.avg_pool2d, F.adaptive_avg_pool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d),
    **_make_average_rules(3, F.avg_pool3d, F.adaptive_avg_pool3d, nn.AvgPool3d, nn.AdaptiveAvgPool3d),
    **_make_rules(
        RESCALE, arithmetic.bound_means, "torch.mean; NUM-04", torch.mean, "mean", step=arithmetic.find_step_of_mean
    ),
    **_make_rules(
        RESCALE,
        arithmetic.bound_interpolation,
        "torch.nn.functional.interpolate",
        F.interpolate,
        nn.Upsample,
        nn.UpsamplingNearest2d,
        nn.UpsamplingBilinear2d,
    ),
    **_make_rules(FUNCTION, arithmetic.bound_floors, "torch.floor_divide", operator.floordiv),
    # A bound that is off the output's grid is rounded to it; what lies between the bounds is not touched.
    **_make_rules(
        MOVES,
        bounds.bound_clamps,
        "NUM-05",
        nn.ReLU,
        F.relu,
        torch.relu,
        "relu",
        "relu_",
        nn.ReLU6,
        F.relu6,
        nn.Hardtanh,
        F.hardtanh,
        F.hardtanh_,
        torch.clamp,
        "clamp",
    ),
    # Not in force when not training; it has its own observer all the same.
    **_make_rules(RESCALE, bounds.bound_clamps, "torch.nn.functional.dropout; NUM-04", nn.Dropout, F.dropout),
    **_make_rules(
        MOVES,
        arithmetic.bound_padding,
        "torch.nn.functional.pad; NUM-05",
        F.pad,
        nn.ConstantPad2d,
        nn.ConstantPad1d,
        nn.ConstantPad3d,
        nn.ZeroPad1d,
        nn.ZeroPad2d,
        nn.ZeroPad3d,
        nn.ReflectionPad1d,
        nn.ReflectionPad2d,
        nn.ReflectionPad3d,
        nn.ReplicationPad1d,
        nn.ReplicationPad2d,
        nn.ReplicationPad3d,
        nn.CircularPad1d,
        nn.CircularPad2d,
        nn.CircularPad3d,
    ),
    **{method: _move_copy(method) for method in ("resize_", "detach_", "squeeze_", "unsqueeze_")},
    **_make_rules(
        MOVES,
        bounds.bound_moves,
        "NUM-05",
        operator.getitem,
        torch.cat,
        torch.concat,
        torch.concatenate,
        torch.stack,
        torch.chunk,
        torch.split,
        torch.flatten,
        torch.narrow,
        torch.transpose,
        torch.permute,
        torch.permute_copy,
        torch.squeeze,
        torch.unsqueeze,
        torch.repeat_interleave,
        torch.pixel_shuffle,
        torch.pixel_unshuffle,
        F.max_pool1d,
        F.max_pool2d,
        F.max_pool3d,
        nn.MaxPool1d,
        nn.MaxPool2d,
        nn.MaxPool3d,
        nn.Identity,
        nn.Flatten,
        nn.PixelShuffle,
        nn.PixelUnshuffle,
        "chunk",
        "contiguous",
        "detach",
        "expand",
        "flatten",
        "permute",
        "repeat",
        "repeat_interleave",
        "reshape",
        "squeeze",
        "transpose",
        "unbind",
        "unsqueeze",
    ),
    "view": OpRule(arithmetic=MOVES, bound=bounds.bound_moves, source="NUM-05", exact=view_in_any_layout),
}
