"""Samples of ops without weights that add, multiply, join, clamp, average or pad values (variants.py)."""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from conformance.ops.calls import ANY_SHAPE, LARGE, Shape, are_axes, call, module, one_input
from conformance.ops.op_model import Input, Step
from conformance.ops.variants import Arguments, Fixed, OpSamples

_INPLACE = (False, True)
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


def _binary_inputs(arguments: Arguments) -> tuple[Input, ...]:
    shapes = arguments["shape"] if arguments["other"] == "tensor" else arguments["shape"][:1]
    return tuple(Input(shape=shape) for shape in shapes)


def _binary(op: Any, arguments: Arguments) -> Step:
    """The op on two tensors, on one tensor twice, or on a tensor and a number, which may come first."""
    other = arguments["other"]
    keywords = () if arguments.get("alpha", 1) == 1 else (("alpha", arguments["alpha"]),)
    if other == "itself":
        return Step(op=lambda x, **options: op(x, x, **options), keywords=keywords)
    if arguments["_number_first"]:
        return Step(op=lambda x, **options: op(other, x, **options), keywords=keywords)
    return Step(op=op, arguments=() if other == "tensor" else (other,), keywords=keywords)


def _binary_is_valid(arguments: Arguments) -> bool:
    """Without a second tensor there is nothing to broadcast, and only a number can come first."""
    if arguments["other"] == "tensor":
        return not arguments["_number_first"]
    is_number = arguments["other"] != "itself"
    return arguments["shape"] in _PAIRS[:2] and (is_number or not arguments["_number_first"])


def _binary_samples(*, has_alpha: bool) -> OpSamples:
    alpha: dict[str, Any] = {"alpha": (1, -2.5)} if has_alpha else {}
    return OpSamples(
        arguments={
            "other": ("tensor", "itself", 2, 0.3, -1.5), **alpha, "shape": _PAIRS, "_number_first": (False, True)
        },
        inputs=_binary_inputs,
        step=_binary,
        is_valid=_binary_is_valid,
        known=({"shape": (LARGE["shape"], LARGE["shape"])}, {"shape": (LARGE["shape"], LARGE["shape"][-1:])}),
    )  # fmt: skip


_FLOOR = OpSamples(
    arguments={"other": (2, 0.5, -1.5), "shape": ANY_SHAPE},
    inputs=one_input,
    step=call("other"),
)
"""⌊x / d⌋ of a tensor. Models use the op on sizes; on those there are no dtypes to claim, and nothing is quantized."""


def _several(arguments: Arguments) -> tuple[Input, ...]:
    return tuple(Input(shape=shape) for shape in arguments["shape"])


_MATRICES: tuple[tuple[Shape, Shape], ...] = (
    ((3, 9), (9, 5)), ((2, 8, 7), (2, 7, 8)), ((2, 1, 3, 65), (4, 65, 1)), ((63,), (63,)), ((7,), (7, 9)),
    ((2, 9, 7), (7,)), ((1, 2, 1, 3, 4), (4, 3)), ((2, 1025), (1025, 3)), ((64, 1), (1, 64)),
)  # fmt: skip
_MATMUL = OpSamples(arguments={"shape": _MATRICES}, inputs=_several, step=call())


def _add_product(op: Any, arguments: Arguments) -> Step:
    """β·bias + α·x·weight: configs that name the op say which operand is the weight and which the bias."""
    (bias, _, weight), options = arguments["shape"], call(beta=1, alpha=1)(op, arguments).keywords
    return Step(
        op=lambda x, weight, bias, **scales: op(bias, x, weight, **scales),
        parameters=(torch.empty(weight).uniform_(-1, 1), torch.empty(bias).uniform_(-1, 1)),
        keywords=options,
    )


_ADDMM = OpSamples(
    arguments={
        "beta": (1, 0.5, -1), "alpha": (1, 2, -0.5), "out_dtype": _FLOAT_DTYPE,
        "shape": (((3, 5), (3, 9), (9, 5)), ((5,), (3, 8), (8, 5)), ((3, 1), (3, 1025), (1025, 1)),
                  ((1, 65), (64, 7), (7, 65))),
    },
    inputs=lambda arguments: (Input(shape=arguments["shape"][1]),),
    step=_add_product,
)  # fmt: skip

