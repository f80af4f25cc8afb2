"""Rules of the oracle's table: ops that move, select, add, multiply, average or interpolate values."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from conformance.oracle import error_bounds as bounds
from conformance.oracle import error_bounds_arithmetic as arithmetic
from conformance.oracle.error_bounds import DOT_PRODUCT, FUNCTION, MOVES, RESCALE, OpRule


def _rules(ops: Iterable[Any], row: OpRule) -> dict[Any, OpRule]:
    return dict.fromkeys(ops, row)


def _in_place(method: str) -> OpRule:
    """An op in place moves a copy: it cannot change a view, and of an expanded tensor reach beyond what is stored."""

    def exact(x: Tensor, *rest: Any, **options: Any) -> Any:
        return getattr(x.clone(), method)(*rest, **options)

    return OpRule(verifier=MOVES, bound=bounds.moves, source=f"torch.Tensor.{method}; NUM-05", exact=exact)


_MOVED = OpRule(verifier=MOVES, bound=bounds.moves, source="NUM-05")
_PADDED = OpRule(verifier=MOVES, bound=arithmetic.pads, source="torch.nn.functional.pad; NUM-05")
# A bound that is off the output's grid is rounded to it; what lies between the bounds is not touched.
_CLAMPED = OpRule(verifier=MOVES, bound=bounds.clamps, source="NUM-05")
# Not in force when not training; it has an observer of its own all the same.
_DROPPED = OpRule(verifier=RESCALE, bound=bounds.clamps, source="torch.nn.functional.dropout; NUM-04")
_SUM = OpRule(verifier=RESCALE, bound=bounds.sums, source="NUM-04")
_PRODUCT = OpRule(verifier=RESCALE, bound=arithmetic.products, source="NUM-04")
_MEAN = OpRule(verifier=RESCALE, bound=arithmetic.means, source="torch.mean; NUM-04")


def _averages(rank: int, *ops: Any) -> dict[Any, OpRule]:
    source = f"torch.nn.functional.avg_pool{rank}d; NUM-04"
    return _rules(ops, OpRule(verifier=RESCALE, bound=arithmetic.averages_over(rank), source=source))


OP_RULES: dict[Any, OpRule] = {
    **_rules((operator.add, torch.add, operator.sub, torch.sub), _SUM),
    **_rules((operator.mul, torch.mul), _PRODUCT),
    torch.matmul: OpRule(verifier=DOT_PRODUCT, bound=bounds.matrix_products, source="torch.matmul; NUM-03"),
    torch.addmm: OpRule(verifier=DOT_PRODUCT, bound=arithmetic.affine_products, source="torch.addmm; NUM-03"),
    **_averages(1, F.avg_pool1d, F.adaptive_avg_pool1d, nn.AvgPool1d, nn.AdaptiveAvgPool1d),
    **_averages(2, F.avg_pool2d, F.adaptive_avg_pool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d),
    **_averages(3, F.avg_pool3d, F.adaptive_avg_pool3d, nn.AvgPool3d, nn.AdaptiveAvgPool3d),
    **_rules((torch.mean, "mean"), _MEAN),
    F.interpolate: OpRule(verifier=RESCALE, bound=arithmetic.interpolates, source="torch.nn.functional.interpolate"),
    operator.floordiv: OpRule(verifier=FUNCTION, bound=arithmetic.floors, source="torch.floor_divide"),
    **_rules((nn.ReLU, F.relu, torch.relu, "relu", "relu_", nn.ReLU6, F.relu6, nn.Hardtanh, F.hardtanh, F.hardtanh_,
             torch.clamp, "clamp"), _CLAMPED),
    **_rules((nn.Dropout, F.dropout), _DROPPED),
    **_rules((F.pad, nn.ConstantPad2d), _PADDED),
    **{method: _in_place(method) for method in ("resize_", "detach_", "squeeze_", "unsqueeze_")},
    **_rules((operator.getitem, torch.cat, torch.concat, torch.concatenate, torch.stack, torch.chunk, torch.split,
             torch.flatten, torch.narrow, torch.transpose, torch.permute, torch.permute_copy, torch.squeeze,
             torch.unsqueeze, torch.repeat_interleave, torch.pixel_shuffle, torch.pixel_unshuffle,
             F.max_pool1d, F.max_pool2d, F.max_pool3d, nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d,
             nn.Identity, nn.Flatten, nn.PixelShuffle, nn.PixelUnshuffle,
             "contiguous", "detach", "permute", "repeat", "repeat_interleave", "reshape", "squeeze",
             "transpose", "unsqueeze", "view"), _MOVED),
}  # fmt: skip
