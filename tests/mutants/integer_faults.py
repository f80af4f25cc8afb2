"""Faulty integer kernels, one seeded fault each, and honest ones that differ within the rules.

Every fault names the patterns on which it must be found, and the verdict that it must get there at the least.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Node

from fx_quant_conformance.reports.verdicts import Verdict
from tests.mutants.fault_table import CONV, LINEAR, MOVING, RATIO, RELU_AFTER, RESCALED, WEIGHTED, fault, seed
from tests.mutants.integer_kernels import Integers, Kernels, Sum

# -- rounding, zero points, scales, range -----------------------------------------------------------------------------

seed("rounding", "rounds towards zero", "rounded", lambda honest, v: v.trunc(), RESCALED)
seed("rounding", "rounds down", "rounded", lambda honest, v: v.floor(), RESCALED)
seed("rounding", "rounds twice", "rounded", lambda honest, v: honest(honest(v * 16) / 16), RESCALED)
seed("rounding", "rounds up", "rounded", lambda honest, v: v.ceil(), RESCALED)
seed("zero point", "input zero point dropped", "zeroed", lambda honest, x: x.q, RESCALED)
seed("zero point", "input zero point off by one", "zeroed", lambda honest, x: honest(x) + 1, RESCALED)
seed("zero point", "input zero point added", "zeroed", lambda honest, x: x.q + x.zero_point, RESCALED)
seed("zero point", "output zero point dropped", "placed", lambda honest, v, zero: v, RESCALED)
seed("zero point", "output zero point off by one", "placed", lambda honest, v, zero: v + zero + 1, RESCALED)
seed("zero point", "output zero point subtracted", "placed", lambda honest, v, zero: v - zero, RESCALED)
seed("scale", "output scale inverted", "rescale", lambda honest, total, ratio: total / ratio, RATIO)
seed(
    "activation",
    "range ends one early",
    "clamped",
    lambda honest, v, grid, **more: honest(v, replace(grid, high=grid.high - 1), **more),
    RESCALED,
)
seed(
    "activation",
    "range starts one late",
    "clamped",
    lambda honest, v, grid, **more: honest(v, replace(grid, low=grid.low + 1), **more),
    RESCALED,
)
seed(
    "activation",
    "wraps instead of saturating",
    "clamped",
    lambda honest, v, grid, **more: (v - grid.low).remainder(256) + grid.low,
    (*WEIGHTED,),
)
for bits in (8, 10):
    seed(
        "scale",
        f"rescale ratio off by 2^-{bits}",
        "rescale",
        lambda honest, total, ratio, e=2.0**-bits: total * ratio * (1 + e),
        RATIO,
        size=2.0**-bits,
    )


def in_bits(factor: Tensor, bits: int) -> Tensor:
    """A factor whose mantissa has so many bits."""
    mantissa, exponent = torch.frexp(factor)
    return (mantissa * 2.0**bits).round() * 2.0**-bits * 2.0 ** exponent.double()


def multiplier(bits: int) -> Callable[..., Tensor]:
    """A fixed-point multiplier: a mantissa of so many bits, and a shift."""

    def body(honest: Any, total: Tensor, ratio: Tensor) -> Tensor:
        kept: Tensor = honest(total, in_bits(ratio, bits))
        return kept

    return body


seed("scale", "7-bit multiplier", "rescale", multiplier(7), RATIO)
seed(
    "scale",
    "rescale in bfloat16",
    "rescale",
    lambda honest, total, ratio: total * ratio.bfloat16().double(),
    RATIO,
)

# -- weights and biases -----------------------------------------------------------------------------------------------


def _bias_on_weights(honest: Any, total: Sum, bias: Tensor) -> Any:
    """The bias as integers of the weight's scale, taken for integers of the accumulator's."""
    return honest(total, (bias / total.scale.max()).round() * total.scale)


def _one_scale(honest: Any, weight: Integers) -> Tensor:
    return weight.scale[:1].expand_as(weight.scale)


seed("scale", "first channel's scale for all", "weight_scale", _one_scale, WEIGHTED, per_channel=True)
seed(
    "scale",
    "largest scale for all",
    "weight_scale",
    lambda honest, w: w.scale.max().expand_as(w.scale),
    WEIGHTED,
    per_channel=True,
)
seed("scale", "next channel's scale", "weight_scale", lambda honest, w: w.scale.roll(1), WEIGHTED, per_channel=True)
seed("scale", "scale of 4 channels on", "weight_scale", lambda honest, w: w.scale.roll(4), WEIGHTED, per_channel=True)
seed("bias", "bias dropped", "with_bias", lambda honest, total, bias: total, WEIGHTED)
seed("bias", "bias subtracted", "with_bias", lambda honest, total, bias: honest(total, -bias), WEIGHTED)
seed("bias", "bias after the rescale", "with_bias", lambda honest, t, bias: replace(t, late=bias), WEIGHTED)
seed("bias", "bias of the next channel", "with_bias", lambda honest, t, b: honest(t, b.roll(1, 0)), WEIGHTED)


def _bias_int8(honest: Any, total: Sum, bias: Tensor) -> Any:
    scale = bias.abs().max() / 127
    return honest(total, (bias / scale).round() * scale)


seed("bias", "largest scale for every bias", "with_bias", _bias_on_weights, WEIGHTED, per_channel=True)
seed("bias", "bias in steps of 1", "with_bias", lambda honest, t, bias: honest(t, bias.round()), WEIGHTED)
seed("bias", "bias as int8", "with_bias", _bias_int8, WEIGHTED)


def _bias_int16(honest: Any, total: Sum, bias: Tensor) -> Any:
    return honest(total, (bias / total.scale).round().clamp(-(2**15), 2**15 - 1) * total.scale)


seed("bias", "bias saturates as int16", "with_bias", _bias_int16, ("nn.Linear",))

# -- sums -------------------------------------------------------------------------------------------------------------


def _pairs_int16(honest: Any, x: Integers, weight: Integers) -> Tensor:
    """As vpmaddubsw: products of neighbours are added in int16, which saturates."""
    products = (x.q - x.low).unsqueeze(-2) * weight.centred()
    even = F.pad(products, (0, products.shape[-1] % 2))
    pairs = (even[..., ::2] + even[..., 1::2]).clamp(-(2**15), 2**15 - 1)
    total: Tensor = pairs.sum(-1) - (x.zero_point - x.low) * weight.centred().sum(-1)
    return total


def _without_tail(dim: int, tile: int = 8) -> Callable[..., Tensor]:
    def body(honest: Any, x: Integers, *more: Any) -> Tensor:
        q = x.q.clone()
        if q.shape[dim] % tile:
            q.select(dim, -1).fill_(int(x.zero_point))
        result: Tensor = honest(replace(x, q=q), *more)
        return result

    return body


def wraps(bits: int) -> Callable[..., Tensor]:
    def body(honest: Any, *arguments: Any) -> Tensor:
        half = 2.0 ** (bits - 1)
        result: Tensor = (honest(*arguments) + half).remainder(2 * half) - half
        return result

    return body


def _in_half(x: Integers, weight: Integers) -> Tensor:
    """Products and sums in half precision, one after the other; what is too large for it stays at its largest."""
    most = torch.finfo(torch.float16).max
    total = torch.zeros(*x.q.shape[:-1], weight.q.shape[0], dtype=torch.float16)
    for left, right in zip(x.centred().unbind(-1), weight.centred().unbind(-1), strict=True):
        product = (left.unsqueeze(-1) * right).clamp(-most, most)
        total = (total.double() + product.half().double()).clamp(-most, most).half()
    return total.double()


seed("accumulation", "pairs saturate in int16", "linear", _pairs_int16, LINEAR, dtypes=("in=quint8",))
seed("accumulation", "linear: last element dropped", "linear", _without_tail(-1), LINEAR)
seed("accumulation", "conv: last input channel dropped", "convolution", _without_tail(1), CONV)
for tile in (4, 16):
    seed(
        "accumulation",
        f"linear: last element dropped beside tiles of {tile}",
        "linear",
        _without_tail(-1, tile),
        LINEAR,
    )
seed("accumulation", "linear: sums in float16", "linear", lambda honest, x, w: _in_half(x, w), LINEAR)
seed("accumulation", "linear: 16-bit accumulator", "linear", wraps(16), LINEAR)
seed("accumulation", "conv: 16-bit accumulator", "convolution", wraps(16), CONV)
seed(
    "geometry",
    "rows of the weight in reverse",
    "linear",
    lambda honest, x, w: honest(x, replace(w, q=w.q.flip(0))),
    LINEAR,
)


@fault("layout", "wrong beyond the first of a batch", *WEIGHTED, also=("NUM-07", "NUM-05"))
class FirstOfBatch(Kernels):
    def requantize(self, value: Sum, grid: Integers) -> Integers:
        found = super().requantize(value, grid)
        return replace(found, q=found.q[:1].expand_as(found.q)) if found.q.dim() > 1 else found


# -- geometry of convolutions -----------------------------------------------------------------------------------------


def _geometry(change: Callable[[Any, Any, Any, Any], tuple[Any, ...]]) -> Callable[..., Tensor]:
    def body(honest: Any, x: Integers, weight: Integers, geometry: tuple[Any, ...]) -> Tensor:
        result: Tensor = honest(x, weight, change(*geometry))
        return result

    return body


def padding_with(integer: int) -> Callable[..., Tensor]:
    def body(honest: Any, x: Integers, weight: Integers, geometry: tuple[Any, ...]) -> Tensor:
        stride, padding, *more = geometry
        result: Tensor = honest(replace(x, q=_padded(x.q, padding, integer)), weight, (stride, 0, *more))
        return result

    return body


def _padded(q: Tensor, padding: Any, value: float) -> Tensor:
    height, width = padding if isinstance(padding, tuple) else (padding, padding)
    return F.pad(q, (width, width, height, height), value=value)


def _one_sided(honest: Any, x: Integers, weight: Integers, geometry: tuple[Any, ...]) -> Tensor:
    """All of the padding on the left, none on the right."""
    stride, padding, *more = geometry
    height, width = padding if isinstance(padding, tuple) else (padding, padding)
    q = F.pad(x.q, (2 * width, 0, height, height), value=int(x.zero_point))
    result: Tensor = honest(replace(x, q=q), weight, (stride, 0, *more))
    return result


def _first_group(honest: Any, x: Integers, weight: Integers, geometry: tuple[Any, ...]) -> Tensor:
    """Every group reads the first group's channels."""
    groups = geometry[3]
    width = x.q.shape[1] // groups
    result: Tensor = honest(replace(x, q=x.q[:, :width].repeat(1, groups, 1, 1)), weight, geometry)
    return result