# -- lists of tensors -------------------------------------------------------------------------------------------------


def _join(op: Any, arguments: Arguments) -> Step:
    keywords = () if arguments["dim"] == 0 else (("dim", arguments["dim"]),)
    return Step(op=op, keywords=keywords, takes_list=True)


def _can_cat(arguments: Arguments) -> bool:
    """All tensors agree on all axes but the one that they are joined along."""
    first, dim = arguments["shape"][0], arguments["dim"]
    if not are_axes(len(first), dim):
        return False
    dim %= len(first)
    return len({(*shape[:dim], *shape[dim + 1 :]) for shape in arguments["shape"]}) == 1


_CAT = OpSamples(
    arguments={
        "dim": (0, 1, -1, -2),
        "shape": (((2, 7), (3, 7)), ((2, 7, 3, 3), (2, 7, 3, 3)), ((65,), (1,)), ((2, 8, 3), (2, 9, 3), (2, 1, 3)),
                  ((4, 3, 63), (4, 3, 64)), ((1, 2, 2, 3, 9), (1, 2, 2, 1, 9)), ((4, 8),)),
    },
    inputs=_several,
    step=_join,
    is_valid=_can_cat,
)  # fmt: skip
_STACK = OpSamples(
    arguments={
        "dim": (0, 1, -1),
        "shape": (((2, 7), (2, 7)), ((65,), (65,), (65,)), ((2, 8, 3, 3),) * 2, ((1, 9, 1),) * 3, ((4, 8),)),
    },
    inputs=_several,
    step=_join,
)

# -- elementwise ------------------------------------------------------------------------------------------------------


def _clamp(op: Any, arguments: Arguments) -> Step:
    spelled = call(min=None, max=None) if arguments["_by_name"] else call("min", "max")
    return spelled(op, arguments)


_CLAMP = OpSamples(
    arguments={
        "min": (-0.5, None, 0.0, 0.3), "max": (0.6, None, 1, 6.0), "shape": ANY_SHAPE, "_by_name": (False, True)
    },
    inputs=one_input,
    step=_clamp,
    is_valid=lambda arguments: arguments["min"] is not None or arguments["max"] is not None,
    known=(LARGE,),
)  # fmt: skip
_OLD_NAME = Fixed(reason="an old name of the bound, which warns")
_BOUNDS: dict[str, tuple[Any, ...]] = {"min_val": (-1.0, -0.3, 0.0), "max_val": (1.0, 0.7, 6)}


def _hardtanh(*, is_module: bool, is_in_place: bool) -> OpSamples:
    options: dict[str, Any] = {"min_val": -1.0, "max_val": 1.0} | ({} if is_in_place else {"inplace": False})
    flags = {} if is_in_place else {"inplace": _INPLACE}
    old = {"min_value": _OLD_NAME, "max_value": _OLD_NAME} if is_module else {}
    return OpSamples(
        arguments={**_BOUNDS, **flags, **old, "shape": ANY_SHAPE},
        inputs=one_input,
        step=module if is_module else call(**options),
        known=(LARGE,),
    )


_PLAIN = OpSamples(arguments={"shape": ANY_SHAPE}, inputs=one_input, step=call(), known=(LARGE,))
_IN_PLACE = OpSamples(
    arguments={"inplace": _INPLACE, "shape": ANY_SHAPE}, inputs=one_input, step=call(inplace=False), known=(LARGE,)
)
_IN_PLACE_MODULE = OpSamples(
    arguments={"inplace": _INPLACE, "shape": ANY_SHAPE}, inputs=one_input, step=module, known=(LARGE,)
)
_IGNORED = Fixed(reason="taken by the constructor and ignored")
_IDENTITY = OpSamples(
    arguments={"args": _IGNORED, "kwargs": _IGNORED, "shape": ANY_SHAPE}, inputs=one_input, step=module
)
_DROPOUT_MODULE = OpSamples(
    arguments={"p": (0.5, 0.1, 0.0), "inplace": _INPLACE, "shape": ANY_SHAPE}, inputs=one_input, step=module
)
# Not training, or with nothing dropped: what is dropped at random has no exact result.
_DROPOUT = OpSamples(
    arguments={"p": (0.5, 0.1, 0.0), "training": (False, True), "inplace": _INPLACE, "shape": ANY_SHAPE},
    inputs=one_input,
    step=call(p=0.5, training=True, inplace=False),
    is_valid=lambda arguments: not arguments["training"] or arguments["p"] == 0.0,
)

