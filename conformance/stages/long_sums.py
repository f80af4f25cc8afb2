"""Long sums: operands whose sums of products pass 2²⁴ on the way, and come back to small ones.

An accumulator of 32-bit integers holds every partial sum of them exactly, and so does float64. float32 does not: it
holds all integers up to 2²⁴, beyond that every second one, from 2²⁵ on every fourth. So the results tell one from the
other, whatever the rounding that follows.

*Why no usual order of additions in float32 gives the exact sums.* A kernel adds products one by one, in pairs, in
blocks, in the lanes of a vector, or in several of these ways inside of each other. Each of them puts products into
partial sums by the digits of their number, and the last addition joins two partial sums that differ in one bit of it.
A sum has 2¹⁶ products. It has an output channel for each of the 16 bits, which adds where the bit is 0 and subtracts
where it is 1. In the channel of the bit that is joined last, both partial sums are of one sign: 2¹⁵ products of at
least 3/4·127 · 3/4·63, about 2¹², so that they are above 2²⁷, where float32 holds every 16th integer. On the way there
each crosses three more such ranges, and additions in them round. The order with the fewest of these additions is that
of pairs: 15 for each half, which are off by 1, 2, 4 or 8 units or, as often, not at all; together their standard
deviation is 11 units. The operands are drawn, with low bits that are as good as independent: so a result is within a
unit of the exact one about once in nine times, and all four rows of that channel once in 6000 times. The channels of
the bits that are joined just before have sums half as long, and a quarter, and are nearly as often wrong. In all other
orders more additions round. The operands are the same in every run, and a test tries common orders on them.

No test of numbers can do more: a kernel may add what cancels first, or in float64.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

BITS = 16
"""There is an output channel for each bit of a product's number."""
ROWS = 4
WIDTH = 2**BITS
"""Number of products of a sum."""
LARGEST = 63
"""Largest weight: two products of it and an 8-bit operand fit 16 bits, so that kernels which add those lose nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LongSums:
    """Operands, weights and their sums of products, integers in float64."""

    x: Tensor
    """The operands (ROWS × WIDTH)."""
    weight: Tensor
    """The weights (BITS × WIDTH)."""
    totals: Tensor
    """The sums (ROWS × BITS); they are even, from 2 to 32."""
    idle: tuple[int, int]
    """Numbers of two products that are 0·0 in every sum, for a caller to change the weights there."""


@cache
def draw_long_sums(amplitude: int) -> LongSums:
    """Draw the operands, the same at every call; ``amplitude``: their largest magnitude, of which 127 are used."""
    most = min(amplitude, 127)
    generator = torch.Generator().manual_seed(0)
    number = torch.arange(WIDTH)
    signs = 1.0 - 2.0 * torch.stack([number >> bit & 1 for bit in range(BITS)]).double()
    weight = signs * torch.randint(LARGEST * 3 // 4, LARGEST + 1, signs.shape, generator=generator)
    x = torch.randint(most * 3 // 4, most + 1, (ROWS, WIDTH), generator=generator).double()
    spare = (number >> BITS - 6 == number & 63).nonzero().flatten()  # of these, half have a 1 in any bit
    x[:, spare] = weight[:, spare] = 0
    totals = 2.0 + 2.0 * (torch.arange(ROWS * BITS).reshape(ROWS, BITS) % 16).double()
    missing = totals - x @ weight.T
    *_, first, second = spare.tolist()
    for row in range(ROWS):
        _bring_back(x[row], weight, missing[row], spare[row:-2:ROWS], most)
    return LongSums(x=x, weight=weight, totals=totals, idle=(first, second))


def _bring_back(x: Tensor, weight: Tensor, missing: Tensor, places: Tensor, most: int) -> None:
    """Add what is missing (BITS) in one row, at places where all other rows are 0."""
    unit, rest = places[0], places[1:]
    high = (missing / most).round()
    x[unit], x[rest] = 1, most
    weight[:, unit] = missing - most * high
    left = high.abs()[:, None] - LARGEST * torch.arange(len(rest))
    weight[:, rest] = high.sign()[:, None] * left.clamp(0, LARGEST)
