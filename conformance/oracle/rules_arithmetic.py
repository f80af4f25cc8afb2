"""Rows of the oracle's table: ops that move, select, add, multiply, average or interpolate values."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from conformance.oracle import error_bounds as spreads
from conformance.oracle import error_bounds_arithmetic as spreads_values
from conformance.oracle.error_bounds import DOT_PRODUCT, FUNCTION, MOVES, RESCALE, Row


def _rows(ops: Iterable[Any], row: Row) -> dict[Any, Row]:
    return dict.fromkeys(ops, row)


def _in_place(method: str) -> Row:
    """An op in place moves a copy: it cannot change a view, and of an expanded tensor reach beyond what is stored."""

    def exact(x: Tensor, *rest: Any, **options: Any) -> Any:
        return getattr(x.clone(), method)(*rest, **options)

    return Row(verifier=MOVES, spread=spreads.moves, source=f"torch.Tensor.{method}; NUM-05", exact=exact)


_MOVED = Row(verifier=MOVES, spread=spreads.moves, source="NUM-05")
_PADDED = Row(verifier=MOVES, spread=spreads_values.pads, source="torch.nn.functional.pad; NUM-05")
# A bound that is off the output's grid is rounded to it; what lies between the bounds is not touched.
_CLAMPED = Row(verifier=MOVES, spread=spreads.clamps, source="NUM-05")
# Not in force when not training; it has an observer of its own all the same.
_DROPPED = Row(verifier=RESCALE, spread=spreads.clamps, source="torch.nn.functional.dropout; NUM-04")
_SUM = Row(verifier=RESCALE, spread=spreads.sums, source="NUM-04")
_PRODUCT = Row(verifier=RESCALE, spread=spreads_values.products, source="NUM-04")
_MEAN = Row(verifier=RESCALE, spread=spreads_values.means, source="torch.mean; NUM-04")


def _averages(rank: int, *ops: Any) -> dict[Any, Row]:
    source = f"torch.nn.functional.avg_pool{rank}d; NUM-04"
    return _rows(ops, Row(verifier=RESCALE, spread=spreads_values.averages_over(rank), source=source))


ROWS: dict[Any, Row] = {
    **_rows((operator.add, torch.add, operator.sub, torch.sub), _SUM),
    **_rows((operator.mul, torch.mul), _PRODUCT),
    torch.matmul: Row(verifier=DOT_PRODUCT, spread=spreads.matrix_products, source="torch.matmul; NUM-03"),
    torch.addmm: Row(verifier=DOT_PRODUCT, spread=spreads_values.affine_products, source="torch.addmm; NUM-03"),
    **_averages(1, F.avg_pool1d, F.adaptive_avg_pool1d, nn.AvgPool1d, nn.AdaptiveAvgPool1d),
    **_averages(2, F.avg_pool2d, F.adaptive_avg_pool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d),
    **_averages(3, F.avg_pool3d, F.adaptive_avg_pool3d, nn.AvgPool3d, nn.AdaptiveAvgPool3d),
    **_rows((torch.mean, "mean"), _MEAN),
    F.interpolate: Row(verifier=RESCALE, spread=spreads_values.interpolates, source="torch.nn.functional.interpolate"),
    operator.floordiv: Row(verifier=FUNCTION, spread=spreads_values.floors, source="torch.floor_divide"),
    **_rows((nn.ReLU, F.relu, torch.relu, "relu", "relu_", nn.ReLU6, F.relu6, nn.Hardtanh, F.hardtanh, F.hardtanh_,
             torch.clamp, "clamp"), _CLAMPED),
    **_rows((nn.Dropout, F.dropout), _DROPPED),
    **_rows((F.pad, nn.ConstantPad2d), _PADDED),
    **{method: _in_place(method) for method in ("resize_", "detach_", "squeeze_", "unsqueeze_")},
    **_rows((operator.getitem, torch.cat, torch.concat, torch.concatenate, torch.stack, torch.chunk, torch.split,
             torch.flatten, torch.narrow, torch.transpose, torch.permute, torch.permute_copy, torch.squeeze,
             torch.unsqueeze, torch.repeat_interleave, torch.pixel_shuffle, torch.pixel_unshuffle,
             F.max_pool1d, F.max_pool2d, F.max_pool3d, nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d,
             nn.Identity, nn.Flatten, nn.PixelShuffle, nn.PixelUnshuffle,
             "contiguous", "detach", "permute", "repeat", "repeat_interleave", "reshape", "squeeze",
             "transpose", "unsqueeze", "view"), _MOVED),
}  # fmt: skip