# -- means ------------------------------------------------------------------------------------------------------------


def _mean(op: Any, arguments: Arguments) -> Step:
    keywords = (("keepdim", True),) if arguments["keepdim"] else ()
    return Step(op=op, arguments=() if arguments["dim"] is None else (arguments["dim"],), keywords=keywords)


def _mean_is_valid(arguments: Arguments) -> bool:
    dim = arguments["dim"]
    dims = dim if isinstance(dim, tuple) else (dim,)
    if arguments["keepdim"] and dim is None:
        return False
    return are_axes(len(arguments["shape"]), *dims)


_MEAN = OpSamples(
    arguments={
        "dim": (None, (2, 3), (-1, -2), 1, (0,), -1),
        "keepdim": (False, True),
        "dtype": _FLOAT_DTYPE,
        "shape": ((2, 7, 3, 4), (65,), (4, 8, 9), (3, 1025), (1, 2, 3, 4, 5)),
    },
    inputs=one_input,
    step=_mean,
    is_valid=_mean_is_valid,
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


_PAD = OpSamples(
    arguments={
        "pad": ((1, 2), (0, 1, 2, 0), (-1, 1, 0, -2), (1, 0, 2, 1, 0, 1)),
        "mode": ("constant", "reflect", "replicate", "circular"),
        "value": (None, 0.5, -0.3),
        "shape": _PAD_SHAPES,
    },
    inputs=one_input,
    step=call("pad", mode="constant", value=None),
    is_valid=_can_pad,
)
_PAD_MODULE = OpSamples(
    arguments={
        "padding": (1, (0, 1, 2, 0), (-1, 1, 0, -2)), "value": (0.0, 0.5, -0.3),
        "shape": ((2, 7, 4, 5), (8, 4, 5), (1, 65, 3, 3), (4, 9)),
    },
    inputs=one_input,
    step=module,
)  # fmt: skip

OP_SAMPLES: dict[Any, OpSamples] = {
    **dict.fromkeys((operator.add, operator.sub, operator.mul, torch.mul), _binary_samples(has_alpha=False)),
    **dict.fromkeys((torch.add, torch.sub), _binary_samples(has_alpha=True)),
    operator.floordiv: _FLOOR,
    torch.matmul: _MATMUL,
    torch.addmm: _ADDMM,
    **dict.fromkeys((torch.cat, torch.concat, torch.concatenate), _CAT),
    torch.stack: _STACK,
    **dict.fromkeys((torch.clamp, "clamp"), _CLAMP),
    nn.Hardtanh: _hardtanh(is_module=True, is_in_place=False),
    F.hardtanh: _hardtanh(is_module=False, is_in_place=False),
    F.hardtanh_: _hardtanh(is_module=False, is_in_place=True),
    **dict.fromkeys((nn.ReLU, nn.ReLU6), _IN_PLACE_MODULE),
    **dict.fromkeys((F.relu, F.relu6), _IN_PLACE),
    **dict.fromkeys((torch.relu, "relu", "relu_", "detach", "detach_"), _PLAIN),
    nn.Identity: _IDENTITY,
    nn.Dropout: _DROPOUT_MODULE,
    F.dropout: _DROPOUT,
    **dict.fromkeys((torch.mean, "mean"), _MEAN),
    F.pad: _PAD,
    nn.ConstantPad2d: _PAD_MODULE,
}
