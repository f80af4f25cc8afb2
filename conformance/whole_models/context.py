"""Judging the parts of a model in its context: each on the values that the model itself gives there.

In a deep network the bound end to end is many steps wide, and a part that runs alone does not show how it is wired:
which branch it reads, or which mask. So the model is lowered once more, to return beside its results the values that
its parts read and give. Each part is held to what is exact for the values that it should have read: no bound grows, and
whatever is read from the wrong place differs. (NUM-03)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node
from torch.utils._pytree import tree_leaves

from fx_quant_conformance.conformance.bounds.error_bounds import NoOracleError
from fx_quant_conformance.conformance.claims.inputs import Batch
from fx_quant_conformance.conformance.machine.fault import FaultFound
from fx_quant_conformance.conformance.oracle.evaluate import Walk
from fx_quant_conformance.conformance.oracle.grids import placeholder_grids
from fx_quant_conformance.conformance.stages.bench import Bench
from fx_quant_conformance.conformance.stages.comparison import Comparison, compare_all
from fx_quant_conformance.conformance.stages.lower import lower, run_all
from fx_quant_conformance.conformance.stages.numerics import judge_comparisons
from fx_quant_conformance.conformance.whole_models.subgraphs import Subgraph
from fx_quant_conformance.refimpl.graph.in_place import writes
from fx_quant_conformance.refimpl.graph.invariants import is_dequantize, is_quantize
from fx_quant_conformance.refimpl.graph.tracing import finish
from fx_quant_conformance.reports.schema import Check, Where


class UntoldError(Exception):
    """The backend does not return the inner values of a model; the message says why."""


def judge_in_context(
    bench: Bench, name: str, reference: GraphModule, batches: Sequence[Batch], parts: Sequence[Subgraph]
) -> list[tuple[Subgraph, Check, Sequence[Comparison]]]:
    """Judge each part on the values that the model gives. Raises UntoldError.

    Where the backend does not return a value on both sides of a dropout, it is asked for the one before it, which
    stands for the other; the dropout, which would be held to itself, is then not judged.
    """
    nodes = _list_inner(reference, parts)
    modules = dict(reference.named_modules(remove_duplicate=False))
    sources = {name: _find_source(node, modules) for name, node in nodes.items()}
    try:
        told = _run_told(bench, reference, batches, nodes)
    except UntoldError:
        if sources == nodes:
            raise
        nodes, told = sources, _run_told(bench, reference, batches, sources)
    judged: list[tuple[Subgraph, Check, Sequence[Comparison]]] = []
    for part in parts:
        if "" in part.gives or all(nodes[name].name != name for name in part.gives):
            continue
        walk, grids = Walk(part.model, bench.capabilities), tuple(placeholder_grids(part.model))
        comparisons: list[Comparison] = []
        for number, values in enumerate(told):
            place = Where(input=f"batch {number}, in context")
            outputs = [values[each] for each in part.gives]
            output = outputs if len(outputs) > 1 else outputs[0]
            try:
                inputs = tuple(_read_inputs(part, number, values))
                comparisons += compare_all(place, walk.exact(inputs), output, grids, moves_only=part.moves_only)
            except NoOracleError:  # alone it has none either, which is said there; or what it reads is not given
                continue
        judged.append((part, judge_comparisons(name, comparisons), comparisons))
    return judged


def _list_inner(reference: GraphModule, parts: Sequence[Subgraph]) -> dict[str, Node]:
    """Return the inner nodes that parts read and give, by their names."""
    names = {each for part in parts for each in (*part.reads, *part.gives)}
    return {node.name: node for node in reference.graph.nodes if node.name in names and node.op != "placeholder"}


def _run_told(
    bench: Bench, reference: GraphModule, batches: Sequence[Batch], nodes: Mapping[str, Node]
) -> list[Mapping[str, Tensor]]:
    """Return, for each batch, the values of inputs and inner nodes (``_tell``), by their names. Raises UntoldError."""
    inputs = [node.name for node in reference.graph.nodes if node.op == "placeholder"]
    model, numbers = _tell(reference, nodes)
    places = [Where(input=f"batch {number}, with inner values") for number in range(len(batches))]
    try:
        lowered = lower(bench, model, batches[0])
        outputs = [tree_leaves(each) for each in run_all(lowered, places, batches)]
    except FaultFound as found:
        raise UntoldError(found.fault.message) from found
    told: list[Mapping[str, Tensor]] = []
    expected = 1 + max(numbers.values(), default=-1)
    for batch, values in zip(batches, outputs, strict=True):
        if len(values) < expected:
            raise UntoldError(f"the model returned {len(values)} results; expected {expected}")
        of_nodes = {name: values[number] for name, number in numbers.items()}
        told.append(dict(zip(inputs, batch, strict=True)) | of_nodes)
    return told


def _tell(reference: GraphModule, sources: Mapping[str, Node]) -> tuple[GraphModule, Mapping[str, int]]:
    """Return the model with values of inner nodes behind its results, each once, and the number of each.

    ``sources``: by the name of a node, the one that is told for it. Where some op writes into what it reads, they are
    copies.
    """
    graph, copies, named = Graph(), dict[Node, Node](), dict[str, Node]()
    modules = dict(reference.named_modules(remove_duplicate=False))
    is_written = any(writes(node, modules) for node in reference.graph.nodes)
    told = {node.name for node in sources.values()}
    for node in reference.graph.nodes:
        if node.op == "output":
            continue
        copies[node] = graph.node_copy(node, copies.__getitem__)
        if node.name in told:
            named[node.name] = graph.call_function(torch.clone, (copies[node],)) if is_written else copies[node]
    ends = [each for each in tree_leaves(reference.graph.output_node().args[0]) if isinstance(each, Node)]
    results = [copies[sources.get(node.name, node)] for node in ends]
    outputs = list(dict.fromkeys((*results, *named.values())))
    graph.output(tuple(outputs))
    numbers = {name: outputs.index(named[node.name]) for name, node in sources.items()}
    return finish(reference, graph, reference), numbers


def _find_source(node: Node, modules: Mapping[str, nn.Module]) -> Node:
    """Return the first node with the values of this one: before all dropouts that are not in force and keep its grid.

    What leaves them out has one value in place of two, and ExecuTorch's delegate refuses to return it twice
    (pytorch/executorch#14937).
    """
    while is_dequantize(node) and is_quantize(node.args[0]):
        op: Any = cast(Node, node.args[0]).args[0]
        source: Any = op.args[0] if op.args else None
        quantize: Any = source.args[0] if is_dequantize(source) else None
        if not _is_idle(op, modules) or quantize is None or quantize.args[1:] != cast(Node, node.args[0]).args[1:]:
            break
        node = source
    return node


def _is_idle(node: Node, modules: Mapping[str, nn.Module]) -> bool:
    """Tell whether a node is a dropout that is not in force."""
    if node.op == "call_module":
        module = modules[str(node.target)]
        return isinstance(module, nn.modules.dropout._DropoutNd) and not module.training
    is_training = node.kwargs.get("training", node.args[2] if len(node.args) > 2 else True)
    return node.target is F.dropout and is_training is False


def _read_inputs(part: Subgraph, number: int, values: Mapping[str, Tensor]) -> Iterator[Tensor]:
    """Yield the inputs of a part: what the model gave; of integers beyond what the reference model has, its own.

    Raises NoOracleError if the model did not give a float value: that of the reference model may rightly be another.
    """
    for name, own in zip(part.reads, part.batches[number], strict=True):
        given = values.get(name)
        if isinstance(given, Tensor) and given.shape == own.shape and _may_stand_for(given, own):
            yield given.to(own.dtype)
        elif own.is_floating_point() or own.is_complex():
            raise NoOracleError(f"the model does not give {name or 'an item of several results'}")
        else:
            yield own


def _may_stand_for(given: Tensor, own: Tensor) -> bool:
    if own.is_floating_point() or own.is_complex() or own.dtype is torch.bool or not own.numel():
        return given.dtype == own.dtype
    return not given.is_floating_point() and bool(((given >= own.min()) & (given <= own.max())).all())