def _undilated(honest: Any, x: Integers, weight: Integers, geometry: tuple[Any, ...]) -> Tensor:
    """The right shape, the wrong taps."""
    stride, padding, _, groups = geometry
    full: Tensor = honest(x, weight, geometry)
    near: Tensor = honest(x, weight, (stride, padding, 1, groups))
    return near[..., : full.shape[-2], : full.shape[-1]]


def _interleaved(honest: Any, x: Integers, weight: Integers, geometry: tuple[Any, ...]) -> Tensor:
    """Output channels in the order of a depth multiplier that counts the wrong way round."""
    result: Tensor = honest(x, weight, geometry)
    order = torch.arange(result.shape[1]).reshape(geometry[3], -1).T.flatten()
    return result[:, order]


def _narrow_at(channels: int, bits: int) -> Callable[..., Tensor]:
    """A kernel for 3x3 and many channels, as by Winograd's algorithm, has sums of fewer bits."""

    def body(honest: Any, x: Integers, weight: Integers, geometry: tuple[Any, ...]) -> Tensor:
        is_chosen = weight.q.shape[1] >= channels and weight.q.shape[2:] == (3, 3) and geometry[0] in (1, (1, 1))
        result: Tensor = wraps(bits)(honest, x, weight, geometry) if is_chosen else honest(x, weight, geometry)
        return result

    return body


