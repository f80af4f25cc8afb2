"""How ops are written in primitives of which torch has no decomposition (NUM-04)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_aten: Any = torch.ops.aten


def _open_trilinear(
    a: Tensor,
    b: Tensor,
    c: Tensor,
    expand_a: Sequence[int],
    expand_b: Sequence[int],
    expand_c: Sequence[int],
    axes: Sequence[int],
    unroll_dim: int = 1,
) -> Tensor:
    """The sum of products of three tensors, each with axes put in."""
    for axis in expand_a:
        a = a.unsqueeze(axis)
    for axis in expand_b:
        b = b.unsqueeze(axis)
    for axis in expand_c:
        c = c.unsqueeze(axis)
    return (a * b * c).sum(tuple(axes))


def _open_random_slope(
    x: Tensor, noise: Tensor, lower: float = 1 / 8, upper: float = 1 / 3, training: bool = False, generator: Any = None
) -> Any:
    """A leaky relu of a slope that is random in training alone."""
    return NotImplemented if training else torch.where(x > 0, x, x * ((lower + upper) / 2))


def _open_random_slope_functional(x: Tensor, noise: Tensor, *options: Any) -> Any:
    """As above, with the noise, which evaluation does not change."""
    opened = _open_random_slope(x, noise, *options)
    return opened if opened is NotImplemented else (opened, noise)


def _open_masked_scatter(x: Tensor, mask: Tensor, source: Tensor) -> Tensor:
    """Where a mask holds stand the values of a source, in order."""
    if source.numel() == 0:
        return x.clone()
    x, mask = _aten.broadcast_tensors([x, mask])
    place = mask.flatten().long().cumsum(0) - 1
    taken = source.flatten()[place.clamp(0, source.numel() - 1)]
    return torch.where(mask, taken.reshape(x.shape), x)


def _open_masked_select(x: Tensor, mask: Tensor) -> Tensor:
    """What a mask selects."""
    x, mask = _aten.broadcast_tensors([x, mask])
    selected: Tensor = x[mask]
    return selected


def _open_put(x: Tensor, places: Tensor, source: Tensor, accumulate: bool = False) -> Tensor:
    """Values that are put at places of the flattened tensor."""
    return x.flatten().index_put((places.flatten(),), source.flatten(), accumulate).reshape(x.shape)


def _open_angle(x: Tensor) -> Tensor:
    """The angle of a complex number, or of a real one."""
    if x.is_complex():
        return torch.atan2(x.imag, x.real)
    return torch.where(x < 0, torch.full_like(x, math.pi), torch.zeros_like(x))


def _open_pair_distances(x: Tensor, p: float = 2.0) -> Tensor:
    """The distance of each two rows."""
    distances = torch.cdist(x, x, p)
    return _open_masked_select(distances, torch.ones(x.shape[0], x.shape[0], dtype=torch.bool).triu(1))


def _open_cholesky_solve(b: Tensor, factor: Tensor, upper: bool = False) -> Tensor:
    """X of L·Lᵀ·X = B, or of Uᵀ·U·X = B, by two triangular systems."""
    first, second = (factor.mT, factor) if upper else (factor, factor.mT)
    inner = torch.linalg.solve_triangular(first, b, upper=False)
    solution: Tensor = torch.linalg.solve_triangular(second, inner, upper=True)
    return solution


def _open_fake_quantize(x: Tensor, scale: Any, zero_point: Any, low: int, high: int) -> tuple[Tensor, Tensor]:
    """The grid's value that is nearest, and whether it lies between the ends."""
    rounded = torch.round(x / scale) + zero_point
    return (rounded.clamp(low, high) - zero_point) * scale, (rounded >= low) & (rounded <= high)


def _open_fake_quantize_by_channel(
    x: Tensor, scale: Tensor, zero_point: Tensor, axis: int, low: int, high: int
) -> tuple[Tensor, Tensor]:
    """As above, with a grid for each channel."""
    shape = [-1 if each == axis else 1 for each in range(x.dim())]
    return _open_fake_quantize(x, scale.reshape(shape), zero_point.reshape(shape), low, high)


OPENINGS: Mapping[Any, Callable[..., Any]] = {
    _aten._trilinear.default: _open_trilinear,
    _aten.rrelu_with_noise.default: _open_random_slope,
    _aten.rrelu_with_noise_functional.default: _open_random_slope_functional,
    _aten.masked_scatter.default: _open_masked_scatter,
    _aten.masked_select.default: _open_masked_select,
    _aten.put.default: _open_put,
    _aten.angle.default: _open_angle,
    _aten.cholesky_solve.default: _open_cholesky_solve,
    _aten._pdist_forward.default: _open_pair_distances,
    _aten.fake_quantize_per_tensor_affine_cachemask.default: _open_fake_quantize,
    _aten.fake_quantize_per_channel_affine_cachemask.default: _open_fake_quantize_by_channel,
}
"""By the aten op."""


def _fill_diagonal(x: Tensor, value: Any, wrap: bool = False) -> Tensor:
    length = (x.numel() + x.shape[1]) // (x.shape[1] + 1) if wrap and x.dim() == 2 else min(x.shape)
    x.as_strided((length,), (sum(x.stride()),)).fill_(value)
    return x


class WithoutWrites(TorchFunctionMode):
    """Replaces what torch cannot make functional: it has no form that does not work in place."""

    _replaced: Mapping[Any, Callable[..., Any]] = {Tensor.fill_diagonal_: _fill_diagonal}

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call a function, or what stands for it."""
        return self._replaced.get(func, func)(*args, **(kwargs or {}))
