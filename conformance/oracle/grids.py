"""Grids: the integers that a value of a reference model is quantized to, read off its graph (NUM-01, CVT-09)."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from fx_quant_conformance.conformance.bounds.error_bounds import NoOracleError
from fx_quant_conformance.refimpl import explain
from fx_quant_conformance.refimpl.graph.invariants import is_dequantize, is_quantize
from fx_quant_conformance.refimpl.graph.tracing import attribute_of
from fx_quant_conformance.refimpl.legacy.weights import to_plain
from fx_quant_conformance.refimpl.observers.decomposed import OPS


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """The integers that a value is quantized to: real = (q - zero_point) * scale, low <= q <= high."""

    scale: float
    zero_point: int
    low: int
    high: int
    dtype: str

    @property
    def centred_ends(self) -> tuple[int, int]:
        """The lowest and the highest integer, less the zero point."""
        return self.low - self.zero_point, self.high - self.zero_point

    def integers(self, real: Tensor) -> Tensor:
        """Return q (float64, not rounded, not clamped) of real values."""
        return real.double() / self.scale + self.zero_point

    def values(self, integers: Tensor) -> Tensor:
        """Return the float32 values of integers: what dequantize gives for them. (NUM-01)"""
        return ((integers.double() - self.zero_point) * self.scale).float()

    def place(self, real: Tensor) -> Tensor:
        """Return real values, each rounded to the nearest one of the grid."""
        return self.values(self.integers(real).round().clamp(self.low, self.high))

    def nearness(self, integers: Tensor) -> Tensor:
        """Return how far from q float32 arithmetic may put the value of q, in steps: beyond it is between integers.

        (q − z)·s rounds once. A fake quantization gives l + q·s with l = −z·s: l and s are rounded, and so are product
        and sum, u·(2|q| + |z| + |q − z|) ≤ 3u·(|q − z| + |z|). Four are allowed, and 2⁻²⁰ for the division here.
        """
        return 4 * 2.0**-24 * ((integers - self.zero_point).abs() + abs(self.zero_point)) + 2.0**-20

    def row(self) -> dict[str, object]:
        """Return the plain form for a report."""
        bounds = f"{self.low}..{self.high}"
        return {"scale": self.scale, "zero_point": self.zero_point, "range": bounds, "dtype": self.dtype}


_STATIC = frozenset(
    getattr(OPS, f"{verb}_per_{extent}").default
    for verb in ("quantize", "dequantize")
    for extent in ("tensor", "channel")
)


def integers_of(tensor: Tensor) -> Tensor:
    """Return the integers (float64) of a quantized tensor, or of one that holds them as they are."""
    return to_plain(tensor).double()


def lay_along(axis: int, integers: Tensor, *qparams: Tensor) -> list[Tensor]:
    """Return qparams per channel, or one for all, in a shape that broadcasts to the integers along an axis."""
    shape = [1] * integers.dim()
    shape[axis] = -1
    return [numbers.reshape(shape) for numbers in qparams]


def qparams_of(model: GraphModule, node: Node) -> tuple[Tensor, Tensor, int | None]:
    """Return scale and zero point (float64) of a quantize node, and the axis if they are per channel."""
    scale, zero_point = (
        torch.as_tensor(attribute_of(model, str(a.target)) if isinstance(a, Node) else a).double()
        for a in node.args[1:3]
    )
    axis = node.args[3] if "per_channel" in str(node.target) else None
    return scale, zero_point, axis if isinstance(axis, int) else None


def is_constant(node: Node) -> bool:
    """Tell whether a value depends only on attributes of the model: a weight, or a tensor that a function makes."""
    waiting, seen = [node], {node}
    while waiting:
        each = waiting.pop()
        if each.op == "placeholder":
            return False
        new = [source for source in each.all_input_nodes if source not in seen]
        waiting += new
        seen.update(new)
    return True


def find_nodes_left_in_float(model: GraphModule) -> Iterator[Node]:
    """Yield the nodes from which no way leads to a quantize."""
    quantized_later = set[Node]()
    for node in reversed(model.graph.nodes):
        if is_quantize(node) or quantized_later.intersection(node.users):
            quantized_later.add(node)
        else:
            yield node


def find_constants(model: GraphModule) -> frozenset[Node]:
    """Return the nodes that `is_constant` holds for, in one pass."""
    found = set[Node]()
    for node in model.graph.nodes:
        if node.op != "placeholder" and found.issuperset(node.all_input_nodes):
            found.add(node)
    return frozenset(found)


def find_folded_nodes(model: GraphModule, constants: Collection[Node]) -> Iterator[Node]:
    """Yield the nodes that a weight is computed by, before it is quantized: the flow does so, and no machine."""
    folded = set[Node]()
    for node in reversed(model.graph.nodes):
        if folded.intersection(node.users) or (is_quantize(node) and node in constants):
            folded.add(node)
            yield node


def ends_of(node: Node) -> tuple[int, int]:
    """Return the lowest and the highest integer that a quantize node gives. (CVT-09)

    Raises NoOracleError for a node of another form, as a user's own code may call it.
    """
    if not is_static(node):
        raise NoOracleError(f"no rule in the oracle's table for {node}: it is not in the decomposed form")
    low, high = node.args[-3:-1]
    return int(low), int(high)  # type: ignore[arg-type]


def is_static(node: Node) -> bool:
    """Tell whether a node quantizes or dequantizes with qparams that the model holds."""
    return node.target in _STATIC


def grid_of(model: GraphModule, node: Node) -> Grid:
    """Return the grid of a per-tensor quantize node. Raises NoOracleError for one that has a grid for each channel."""
    scale, zero_point, axis = qparams_of(model, node)
    if axis is not None:
        raise NoOracleError(f"{node} has a grid for each channel")
    return make_grid(node, float(scale), int(zero_point))


def make_grid(node: Node, scale: float, zero_point: int) -> Grid:
    """Return the grid that a quantize node has for a scale and a zero point."""
    low, high = ends_of(node)
    name = str(node.args[-1]).removeprefix("torch.")
    return Grid(scale=scale, zero_point=zero_point, low=low, high=high, dtype=name)


def placeholder_grids(model: GraphModule) -> list[Grid | None]:
    """Return the grid of each input of a reference model, in order; None: it is not quantized before the run."""
    return [_find_grid(model, node) for node in model.graph.nodes if node.op == "placeholder"]


def place_on_grids(model: GraphModule, batch: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return inputs, each rounded to the grid that a reference model has for it: so nothing else rounds them."""
    pairs = zip(batch, placeholder_grids(model), strict=True)
    return tuple(value if grid is None else grid.place(value) for value, grid in pairs)


