"""Faults in the reference backend's kernels: its model edited, its steps replaced, what is called wrapped."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.ao.nn.quantized.reference as nnqr
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from fx_quant_conformance.backends.base import Backend, Capabilities
from fx_quant_conformance.refimpl.observers.decomposed import OPS
from tests.mutants.reference_kernels import SAMPLE, Edited, Stepped, Wrapped, weighted
from tests.mutation.mutant import Mutant

MUTANTS: list[Mutant] = []
NUMBERS = ("NUM-03", "NUM-05")
CHOOSES: Any = OPS.choose_qparams.tensor

WEIGHTED = ("nn.Linear/static:*/ptq/*", "nn.Conv*", "*.conv2d/*", "F.linear/static:*")
EVERY_OP = (*SAMPLE, "nn.Ad*Pool2d/*/ptq/*", "F.interpolate/*/ptq/*", "torch.mean/*/ptq/*", ".size/*/ptq/*")
DYNAMIC = ("*/dynamic:in=quint8*/ptq/*",)
SUMS = ("operator.*/ptq/*", "torch.flatten/*/ptq/*")

Wrap = Callable[[Callable[..., Any], GraphModule, tuple[Any, ...]], Callable[..., Any]]


def seed(group: str, name: str, make: Callable[[], Backend], *rules: str, **more: Any) -> None:
    """Enter a fault into the table. ``claims``: the only ones that it touches, and others."""
    more = {"in_full": () if "claims" in more else SAMPLE, **more}
    MUTANTS.append(Mutant(group=group, name=name, make=make, rules=rules or NUMBERS, **more))


def edited(group: str, name: str, edit: Callable[[GraphModule], object], *rules: str, **more: Any) -> None:
    seed(group, name, lambda: Edited(edit), *rules, **more)


def stepped(group: str, name: str, step: str, body: Callable[..., Any], *rules: str, **more: Any) -> None:
    seed(group, name, lambda: Stepped(step, body), *rules, **more)


def wrapped(group: str, name: str, wrap: Wrap, *rules: str, **more: Any) -> None:
    seed(group, name, lambda: Wrapped(wrap), *rules, **more)


# -- rounding, zero points, scales of every op: what quantizes a result -----------------------------------------------


def to_integers(round_: Callable[[Tensor], Tensor]) -> Callable[..., Any]:
    """Quantize with another rounding."""

    def body(honest: Any, node: Node, value: Any, scale: Any, zero: Any, low: int, high: int, dtype: Any) -> Any:
        if not isinstance(scale, float):
            return honest(node, value, scale, zero, low, high, dtype)
        return (round_(value / scale) + zero).clamp(low, high).to(dtype)

    return body


def _other_numbers(change: Callable[..., tuple[Any, ...]]) -> Callable[..., Any]:
    """Quantize with other qparams."""
    return lambda honest, node, value, *numbers: honest(node, value, *change(*numbers))


def _is_static(scale: Any) -> bool:
    return isinstance(scale, float)


def _scaled(factor: float) -> Callable[..., tuple[Any, ...]]:
    return lambda scale, *rest: (scale * factor if _is_static(scale) else scale, *rest)


stepped("rounding", "results truncated", "quantize", to_integers(torch.trunc))
stepped("rounding", "results rounded down", "quantize", to_integers(torch.floor))
stepped(
    "rounding", "results rounded by adding a half and truncating", "quantize", to_integers(lambda v: (v + 0.5).trunc())
)
stepped(
    "zero point",
    "zero point off by one when quantizing",
    "quantize",
    _other_numbers(lambda scale, zero, *rest: (scale, zero + 1 if _is_static(scale) else zero, *rest)),
)
stepped(
    "zero point",
    "zero point dropped when quantizing",
    "quantize",
    _other_numbers(lambda scale, zero, *rest: (scale, 0 if _is_static(scale) else zero, *rest)),
)
for bits in (8, 12, 16):
    stepped(
        "scale",
        f"results in steps larger by 2^-{bits}",
        "quantize",
        _other_numbers(_scaled(1 + 2.0**-bits)),
        size=2.0**-bits,
        in_full=EVERY_OP,
    )
stepped(
    "activation",
    "range ends one early, any op",
    "quantize",
    _other_numbers(lambda scale, zero, low, high, dtype: (scale, zero, low, high - 1, dtype)),
)
stepped(
    "structure",
    "results in 7 bits",
    "quantize",
    _other_numbers(lambda scale, zero, low, high, dtype: (scale, zero, low, low + 127, dtype)),
)


# -- weights and biases -----------------------------------------------------------------------------------------------


def _weights(change: Callable[[Any], object]) -> Callable[[GraphModule], None]:
    def edit(model: GraphModule) -> None:
        with torch.no_grad():
            for module in weighted(model):
                change(module)

    return edit


def _in_float(module: Any) -> None:
    """The weight is not quantized: as a kernel that keeps the float one."""
    module.get_weight = lambda: module.weight


def _no_zero_point(module: Any) -> None:
    module.weight_zero_point.zero_()


def _without_lowest(module: Any) -> None:
    """A kernel whose weights are symmetric: the integer -128 becomes -127, though the config does not say so."""
    get = module.get_quantized_weight

    def clamped() -> Tensor:
        integers: Tensor = get()
        return integers.clamp(min=-127)

    module.get_quantized_weight = clamped
    module.get_weight = lambda: _dequantized(module, clamped())


def _dequantized(module: Any, integers: Tensor) -> Tensor:
    shape = [1] * integers.dim()
    if module.weight_scale.numel() > 1:
        shape[int(module.weight_axis)] = -1
    scale, zero = module.weight_scale.reshape(shape), module.weight_zero_point.reshape(shape)
    weight: Tensor = (integers - zero) * scale
    return weight.float()


class AffineWeights(Edited):
    """Takes weights with a zero point."""

    def capabilities(self) -> Capabilities:
        return replace(super().capabilities(), weight_schemes=("per_tensor_affine",))


def _square_transposed(module: Any) -> None:
    """The layout of the weight is (in, out): where both are equal, nothing complains."""
    if module.weight.dim() > 1 and module.weight.shape[0] == module.weight.shape[1]:
        module.weight.copy_(module.weight.transpose(0, 1).clone())


def _groups_mixed(module: Any) -> None:
    """Weights of a transposed convolution in the order (in, group, out / group)."""
    if isinstance(module, nnqr.ConvTranspose2d) and module.groups > 1:
        module.weight.copy_(module.weight.roll(1, 0).clone())


edited("weights", "weight left in float", _weights(_in_float))
seed("zero point", "weight zero point dropped", lambda: AffineWeights(_weights(_no_zero_point)))
edited("claims", "takes no weight of -128, unsaid", _weights(_without_lowest))
edited("geometry", "square weights transposed", _weights(_square_transposed), claims=WEIGHTED)
edited(
    "geometry",
    "transposed convolution: groups in another order",
    _weights(_groups_mixed),
    claims=("nn.ConvTranspose2d/*",),
)
edited("bias", "bias dropped, any op", _weights(lambda module: setattr(module, "bias", None)))


# -- geometry ---------------------------------------------------------------------------------------------------------


def modules(kind: Any, change: Callable[[Any], object]) -> Callable[[GraphModule], None]:
    def edit(model: GraphModule) -> None:
        for module in model.modules():
            if isinstance(module, kind):
                change(module)

    return edit


def _relu6(module: Any) -> None:
    module.max_val = math.inf


edited("activation", "relu6 as relu", modules(nn.ReLU6, _relu6), claims=("nn.ReLU6/*",))
edited(
    "activation",
    "relu missing after a fused op",
    modules(nn.Sequential, lambda m: isinstance(m[-1], nn.ReLU) and m.register_module(str(len(m) - 1), nn.Identity())),
)
edited(
    "geometry",
    "transposed convolution: output padding ignored",
    modules(nnqr.ConvTranspose2d, lambda m: setattr(m, "output_padding", (0, 0))),
)
edited(
    "geometry",
    "max_pool: dilation ignored, any shape",
    modules(nn.MaxPool2d, lambda m: setattr(m, "dilation", 1)),
    *NUMBERS,
)


def _align_corners(honest: Any, target: Any, *arguments: Any, **keywords: Any) -> Any:
    if target is F.interpolate and keywords.get("mode") == "bilinear":
        keywords["align_corners"] = not keywords.get("align_corners")
    return honest(target, *arguments, **keywords)


def _one_less(honest: Any, target: Any, *arguments: Any, **keywords: Any) -> Any:
    """The mean divides by one less than there are."""
    result = honest(target, *arguments, **keywords)
    count = arguments[0].numel() // max(1, result.numel()) if target is torch.mean else 0
    return result * count / (count - 1) if count > 1 else result


def _wrong_eps(honest: Any, target: Any, *arguments: Any, **keywords: Any) -> Any:
    if target is F.layer_norm:
        keywords["eps"] = 1e-3
    return honest(target, *arguments, **keywords)


stepped("geometry", "interpolate: corners aligned otherwise", "function", _align_corners, claims=("F.interpolate/*",))
stepped("geometry", "mean divides by one less", "function", _one_less, claims=("torch.mean/*",))
stepped("geometry", "layer_norm with another eps", "function", _wrong_eps, claims=("F.layer_norm/*",))


def _clamps_open(honest: Any, target: Any, *arguments: Any, **keywords: Any) -> Any:
    """clamp without its lower end."""
    if target is torch.clamp:
        arguments, keywords = arguments[:1], {"max": arguments[2] if len(arguments) > 2 else keywords.get("max")}
        if keywords["max"] is None:
            return arguments[0]
    return honest(target, *arguments, **keywords)


def _cat_swapped(honest: Any, target: Any, *arguments: Any, **keywords: Any) -> Any:
    if target is torch.cat and len(arguments[0]) > 1 and arguments[0][0].shape == arguments[0][1].shape:
        first, second, *rest = arguments[0]
        arguments = ([second, first, *rest], *arguments[1:])
    return honest(target, *arguments, **keywords)


def _summed_in_half(honest: Any, target: Any, *arguments: Any, **keywords: Any) -> Any:
    result = honest(target, *arguments, **keywords)
    return result.half().float() if target in (operator.add, operator.mul) else result


stepped("activation", "clamp has no lower end", "function", _clamps_open, claims=("torch.clamp/*",))
stepped("sharing", "cat swaps inputs of one shape", "function", _cat_swapped, claims=("torch.cat/*", "model/cat*"))
stepped("accumulation", "sums and products in float16", "function", _summed_in_half, claims=("operator.*",))


def _softmax_elsewhere(module: Any) -> None:
    module.dim = 0


edited("geometry", "softmax along the first axis", modules(nn.Softmax, _softmax_elsewhere), claims=("nn.Softmax/*",))


def _approximate(honest: Any, module: nn.Module, *arguments: Any, **keywords: Any) -> Any:
    """A sigmoid of a few pieces."""
    is_sigmoid = isinstance(module, nn.Sigmoid)
    return (arguments[0] / 4 + 0.5).clamp(0, 1) if is_sigmoid else honest(module, *arguments, **keywords)


stepped("activation", "sigmoid of three pieces", "called", _approximate, claims=("nn.Sigmoid/*",))


def _overflowing(honest: Any, module: nn.Module, *arguments: Any, **keywords: Any) -> Any:
    """A softmax whose sum of exponentials has nine bits before the point: it is 0 where 512 of them are 1."""
    result = honest(module, *arguments, **keywords)
    if not isinstance(module, nn.Softmax):
        return result
    x = arguments[0]
    largest = x == x.amax(module.dim, keepdim=True)
    return torch.where(largest.sum(module.dim, keepdim=True) >= 512, torch.zeros_like(result), result)


stepped("accumulation", "softmax: 512 equal values overflow", "called", _overflowing, claims=("nn.Softmax/*",))
