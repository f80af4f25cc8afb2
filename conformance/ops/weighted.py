"""Ops with a weight: linear layers, convolutions and transposed convolutions, modules and functions.

What quantized kernels commonly lack (a padding mode, padding as a word, an input without batch) is varied with few
other arguments, so that a fallback to float does not hide the pairs of the others.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fx_quant_conformance.conformance.bounds.dynamic import bound_linear_products
from fx_quant_conformance.conformance.bounds.error_bounds import DOT_PRODUCT, OpRule, bound_dot_products
from fx_quant_conformance.conformance.ops.calls import PLACES, TENSOR, call
from fx_quant_conformance.conformance.ops.op_model import Input, Step
from fx_quant_conformance.conformance.ops.variants import Arguments, Fixed, OpRecord


class LayerShape(NamedTuple):
    """The channels of a convolution, or the features of a linear layer, and how many inputs it gets at once."""

    c_in: int
    c_out: int
    groups: int = 1
    batch: int = 1


class Network(NamedTuple):
    """A convolution as known networks have it, for which engines have kernels of their own.

    Output and input have equally many channels; the padding is half of what the kernel reaches beyond one element, so
    that a stride of two halves the image, or doubles it where the convolution is transposed.
    """

    channels: int
    groups: int
    kernel: int
    stride: int = 1
    dilation: int = 1
    width: int = 0
    """The image's width, if it differs from the other images'."""


# -- parameters -------------------------------------------------------------------------------------------------------


def draw_weight(c_out: int, c_in: int, *kernel: int) -> Tensor:
    """Draw a weight of shape (c_out, c_in, *kernel), in float32, from torch's generator.

    Channels differ in magnitude by powers of two, so that a wrong channel's scale shows. The first few weights of a
    channel are at the end of the range, counted along its inputs and counted along its kernel: products of neighbours,
    added in 16 bits, overflow. Each fourth channel has no positive weight; each seventh has zeros but for one weight:
    with none, the bias would be beyond int32 in steps of the smallest possible scale.
    """
    weight = torch.empty(c_out, c_in, *kernel).uniform_(-1, 1)
    by_input = weight.reshape(c_out, c_in, -1)
    terms = weight[0].numel()
    for number in range(min(4, terms // 3)):
        weight.flatten(1)[:, number] = 1.0
        by_input[:, number % c_in, number // c_in] = 1.0
    weight[3::4] = -weight[3::4].abs()
    weight[6::7].flatten(1)[:, 1:] = 0.0
    magnitude = torch.tensor([2.0 ** -(channel % 4) for channel in range(c_out)])
    scaled: Tensor = weight * magnitude.reshape(-1, *[1] * (weight.dim() - 1)) / terms**0.5
    return scaled


def transpose_weight(weight: Tensor, groups: int) -> Tensor:
    """Lay a weight (c_out, c_in / groups, *kernel) out as transposed convolutions do: (c_in, c_out / groups, *kernel).

    The operands of each output channel stay what they were.
    """
    c_out, within, *kernel = weight.shape
    by_group = weight.reshape(groups, c_out // groups, within, *kernel).transpose(1, 2)
    return by_group.reshape(groups * within, c_out // groups, *kernel).contiguous()


def _draw_bias(layer: LayerShape, has_bias: bool) -> Tensor | None:
    return torch.empty(layer.c_out).uniform_(-1, 1) if has_bias else None


def _set_parameters(module: Any, weight: Tensor, bias: Tensor | None, **keywords: Any) -> Step:
    with torch.no_grad():
        module.weight.copy_(weight)
        if bias is not None:
            module.bias.copy_(bias)
    return Step(op=module, keywords=tuple(keywords.items()))


# -- convolutions -----------------------------------------------------------------------------------------------------

# U-Net's and ResNet's ways to another size; MobileNet's depthwise layers, with channels in multiples of eight; then
# ResNeXt's groups of 4 and of 8 channels.
UP = Network(channels=16, groups=1, kernel=2, stride=2)
NETWORKS = (
    UP,
    Network(channels=8, groups=1, kernel=3, stride=2),
    Network(channels=16, groups=16, kernel=3, stride=1),
    Network(channels=16, groups=16, kernel=3, stride=2),
    Network(channels=16, groups=16, kernel=5, stride=1),
    Network(channels=128, groups=128, kernel=3, stride=1),
    Network(channels=32, groups=8, kernel=3, stride=1),
    Network(channels=64, groups=8, kernel=3, stride=2),
)
# Dilation as in DeepLab, plain and depthwise; ConvNeXt's window; two and sixteen channels in a group; images wider than
# a register block, of a large window and of none, which is a matrix product of many rows.
MORE_NETWORKS = (
    Network(channels=8, groups=1, kernel=3, dilation=2),
    Network(channels=16, groups=16, kernel=3, dilation=2),
    Network(channels=16, groups=16, kernel=7),
    Network(channels=4, groups=2, kernel=3),
    Network(channels=32, groups=2, kernel=3),
    Network(channels=8, groups=1, kernel=3, width=37),
    Network(channels=16, groups=16, kernel=3, width=37),
    Network(channels=64, groups=1, kernel=1, width=37),
)
# The usual numbers, the same along all axes; by rank, a reduction whose sum is beyond what float32 holds exactly.
_USUAL: tuple[Arguments, ...] = (
    {"stride": 2},
    {"padding": 1},
    {"stride": 2, "padding": 1},
    {"dilation": 2},
    {"dilation": 2, "padding": 2},
    {"kernel_size": 2, "stride": 2},
)
_LARGE_REDUCTION = {1: LayerShape(c_in=300, c_out=9), 2: LayerShape(c_in=100, c_out=9), 3: LayerShape(c_in=33, c_out=9)}
# Channels that fill no tile; a large reduction, of several images; groups; depthwise with a multiplier and without.
LAYERS = (
    LayerShape(c_in=3, c_out=5),
    LayerShape(c_in=65, c_out=9, batch=4),
    LayerShape(c_in=4, c_out=6, groups=2),
    LayerShape(c_in=8, c_out=16, groups=8),
    LayerShape(c_in=9, c_out=9, groups=9, batch=2),
    LayerShape(c_in=16, c_out=16, groups=16),
)
DEPTHWISE = LAYERS[-1]
"""Depthwise convolutions have kernels of their own in every engine, many for channels in multiples of 8 or 16."""
EXTENTS = (7, 6, 5)
"""An input's length along each axis: not the same twice, so that swapped axes show."""