def _packed(honest: Any, x: Integers, weight: Integers, geometry: tuple[Any, ...]) -> Tensor:
    """Depthwise kernels of channels in eights multiply by a factor that an instruction approximates."""
    result: Tensor = honest(x, weight, geometry)
    return result * (1 + 2.0**-11) if geometry[3] == x.q.shape[1] and geometry[3] % 8 == 0 else result


seed("accumulation", "conv: 18-bit sums for 3x3 and 64 channels", "convolution", _narrow_at(64, 18), CONV)
seed("scale", "depthwise of channels in eights off by 2^-11", "convolution", _packed, CONV)
seed("zero point", "conv pads with integer 0", "convolution", padding_with(0), CONV)
seed("zero point", "conv pads with the lowest integer", "convolution", padding_with(-128), CONV, dtypes=("in=qint8",))
seed("geometry", "conv pads on one side", "convolution", _one_sided, CONV)
seed("geometry", "dilation ignored, shape and all", "convolution", _geometry(lambda s, p, d, g: (s, p, 1, g)), CONV)
seed("geometry", "dilation ignored", "convolution", _undilated, CONV)
seed("geometry", "padding ignored", "convolution", _geometry(lambda s, p, d, g: (s, 0, d, g)), CONV)
seed("geometry", "stride ignored", "convolution", _geometry(lambda s, p, d, g: (1, p, d, g)), CONV)
seed("geometry", "wrong group", "convolution", _first_group, CONV)
seed("geometry", "depth multiplier interleaved", "convolution", _interleaved, CONV)
seed(
    "geometry", "kernel flipped", "convolution", lambda honest, x, w, g: honest(x, replace(w, q=w.q.flip(-1)), g), CONV
)

