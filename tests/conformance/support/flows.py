"""Reference models whose grids are known beforehand, so that a test can compute the right result by itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from hypothesis import settings
from torch import Tensor, nn
from torch.fx import GraphModule

from fx_quant_conformance.backends.torch_engines.tables import native_config
from fx_quant_conformance.conformance.oracle.grids import Grid, placeholder_grids
from fx_quant_conformance.refimpl import (
    BackendConfig,
    MinMaxObserver,
    PerChannelMinMaxObserver,
    QConfig,
    QConfigMapping,
    convert_to_reference_decomposed_fx,
    prepare_fx,
)

PROPERTY = settings(deadline=None, derandomize=True, database=None)
"""Hypothesis for this project: the same examples in every run, on machines of any speed."""


class One(nn.Module):
    """A function of one input as a model."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Any:
        """Call it."""
        return self.function(x)


class Two(nn.Module):
    """A function of two inputs as a model."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor, y: Tensor) -> Any:
        """Call it."""
        return self.function(x, y)


def activation_range(*, scale: float, zero_point: int, low: int = 0, high: int = 255) -> tuple[float, float]:
    """The range of reals for which a min/max observer finds this scale (a power of two) and this zero point."""
    return (low - zero_point) * scale, (high - zero_point) * scale


def input_grids(model: GraphModule) -> list[Grid]:
    """The grid of each input of a reference model all of whose inputs are quantized."""
    return [grid for grid in placeholder_grids(model) if grid is not None]


def drawn_integers(*shape: int, seed: int, low: int = 0, high: int = 255) -> Tensor:
    """Integers that reach both ends of their range."""
    drawn = torch.randint(low, high + 1, shape, generator=torch.Generator().manual_seed(seed))
    drawn.view(-1)[0], drawn.view(-1)[-1] = low, high
    return drawn


def drawn_weight(*shape: int, seed: int) -> tuple[Tensor, Tensor]:
    """Integers of a weight, and its scales per channel: channel c holds integers times 2^-(7 + c % 3)."""
    integers = drawn_integers(*shape, seed=seed, low=-127, high=127)
    integers.flatten(1)[:, 0] = 127
    return integers, torch.tensor([2.0 ** -(7 + channel % 3) for channel in range(shape[0])])


def converted(
    model: nn.Module,
    ranges: Sequence[tuple[float, float]],
    *,
    per_channel: bool = False,
    config: BackendConfig | None = None,
    output: Sequence[Sequence[Tensor]] = (),
    **activation: Any,
) -> GraphModule:
    """Quantize a model (quint8, weights in -127..127) after calibrating each input on its range, and on `output`."""
    observer = PerChannelMinMaxObserver if per_channel else MinMaxObserver
    scheme = torch.per_channel_symmetric if per_channel else torch.per_tensor_symmetric
    qconfig = QConfig(
        activation=MinMaxObserver.with_args(**({"dtype": torch.quint8} | activation)),
        weight=observer.with_args(dtype=torch.qint8, qscheme=scheme, quant_min=-127, quant_max=127),
    )
    config = config or native_config("qnnpack")
    prepared = prepare_fx(model.eval(), QConfigMapping().set_global(qconfig), None, backend_config=config)
    with torch.no_grad():
        for batch in output:
            ends = [torch.linspace(low, high, int(x.numel())) for x, (low, high) in zip(batch, ranges, strict=True)]
            prepared(*(end.reshape(x.shape) for end, x in zip(ends, batch, strict=True)))
    return convert_to_reference_decomposed_fx(prepared)


def on_grid(integers: Tensor, *, scale: float, zero_point: int) -> Tensor:
    """The float32 values of integers."""
    return Grid(scale=scale, zero_point=zero_point, low=0, high=255, dtype="quint8").values(integers)
