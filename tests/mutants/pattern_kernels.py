"""A vendor's fused kernels, run node by node on the reference model: epilogues of known ops, and registered patterns.

Each step is a method, for a fault to replace: the root, the second operand, and what follows, which is told the grids
around it. The reference model's own modules compute the honest results.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from functools import cache, partial
from typing import Any, NamedTuple

import torch
import torch.ao.nn.intrinsic as nni
import torch.ao.nn.quantized.reference as nnqr
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import Node

from fx_quant_conformance import register
from fx_quant_conformance.refimpl import BackendConfig, BackendPatternConfig, DTypeConfig, MatchAllNode
from fx_quant_conformance.refimpl.config.fusers import sequential
from fx_quant_conformance.refimpl.graph.invariants import is_quantize
from tests.mutants.reference_kernels import Stepped, Steps

WEIGHTED = DTypeConfig(torch.quint8, torch.quint8, torch.qint8, torch.float)
PLAIN = DTypeConfig(torch.quint8, torch.quint8)
REFERENCE: dict[type[nn.Module], type[nn.Module]] = {
    nn.Linear: nnqr.Linear,
    nn.Conv1d: nnqr.Conv1d,
    nn.Conv2d: nnqr.Conv2d,
}
FOLLOWED: tuple[tuple[Any, Any], ...] = (
    (nn.Conv2d, nn.ReLU6),
    (nn.Linear, F.relu6),
    (nn.Linear, nn.Hardtanh),
    (nn.Conv2d, nn.Hardswish),
    (nn.Linear, nn.Hardsigmoid),
    (nn.Linear, nn.Sigmoid),
    (nn.Conv1d, nn.SiLU),
    (nn.Linear, nn.LeakyReLU),
    (nn.Conv2d, nn.PReLU),
    (nn.Linear, torch.clamp),
    (operator.add, nn.ReLU6),
)
"""Patterns that the suite builds: a root, and what follows."""


# -- the vendor's own modules -----------------------------------------------------------------------------------------


class Clip(nn.Module):
    """Between −0.75 and 2.5."""

    low, high = -0.75, 2.5

    def forward(self, x: Tensor) -> Tensor:
        return x.clamp(self.low, self.high)


class ConvClip(nni._FusedModule):  # type: ignore[name-defined,misc]
    """A convolution and Clip."""

    def __init__(self, conv: nn.Module, clip: nn.Module) -> None:
        super().__init__(conv, clip)


class ConvAddClip(nni._FusedModule):  # type: ignore[name-defined,misc]
    """A convolution, a second input that is added, and Clip."""

    def __init__(self, conv: nn.Module, clip: nn.Module) -> None:
        super().__init__(conv, clip)

    def forward(self, x: Tensor, y: Tensor) -> Any:
        return self[1](self[0](x) + y)


class Gain(nn.Module):
    """Each channel of the last axis times a number of its own."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.register_buffer("gains", torch.linspace(0.25, 1.0, channels))

    def forward(self, x: Tensor) -> Any:
        return x * self.get_buffer("gains")


ADDED: Any = (Clip, (torch.add, nn.Conv2d, MatchAllNode))


def fuse_added(is_qat: bool, clip: nn.Module, added: tuple[Any, ...]) -> ConvAddClip:
    return ConvAddClip(added[1], clip)


def root_of_added(pattern: Any) -> Any:
    return pattern[1][1]


def further_inputs_of_added(pattern: Any) -> list[Any]:
    return [pattern[1][2]]


class Adding(nn.Module):
    """The same as three calls, which are fused."""

    def __init__(self, root: nn.Module) -> None:
        super().__init__()
        self.root, self.clip = root, Clip()

    def forward(self, x: Tensor, y: Tensor) -> Any:
        return self.clip(torch.add(self.root(x), y))


class Added(nn.Module):
    """The fused module in a model."""

    def __init__(self, root: nn.Module) -> None:
        super().__init__()
        self.fused = ConvAddClip(root, Clip())

    def forward(self, x: Tensor, y: Tensor) -> Any:
        return self.fused(x, y)


register(Clip, lambda: nn.Sequential(Clip()).eval(), [(2, 7)], roundings=1)
register((nn.Conv2d, Clip), lambda root: nn.Sequential(root, Clip()).eval())
register(ConvClip, lambda root: nn.Sequential(ConvClip(root, Clip())).eval())
register(ADDED, lambda root: Adding(root).eval(), lambda shape: [shape])
register(ConvAddClip, lambda root: Added(root).eval(), lambda shape: [shape])
register(
    Gain,
    lambda channels: nn.Sequential(Gain(channels)).eval(),
    lambda channels: [(3, channels)],
    variants=[{"channels": 8}, {"channels": 13}],
    roundings=1,
)


