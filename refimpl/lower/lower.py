"""Lower the reference model to torch's native quantized ops and modules (rules LOW-01 to LOW-04).

Every ``dequantize → op → quantize`` that the table names becomes one quantized op or module. The same table serves the
engines qnnpack, fbgemm, x86 and onednn: weights are packed for ``torch.backends.quantized.engine`` as it is set while
lowering. Patterns that stay in float are listed with their reasons in ``model.meta["not_lowered"]``.
"""

from __future__ import annotations

import copy
from typing import Any, cast

import torch
from torch import nn
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_aggregate

from fx_quant_conformance.refimpl.config.forms import read_flag
from fx_quant_conformance.refimpl.config.qconfig import as_qconfig_mapping
from fx_quant_conformance.refimpl.convert.convert import convert_unwarned
from fx_quant_conformance.refimpl.convert.mapping import find_float_decisions
from fx_quant_conformance.refimpl.errors import ModelError, warn_user
from fx_quant_conformance.refimpl.graph.invariants import check_graph
from fx_quant_conformance.refimpl.graph.modules import remove_qconfig
from fx_quant_conformance.refimpl.graph.tracing import (
    NOT_LOWERED,
    add_notes,
    attribute_of,
    finish,
    is_effect,
    no_collection,
    notes_of,
)
from fx_quant_conformance.refimpl.legacy.quantized_tensors import check_torch
from fx_quant_conformance.refimpl.lower.calls import Call
from fx_quant_conformance.refimpl.observers.observers import asks_whole_range
from fx_quant_conformance.refimpl.prepare.grid_losses import warn_of_losses
from fx_quant_conformance.refimpl.prepare.plan import GRID_LOSSES, LEFT_FLOAT, PLAN
from fx_quant_conformance.refimpl.prepare.prepare import PREPARED


@no_collection()
def convert_fx(
    graph_module: GraphModule,
    convert_custom_config: object | None = None,
    _remove_qconfig: bool = True,
    qconfig_mapping: object | None = None,
    backend_config: object | None = None,
    keep_original_weights: bool = False,
) -> GraphModule:
    """Convert a prepared model and lower it to torch's quantized ops and modules. (LOW-01)

    Weights are packed for ``torch.backends.quantized.engine`` as it is set now. Patterns that stay in float are listed
    as in ``lower``, with a warning. `keep_original_weights`: the model has ``original_weights_lookup``, a map of the
    name of every packed weight to the tensors that it was made from, the largest first. Other arguments and errors are
    convert_to_reference_fx's.
    """
    is_bare = read_flag("_remove_qconfig", _remove_qconfig)
    keep = read_flag("keep_original_weights", keep_original_weights)
    mapping = None if qconfig_mapping is None else as_qconfig_mapping(qconfig_mapping)
    reference = convert_unwarned(graph_module, convert_custom_config, mapping, backend_config)
    notes = notes_of(graph_module)
    floating = find_float_decisions(notes[PLAN], notes[PREPARED].mapping, mapping)  # rule: CVT-05
    lowered = _lower(reference, keep, floating)
    losses, left = notes_of(reference)[GRID_LOSSES], {refused.node for refused in lowered.meta[NOT_LOWERED]}
    warn_of_losses(losses, {loss.node for loss in losses} - left)
    if refused := lowered.meta[NOT_LOWERED]:  # rule: LOW-04
        suffix = f" and {len(refused) - 1} more" if len(refused) > 1 else ""
        warn_user(f"convert_fx: not lowered: {refused[0]}{suffix}; meta[{NOT_LOWERED!r}] of the result lists all")
    return remove_qconfig(lowered) if is_bare else lowered  # rule: CVT-08


def lower(
    reference_model: GraphModule, *, keep_original_weights: bool = False, keep_dropout: bool = False
) -> GraphModule:
    """Lower a reference model on quantized tensors, of refimpl or torch, for torch's current engine. (LOW-01)

    The model itself is not changed. The result's ``meta["not_lowered"]`` is a tuple of the patterns that stay in float,
    each with ``node``, ``op`` and ``reason`` (LOW-04). `keep_original_weights`: as for convert_fx. Torch's quantized
    dropout returns its input, whatever qparams its output has; with `keep_dropout` one whose qparams differ stays in
    float (LOW-03). Raises ModelError for a model without a graph, RefimplError where torch has no
    quantized tensors.
    """
    if not isinstance(reference_model, GraphModule):
        raise ModelError(f"lower: expected a GraphModule, found {type(reference_model).__name__}")
    keep, strict = read_flag("keep_original_weights", keep_original_weights), read_flag("keep_dropout", keep_dropout)
    return _lower(reference_model, keep, keep_dropout=strict)


