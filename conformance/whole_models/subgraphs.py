"""Sub-graphs: the quantized patterns of a reference model, and what is float between them, each cut out as a model.

A sub-graph is what the reference writes for one match: quantize and dequantize of its inputs, the ops, quantize and
dequantize of its results (CVT-01). It is a reference model like any other, so that a backend can lower and run it
and the oracle can evaluate it. A float region is made of ops that hang together and that no quantized pattern takes.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Interpreter, Node
from torch.utils._pytree import tree_leaves

from fx_quant_conformance.conformance.claims.claim import op_moves
from fx_quant_conformance.conformance.claims.inputs import Batch
from fx_quant_conformance.conformance.oracle.grids import is_constant, is_static
from fx_quant_conformance.conformance.stages.float_ops import name_op
from fx_quant_conformance.refimpl import explain
from fx_quant_conformance.refimpl.config.backend_config import SHARE
from fx_quant_conformance.refimpl.graph.invariants import is_dequantize, is_quantize
from fx_quant_conformance.refimpl.graph.tracing import finish
from fx_quant_conformance.refimpl.observers.decomposed import OPS
from fx_quant_conformance.refimpl.prepare.plan import Decision

_OWN = "quantized_decomposed."
"""How the names of ops begin that quantize, or choose qparams."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Subgraph:
    """One pattern cut out."""

    node: str
    """The pattern's last node."""
    pattern: str
    model: GraphModule
    batches: tuple[Batch, ...]
    """Inputs of ``model``, with the values of the whole reference model."""
    moves_only: bool
    """Whether it moves or selects values, so nothing may differ. (NUM-05)"""
    reads: tuple[str, ...]
    """The nodes of the whole model with the values of its inputs; "": an item of what a node gives."""
    gives: tuple[str, ...]
    """The nodes of the whole model with the values of its results; "": an item of what a node gives."""
    float_ops: tuple[str, ...] = ()
    """The ops of a float region, in their order; none: it is a pattern."""

    @property
    def is_region(self) -> bool:
        """Whether it is float, and no pattern."""
        return bool(self.float_ops)


class _Recorder(Interpreter):
    """Runs a model and records the value of every node."""

    def __init__(self, model: GraphModule) -> None:
        super().__init__(model, garbage_collect_values=False)
        self.recorded: dict[Node, Any] = {}

    def run_node(self, n: Node) -> Any:
        value = super().run_node(n)
        self.recorded[n] = value.clone() if isinstance(value, Tensor) else value  # an op in place may follow
        return value


def cut_subgraphs(
    reference: GraphModule, batches: Sequence[Batch], *, with_regions: bool = False
) -> Iterator[Subgraph]:
    """Yield the quantized patterns of a reference model, in the order of the graph; then its float regions, if asked.

    Their inputs are those of the reference model on `batches`: real values on the grids, where it quantizes them. What
    nobody reads is decided about, and in no reference model.
    """
    recorded = [record(reference, batch) for batch in batches]
    order = {node.name: number for number, node in enumerate(reference.graph.nodes)}
    decisions = explain(reference).plan.decisions
    quantized = [decision for decision in decisions if decision.is_quantized and decision.node in order]
    for decision in sorted(quantized, key=lambda decision: order[decision.node]):
        of_data = _cut_pattern(reference, decision, recorded)
        yield of_data if of_data.batches[0] else _cut_pattern(reference, decision, recorded, enters_constants=True)
    taken = {name for decision in quantized for name in decision.nodes}
    for nodes in _find_regions(reference, taken, recorded[0]) if with_regions else ():
        yield from _cut_region(reference, nodes, recorded)


def _cut_pattern(
    reference: GraphModule, decision: Decision, recorded: list[dict[Node, Any]], *, enters_constants: bool = False
) -> Subgraph:
    inside = [node for node in reference.graph.nodes if node.name in decision.nodes]
    cut = _Cut(reference, inside, recorded, enters_constants=enters_constants)
    model, batches = cut.write([inside[-1]])
    return Subgraph(
        node=decision.node,
        pattern=decision.pattern,
        model=model,
        batches=batches,
        moves_only=decision.observation is SHARE and all(map(cut.is_move, inside)),
        reads=tuple(cut.reads),
        gives=tuple(cut.gives),
    )


