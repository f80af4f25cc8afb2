"""Ops that sum products, in a form where a probe chooses every operand, every weight and every scale (fingerprints).

Every probe is a set of operands x (centred: integers less their zero point) for one set of weights (integers), so that
each output channel holds sum(x·w)·s_x·s_w/s_y.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from conformance.facts.probe_models import WEIGHT_END, WEIGHT_SCALE, ProbeModel, Site, operand
from conformance.oracle.grids import Grid

CHANNELS = 8  # of every output: kernels of depthwise convolutions want a multiple of 8
ANCHORS = torch.tensor([WEIGHT_END, -WEIGHT_END]).double()  # fix the weight's scale; their operands are at rest
BIG = 63  # the largest weight elsewhere: two products of it and an 8-bit operand fit 16 bits


@dataclass(frozen=True, slots=True, kw_only=True)
class Dot:
    """An op that sums products, in a form where one of its results is a sum over all of a window.

    ``taps``: sums have a multiple of so many products, ``most`` at the most (0: any number). ``module``: makes it from
    a weight (outputs × products) and a bias. ``shaped``: makes its input from operands (batch × products). ``at``:
    which place of the output to read, of ``rank`` dimensions. ``pads``: the op pads its input by one element.
    """

    pattern: type[nn.Module]
    module: Callable[[Tensor, Tensor | None], nn.Module]
    shaped: Callable[[Tensor], Tensor]
    taps: int = 1
    most: int = 0
    at: int = 0
    rank: int = 0
    pads: bool = False

    @property
    def free(self) -> int:
        """How many products a probe has for itself, beside the anchors: of those of a 3×3 window of 30 channels."""
        return (self.most or 270) - len(ANCHORS)


# -- ops --------------------------------------------------------------------------------------------------------------


def _filled(module: Any, weight: Tensor, bias: Tensor | None) -> nn.Module:
    with torch.no_grad():
        module.weight.copy_(weight.reshape(module.weight.shape))
        if bias is not None:
            module.bias.copy_(bias)
    return module  # type: ignore[no-any-return]


def _linear(weight: Tensor, bias: Tensor | None) -> nn.Module:
    return _filled(nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None), weight, bias)


LINEAR = Dot(pattern=nn.Linear, module=_linear, shaped=lambda x: x)


def _convolution(rank: int) -> Dot:
    kind, taps = getattr(nn, f"Conv{rank}d"), 3**rank

    def module(weight: Tensor, bias: Tensor | None) -> nn.Module:
        channels = weight.shape[1] // taps
        return _filled(kind(channels, len(weight), 3, padding=1, bias=bias is not None), weight, bias)

    def shaped(x: Tensor) -> Tensor:
        return x.reshape(len(x), -1, *[3] * rank)

    return Dot(pattern=kind, module=module, shaped=shaped, taps=taps, at=taps // 2, rank=rank, pads=True)


def _depthwise(weight: Tensor, bias: Tensor | None) -> nn.Module:
    made = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1, groups=CHANNELS, bias=bias is not None)
    return _filled(made, weight, bias)


def _in_every_channel(x: Tensor) -> Tensor:
    return x.reshape(len(x), 1, 3, 3).expand(-1, CHANNELS, -1, -1).contiguous()


DEPTHWISE = Dot(
    pattern=nn.Conv2d, module=_depthwise, shaped=_in_every_channel, taps=9, most=9, at=4, rank=2, pads=True
)  # fmt: skip


def _transposed(rank: int) -> Dot:
    """The kernel is 2 wide, and so is the stride: each result is a sum over the input channels alone.

    A scale per channel is one per input channel here: as many more output channels hold anchors for all of these.
    """
    kind = getattr(nn, f"ConvTranspose{rank}d")

    def module(weight: Tensor, bias: Tensor | None) -> nn.Module:
        anchors = (ANCHORS * WEIGHT_SCALE).repeat(CHANNELS // 2)[:, None].expand(-1, weight.shape[1])
        weight = torch.cat([weight, anchors])
        bias = None if bias is None else torch.cat([bias, torch.zeros(len(anchors))])
        made = kind(weight.shape[1], len(weight), 2, stride=2, bias=bias is not None)
        taps = weight.T.reshape(*weight.T.shape, *[1] * rank).expand(made.weight.shape)
        return _filled(made, taps, bias)

    return Dot(pattern=kind, module=module, shaped=lambda x: x.reshape(*x.shape, *[1] * rank), rank=rank)


DOTS: Mapping[str, Dot] = {
    "linear": LINEAR,
    **{f"conv{rank}d": _convolution(rank) for rank in (1, 2, 3)},
    "depthwise_conv2d": DEPTHWISE,
    **{f"conv_transpose{rank}d": _transposed(rank) for rank in (1, 2, 3)},
}

# -- running one ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Stimulus:
    """Operands x (batch × k), weights (channels × k), scales, and what else differs from the usual.

    ``rest``: the operands (centred) that meet the anchors.
    """

    x: Tensor
    weight: Tensor
    x_grid: Grid
    y_grid: Grid
    bias: Tensor | None = None
    rest: int = 0
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


def probe_model(dot: Dot, stimulus: Stimulus) -> ProbeModel:
    """Add the anchors to a probe's weights and operands, and fill them up to whole windows."""
    channels, width = stimulus.weight.shape
    padding = -(width + len(ANCHORS)) % dot.taps
    weight = torch.cat([ANCHORS.expand(channels, -1), stimulus.weight, torch.zeros(channels, padding)], 1)
    rest = torch.full((len(stimulus.x), len(ANCHORS)), float(stimulus.rest))
    x = torch.cat([rest, stimulus.x, torch.zeros(len(stimulus.x), padding)], 1)
    op = dot.module(weight * WEIGHT_SCALE, stimulus.bias)
    model = nn.Sequential(op, nn.ReLU()) if stimulus.rectified else nn.Sequential(op)
    return ProbeModel(model=model, inputs=(operand(stimulus.x_grid, dot.shaped(x)),), output=stimulus.y_grid)


def measure(dot: Dot, site: Site, stimulus: Stimulus) -> Tensor:
    """Run a probe; return its results (batch × channels) in output steps from the zero point. Raises Unmeasured."""
    found = site.run(probe_model(dot, stimulus))
    channels = len(stimulus.weight)
    return found.flatten(2)[:, :channels, dot.at] if dot.rank else found
