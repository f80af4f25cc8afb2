"""Layouts: equal values that lie otherwise in memory: channels_last, slices, expanded and exchanged axes."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from conformance.claims.inputs import Batch

Layout = tuple[str, Batch, Batch]
"""What is changed, and equal inputs: plain, and not."""


_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}


def in_channels_last(inputs: Batch) -> Iterator[Layout]:
    """All inputs in channels_last, and one beside contiguous others."""
    changed = tuple(_last(each) for each in inputs)
    places = [number for number, each in enumerate(inputs) if each.dim() in _FORMATS]
    if places:
        yield "all inputs", inputs, changed
    for place in places if len(places) > 1 else ():
        one = (*inputs[:place], changed[place], *inputs[place + 1 :])
        yield f"input {place} alone", inputs, one


def _last(value: Tensor) -> Tensor:
    return value.contiguous(memory_format=_FORMATS[value.dim()]) if value.dim() in _FORMATS else value


def strided(inputs: Batch) -> Iterator[Layout]:
    """Every second element of a row, axes exchanged, and one row for all of a batch.

    Indices are left as they are: they are not quantized (nonfinite.py records what strided ones give).
    """
    most = max((each.dim() for each in inputs if each.is_floating_point()), default=0)
    if most:
        yield "slices", inputs, tuple(map(_sliced, inputs))
        expanded = tuple(map(_expanded, inputs))
        yield "expanded", tuple(each.contiguous() for each in expanded), expanded
    if most > 1:
        yield "transposed", inputs, tuple(map(_transposed, inputs))


def _sliced(value: Tensor) -> Tensor:
    return sliced(value) if value.dim() and value.is_floating_point() else value


def sliced(value: Tensor) -> Tensor:
    """Return a tensor of at least one axis as every second element, from the second on, of a larger one."""
    memory = value.new_zeros((*value.shape[:-1], 2 * value.shape[-1] + 1))
    return memory[..., 1::2].copy_(value)


def _expanded(value: Tensor) -> Tensor:
    if not value.dim() or not value.shape[0] or not value.is_floating_point():
        return value
    return value[:1].expand(value.shape)


def _transposed(value: Tensor) -> Tensor:
    is_changed = value.dim() > 1 and value.is_floating_point()
    return value.transpose(-1, -2).contiguous().transpose(-1, -2) if is_changed else value


def clone_with_strides(value: Tensor) -> Tensor:
    """Copy a tensor with its strides, whatever they are: ``clone`` makes one contiguous that overlaps or has gaps."""
    size = 1 + sum((length - 1) * stride for length, stride in zip(value.shape, value.stride(), strict=True))
    if not value.numel():
        return value.clone()
    memory = value.as_strided((size,), (1,)).clone()
    return memory.as_strided(value.shape, value.stride())