def _find_regions(reference: GraphModule, taken: Set[str], values: Mapping[Node, Any]) -> Iterator[list[Node]]:
    """Yield float regions, by their nodes: what reads values of the model, and no pattern or quantization takes."""
    region_of: dict[Node, list[Node]] = {}
    for node in reference.graph.nodes:
        is_quantizing = (
            is_quantize(node) or is_dequantize(node) or _is_chosen(node) or str(node.target).startswith(_OWN)
        )
        if not node.op.startswith("call_") or node.name in taken or is_quantizing or is_constant(node):
            continue
        if not any(isinstance(leaf, Tensor) for leaf in tree_leaves(values[node])):
            continue
        region = [node]
        for source in node.all_input_nodes:
            if source in region_of and region_of[source] is not region:
                region = region_of[source] + [each for each in region if each not in region_of[source]]
        region_of |= dict.fromkeys(region, region)
    found = {id(region): region for region in region_of.values()}
    order = {node: number for number, node in enumerate(reference.graph.nodes)}
    for region in found.values():
        yield sorted(region, key=order.__getitem__)


def _cut_region(reference: GraphModule, inside: list[Node], recorded: list[dict[Node, Any]]) -> Iterator[Subgraph]:
    """Yield a float region, if it reads values that are not constant and others read what it gives."""
    results = [node for node in inside if any(user not in inside for user in node.users)]
    cut = _Cut(reference, inside, recorded)
    model, batches = cut.write(results)
    if batches[0] and results:
        yield Subgraph(
            node=inside[-1].name,
            pattern=f"{len(inside)} float ops" if len(inside) > 1 else name_op(reference, inside[-1]),
            model=model,
            batches=batches,
            moves_only=False,
            reads=tuple(cut.reads),
            gives=tuple(cut.gives),
            float_ops=tuple(node.name for node in inside),
        )


def cut_in_half(reference: GraphModule, batches: Sequence[Batch], region: Subgraph) -> Iterator[Subgraph]:
    """Yield the first and the second half of the ops of a float region; nothing of a single op."""
    middle = len(region.float_ops) // 2
    if not middle:
        return
    recorded = [record(reference, batch) for batch in batches]
    for names in (region.float_ops[:middle], region.float_ops[middle:]):
        yield from _cut_region(reference, [node for node in reference.graph.nodes if node.name in names], recorded)


def record(reference: GraphModule, batch: Batch) -> dict[Node, Any]:
    """Return the value of every node of a model on a batch."""
    recorder = _Recorder(reference)
    with torch.no_grad():
        recorder.run(*(value.clone() for value in batch))
    return recorder.recorded


