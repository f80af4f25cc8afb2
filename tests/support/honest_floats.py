"""Other right ways to compute in float32: what a compiler may do to the float ops of a model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.utils._python_dispatch import TorchDispatchMode

from fx_quant_conformance.backends.reference import ReferenceBackend

aten = torch.ops.aten
Variant = dict[Any, Callable[..., Any]]


def softmax_online(x: Tensor, axis: int, half_to_float: bool = False) -> Tensor:
    """The sums are rescaled whenever a larger element comes."""
    moved = x.movedim(axis, 0)
    most, total = torch.full_like(moved[0], -torch.inf), torch.zeros_like(moved[0])
    for each in moved:
        larger = torch.maximum(most, each)
        kept = torch.where(most == larger, 1.0, torch.exp(most - larger))
        total = total * kept + torch.where(each == -torch.inf, 0.0, torch.exp(each - larger))
        most = larger
    return (torch.exp(moved - most) / total).movedim(0, axis)


def softmax_by_logarithm(x: Tensor, axis: int, half_to_float: bool = False) -> Tensor:
    """e to the logarithm of the softmax."""
    return torch.exp(x - torch.logsumexp(x, axis, keepdim=True))


def multiply_backwards(a: Tensor, b: Tensor) -> Tensor:
    """Products are summed from the last to the first, one by one."""
    total = torch.zeros(*a.shape[:-1], b.shape[-1])
    for place in reversed(range(a.shape[-1])):
        total = total + a[..., place : place + 1] * b[..., place : place + 1, :]
    return total


def multiply_in_blocks(a: Tensor, b: Tensor) -> Tensor:
    """Products are summed in blocks of three, which are added."""
    blocks = zip(torch.split(a, 3, -1), torch.split(b, 3, -2), strict=True)
    return torch.stack([multiply_backwards(*each) for each in blocks]).sum(0)


def add_matrices(multiply: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Tensor]:
    return lambda c, a, b, *, beta=1, alpha=1: beta * c + alpha * multiply(a, b)


def sum_as_tree(x: Tensor, axes: Any = None, keepdim: bool = False, **options: Any) -> Tensor:
    """Neighbours are added, then their sums."""
    axes = tuple(range(x.dim())) if not axes else tuple(axis % x.dim() for axis in axes)
    for axis in axes:
        while x.shape[axis] > 1:
            if x.shape[axis] % 2:
                x = torch.cat([x, torch.zeros_like(x.narrow(axis, 0, 1))], axis)
            x = x.unflatten(axis, (-1, 2)).select(axis + 1, 0) + x.unflatten(axis, (-1, 2)).select(axis + 1, 1)  # type: ignore[no-untyped-call]
    return x if keepdim else x.squeeze(axes)


def mean_as_tree(x: Tensor, axes: Any = None, keepdim: bool = False, **options: Any) -> Tensor:
    total = sum_as_tree(x, axes, keepdim)
    return total * (1.0 / (x.numel() // max(1, total.numel())))


def norm_in_one_pass(x: Tensor, shape: Any, weight: Any, bias: Any, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """The variance as the mean of squares less the square of the mean."""
    axes = tuple(range(x.dim() - len(shape), x.dim()))
    mean, squares = x.mean(axes, keepdim=True), (x * x).mean(axes, keepdim=True)
    factor = (squares - mean * mean + eps).rsqrt()
    scaled = factor if weight is None else factor * weight
    shift = -mean * scaled if bias is None else bias - mean * scaled
    return x * scaled + shift, mean, factor


def erf_by_a_formula(x: Tensor) -> Tensor:
    """Abramowitz and Stegun, 7.1.26: off by 1.5e-7."""
    t = 1 / (1 + 0.3275911 * x.abs())
    series: Tensor = t * (0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429))))
    result: Tensor = x.sign() * (1 - series * torch.exp(-x * x))
    return result


def gelu_by_a_formula(x: Tensor, *, approximate: str = "none") -> Tensor:
    if approximate == "tanh":
        inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        return x * (1 - 1 / (torch.exp(2 * inner) + 1))
    return 0.5 * x * (1 + erf_by_a_formula(x * 0.7071067811865476))


def sigmoid_by_tanh(x: Tensor) -> Tensor:
    return 0.5 * torch.tanh(0.5 * x) + 0.5


def divide_by_reciprocal(x: Tensor, y: Any) -> Tensor:
    return torch.mul(x, 1.0 / y)


def in_double(op: Any) -> Callable[..., Any]:
    """The op in float64, rounded once."""

    def run(*args: Any, **kwargs: Any) -> Any:
        double = [each.double() if isinstance(each, Tensor) and each.is_floating_point() else each for each in args]
        return torch.utils._pytree.tree_map(_to_float, op(*double, **kwargs))

    return run


def _to_float(each: Any) -> Any:
    return each.float() if isinstance(each, Tensor) and each.dtype is torch.float64 else each


def attend_by_parts(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention that is not fused: all scores, their softmax, and products; the scale is in the queries."""
    scores = (query * (scale or query.shape[-1] ** -0.5)) @ key.mT
    if is_causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)
    if attn_mask is not None:
        scores = scores + attn_mask
    return softmax_online(scores, -1) @ value, scores.logsumexp(-1)