_CHANNELS = Fixed(reason="varied under shape, as groups divide the numbers of channels")
_IN_MODULES = {"in_channels": _CHANNELS, "out_channels": _CHANNELS, "groups": _CHANNELS, **PLACES}
_IN_FUNCTIONS = {"input": TENSOR, "weight": TENSOR, "groups": _CHANNELS, "_positional": (False, True)}
_MODES = {"padding_mode": ("zeros", "reflect", "replicate", "circular")}
_IN_TRANSPOSED = {
    **_IN_MODULES,
    "output_size": (None, "largest"),
    "padding_mode": Fixed(reason="transposed convolutions have padding_mode='zeros' only"),
}


_GEOMETRY = ("kernel_size", "stride", "padding", "output_padding", "dilation")
_PADDING = {1: (1,), 2: (2, 0), 3: (1, 2, 0)}
"""Not the same along all axes, and along one none."""


def _vary_arguments(rank: int, *, is_transposed: bool) -> dict[str, Any]:
    """What modules and functions have in common; per axis where it is uneven."""
    geometry = {"shape": LAYERS, "kernel_size": (3, 1, (2, 3, 1)[:rank]), "stride": (1, (2, 1, 3)[:rank])}
    dilation = {"dilation": (1, (2, 1, 2)[:rank]), "bias": (True, False)}
    if is_transposed:
        return {
            **geometry,
            "padding": (0, (1, 2, 0)[:rank]),
            "output_padding": (0, (1, 0, 1)[:rank]),
            **dilation,
            "_network": (None, UP, NETWORKS[1], NETWORKS[3]),
            "_unbatched": (False, True),
        }
    return {
        **geometry,
        "padding": (0, _PADDING[rank], "same", "valid"),
        **dilation,
        "_network": (None, *NETWORKS),
        "_unbatched": (False, True),
        "_uneven": (False, True),
    }


# What is rarely quantized, and the arguments that are varied with it.
_RARE: tuple[tuple[Callable[[Arguments], bool], frozenset[str]], ...] = (
    (lambda a: a["_unbatched"], frozenset({"_unbatched"})),
    (lambda a: a.get("_uneven", False), frozenset({"_uneven"})),
    (lambda a: a["_network"] is not None, frozenset({"_network"})),
    (lambda a: a["padding"] == "valid", frozenset({"padding"})),
    (lambda a: a["padding"] == "same", frozenset({"padding", "dilation"})),
    (lambda a: a.get("output_size") is not None, frozenset({"output_size", "stride", "padding"})),
    (lambda a: a.get("padding_mode", "zeros") != "zeros", frozenset({"padding_mode", "padding"})),
)


def _go_together(base: Arguments, a: Arguments) -> bool:
    """Whether arguments of a convolution go together."""
    away = {name for name, value in a.items() if value != base[name]}
    if any(is_rare(a) and not away <= companions for is_rare, companions in _RARE):
        return False
    if a.get("output_padding"):
        return bool(away & {"stride", "dilation"})  # torch asks for less than one of them
    if a.get("output_size") is not None:
        return "stride" in away  # a stride of 1 allows only one size
    # without numbers to pad by, the mode is of no effect
    return "padding_mode" not in away or isinstance(a["padding"], tuple)