@no_collection()
def _lower(
    reference: GraphModule,
    keep_original_weights: bool,
    floating: frozenset[str] = frozenset(),
    *,
    keep_dropout: bool = False,
) -> GraphModule:
    check_torch()
    from fx_quant_conformance.refimpl.lower.sites import Sites  # imports torch's quantized modules

    plan = notes_of(reference).get(PLAN)
    floating |= notes_of(reference).get(LEFT_FLOAT, {}).keys()  # rule: OBS-18
    decisions = [] if plan is None else [d for d in plan.decisions if d.dtype_config and d.node not in floating]
    quantized = None if plan is None else frozenset(name for d in decisions for name in d.nodes)  # rule: QCM-03
    unclaimed = frozenset(() if plan is None else (name for name, _, qconfig in plan.unmatched if qconfig))
    dynamic = [d for d in decisions if d.dtype_config.is_dynamic and not asks_whole_range(d.qconfig.activation())]
    by_engine = frozenset(decision.root for decision in dynamic)
    sites = Sites(reference, quantized, unclaimed, by_engine, keep_dropout)
    graph = _rebuild(reference.graph, sites.calls)
    targets = {str(node.target) for node in graph.nodes if node.op in ("call_module", "get_attr")}
    parts = {name: sites.parts[name] if name in sites.parts else attribute_of(reference, name) for name in targets}
    for name, part in parts.items():
        if isinstance(part, GraphModule):
            parts[name] = _lower(part, keep_original_weights, keep_dropout=keep_dropout)  # rule: STD-01
    model: Any = finish(parts, graph, reference)
    add_notes(model, {NOT_LOWERED: tuple(sites.refused)})  # rule: LOW-04
    if keep_original_weights:
        model.original_weights_lookup = sites.originals
    model.register_state_dict_post_hook(_save_packed)
    model.register_load_state_dict_pre_hook(_load_packed)
    check_graph(model, "lower")
    return cast(GraphModule, model)


def _rebuild(graph: Graph, calls: dict[Node, Call]) -> Graph:
    """Copy a graph, with `calls` in the place of their nodes, and without nodes that are then needless. (CVT-06)"""
    rebuilt = Graph(tracer_cls=graph._tracer_cls)
    rebuilt._codegen = copy.deepcopy(graph._codegen)
    values: dict[Node, Node] = {}

    def value_of(leaf: Any) -> Any:
        if isinstance(leaf, Node):
            return values[leaf]
        return emit(leaf) if isinstance(leaf, Call) else leaf

    def emit(call: Call | Node) -> Node:
        origin = call.origin if isinstance(call, Call) else call
        args, kwargs = map_aggregate((call.args, dict(call.kwargs)), value_of)
        name, kind = (None, None) if origin is None else (origin.name, origin.type)
        node = rebuilt.create_node(call.op, call.target, args, kwargs, name, kind)
        node.meta = {} if origin is None else dict(origin.meta)
        return node

    needed: set[Node] = set()  # nodes that an output or side effect depends on
    for node in reversed(graph.nodes):
        if node in needed or node.is_impure() or is_effect(node):
            needed.update((node, *calls.get(node, node).all_input_nodes))  # rule: CVT-06
    for node in graph.nodes:
        if node in needed:
            values[node] = emit(calls.get(node, node))
    return rebuilt


def _find_packed_weights(model: nn.Module) -> dict[str, Any]:
    weights = {name: value for name, value in vars(model).items() if "_packed_weight_" in name}
    return {name: value for name, value in weights.items() if isinstance(value, torch.ScriptObject)}


def _save_packed(model: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    """Put the packed weights of functions into a state dict. (LOW-02)"""
    state.update({prefix + name: value for name, value in _find_packed_weights(model).items()})


def _load_packed(model: nn.Module, state: dict[str, Any], prefix: str, *arguments: Any) -> None:
    """Take the packed weights of functions out of a state dict. (LOW-02)"""
    missing: list[str] = arguments[2]
    for name in _find_packed_weights(model):
        if prefix + name in state:
            setattr(model, name, state.pop(prefix + name))
        else:
            missing.append(prefix + name)