# -- relu -------------------------------------------------------------------------------------------------------------

seed(
    "activation",
    "relu missing",
    "clamped",
    lambda honest, v, grid, rectified: honest(v, grid, rectified=False),
    RELU_AFTER,
)
seed("activation", "relu alone missing", "relu", lambda honest, x: x, ("nn.ReLU",), rule="NUM-05")
seed(
    "activation",
    "relu clamps at integer 0",
    "relu",
    lambda honest, x: replace(x, q=x.q.clamp(min=0)),
    ("nn.ReLU",),
    rule="NUM-05",
)
seed(
    "activation",
    "relu clamps at integer 0 after a sum",
    "clamped",
    lambda honest, v, grid, rectified: honest(v.clamp(min=0) if rectified else v, grid, rectified=False),
    RELU_AFTER,
)

seed(
    "activation",
    "relu ends at 6",
    "clamped",
    lambda honest, v, grid, rectified: honest(
        v.clamp(max=float(grid.zero_point + (6 / grid.scale).round())) if rectified else v, grid, rectified=rectified
    ),
    RELU_AFTER,
)

# -- add, mul, cat ----------------------------------------------------------------------------------------------------


def _swapped(honest: Any, x: Integers, y: Integers) -> Sum:
    result: Sum = honest(replace(x, scale=y.scale), replace(y, scale=x.scale))
    return result


def _half_of_second(honest: Any, values: list[Integers], dim: int) -> Integers:
    other = values[1]
    q = (other.centred() * (1 - 2.0**-6)).round() + other.zero_point
    result: Integers = honest([values[0], replace(other, q=q)], dim)
    return result


seed("sharing", "add with swapped scales", "add", _swapped, ("operator.add",))
seed(
    "sharing",
    "add with the first scale for both",
    "add",
    lambda honest, x, y: honest(x, replace(y, scale=x.scale)),
    ("operator.add",),
)
seed(
    "sharing",
    "mul with the first scale twice",
    "mul",
    lambda honest, x, y: honest(x, replace(y, scale=x.scale)),
    ("operator.mul",),
)
seed(
    "geometry",
    "add broadcasts wrongly",
    "add",
    lambda honest, x, y: honest(x, replace(y, q=y.q.flip(-3)) if y.q.dim() > 3 and y.q.shape != x.q.shape else y),
    ("operator.add",),
)
seed("sharing", "cat rescales", "cat", _half_of_second, ("torch.cat",), rule="NUM-05")
seed(
    "sharing",
    "cat in the wrong order",
    "cat",
    lambda honest, values, dim: replace(values[0], q=torch.cat([values[0].q, values[1].q], dim).roll(1, dim)),
    ("torch.cat",),
    rule="NUM-05",
)

# -- pools ------------------------------------------------------------------------------------------------------------