def in_another_layout(op: Any) -> Callable[..., Any]:
    """A convolution on channels that lie last."""

    def run(x: Tensor, weight: Tensor, *args: Any) -> Any:
        if x.dim() == 4:
            x, weight = (each.contiguous(memory_format=torch.channels_last) for each in (x, weight))
        return op(x, weight, *args)

    return run


VARIANTS: dict[str, Variant] = {
    "online softmax": {aten._softmax.default: softmax_online},
    "softmax by its logarithm": {aten._softmax.default: softmax_by_logarithm},
    "attention by its parts": {aten._scaled_dot_product_flash_attention_for_cpu.default: attend_by_parts},
    "sums from the last": {
        aten.mm.default: multiply_backwards,
        aten.bmm.default: multiply_backwards,
        aten.addmm.default: add_matrices(multiply_backwards),
    },
    "sums in blocks": {
        aten.mm.default: multiply_in_blocks,
        aten.bmm.default: multiply_in_blocks,
        aten.addmm.default: add_matrices(multiply_in_blocks),
    },
    "sums as a tree": {aten.sum.dim_IntList: sum_as_tree, aten.mean.dim: mean_as_tree},
    "norms in one pass": {aten.native_layer_norm.default: norm_in_one_pass},
    "erf by a formula": {aten.erf.default: erf_by_a_formula, aten.gelu.default: gelu_by_a_formula},
    "sigmoid by tanh": {
        aten.sigmoid.default: sigmoid_by_tanh,
        aten.silu.default: lambda x: x * sigmoid_by_tanh(x),
    },
    "division by a reciprocal": {aten.div.Tensor: divide_by_reciprocal},
    "products in float64": {op: in_double(op) for op in (aten.mm.default, aten.bmm.default, aten.convolution.default)},
    "functions in float64": {
        op: in_double(op) for op in (aten.exp.default, aten.log.default, aten.sin.default, aten.cos.default)
    },
    "channels last": {aten.convolution.default: in_another_layout(aten.convolution.default)},
}
"""What each variant computes in its own way."""


class _Mode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, variant: Variant) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.variant, self.used = variant, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        own = self.variant.get(func)
        if own is None or not (isinstance(args[0], Tensor) and args[0].dtype is torch.float32):
            return func(*args, **(kwargs or {}))
        self.used += 1
        return own(*args, **(kwargs or {}))


class HonestFloats(ReferenceBackend):
    """The reference backend, whose float ops are computed in another right way; ``used``: how many were."""

    def __init__(self, variant: Variant) -> None:
        self.mode = _Mode(variant)

    def lower(self, reference_model: GraphModule, example_inputs: tuple[Any, ...]) -> Callable[..., Any]:
        """Return the model, whose ops are dispatched to the variant's."""

        def run(*inputs: Tensor) -> Any:
            with torch.no_grad(), self.mode:
                return reference_model(*inputs)

        return run
