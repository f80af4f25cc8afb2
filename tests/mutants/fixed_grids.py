"""Machines whose layers, sums and products give results on a grid that the claims fix, among ops that share it.

Each config has the same patterns, and the same plain ops beside them; what is fixed, and where, differs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fx_quant_conformance.backends.base import Representation
from fx_quant_conformance.refimpl import (
    BackendConfig,
    DTypeConfig,
    DTypeWithConstraints,
    MinMaxObserver,
    PerChannelMinMaxObserver,
    QConfig,
)
from fx_quant_conformance.refimpl.config.patterns import pattern_name
from tests.mutants.integer_kernels import IntegerBackend
from tests.mutants.reference_kernels import SmallReference, entries

FIXING = ("nn.Linear", "nn.Linear+nn.ReLU", "nni.LinearReLU", "nnqat.Linear", "operator.add", "operator.mul")
"""The patterns whose qparams are fixed."""
PLAIN = ("nn.Identity", "nn.Conv2d", "torch.cat", "nn.MaxPool2d", "nn.ReLU", "torch.flatten", ".reshape")
"""What stands beside them: a layer whose grids are measured, and ops that share their input's."""
CLAIMS = ("nn.Linear*", "nni.*", "nnqat.*", "operator.*")
MODELS = tuple(f"model/{name}/*" for name in ("reused_summand", "cat_of_ranges", "branches", "shared_relu", "two_*"))
"""Models in which a fixed result is pooled, joined, clamped, moved and summed again."""
WEIGHT = DTypeWithConstraints(torch.qint8, quant_min_lower_bound=-127, quant_max_upper_bound=127)
MEASURED = MinMaxObserver.with_args(dtype=torch.quint8)


class OwnFixedObserver(nn.Module):
    """A vendor's own observer of fixed qparams: it keeps the protocol, and has nothing of refimpl's."""

    dtype, qscheme = torch.quint8, torch.per_tensor_affine

    def __init__(self, scale: float, zero_point: int, low: int, high: int, is_dynamic: bool = False) -> None:
        super().__init__()
        self.register_buffer("scale", torch.tensor([scale]))
        self.register_buffer("zero_point", torch.tensor([zero_point], dtype=torch.int32))
        self.quant_min, self.quant_max, self.is_dynamic = low, high, is_dynamic

    def forward(self, x: Tensor) -> Tensor:
        """Pass a value on."""
        return x

    def calculate_qparams(self) -> tuple[Any, Any]:
        """Return scale and zero point."""
        return self.scale, self.zero_point


@dataclass(frozen=True, slots=True, kw_only=True)
class Fixing:
    """What the claims fix: the qparams, the ends, and the range of integers, of which patterns. No ends: nothing."""

    scale: float = 2.0**-4
    zero_point: int = 128
    ends: tuple[str, ...] = ("input", "output")
    bounds: tuple[int, int] = (0, 255)
    patterns: tuple[str, ...] = FIXING

    def config(self) -> BackendConfig:
        """Return the claims."""
        bounded = DTypeWithConstraints(torch.quint8, *self.bounds)
        fixed = DTypeWithConstraints(
            torch.quint8, *self.bounds, scale_exact_match=self.scale, zero_point_exact_match=self.zero_point
        )
        given, made = (fixed if end in self.ends else bounded for end in ("input", "output"))
        config = BackendConfig("fixed grids")
        for entry in entries():
            if (name := pattern_name(entry.normal_pattern)) in (*FIXING, *PLAIN):
                has_weight = name.startswith(("nn.Linear", "nni.", "nnqat.", "nn.Conv"))
                weight, bias = (WEIGHT, torch.float) if has_weight else (None, None)
                plain = DTypeConfig(torch.quint8, torch.quint8, weight, bias)
                entry.set_dtype_configs([DTypeConfig(given, made, weight, bias) if name in self.patterns else plain])
                config.set_backend_pattern_config(entry)
        return config

    def observer(self, kind: Callable[..., Any] = OwnFixedObserver) -> Callable[..., Any]:
        """Return a constructor of a vendor's own observer that gives these qparams."""
        return partial(kind, self.scale, self.zero_point, *self.bounds)


SEVEN = Fixing(scale=0.03, zero_point=60, bounds=(0, 127))


class FixedGridBackend(SmallReference):
    """Claims that fix qparams, kept by the reference model itself.

    ``observers``: the QConfigs are the vendor's own, with these observers of activations.
    """

    def __init__(
        self,
        fixing: Fixing,
        observers: Sequence[Callable[..., Any]] | None = None,
        representation: Representation = Representation.DECOMPOSED,
    ) -> None:
        super().__init__(fixing.config())
        self._observers, self.representation = observers, representation

    def qconfigs(self) -> Sequence[Any] | None:
        """Return one for each observer; None: the suite's own are taken."""
        weight = PerChannelMinMaxObserver.with_args(
            dtype=torch.qint8, qscheme=torch.per_channel_symmetric, quant_min=-127, quant_max=127
        )
        return None if self._observers is None else [QConfig(make, weight) for make in self._observers]


class FixedGridIntegers(IntegerBackend):
    """The same claims, kept by integer kernels that say what they run."""

    def __init__(self, fixing: Fixing) -> None:
        super().__init__(name="fixed grids")
        self._fixing = fixing

    def backend_config(self) -> BackendConfig:
        """Return the claims."""
        return self._fixing.config()