def _resolve(arguments: Arguments) -> Arguments:
    """The arguments with those of a known network's layer in their place; 'same' padding with more on one side."""
    if arguments.get("_uneven"):
        return {**arguments, "padding": "same", "kernel_size": 2}
    network = arguments.get("_network")
    if network is None:
        return arguments
    layer = LayerShape(c_in=network.channels, c_out=network.channels, groups=network.groups)
    reach = network.dilation * (network.kernel - 1)
    geometry = {"kernel_size": network.kernel, "stride": network.stride, "padding": reach // 2}
    if network.dilation > 1:
        geometry["dilation"] = network.dilation
    if "output_padding" in arguments:  # for an output of stride times the input's extent
        geometry["output_padding"] = network.stride - reach - 1 + 2 * (reach // 2)
    return {**arguments, "shape": layer, **geometry}


def _derive_channels(arguments: Arguments) -> Arguments:
    """What shape and a known network's layer say of a convolution."""
    a = _resolve(arguments)
    layer = a["shape"]
    channels = {"in_channels": layer.c_in, "out_channels": layer.c_out, "groups": layer.groups}
    return {**a, **channels}


def _make_image(rank: int, arguments: Arguments) -> tuple[Input, ...]:
    layer, network = _resolve(arguments)["shape"], arguments["_network"]
    batch = () if arguments["_unbatched"] else (layer.batch,)
    *leading, width = EXTENTS[:rank]
    return (Input(shape=(*batch, layer.c_in, *leading, (network and network.width) or width)),)


def _draw_kernels(a: Arguments, rank: int) -> Tensor:
    layer, size = a["shape"], a["kernel_size"]
    kernel = (size,) * rank if isinstance(size, int) else size
    weight = draw_weight(layer.c_out, layer.c_in // layer.groups, *kernel)
    return transpose_weight(weight, layer.groups) if "output_padding" in a else weight


_MODULE_OPTIONS = ("stride", "padding", "output_padding", "dilation", "padding_mode")
_DEFAULTS = {"stride": 1, "padding": 0, "dilation": 1, "groups": 1}
_TRANSPOSED_DEFAULTS = {"stride": 1, "padding": 0, "output_padding": 0, "groups": 1, "dilation": 1}  # in torch's order


def _construct_convolution(rank: int, kind: Any, arguments: Arguments) -> Step:
    a = _resolve(arguments)
    layer = a["shape"]
    options = {name: a[name] for name in _MODULE_OPTIONS if name in a}
    module = kind(layer.c_in, layer.c_out, a["kernel_size"], groups=layer.groups, bias=a["bias"], **options)
    size = {} if a.get("output_size") is None else {"output_size": _find_largest_output(module, rank)}
    return _set_parameters(module, _draw_kernels(a, rank), _draw_bias(layer, a["bias"]), **size)


def _find_largest_output(module: Any, rank: int) -> list[int]:
    """The largest output that a transposed convolution can give for the images of these samples."""
    axes = zip(EXTENTS[:rank], module.stride, module.padding, module.dilation, module.kernel_size, strict=True)
    return [
        extent * stride - 2 * padding + dilation * (kernel - 1) for extent, stride, padding, dilation, kernel in axes
    ]


def _call_convolution(rank: int, function: Any, arguments: Arguments) -> Step:
    """Options are given by name, only those that are not the default; or all of them, in order."""
    a = _resolve(arguments)
    layer = a["shape"]
    defaults = _TRANSPOSED_DEFAULTS if "output_padding" in a else _DEFAULTS
    spell = call(*defaults) if a["_positional"] else call(**defaults)
    parameters = (_draw_kernels(a, rank), _draw_bias(layer, a["bias"]))
    return replace(spell(function, {**a, "groups": layer.groups}), parameters=parameters)


_CONVOLUTION = OpRule(arithmetic=DOT_PRODUCT, bound=bound_dot_products, source="torch.nn.functional.conv*; NUM-03")


def _list_known(rank: int, *, is_transposed: bool) -> tuple[Arguments, ...]:
    """Known networks' layers, and common numbers; 4, 2, 1 is how a transposed convolution doubles an image."""
    doubling = (Network(channels=8, groups=1, kernel=4, stride=2), Network(channels=16, groups=16, kernel=4, stride=2))
    networks = (*doubling, *MORE_NETWORKS) if is_transposed else MORE_NETWORKS
    return (*_USUAL, {"shape": _LARGE_REDUCTION[rank]}, *({"_network": network} for network in networks))


def _sample_convolutions() -> dict[Any, OpRecord]:
    """Sample all convolutions: modules and functions, plain and transposed, in one to three dimensions."""
    samples: dict[Any, OpRecord] = {}
    for rank in (1, 2, 3):
        plain, transposed = _vary_arguments(rank, is_transposed=False), _vary_arguments(rank, is_transposed=True)
        for op, arguments, step in (
            (getattr(nn, f"Conv{rank}d"), plain | _MODES | _IN_MODULES, _construct_convolution),
            (getattr(F, f"conv{rank}d"), plain | _IN_FUNCTIONS, _call_convolution),
            (getattr(nn, f"ConvTranspose{rank}d"), transposed | _IN_TRANSPOSED, _construct_convolution),
            (getattr(F, f"conv_transpose{rank}d"), transposed | _IN_FUNCTIONS, _call_convolution),
        ):
            base = {name: values[0] for name, values in arguments.items() if not isinstance(values, Fixed)}
            samples[op] = OpRecord(
                arguments=arguments,
                inputs=partial(_make_image, rank),
                step=partial(step, rank),
                is_valid=partial(_go_together, base),
                kernels=(({"shape": DEPTHWISE}, _GEOMETRY),),
                known=_list_known(rank, is_transposed="output_padding" in arguments),
                derived=_derive_channels,
                rule=None if isinstance(op, type) else _CONVOLUTION,
            )
    return samples


# -- linear layers ----------------------------------------------------------------------------------------------------

_FEATURES = Fixed(reason="varied under shape")
_LINEAR: dict[str, Any] = {
    "shape": (
        LayerShape(c_in=8, c_out=7),
        LayerShape(c_in=1, c_out=1),
        LayerShape(c_in=65, c_out=64),
        LayerShape(c_in=257, c_out=3),
        LayerShape(c_in=63, c_out=9),
    ),
    "_leading": ((2,), (1, 3), (2, 1, 3), (1, 2, 1, 2)),
    "bias": (True, False),
    "_unbatched": (False, True),
}
# More rows and more features than a tile of any kernel; reductions whose sum is beyond what float32 holds exactly.
_LARGE: tuple[Arguments, ...] = (
    {"_leading": (65,)},
    {"_leading": (129,)},
    {"_leading": (9,), "shape": LayerShape(c_in=64, c_out=65)},
    {"_leading": (7,), "shape": LayerShape(c_in=16, c_out=129)},
    {"shape": LayerShape(c_in=1025, c_out=8)},
    {"_leading": (4, 8), "shape": LayerShape(c_in=2049, c_out=3)},
)


def _make_rows(arguments: Arguments) -> tuple[Input, ...]:
    leading = () if arguments["_unbatched"] else arguments["_leading"]
    return (Input(shape=(*leading, arguments["shape"].c_in)),)


def _is_valid_linear(arguments: Arguments) -> bool:
    """Without a batch all other arguments are at their base."""
    are_at_base = arguments["shape"] == _LINEAR["shape"][0] and arguments["_leading"] == (2,) and arguments["bias"]
    return bool(are_at_base) or not arguments["_unbatched"]


def _derive_features(arguments: Arguments) -> Arguments:
    return {"in_features": arguments["shape"].c_in, "out_features": arguments["shape"].c_out}


def _build_linear(op: Any, a: Arguments) -> Step:
    """A module or a function, with its weight and bias."""
    layer = a["shape"]
    module = op(layer.c_in, layer.c_out, bias=a["bias"]) if isinstance(op, type) else None
    weight, bias = draw_weight(layer.c_out, layer.c_in), _draw_bias(layer, a["bias"])
    return Step(op=op, parameters=(weight, bias)) if module is None else _set_parameters(module, weight, bias)


_sample_linear = partial(
    OpRecord, inputs=_make_rows, step=_build_linear, is_valid=_is_valid_linear, known=_LARGE, derived=_derive_features
)
_PRODUCTS = OpRule(
    arithmetic=DOT_PRODUCT, bound=bound_linear_products, source="torch.nn.functional.linear; NUM-03, CVT-03"
)
RECORDS: dict[Any, OpRecord] = {
    nn.Linear: _sample_linear(arguments={**_LINEAR, "in_features": _FEATURES, "out_features": _FEATURES, **PLACES}),
    F.linear: _sample_linear(arguments={**_LINEAR, "input": TENSOR, "weight": TENSOR}, rule=_PRODUCTS),
    **_sample_convolutions(),
}


def count_out_channels(arguments: Arguments) -> int:
    """Return how many channels or features come out of an op with these arguments, which are samples of this table."""
    layer: LayerShape = _resolve(arguments)["shape"]
    return layer.c_out
