"""Numbers of channels, laid out to broadcast."""

from __future__ import annotations

from torch import Tensor


def lay_along(values: Tensor, axis: int, dim: int) -> Tensor:
    """Return values, one or one for each channel, in a shape that broadcasts to tensors of ``dim`` axes along one.

    ``axis``: that of the channels; a negative one counts from the last.
    """
    return values.reshape([-1 if each == axis % dim else 1 for each in range(dim)])