# -- the config -------------------------------------------------------------------------------------------------------


@cache
def pattern_config() -> BackendConfig:
    """Return the claims; made once, for patterns are compared by identity in places."""
    return BackendConfig("patterns").set_backend_pattern_configs(list(_make_entries()))


def _weighted(entry: BackendPatternConfig, root: type[nn.Module]) -> BackendPatternConfig:
    return entry.set_dtype_configs([WEIGHTED]).set_root_module(root).set_reference_quantized_module(REFERENCE[root])


def _make_entries() -> Iterable[BackendPatternConfig]:
    for kind in REFERENCE:
        yield _weighted(BackendPatternConfig(kind), kind)
    for root, epilogue in FOLLOWED:
        entry = BackendPatternConfig((root, epilogue))
        yield _weighted(entry, root) if root in REFERENCE else entry.set_dtype_configs([PLAIN])
    for own in (Clip, Gain):
        yield BackendPatternConfig(own).set_dtype_configs([PLAIN])
    fused = BackendPatternConfig((nn.Conv2d, Clip)).set_dtype_configs([WEIGHTED])
    yield fused.set_fuser_method(sequential(ConvClip)).set_fused_module(ConvClip)
    added = BackendPatternConfig()._set_pattern_complex_format(ADDED).set_dtype_configs([WEIGHTED])
    added.set_fuser_method(fuse_added).set_fused_module(ConvAddClip)
    yield added._set_root_node_getter(root_of_added)._set_extra_inputs_getter(further_inputs_of_added)
    yield from (_weighted(BackendPatternConfig(kind), nn.Conv2d) for kind in (ConvClip, ConvAddClip))


# -- the kernels ------------------------------------------------------------------------------------------------------


class OnGrid(NamedTuple):
    """Scale and zero point."""

    scale: float
    zero: int


class Around(NamedTuple):
    """The grids of a pattern's first input and of its output."""

    x: OnGrid
    y: OnGrid


EPILOGUES = (nn.ReLU6, nn.Hardtanh, nn.Hardswish, nn.Hardsigmoid, nn.Sigmoid, nn.SiLU, nn.LeakyReLU, nn.PReLU, Clip)


class PatternSteps(Steps):
    """Runs what stands between a dequantize and a quantize as the steps of a fused kernel."""

    def run_node(self, n: Node) -> Any:
        self.node = n
        return super().run_node(n)

    def called(self, module: nn.Module, *arguments: Any, **keywords: Any) -> Any:
        if isinstance(module, ConvClip):
            return self.follow(module[1], self.root(module[0], *arguments), self.around())
        if isinstance(module, ConvAddClip):
            x, y = arguments
            total = self.join(self.root(module[0], x), y, self.around())
            return self.follow(module[1], total, self.around())
        if isinstance(module, EPILOGUES):
            return self.follow(module, arguments[0], self.around())
        return self.gain(module, *arguments) if isinstance(module, Gain) else self.root(module, *arguments, **keywords)

    def function(self, target: Any, *arguments: Any, **keywords: Any) -> Any:
        if target in (F.relu6, torch.clamp):
            op = partial(_call_with, target, arguments[1:], keywords)
            return self.follow(op, arguments[0], self.around())
        return super().function(target, *arguments, **keywords)

    def around(self) -> Around:
        """The grids around the node that runs."""
        first, last = self.node, self.node
        while not is_quantize(first):
            first = first.all_input_nodes[0]
        while not is_quantize(last):
            last = next(iter(last.users))
        return Around(*(OnGrid(*node.args[1:3]) for node in (first, last)))  # type: ignore[arg-type]

    # -- steps that a fault may replace ------------------------------------------------------------------------------

    def root(self, module: Any, *arguments: Any, **keywords: Any) -> Any:
        return module(*arguments, **keywords)

    def join(self, x: Tensor, y: Tensor, around: Around) -> Tensor:
        return x + y

    def follow(self, op: Callable[[Tensor], Tensor], x: Tensor, around: Around) -> Tensor:
        return op(x)

    def gain(self, module: Gain, x: Tensor) -> Any:
        return module(x)


def _call_with(target: Any, rest: tuple[Any, ...], keywords: dict[str, Any], x: Tensor) -> Any:
    return target(x, *rest, **keywords)


class Patterned(Stepped):
    """The reference model of these patterns with one step replaced, as `Stepped` does."""

    name = "patterns"
    steps = PatternSteps

    def __init__(self, step: str, body: Callable[..., Any]) -> None:
        super().__init__(step, body, pattern_config())
