"""Ops that sum products, in a form where a probe chooses every operand, every weight and every scale (fingerprints).

Every probe is a set of operands x (centred: integers less their zero point) for one set of weights (integers), so that
each output channel holds sum(x·w)·s_x·s_w/s_y.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fx_quant_conformance.conformance.facts.probe_models import WEIGHT_END, WEIGHT_SCALE, ProbeModel, Site, make_operand
from fx_quant_conformance.conformance.oracle.grids import Grid

CHANNELS = 8  # of every output: kernels of depthwise convolutions want a multiple of 8
ANCHORS = torch.tensor([WEIGHT_END, -WEIGHT_END]).double()  # fix the weight's scale; their operands are at rest


@dataclass(frozen=True, slots=True, kw_only=True)
class Dot:
    """An op that sums products, in a form where one of its results is a sum over all of a window."""

    pattern: type[nn.Module]
    build: Callable[[Tensor, Tensor | None], nn.Module]
    """Makes it from a weight (outputs × products) and a bias."""
    lay_out: Callable[[Tensor], Tensor]
    """Makes its input from operands (batch × products)."""
    taps: int = 1
    """Sums have a multiple of this number of products."""
    most: int = 0
    """The largest number of products of a sum; 0: any number."""
    at: int = 0
    """Which place of the output to read."""
    rank: int = 0
    """How many dimensions the places of the output have."""
    pads: bool = False
    """Whether the op pads its input by one element."""

    @property
    def free(self) -> int:
        """How many products a probe has without the anchors: of those of a 3×3 window of 30 channels."""
        return (self.most or 270) - len(ANCHORS)


# -- ops --------------------------------------------------------------------------------------------------------------


def _build(kind: Any, shape: tuple[int, ...], weight: Tensor, bias: Tensor | None, **options: Any) -> nn.Module:
    module = kind(*shape, bias=bias is not None, **options)
    with torch.no_grad():
        module.weight.copy_(weight.reshape(module.weight.shape))
        if bias is not None:
            module.bias.copy_(bias)
    return module  # type: ignore[no-any-return]


def _make_convolution(rank: int) -> Dot:
    kind, taps = getattr(nn, f"Conv{rank}d"), 3**rank
    return Dot(
        pattern=kind,
        build=lambda weight, bias: _build(kind, (weight.shape[1] // taps, len(weight), 3), weight, bias, padding=1),
        lay_out=lambda x: x.reshape(len(x), -1, *[3] * rank),
        taps=taps,
        at=taps // 2,
        rank=rank,
        pads=True,
    )


def _make_transposed(rank: int) -> Dot:
    """The kernel is 2 wide, and so is the stride: each result is a sum over the input channels only.

    A scale per channel is one per input channel here: as many more output channels hold anchors for all of these.
    """
    kind = getattr(nn, f"ConvTranspose{rank}d")

    def build(weight: Tensor, bias: Tensor | None) -> nn.Module:
        anchors = (ANCHORS * WEIGHT_SCALE).repeat(CHANNELS // 2)[:, None].expand(-1, weight.shape[1])
        weight = torch.cat([weight, anchors])
        bias = None if bias is None else torch.cat([bias, torch.zeros(len(anchors))])
        taps = weight.T.reshape(*weight.T.shape, *[1] * rank).expand(-1, -1, *[2] * rank)
        return _build(kind, (weight.shape[1], len(weight), 2), taps, bias, stride=2)

    return Dot(pattern=kind, build=build, lay_out=lambda x: x.reshape(*x.shape, *[1] * rank), rank=rank)


DOTS: Mapping[str, Dot] = {
    "linear": Dot(
        pattern=nn.Linear,
        build=lambda weight, bias: _build(nn.Linear, (weight.shape[1], len(weight)), weight, bias),
        lay_out=lambda x: x,
    ),
    **{f"conv{rank}d": _make_convolution(rank) for rank in (1, 2, 3)},
    "depthwise_conv2d": Dot(
        pattern=nn.Conv2d,
        build=partial(_build, nn.Conv2d, (CHANNELS, CHANNELS, 3), padding=1, groups=CHANNELS),
        lay_out=lambda x: x.reshape(len(x), 1, 3, 3).expand(-1, CHANNELS, -1, -1).contiguous(),
        taps=9,
        most=9,
        at=4,
        rank=2,
        pads=True,
    ),
    **{f"conv_transpose{rank}d": _make_transposed(rank) for rank in (1, 2, 3)},
}

# -- running one ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Stimulus:
    """Operands x (batch × k), weights (channels × k), scales, and what else differs from probe to probe."""

    x: Tensor
    weight: Tensor
    x_grid: Grid
    y_grid: Grid
    bias: Tensor | None = None
    rest: int = 0
    """The value of the operands (centred) that meet the anchors."""
    rectified: bool = False

    @property
    def sums(self) -> Tensor:
        """The exact sums of products (batch × channels)."""
        return self.x @ self.weight.T

    @property
    def exact(self) -> Tensor:
        """The exact results, in output steps from the zero point, without the bias."""
        return self.sums * self.ratio

    @property
    def ratio(self) -> float:
        """s_x·s_w/s_y."""
        return self.x_grid.scale * WEIGHT_SCALE / self.y_grid.scale


def build_probe(dot: Dot, stimulus: Stimulus) -> ProbeModel:
    """Add the anchors to a probe's weights and operands, and fill them up to whole windows."""
    channels, width = stimulus.weight.shape
    padding = -(width + len(ANCHORS)) % dot.taps
    weight = torch.cat([ANCHORS.expand(channels, -1), stimulus.weight, torch.zeros(channels, padding)], 1)
    rest = torch.full((len(stimulus.x), len(ANCHORS)), float(stimulus.rest))
    x = torch.cat([rest, stimulus.x, torch.zeros(len(stimulus.x), padding)], 1)
    op = dot.build(weight * WEIGHT_SCALE, stimulus.bias)
    model = nn.Sequential(op, nn.ReLU()) if stimulus.rectified else nn.Sequential(op)
    return ProbeModel(model=model, inputs=(make_operand(stimulus.x_grid, dot.lay_out(x)),), output=stimulus.y_grid)


def run_stimulus(dot: Dot, site: Site, stimulus: Stimulus) -> Tensor:
    """Run a probe; return its results (batch × channels) in output steps from the zero point. Raises Unmeasured."""
    results = site.run(build_probe(dot, stimulus))
    return results.flatten(2)[:, : len(stimulus.weight), dot.at] if dot.rank else results