def _with(**changes: Any) -> Callable[..., Tensor]:
    def body(honest: Any, pool: Any, x: Integers) -> Tensor:
        for name, value in changes.items():
            if not hasattr(pool, name):
                continue
            setattr(pool, name, value(getattr(pool, name)) if callable(value) else value)
        result: Tensor = honest(pool, x)
        return result

    return body


def _max_pads_with(integer: Callable[[Integers], int]) -> Callable[..., Tensor]:
    def body(honest: Any, pool: Any, x: Integers) -> Tensor:
        q = _padded(x.q, pool.padding, integer(x))
        pool.padding = 0
        result: Tensor = honest(pool, replace(x, q=q))
        return result

    return body


AVERAGE, MAXIMUM = ("nn.AvgPool2d",), ("nn.MaxPool2d",)
seed("geometry", "count_include_pad flipped", "average", _with(count_include_pad=lambda flag: not flag), AVERAGE)
seed("geometry", "avg_pool: ceil_mode ignored", "average", _with(ceil_mode=False), AVERAGE)
seed("geometry", "avg_pool: padding ignored", "average", _with(padding=0), AVERAGE)
seed("geometry", "avg_pool: stride is the kernel", "average", _with(stride=3), AVERAGE)
seed("geometry", "avg_pool: divides by 8", "average", _with(divisor_override=8), AVERAGE)
seed(
    "geometry",
    "adaptive: divides once too little",
    "average",
    lambda honest, pool, x: honest(pool, x) * 2,
    ("nn.AdaptiveAvgPool2d",),
)
seed(
    "zero point",
    "max_pool pads with the zero point",
    "maximum",
    _max_pads_with(lambda x: int(x.zero_point)),
    MAXIMUM,
    rule="NUM-05",
)
seed(
    "zero point",
    "max_pool pads with integer 0",
    "maximum",
    _max_pads_with(lambda x: 0),
    MAXIMUM,
    rule="NUM-05",
    dtypes=("in=qint8",),
)
seed("geometry", "max_pool: dilation ignored", "maximum", _with(dilation=1), MAXIMUM, rule="NUM-05")
seed("geometry", "max_pool: ceil_mode ignored", "maximum", _with(ceil_mode=False), MAXIMUM, rule="NUM-05")

# -- the output as a whole --------------------------------------------------------------------------------------------


def _at_end(group: str, name: str, change: Callable[[Tensor], Any], patterns: tuple[str, ...], **more: Any) -> None:
    seed(group, name, "dequantize", lambda honest, x: change(honest(x)), patterns, **more)


_at_end("structure", "returns float64", lambda y: y.double(), CONV)
_at_end("structure", "returns integers", lambda y: y.int(), CONV)
_at_end("structure", "returns a list", lambda y: [y], CONV)
_at_end("structure", "returns NaN", lambda y: y * float("nan"), CONV)
_at_end("structure", "returns channels last", lambda y: y.movedim(1, -1), CONV)
_at_end("structure", "returns one dimension more", lambda y: y[None], CONV)
_at_end(
    "state",
    "last element never written",
    lambda y: y.flatten().index_fill(0, torch.tensor(y.numel() - 1), 0.0).view_as(y),
    RESCALED,
)


@fault(
    "structure",
    "in float, silently",
    *WEIGHTED,
    "operator.add",
    "operator.mul",
    "nn.AvgPool2d",
    verdict=Verdict.FALLBACK,
)
class SilentFloat(Kernels):
    """Takes the integers in, and leaves the results as they are: on no grid."""

    def rounded(self, value: Tensor) -> Tensor:
        return value


@fault("state", "second call differs", *WEIGHTED, *MOVING, rule="NUM-07")
class SecondCall(Kernels):
    """Accumulates into a buffer that it forgets to clear when it sees one input twice."""

    def run(self, *args: Any, **keywords: Any) -> Any:
        seen = self.__dict__.setdefault("seen", set())
        key = tuple(float(value.double().sum()) for value in args)
        result = super().run(*args, **keywords)
        is_new = key not in seen
        seen.add(key)
        return result if is_new else result + 0.5


@fault("claims", "raises on one op", "nn.Conv2d", "torch.cat", rule="LOW-01")
class Raises(Kernels):
    def run_node(self, n: Node) -> Any:
        if n.name in ("op0", "cat"):
            raise RuntimeError("no kernel for this op")
        return super().run_node(n)
