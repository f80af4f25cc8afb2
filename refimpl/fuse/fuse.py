"""fuse_fx: merge adjacent modules as the config's fuser methods say (rules FUS-01 to FUS-07, CUS-03)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.fx import GraphModule, Node
from torch.fx.node import base_types
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_leaves

from fx_quant_conformance.refimpl.config.backend_config import BackendConfig
from fx_quant_conformance.refimpl.config.custom_config import FuseCustomConfig
from fx_quant_conformance.refimpl.config.forms import check_model, instance_of, list_of
from fx_quant_conformance.refimpl.config.fusers import linear_bn_is_foldable
from fx_quant_conformance.refimpl.config.native import config_or_native
from fx_quant_conformance.refimpl.config.patterns import MatchAllNode, is_match_all
from fx_quant_conformance.refimpl.errors import ConfigError, ModelError, blame
from fx_quant_conformance.refimpl.graph.example_run import Examples, Seen
from fx_quant_conformance.refimpl.graph.graph_modules import Draft
from fx_quant_conformance.refimpl.graph.in_place import trace_values
from fx_quant_conformance.refimpl.graph.invariants import check_graph
from fx_quant_conformance.refimpl.graph.matching import Match, Nested, find_matches, run_getter
from fx_quant_conformance.refimpl.graph.tracing import (
    FUSED_PARTS,
    FusedPart,
    Places,
    class_of,
    finish,
    keep_reads,
    list_reads,
    no_collection,
)

# Functions inside a fusable pattern, and the module that stands for each: (attribute, position, default). (FUS-05)
_MODULE_OF_FUNCTION: dict[Any, tuple[type[nn.Module], tuple[tuple[str, int, Any], ...]]] = {
    F.relu: (nn.ReLU, ()),
    torch.relu: (nn.ReLU, ()),
    torch.tanh: (nn.Tanh, ()),
    F.leaky_relu: (nn.LeakyReLU, (("negative_slope", 1, 0.01),)),
}

# The arguments that fx takes.
_EXTRA_INPUTS = list_of("nodes", instance_of((Node, *base_types, type(None)), "a node").take)

# Keyword arguments with the values that change nothing.
_NEUTRAL: Mapping[str, Any] = {"alpha": 1, "out": None}


@no_collection()
def fuse_fx(model: nn.Module, fuse_custom_config: object = None, backend_config: object = None) -> GraphModule:
    """Trace a model in eval mode and fuse it, for post-training quantization. (FUS-01)

    `fuse_custom_config`: a FuseCustomConfig; `backend_config`: a BackendConfig, without one torch's native one. The
    input model is not changed; the result shares the parameters that are not fused. Without example inputs ranks are
    not known: a Linear + BatchNorm1d is folded, which is right only for inputs of rank 2; prepare_fx checks ranks.

    Raises ModelError for a model in train mode, one that cannot be traced, or parts that cannot be fused; ConfigError
    for a bad config or fuser method.
    """
    check_model("fuse_fx", model)
    if model.training:  # rule: FUS-01
        raise ModelError(f"fuse_fx needs a model in eval mode; {type(model).__name__} is in train mode: call .eval()")
    config = config_or_native(backend_config)
    return trace_and_fuse(model, config, preserved=FuseCustomConfig.of(fuse_custom_config).preserved_attributes)


def trace_and_fuse(
    model: nn.Module, config: BackendConfig, *, leaves: tuple[type, ...] = (), preserved: Sequence[str] = ()
) -> GraphModule:
    """Trace a model in eval mode and fuse it; modules of the classes `leaves` stay whole, as in prepare. (CUS-02)"""
    traced = trace_values(model, leaf_classes=leaves)
    fuse(traced, config, is_qat=False)
    values = {name: getattr(model, name) for name in preserved if hasattr(model, name)}
    return finish(traced, traced.graph, traced, values)


def _callees_of(match: Match, places: Places) -> tuple[Any, ...]:
    """Return the callees of a match: two matches with the same ones become calls of one fused module."""
    return tuple(places.module_of(node) or (node.target, str(node.args[1:]), str(node.kwargs)) for node in match.nodes)


def _refuse_shared(match: Match, places: Places, alike: int) -> str | None:
    """Return a refusal if a call outside of the `alike` matches needs a module with state, or the root's."""
    for node in match.nodes:
        is_used = node is match.root or places.is_shared_state(node)
        if is_used and places.calls[id(places.module_of(node))] > alike:  # rule: FUS-07
            return f"FUS-07: module {str(node.target)!r} is called at more than one place"
    return None