@dataclass(eq=False)
class _Cut:
    """A sub-graph being cut out: the new graph, and its inputs."""

    reference: GraphModule
    inside: list[Node]
    recorded: list[dict[Node, Any]]
    enters_constants: bool = False
    """Whether constants that are quantized are inputs as well. A pattern that reads no data has no others."""
    graph: Graph = field(default_factory=Graph)
    copies: dict[Node, Any] = field(default_factory=dict)
    """The copies in the new graph, by node of the whole graph."""
    placeholders: list[Node] = field(default_factory=list)
    inputs: list[list[Tensor]] = field(default_factory=list)
    reads: list[str] = field(default_factory=list)
    gives: list[str] = field(default_factory=list)

    def write(self, lasts: Sequence[Node]) -> tuple[GraphModule, tuple[Batch, ...]]:
        """Write the inputs, the ops and the results of the last ones; return the model and its inputs."""
        for value in (value for node in self.inside for value in node.all_input_nodes if value not in self.inside):
            self._take(value)
        for node in self.inside:
            self._copy(node)
        results = [result for last in lasts for result in self._write_results(last)]
        self.graph.output(results[0] if len(results) == 1 else tuple(results))
        model = finish(self.reference, self.graph, self.reference)
        return model, tuple(tuple(values[number] for values in self.inputs) for number in range(len(self.recorded)))

    def is_move(self, node: Node) -> bool:
        """Tell whether an op only moves or selects values. (NUM-05)"""
        kind = type(self.reference.get_submodule(str(node.target))) if node.op == "call_module" else node.target
        return op_moves(kind)

    def _take(self, node: Node) -> None:
        """Bring a value in: constants and quantization as they are, data as an input, sizes as numbers."""
        if node in self.copies:
            return
        if (is_quantize(node) or _casts(node, torch.float16)) and (self.enters_constants or not is_constant(node)):
            self._quantize(node)
        elif is_constant(node) or is_dequantize(node) or _casts(node, torch.float32) or _is_chosen(node):
            for value in node.all_input_nodes:
                self._take(value)
            self._copy(node)
        elif isinstance(self.recorded[0][node], Tensor):
            self.copies[node] = self._enter(node, lambda values: values[node], node.name)
        elif isinstance(self.recorded[0][node], (tuple, list)) and _holds_tensors(self.recorded[0][node]):
            picked = {user.args[1]: user.name for user in node.users if user.target is operator.getitem}
            is_picked = all(user.target is operator.getitem for user in node.users)
            self.copies[node] = [
                None
                if is_picked and number not in picked  # nobody reads it
                else self._enter(node, partial(_pick_item, node, number), picked.get(number, ""))
                for number in range(len(self.recorded[0][node]))
            ]
        else:
            self.copies[node] = self.recorded[0][node]

    def _quantize(self, node: Node) -> None:
        """Quantize an input: the real values of its integers, or all of it where qparams are chosen at run time."""
        source, *numbers = node.all_input_nodes
        for number in numbers:
            self._take(number)
        if source not in self.copies and (self.enters_constants or not is_constant(source)):
            on_grid = filter(is_dequantize, node.users if is_static(node) else ())
            like = next(on_grid, source)
            self.copies[source] = self._enter(source, lambda values: values[like], like.name)
        self._copy(node)

    def _enter(self, node: Node, read: Callable[[dict[Node, Any]], Tensor], name: str) -> Node:
        """Make an input that stands for a node, or an item of it, with what is read of the recorded values."""
        at = self.graph.inserting_after(self.placeholders[-1]) if self.placeholders else self.graph.inserting_before()
        with at:
            placed = self.graph.placeholder(f"{node.name}_value{len(self.placeholders) or ''}")
        self.placeholders.append(placed)
        self.reads.append(name)
        self.inputs.append([read(values) for values in self.recorded])
        return placed

    def _copy(self, node: Node) -> Node:
        if node not in self.copies:
            self.copies[node] = self.graph.node_copy(node, self.copies.__getitem__)
        copied: Node = self.copies[node]
        return copied

    def _write_results(self, node: Node) -> Iterator[Node]:
        """Write the tensors that an op gives: itself, or the items of its tuple that are read."""
        value = self.recorded[0][node]
        if isinstance(value, Tensor):
            yield self._write_result(node)
            return
        for user in node.users:
            if user.target is operator.getitem:
                self._copy(user)
                yield from self._write_results(user)
        if any(user.target is not operator.getitem for user in node.users):  # all of it is read
            yield from self._write_items(self._copy(node), value)

    def _write_items(self, node: Node, values: Any) -> Iterator[Node]:
        """Write the items of a tuple, for which the whole model has no nodes."""
        for number, value in enumerate(values if isinstance(values, (tuple, list)) else ()):
            item = self.graph.call_function(operator.getitem, (node, number))
            if isinstance(value, Tensor):
                self.gives.append("")
                yield item
            else:
                yield from self._write_items(item, value)

    def _write_result(self, leaf: Node) -> Node:
        """Quantize and dequantize a result as the reference does; one that it leaves in float goes out as it is."""
        for quantize in leaf.users:
            dequantize = next(filter(is_dequantize, quantize.users), None)
            if is_quantize(quantize) and dequantize is not None and is_static(quantize):
                for node in (*quantize.all_input_nodes[1:], quantize):
                    self._copy(node)
                self.gives.append(dequantize.name)
                return self._copy(dequantize)
        self.gives.append(leaf.name)
        return self._copy(leaf)


def _pick_item(node: Node, number: int, values: dict[Node, Any]) -> Tensor:
    item: Tensor = values[node][number]
    return item


def _holds_tensors(value: Any) -> bool:
    return all(isinstance(each, Tensor) for each in value)


def _casts(node: Node, dtype: torch.dtype) -> bool:
    """Tell whether a node casts to half precision, or back from it. (CVT-04)"""
    return node.target is OPS.convert_element_type.no_fuse and node.args[1] is dtype


def _is_chosen(node: Node) -> bool:
    """Tell whether a node chooses the qparams of a dynamic input, or picks one of them. (CVT-03)"""
    source = node.all_input_nodes[0] if node.target is operator.getitem else node
    return str(getattr(source.target, "_opname", "")).startswith("choose_qparams")
