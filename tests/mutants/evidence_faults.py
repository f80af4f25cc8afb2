"""Lying evidence: backends that compute in floating point and report that they ran quantized.

Their numbers are as right as float32 makes them; where less precise kinds of numbers are summed, less so. What they
declare is what an honest machine of integers declares: no sums in float.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import GraphModule

from fx_quant_conformance.backends.base import Capabilities, Execution
from tests.conformance.support.told import name_ops
from tests.mutants.reference_kernels import SmallReference, weighted
from tests.mutation.mutant import Mutant

MUTANTS: list[Mutant] = []
LINEAR, CONV = ("nn.Linear/static:*", "nnqat.Linear/static:*"), ("nn.Conv2d/*", "torch.conv2d/*")

Forward = Callable[[Any, Tensor], Tensor]
"""What a weighted module does: the module, the input."""


class Liar(SmallReference):
    """Runs the reference model in float, its weighted modules as ``forward`` says, and reports a quantized kernel.

    ``tells``: whether it reports, by the number of the question, from 0.
    """

    def __init__(self, forward: Forward | None = None, tells: Callable[[int], bool] = lambda number: True) -> None:
        super().__init__()
        self._forward, self._tells, self._asked = forward, tells, 0

    def capabilities(self) -> Capabilities:
        return replace(super().capabilities(), float_accumulation=False)

    def lower(self, reference_model: GraphModule, example_inputs: tuple[Any, ...]) -> Callable[..., Any]:
        for module in weighted(reference_model) if self._forward else ():
            module.forward = _bind(self._forward, module)
        return super().lower(reference_model, example_inputs)

    def execution(self, lowered: Callable[..., Any]) -> Execution | None:
        self._asked += 1
        told = Execution(quantized_ops=name_ops(lowered), float_fallbacks=(), kernels=("gemm_u8s8_avx2",))
        return told if self._tells(self._asked - 1) else None


def _bind(forward: Any, module: nn.Module) -> Callable[[Tensor], Tensor]:
    return lambda x: forward(module, x)


def lying(name: str, claims: tuple[str, ...], *arguments: Any) -> None:
    """Enter a liar into the table. Where its numbers are wrong on their own, these find it first."""
    MUTANTS.append(
        Mutant(
            group="evidence",
            name=name,
            make=lambda: Liar(*arguments),
            rules=("LOW-04", "NUM-03"),
            claims=claims,
        )
    )


# -- how the sums are made --------------------------------------------------------------------------------------------


def _narrow(dtype: torch.dtype) -> Forward:
    """Products and sums in another dtype."""

    def forward(module: Any, x: Tensor) -> Tensor:
        bias = None if module.bias is None else module.bias.to(dtype)
        return F.linear(x.to(dtype), module.get_weight().to(dtype), bias).float()

    return forward


def _in_lanes(lanes: int) -> Forward:
    """Each lane of a vector register sums every n-th product in float32; then the lanes are added in pairs."""

    def forward(module: Any, x: Tensor) -> Tensor:
        weight = module.get_weight()
        padding = (0, -x.shape[-1] % lanes)
        products = F.pad(x, padding).reshape(*x.shape[:-1], 1, -1, lanes) * F.pad(weight, padding).reshape(
            len(weight), -1, lanes
        )
        sums = torch.from_numpy(np.add.accumulate(products.numpy(), axis=-2)[..., -1, :].copy())
        while sums.shape[-1] > 1:
            sums = sums[..., ::2] + sums[..., 1::2]
        return sums[..., 0] if module.bias is None else sums[..., 0] + module.bias

    return forward


lying("linear in float32, reported as quantized", LINEAR)
lying("convolution in float32, reported as quantized", CONV)
lying("transposed convolution in float32, reported as quantized", ("nn.ConvTranspose2d/*",))
lying(
    "convolutions with and without batch norm in float32, reported as quantized",
    ("nn.Conv2d+nn.BatchNorm2d/*", "nn.Conv2d/*"),
)
lying("linear summed in float32 lanes, reported as quantized", LINEAR, _in_lanes(16))
lying("linear in bfloat16, reported as quantized", LINEAR, _narrow(torch.bfloat16))
lying("linear in float16, reported as quantized", LINEAR, _narrow(torch.float16))
lying("linear in float32, reported as quantized every other time", LINEAR, None, lambda number: number % 2 == 0)
lying("linear in float32, reported as quantized once", LINEAR, None, lambda number: number == 0)