def _find_grid(model: GraphModule, node: Node) -> Grid | None:
    found = (user for user in node.users if is_static(user) and qparams_of(model, user)[2] is None)
    return next((grid_of(model, user) for user in found), None)


def list_unclaimed(model: GraphModule) -> list[str]:
    """List the nodes of a reference model that prepare left in float, as no entry takes them."""
    plan, present = explain(model).plan, {node.name for node in model.graph.nodes}
    names = [name for name, *_ in plan.unmatched] + [each.node for each in plan.decisions if not each.is_quantized]
    return [name for name in names if name in present]


def weight_scales(model: GraphModule) -> list[float]:
    """Return all scales of a reference model's weights: of its modules, and of parameters that it quantizes itself."""
    found = [module.weight_scale for module in model.modules() if hasattr(module, "weight_scale")]
    found += [qparams_of(model, node)[0] for node in model.graph.nodes if is_quantize(node) and is_constant(node)]
    return [float(scale) for each in found for scale in torch.as_tensor(each).flatten()]


def output_step(model: GraphModule) -> float:
    """Return the scale of a reference model's output; 0 where it has none, or several outputs."""
    last: Any = model.graph.output_node().args[0]
    quantize = last.args[0] if isinstance(last, Node) and is_dequantize(last) else None
    return grid_of(model, quantize).scale if isinstance(quantize, Node) and is_quantize(quantize) else 0.0
