"""Long sums: exact in integers, and wrong in float32, whatever the usual order of its additions."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fx_quant_conformance.conformance.stages.long_sums import BITS, LARGEST, ROWS, WIDTH, draw_long_sums

TWO_UNITS = 2
"""By how much a sum must be off to be off by a step of the probe's output."""


@pytest.mark.parametrize("amplitude", (63, 127, 128, 255))
def test_the_sums_are_small_even_integers_of_operands_of_eight_bits(amplitude: int) -> None:
    sums = draw_long_sums(amplitude)
    assert sums.x.shape == (ROWS, WIDTH) and sums.weight.shape == (BITS, WIDTH)
    assert float(sums.x.max()) == min(amplitude, 127) and float(sums.x.min()) == 0
    assert float(sums.weight.abs().max()) == LARGEST
    exact = sums.x.to(torch.int64) @ sums.weight.to(torch.int64).T
    assert torch.equal(exact, sums.totals.to(torch.int64))
    assert set(sums.totals.flatten().tolist()) == {float(2 * number) for number in range(1, 17)}
    assert not sums.x[:, sums.idle].any() and not sums.weight[:, sums.idle].any()
    assert float((sums.x @ sums.weight.abs().T).max()) < 2**31, "int32 holds every partial sum"


@cache
def products() -> Tensor:
    """The products of every sum, in float32: (ROWS, BITS, WIDTH). They are exact."""
    sums = draw_long_sums(127)
    return (sums.x[:, None] * sums.weight).float()


def one_by_one(values: Tensor) -> Tensor:
    """Add along the last axis, one after the other, in float32."""
    return torch.from_numpy(np.add.accumulate(values.numpy(), axis=-1, dtype=np.float32)[..., -1].copy())


def neighbours(values: Tensor) -> Tensor:
    """Add in pairs of neighbours, again and again."""
    while values.shape[-1] > 1:
        values = F.pad(values, (0, values.shape[-1] % 2))
        values = values[..., ::2] + values[..., 1::2]
    return values[..., 0]


def halves(values: Tensor) -> Tensor:
    """Add the second half to the first, again and again."""
    while values.shape[-1] > 1:
        values = F.pad(values, (0, values.shape[-1] % 2))
        middle = values.shape[-1] // 2
        values = values[..., :middle] + values[..., middle:]
    return values[..., 0]


Order = Callable[[Tensor], Tensor]


def blocks(size: int, inside: Order, between: Order) -> Order:
    """Add neighbours in blocks of a size, then the blocks."""

    def add(values: Tensor) -> Tensor:
        padded = F.pad(values, (0, -values.shape[-1] % size))
        return between(inside(padded.reshape(*padded.shape[:-1], -1, size)))

    return add


def lanes(count: int, between: Order) -> Order:
    """Add every n-th product, one after the other, then the lanes."""

    def add(values: Tensor) -> Tensor:
        padded = F.pad(values, (0, -values.shape[-1] % count))
        return between(one_by_one(padded.reshape(*padded.shape[:-1], -1, count).transpose(-1, -2).contiguous()))

    return add


ORDERS: dict[str, Order] = {
    "one by one": one_by_one,
    "neighbours": neighbours,
    "halves": halves,
    "torch.sum": lambda values: values.sum(-1),
    "one by one in blocks of 384": blocks(384, one_by_one, one_by_one),
    "neighbours in blocks of 256": blocks(256, neighbours, one_by_one),
    **{f"{count} lanes, then neighbours": lanes(count, neighbours) for count in (3, 8, 64)},
    "16 lanes, then one by one": lanes(16, one_by_one),
    "32 lanes, then halves": lanes(32, halves),
    "16 lanes in blocks of 256": blocks(256, lanes(16, neighbours), one_by_one),
}
"""The orders, each alone and within another; a few of the sizes that kernels have."""


@pytest.mark.parametrize("order", ORDERS)
def test_no_usual_order_of_float32_gives_them(order: str) -> None:
    errors = (ORDERS[order](products()).double() - draw_long_sums(127).totals).abs()
    assert int((errors >= TWO_UNITS).sum()) >= ROWS, f"only {int((errors >= TWO_UNITS).sum())} sums are wrong"


KERNELS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "matmul": lambda x, weight: x @ weight.T,
    "conv2d": lambda x, weight: F.conv2d(x[..., None, None], weight[..., None, None])[..., 0, 0],
    "conv_transpose2d": lambda x, weight: F.conv_transpose2d(
        x[..., None, None], weight.T[..., None, None].contiguous()
    )[..., 0, 0],
}


@pytest.mark.parametrize("kernel", KERNELS)
def test_no_float32_kernel_of_this_machine_gives_them_and_float64_does(kernel: str) -> None:
    sums = draw_long_sums(127)
    errors = (KERNELS[kernel](sums.x.float(), sums.weight.float()).double() - sums.totals).abs()
    assert int((errors >= TWO_UNITS).sum()) >= ROWS
    assert torch.equal(KERNELS[kernel](sums.x, sums.weight), sums.totals)


def test_float32_after_integers_or_before_them_is_no_matter() -> None:
    """What is rounded once, after sums of integers, is as right as they are: a rescale in float32 is no sum in it."""
    sums = draw_long_sums(127)
    assert torch.equal((sums.x.float().double() @ sums.weight.float().double().T).float().double(), sums.totals)