def _refuse_lost(match: Match) -> str | None:
    """Return a refusal if a keyword argument would be lost: a fuser gets functions and methods without arguments."""
    for node in (node for node in match.nodes if node.op in ("call_function", "call_method")):
        _, parameters = _MODULE_OF_FUNCTION.get(node.target, (None, ()))
        expressible = {"input", "other", "inplace", *(name for name, _, _ in parameters)}
        lost = {name: value for name, value in node.kwargs.items() if name not in expressible}
        if any(_NEUTRAL.get(name, lost) != value for name, value in lost.items()):  # rule: LOW-03
            return f"LOW-03: the fused module cannot express {node.name}'s arguments {lost}"
    return None


def _refuse_folding(match: Match, places: Places, examples: Examples) -> str | None:
    """Return a refusal if a batch norm cannot be folded into a linear layer, as far as the examples show. (FUS-06)"""
    for layer, epilogue in pairwise(match.nodes) if examples.are_given else ():
        norm = places.module_of(epilogue)
        if not isinstance(places.module_of(layer), nn.Linear) or not isinstance(norm, nn.BatchNorm1d):
            continue
        fact = examples.seen.get(layer)
        rank = fact.rank if isinstance(fact, Seen) else None
        if linear_bn_is_foldable(norm, -1 if rank is None else rank):
            return None
        if rank is None and examples.failure and not norm.training:  # rule: FUS-06
            raise ModelError(
                f"{match.name} at {layer.name}: the rank of the linear layer's output decides whether the batch norm "
                f"can be folded, and example_inputs do not tell it: {examples.failure}. Give inputs that the model can "
                "be run on, or None if the rank is 2"
            )
        axes = f"axis 1, not the last, of an output of rank {'unknown' if rank is None else rank}"
        return f"FUS-06: BatchNorm1d normalises {axes}"  # rule: FUS-06
    return None


def fuse(model: Draft, config: BackendConfig, *, is_qat: bool, examples: Examples | None = None) -> None:
    """Fuse a traced model, in place; ``model.meta`` gets "fusions", and "not_fused" with the reasons.

    All is decided before anything is changed. Without example inputs ranks are not known, and a batch norm is folded
    into a linear layer as if its rank were 2.
    """
    places = Places(model)
    entries = [entry for entry in config.configs if entry.fuser_method is not None]  # rule: FUS-01
    matches = find_matches(model.graph, places, entries)
    examples = Examples(model, None) if examples is None else examples
    keys = [_callees_of(match, places) for match in matches]
    alike = Counter(keys)
    refusals = {
        key: refusal
        for m, key in zip(matches, keys, strict=True)
        if (refusal := _refuse_shared(m, places, alike[key]) or _refuse_lost(m) or _refuse_folding(m, places, examples))
    }
    reads = list_reads(model)
    accepted = [match for match, key in zip(matches, keys, strict=True) if key not in refusals]
    gone = {node: match for match in accepted for node in match.nodes if node is not match.last}
    extras = {id(match): _find_extra_inputs(match, gone) for match in accepted}
    replaced: dict[Node, Node] = {}
    fused: dict[tuple[Any, ...], nn.Module] = {}
    fusions, not_fused = [], []
    for match, key in zip(matches, keys, strict=True):
        name = f"{match.name} at {match.root.name}"
        if key in refusals:
            not_fused.append(f"{name}: {refusals[key]}")
            continue
        fused[key] = fused.get(key) or _make_fused_module(places, match, is_qat)
        _apply(model, places, match, fused[key], extras[id(match)], replaced)
        examples.replace(match.last, match.root)
        fusions.append(name)
    keep_reads(model, reads)
    model.meta["fusions"], model.meta["not_fused"] = tuple(fusions), tuple(not_fused)
    check_graph(model, "fuse")


def _find_extra_inputs(match: Match, gone: Mapping[Node, Match]) -> list[Any]:
    """Return the further arguments of a fused module's call, in terms of the graph before fusing. (FUS-04)

    `gone`: the nodes whose values no longer exist after fusing. Raises ConfigError for one that cannot be an argument.
    """
    getter = match.entry._extra_inputs_getter
    if getter is None:
        return []
    extra: list[Any] = run_getter(getter, "extra inputs getter", match.entry, match.nested, _EXTRA_INPUTS)
    for value in (value for value in extra if isinstance(value, Node)):
        taken = match if value is match.last else gone.get(value)
        if taken is not None or value.graph is not match.last.graph or match.last < value:  # rule: FUS-04
            why = "is computed after the match" if taken is None else f"is fused, as a part of {taken.name}"
            raise ConfigError(f"extra inputs getter of {match.name}: it gives {value.name!r}, which {why}")
    return extra


