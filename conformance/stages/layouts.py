"""Equal values with another layout in memory: channels_last, slices, an offset, expanded and exchanged axes."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from fx_quant_conformance.conformance.claims.inputs import Batch
from fx_quant_conformance.conformance.remote.wire import extent_of

Layout = tuple[str, Batch, Batch]
"""A label, and equal inputs: plain, and in another layout."""
_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}


def lay_in_channels_last(inputs: Batch) -> Iterator[Layout]:
    """Lay all inputs in channels_last, then each one with the others contiguous."""
    places = [number for number, each in enumerate(inputs) if each.dim() in _FORMATS]
    changed = {place: inputs[place].contiguous(memory_format=_FORMATS[inputs[place].dim()]) for place in places}
    if places:
        yield "all inputs", inputs, tuple(changed.get(number, each) for number, each in enumerate(inputs))
    for place in places if len(places) > 1 else ():
        yield f"input {place} alone", inputs, (*inputs[:place], changed[place], *inputs[place + 1 :])


def lay_strided(inputs: Batch) -> Iterator[Layout]:
    """Lay inputs as every second element of a row, at an offset, as one row for a whole batch, and with axes exchanged.

    Indices are left as they are: they are not quantized (nonfinite.py records the results for strided ones).
    """
    most = max((each.dim() for each in inputs if each.is_floating_point()), default=0)
    if most:
        yield "slices", inputs, _change_floats(inputs, copy_with_gaps)
        yield "at an offset", inputs, _change_floats(inputs, _copy_at_an_offset)
        expanded = _change_floats(inputs, lambda value: value[:1].expand(value.shape))
        yield "expanded", tuple(each.contiguous() for each in expanded), expanded
    if most > 1:
        yield "transposed", inputs, _change_floats(inputs, lambda x: x.mT.contiguous().mT, axes=2)


def _change_floats(inputs: Batch, change: Callable[[Tensor], Tensor], *, axes: int = 1) -> Batch:
    """Change the float inputs with at least that many axes."""
    return tuple(change(each) if each.is_floating_point() and each.dim() >= axes else each for each in inputs)


def copy_with_gaps(value: Tensor) -> Tensor:
    """Return a tensor of at least one axis as every second element, from the second on, of a larger one."""
    memory = value.new_zeros((*value.shape[:-1], 2 * value.shape[-1] + 1))
    return memory[..., 1::2].copy_(value)


def _copy_at_an_offset(value: Tensor) -> Tensor:
    """Return a contiguous tensor that begins later than its memory."""
    return torch.cat([value.new_zeros(1), value.flatten()])[1:].view(value.shape)


def clone_with_strides(value: Tensor) -> Tensor:
    """Copy a tensor with its strides, whatever they are: ``clone`` makes one contiguous that overlaps or has gaps.

    One that begins later than its storage does so in the copy, by one element.
    """
    if not value.numel():
        return value.clone()
    used, offset = value.as_strided((extent_of(value.shape, value.stride()),), (1,)), int(value.storage_offset() > 0)
    return torch.cat([used.new_zeros(offset), used]).as_strided(value.shape, value.stride(), offset)
