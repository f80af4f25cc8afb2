"""Ops without weights that add, multiply, join, clamp, average or pad values: their samples and rules (variants.py)."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fx_quant_conformance.conformance.bounds import error_bounds_arithmetic as bounds
from fx_quant_conformance.conformance.bounds.error_bounds import (
    DOT_PRODUCT,
    FUNCTION,
    MOVES,
    RESCALE,
    ErrorBound,
    OpCall,
    OpRule,
    bound_clamps,
    bound_matrix_products,
    bound_sums,
)
from fx_quant_conformance.conformance.ops.calls import (
    ANY_SHAPE,
    INPLACE,
    LARGE,
    MOVED,
    TENSOR,
    Shape,
    are_axes,
    call,
    construct,
    move_copy,
    sample_elementwise,
)
from fx_quant_conformance.conformance.ops.op_model import Input, Step
from fx_quant_conformance.conformance.ops.variants import Arguments, Fixed, OpRecord

# -- rules ------------------------------------------------------------------------------------------------------------


def _make_rule(
    kind: str, bound: ErrorBound, source: str, step: Callable[[OpCall], Tensor | None] | None = None
) -> OpRule:
    return OpRule(arithmetic=kind, bound=bound, source=source, accumulator_step=step)


_SUM = _make_rule(RESCALE, bound_sums, "NUM-04", lambda call: torch.zeros((), dtype=torch.float64))
_PRODUCT = _make_rule(RESCALE, bounds.bound_products, "NUM-04", bounds.find_step_of_product)
_MATRIX_PRODUCT = _make_rule(DOT_PRODUCT, bound_matrix_products, "torch.matmul; NUM-03")
_FLOORS = _make_rule(FUNCTION, bounds.bound_floors, "torch.floor_divide")
# A bound that is off the output's grid is rounded to it; what lies between the bounds is not touched.
_CLAMPED = _make_rule(MOVES, bound_clamps, "NUM-05")
# Not in force when not training; it has its own observer all the same.
_DROPPED = _make_rule(RESCALE, bound_clamps, "torch.nn.functional.dropout; NUM-04")
_PADDED = _make_rule(MOVES, bounds.bound_padding, "torch.nn.functional.pad; NUM-05")

# -- samples ----------------------------------------------------------------------------------------------------------

_ROUNDS = Fixed(reason="a floor or a truncation is another function: operator.floordiv has samples")
_FLOAT_DTYPE = Fixed(reason="asks for a float dtype, and the claim is about a quantized result")

# -- two operands -----------------------------------------------------------------------------------------------------

_PAIRS: tuple[tuple[Shape, Shape], ...] = (
    ((2, 7, 3, 3), (2, 7, 3, 3)),
    ((65,), (65,)),
    ((2, 7, 3, 3), (2, 7, 1, 1)),
    ((8, 1, 1), (2, 8, 3, 3)),
    ((4, 1, 9), (1, 63, 1)),
    ((1, 2, 3, 4, 5), (5,)),
)


def _make_inputs(arguments: Arguments) -> tuple[Input, ...]:
    """All tensors; of two operands only the first, where the other one is no tensor."""
    count = 1 if arguments.get("other", "tensor") != "tensor" else None
    return tuple(Input(shape=shape) for shape in arguments["shape"][:count])


def _call_binary(op: Any, arguments: Arguments) -> Step:
    """The op on two tensors, on one tensor twice, or on a tensor and a number, which may come first."""
    other = arguments["other"]
    keywords = () if arguments.get("alpha", 1) == 1 else (("alpha", arguments["alpha"]),)
    if other == "itself":
        return Step(op=partial(_apply_to_itself, op), keywords=keywords)
    if arguments["_number_first"]:
        return Step(op=partial(op, other), keywords=keywords)
    return Step(op=op, arguments=() if other == "tensor" else (other,), keywords=keywords)


def _apply_to_itself(op: Any, x: Any, **options: Any) -> Any:
    return op(x, x, **options)


def _is_valid_binary(arguments: Arguments) -> bool:
    """Without a second tensor there is nothing to broadcast, and only a number can come first."""
    if arguments["other"] == "tensor":
        return not arguments["_number_first"]
    is_number = arguments["other"] != "itself"
    return arguments["shape"] in _PAIRS[:2] and (is_number or not arguments["_number_first"])


def _sample_binary(rule: OpRule, **alpha: tuple[float, ...]) -> OpRecord:
    return OpRecord(
        rule=rule,
        arguments={
            "other": ("tensor", "itself", 2, 0.3, -1.5),
            **alpha,
            "shape": _PAIRS,
            "_number_first": (False, True),
        },
        inputs=_make_inputs,
        step=_call_binary,
        is_valid=_is_valid_binary,
        known=({"shape": (LARGE["shape"], LARGE["shape"])}, {"shape": (LARGE["shape"], LARGE["shape"][-1:])}),
    )


_FLOOR = sample_elementwise(call("other"), known=(), rule=_FLOORS, other=(2, 0.5, -1.5))
"""⌊x / d⌋ of a tensor. Models use the op on sizes; on those there are no dtypes to claim, and nothing is quantized."""

_MATRICES: tuple[tuple[Shape, Shape], ...] = (
    ((3, 9), (9, 5)),
    ((2, 8, 7), (2, 7, 8)),
    ((2, 1, 3, 65), (4, 65, 1)),
    ((63,), (63,)),
    ((7,), (7, 9)),
    ((2, 9, 7), (7,)),
    ((1, 2, 1, 3, 4), (4, 3)),
    ((2, 1025), (1025, 3)),
    ((64, 1), (1, 64)),
)
_MATMUL = OpRecord(
    arguments={"shape": _MATRICES, "other": TENSOR}, inputs=_make_inputs, step=call(), rule=_MATRIX_PRODUCT
)
_BATCHES: tuple[tuple[Shape, Shape], ...] = (
    ((2, 3, 9), (2, 9, 5)),
    ((1, 8, 65), (1, 65, 7)),
    ((3, 1, 63), (3, 63, 1)),
    ((2, 9, 1), (2, 1, 8)),
    ((1, 2, 1025), (1, 1025, 3)),
)
_BMM = replace(_MATMUL, arguments={"shape": _BATCHES, "out_dtype": _FLOAT_DTYPE})
_QUOTIENT = sample_elementwise(
    call("other"),
    rule=_make_rule(RESCALE, bounds.bound_quotients, "torch.div; NUM-04"),
    other=(2, 0.3, -8.0),
)
"""x / d by a number. The grid of a quantized divisor holds zero, for which there is no exact result."""


def _call_bias_first(op: Any, x: Tensor, weight: Tensor, bias: Tensor, **scales: Any) -> Any:
    return op(bias, x, weight, **scales)


def _add_product(op: Any, arguments: Arguments) -> Step:
    """β·bias + α·x·weight: configs that name the op say which operand is the weight and which the bias."""
    bias, _, weight = arguments["shape"]
    parameters = (torch.empty(weight).uniform_(-1, 1), torch.empty(bias).uniform_(-1, 1))
    step = call(beta=1, alpha=1)(partial(_call_bias_first, op), arguments)
    return replace(step, parameters=parameters)


_ADDMM = OpRecord(
    arguments={
        "beta": (1, 0.5, -1),
        "alpha": (1, 2, -0.5),
        "out_dtype": _FLOAT_DTYPE,
        "shape": (
            ((3, 5), (3, 9), (9, 5)),
            ((5,), (3, 8), (8, 5)),
            ((3, 1), (3, 1025), (1025, 1)),
            ((1, 65), (64, 7), (7, 65)),
        ),
    },
    inputs=lambda arguments: (Input(shape=arguments["shape"][1]),),
    step=_add_product,
    rule=_make_rule(DOT_PRODUCT, bounds.bound_affine_products, "torch.addmm; NUM-03"),
)

# -- lists of tensors -------------------------------------------------------------------------------------------------


def _join(op: Any, arguments: Arguments) -> Step:
    return replace(call(dim=0)(op, arguments), takes_list=True)


def _can_cat(arguments: Arguments) -> bool:
    """All tensors agree on all axes but the one that they are joined along."""
    rank, dim = len(arguments["shape"][0]), arguments["dim"]
    axis = dim % rank
    return are_axes(rank, dim) and len({(*shape[:axis], *shape[axis + 1 :]) for shape in arguments["shape"]}) == 1


_CAT = OpRecord(
    arguments={
        "dim": (0, 1, -1, -2),
        "shape": (
            ((2, 7), (3, 7)),
            ((2, 7, 3, 3), (2, 7, 3, 3)),
            ((65,), (1,)),
            ((2, 8, 3), (2, 9, 3), (2, 1, 3)),
            ((4, 3, 63), (4, 3, 64)),
            ((1, 2, 2, 3, 9), (1, 2, 2, 1, 9)),
            ((4, 8),),
        ),
    },
    inputs=_make_inputs,
    step=_join,
    is_valid=_can_cat,
    rule=MOVED,
)
_STACK = OpRecord(
    arguments={
        "dim": (0, 1, -1),
        "shape": (((2, 7), (2, 7)), ((65,), (65,), (65,)), ((2, 8, 3, 3),) * 2, ((1, 9, 1),) * 3, ((4, 8),)),
    },
    inputs=_make_inputs,
    step=_join,
    rule=MOVED,
)

# -- elementwise ------------------------------------------------------------------------------------------------------


def _clamp(op: Any, arguments: Arguments) -> Step:
    spell = call(min=None, max=None) if arguments["_by_name"] else call("min", "max")
    return spell(op, arguments)


_CLAMP = OpRecord(
    arguments={
        "min": (-0.5, None, 0.0, 0.3),
        "max": (0.6, None, 1, 6.0),
        "shape": ANY_SHAPE,
        "_by_name": (False, True),
    },
    step=_clamp,
    is_valid=lambda arguments: arguments["min"] is not None or arguments["max"] is not None,
    known=(LARGE,),
    rule=_CLAMPED,
    epilogue={"min": -0.5, "max": 0.6, "_by_name": True},
)
_OLD_NAME = Fixed(reason="an old name of the bound, which warns")
_BOUNDS: dict[str, Any] = {"min_val": (-1.0, -0.3, 0.0), "max_val": (1.0, 0.7, 6)}
_IGNORED = Fixed(reason="taken by the constructor and ignored")
_PROBABILITIES = (0.5, 0.1, 0.0)
# Not training, or with nothing dropped: what is dropped at random has no exact result.
_DROPOUT = OpRecord(
    arguments={"p": _PROBABILITIES, "training": (False, True), "inplace": INPLACE, "shape": ANY_SHAPE},
    step=call(p=0.5, training=True, inplace=False),
    is_valid=lambda arguments: not arguments["training"] or arguments["p"] == 0.0,
    rule=_DROPPED,
)

# -- means ------------------------------------------------------------------------------------------------------------


def _call_mean(op: Any, arguments: Arguments) -> Step:
    spell = call(keepdim=False) if arguments["dim"] is None else call("dim", keepdim=False)
    return spell(op, arguments)


def _is_valid_mean(arguments: Arguments) -> bool:
    dim = arguments["dim"]
    dims = dim if isinstance(dim, tuple) else (dim,)
    return not (arguments["keepdim"] and dim is None) and are_axes(len(arguments["shape"]), *dims)


_MEAN = OpRecord(
    arguments={
        "dim": (None, (2, 3), (-1, -2), 1, (0,), -1),
        "keepdim": (False, True),
        "dtype": _FLOAT_DTYPE,
        "shape": ((2, 7, 3, 4), (65,), (4, 8, 9), (3, 1025), (1, 2, 3, 4, 5)),
    },
    step=_call_mean,
    is_valid=_is_valid_mean,
    rule=_make_rule(RESCALE, bounds.bound_means, "torch.mean; NUM-04", bounds.find_step_of_mean),
)

# -- padding ----------------------------------------------------------------------------------------------------------

_PAD_SHAPES: tuple[Shape, ...] = ((2, 7, 4, 5), (65,), (4, 9), (1, 8, 6), (1, 2, 4, 3, 5))


def _can_pad(arguments: Arguments) -> bool:
    """A constant pads or crops any axes; other modes have no value and pad all axes but two, by less than each has."""
    pad, shape, mode = arguments["pad"], arguments["shape"], arguments["mode"]
    axes = len(pad) // 2
    if mode == "constant":
        return axes <= len(shape)
    ends = zip(pad, (extent for extent in shape[::-1][:axes] for _ in range(2)), strict=True)
    return axes == len(shape) - 2 and arguments["value"] is None and all(0 <= by < extent for by, extent in ends)


_PAD = OpRecord(
    arguments={
        "pad": ((1, 2), (0, 1, 2, 0), (-1, 1, 0, -2), (1, 0, 2, 1, 0, 1)),
        "mode": ("constant", "reflect", "replicate", "circular"),
        "value": (None, 0.5, -0.3),
        "shape": _PAD_SHAPES,
    },
    step=call("pad", mode="constant", value=None),
    is_valid=_can_pad,
    rule=_PADDED,
)
_PAD_MODULE = OpRecord(
    arguments={
        "padding": (1, (0, 1, 2, 0), (-1, 1, 0, -2)),
        "value": (0.0, 0.5, -0.3),
        "shape": ((2, 7, 4, 5), (8, 4, 5), (1, 65, 3, 3), (4, 9)),
    },
    step=construct,
    rule=_PADDED,
)


def _fits_padding(rank: int, arguments: Arguments) -> bool:
    """What is padded with values of the image has more of them along each axis; a crop leaves some."""
    padding, extents = arguments["padding"], arguments["shape"][-rank:]
    pads = (padding,) * 2 * rank if isinstance(padding, int) else padding
    return all(abs(pad) < extents[-1 - number // 2] for number, pad in enumerate(pads))


def _sample_pad(rank: int, *, can_crop: bool, **value: tuple[float, ...]) -> OpRecord:
    """Sample a padding module: the same on all sides, another number on each; of constants, also fewer than none."""
    paddings = (1, (1, 2, 0, 1, 2, 0)[: 2 * rank], (2, 0, 1, 1, 0, 1)[: 2 * rank])
    crops = ((-1, 1, 0, -2, 1, 0)[: 2 * rank],) if can_crop else ()
    shapes = ((2, 7, 4, 5, 3)[: rank + 2], (8, 4, 5, 6)[: rank + 1], (1, 65, 3, 3, 3)[: rank + 2])
    return OpRecord(
        arguments={"padding": (*paddings, *crops), **value, "shape": shapes},
        step=construct,
        is_valid=partial(_fits_padding, rank),
        rule=_PADDED,
    )


def _sample_pads() -> dict[Any, OpRecord]:
    """Sample the padding modules of torch.nn."""
    samples: dict[Any, OpRecord] = {nn.ConstantPad2d: _PAD_MODULE}
    for rank in (1, 2, 3):
        if rank != 2:
            samples[getattr(nn, f"ConstantPad{rank}d")] = _sample_pad(rank, can_crop=True, value=(0.0, 0.5, -0.3))
        for kind in ("Zero", "Reflection", "Replication", "Circular"):
            samples[getattr(nn, f"{kind}Pad{rank}d")] = _sample_pad(rank, can_crop=kind == "Zero")
    return samples


_RANGE: Arguments = {"min_val": -0.3, "max_val": 0.7}
_RELU = sample_elementwise(construct, rule=_CLAMPED, inplace=INPLACE)
_RELU_FUNCTION = sample_elementwise(call(inplace=False), rule=_CLAMPED, inplace=INPLACE)
RECORDS: dict[Any, OpRecord] = {
    **dict.fromkeys((operator.add, operator.sub), _sample_binary(_SUM)),
    **dict.fromkeys((operator.mul, torch.mul), _sample_binary(_PRODUCT)),
    **dict.fromkeys((torch.add, torch.sub), _sample_binary(_SUM, alpha=(1, -2.5))),
    operator.floordiv: _FLOOR,
    operator.truediv: _QUOTIENT,
    **dict.fromkeys(
        (torch.div, "div"), replace(_QUOTIENT, arguments={**_QUOTIENT.arguments, "rounding_mode": _ROUNDS})
    ),
    **dict.fromkeys((torch.matmul, operator.matmul, "matmul"), _MATMUL),
    **dict.fromkeys((torch.bmm, "bmm"), _BMM),
    torch.addmm: _ADDMM,
    **dict.fromkeys((torch.cat, torch.concat, torch.concatenate), _CAT),
    torch.stack: _STACK,
    **dict.fromkeys((torch.clamp, "clamp"), _CLAMP),
    nn.Hardtanh: sample_elementwise(
        construct,
        rule=_CLAMPED,
        epilogue=_RANGE,
        **_BOUNDS,
        inplace=INPLACE,
        min_value=_OLD_NAME,
        max_value=_OLD_NAME,
    ),
    F.hardtanh: sample_elementwise(
        call(min_val=-1.0, max_val=1.0, inplace=False), rule=_CLAMPED, epilogue=_RANGE, **_BOUNDS, inplace=INPLACE
    ),
    F.hardtanh_: sample_elementwise(call(min_val=-1.0, max_val=1.0), rule=_CLAMPED, **_BOUNDS),
    nn.ReLU: _RELU,
    F.relu: _RELU_FUNCTION,
    nn.ReLU6: replace(_RELU, epilogue={}),
    F.relu6: replace(_RELU_FUNCTION, epilogue={}),
    **dict.fromkeys((torch.relu, "relu", "relu_"), sample_elementwise(call(), rule=_CLAMPED)),
    "detach": sample_elementwise(call(), rule=MOVED),
    "detach_": sample_elementwise(call(), rule=move_copy("detach_")),
    nn.Identity: sample_elementwise(construct, known=(), rule=MOVED, args=_IGNORED, kwargs=_IGNORED),
    nn.Dropout: sample_elementwise(construct, known=(), rule=_DROPPED, p=_PROBABILITIES, inplace=INPLACE),
    F.dropout: _DROPOUT,
    **dict.fromkeys((torch.mean, "mean"), _MEAN),
    F.pad: _PAD,
    **_sample_pads(),
}
UNSAMPLED: dict[Any, OpRule] = {**dict.fromkeys(("add", "sub"), _SUM), "mul": _PRODUCT}
"""Rules of methods that no pattern names."""