def _apply(
    model: GraphModule, places: Places, match: Match, fused: nn.Module, extra: list[Any], replaced: dict[Node, Node]
) -> None:
    """Put the fused module in the root's place, rewire the users, and erase the other nodes. (FUS-03, FUS-04)

    `replaced` maps the last nodes of earlier fusions, which may be extra inputs, to their replacements.
    """
    root, last, absorbed = match.root, match.last, [node for node in match.nodes if node is not match.root]
    extra = [replaced.get(value, value) if isinstance(value, Node) else value for value in extra]  # rule: FUS-04
    root.meta[FUSED_PARTS] = tuple(FusedPart(places.object_type_of(p), places.name_of(p)) for p in (root, *absorbed))
    model.set_submodule(str(root.target), fused)
    places.modules[str(root.target)] = fused
    replaced[last] = root
    if last is not root:  # rule: FUS-03
        last.replace_all_uses_with(root)
        last.append(root)
    root.args = (*root.args, *extra)
    for old in reversed(absorbed):
        model.graph.erase_node(old)


def _make_fused_module(places: Places, match: Match, is_qat: bool) -> nn.Module:
    """Call the entry's fuser method on the matched modules. (FUS-02)

    Raises ConfigError when it fails or returns another class than the entry's, ModelError when it fails on modules in
    train mode though this is not QAT.
    """
    method, root = match.entry.fuser_method, match.root
    assert method is not None
    lost = [node.name for node in root.all_input_nodes if node in match.nodes]
    if root.op != "call_module" or lost:
        why = f"takes {lost[0]!r}, which goes away" if lost else "calls no module to be replaced"
        raise ConfigError(f"pattern {match.name}: the root node {root.name!r} {why}")
    is_train = any(m.training for node in match.nodes if (m := places.module_of(node)) is not None)
    to_module = partial(_as_module, places, is_train)
    if match.entry.pattern is not None:
        arguments: Any = tuple(map(to_module, match.nodes))
    else:
        arguments = _map_nested(match.nested, match.entry.normal_pattern, to_module)
    if not isinstance(arguments, tuple):
        arguments = (arguments,)
    parts = tree_leaves(arguments)
    names = ", ".join(getattr(part, "__name__", type(part).__name__) for part in parts)
    where = f"fuser method of {match.name}, called at {match.root.name!r} with (is_qat={is_qat}, {names})"
    is_early = is_train and not is_qat  # rule: FUS-06
    advice = "; the modules are in train mode: call .eval()" if is_early else ""
    with blame(ModelError if is_early else ConfigError, where, "it", advice):
        fused: object = method(is_qat, *arguments)  # rule: FUS-02
    expected = match.entry.fused_module or nn.Module
    if isinstance(fused, expected) or (not is_qat and isinstance(fused, nn.Module) and _is_folded(fused, parts)):
        return fused
    raise ConfigError(f"{where} returned {type(fused).__name__}; expected {expected.__module__}.{expected.__name__}")


def _is_folded(fused: nn.Module, parts: list[Any]) -> bool:
    """Tell whether a module is the fused class in eval mode: of all parts but the batch norms. (FUS-06)"""
    kinds = [part if isinstance(part, type) else class_of(part) for part in parts if not isinstance(part, _BatchNorm)]
    return len(kinds) < len(parts) and kinds in ([class_of(fused)], [class_of(child) for child in fused.children()])


def _as_module(places: Places, is_train: bool, node: Node) -> Any:
    """Return a matched node's module; for a function that has one, a module that does the same. (FUS-05)"""
    module = places.module_of(node)
    if module is not None:
        return module
    if node.target not in _MODULE_OF_FUNCTION:
        return node.target
    kind, parameters = _MODULE_OF_FUNCTION[node.target]  # rule: FUS-05
    args = dict(enumerate(node.args))
    arguments = {name: args.get(at, node.kwargs.get(name, default)) for name, at, default in parameters}
    return kind(**arguments).train(is_train)


def _map_nested(nested: Nested, pattern: Any, to_module: Callable[[Node], Any]) -> Any:
    if is_match_all(pattern):
        return MatchAllNode
    if isinstance(pattern, tuple):
        return tuple(_map_nested(n, p, to_module) for n, p in zip(nested, pattern, strict=True))
    return to_module(nested)
