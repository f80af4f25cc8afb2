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

from refimpl.backend_config import BackendConfig
from refimpl.custom_config import FuseCustomConfig
from refimpl.errors import ConfigError, ModelError, blaming
from refimpl.example_run import Examples, Seen
from refimpl.forms import check_model, instance, list_of
from refimpl.fusers import linear_bn_is_foldable
from refimpl.invariants import check_graph
from refimpl.matching import Match, Nested, ask, find_matches
from refimpl.native import given_config
from refimpl.patterns import MatchAllNode, is_match_all
from refimpl.tracing import FUSED_PARTS, Draft, FusedPart, Places, finished, module_type, no_collection, trace

# Functions inside a fusable pattern, and the module that stands for each: (attribute, position, default). (FUS-05)
_MODULE_OF_FUNCTION: dict[Any, tuple[type[nn.Module], tuple[tuple[str, int, Any], ...]]] = {
    F.relu: (nn.ReLU, ()),
    torch.relu: (nn.ReLU, ()),
    torch.tanh: (nn.Tanh, ()),
    F.leaky_relu: (nn.LeakyReLU, (("negative_slope", 1, 0.01),)),
}

_EXTRA_INPUTS = list_of("nodes", instance((Node, *base_types, type(None)), "a node").take)  # what fx takes as arguments

# Keyword arguments with the values that change nothing.
_NEUTRAL: Mapping[str, Any] = {"alpha": 1, "out": None}


@no_collection()
def fuse_fx(model: nn.Module, fuse_custom_config: object = None, backend_config: object = None) -> GraphModule:
    """Trace a model in eval mode and fuse it, for post-training quantization. (FUS-01)

    `fuse_custom_config`: a FuseCustomConfig; `backend_config`: a BackendConfig, without one torch's native one. The
    input model is not changed; the result shares the parameters of what is not fused. There are no example inputs here,
    hence no ranks: a Linear + BatchNorm1d is folded, which is right for inputs of rank 2 alone; prepare_fx, which has
    them, checks.

    Raises ModelError for a model in train mode, one that cannot be traced, or parts that cannot be fused; ConfigError
    for a bad config or fuser method.
    """
    check_model("fuse_fx", model)
    if model.training:  # rule: FUS-01
        raise ModelError(f"fuse_fx needs a model in eval mode; {type(model).__name__} is in train mode: call .eval()")
    config = given_config(backend_config)
    return fused_model(model, config, preserved=FuseCustomConfig.of(fuse_custom_config).preserved_attributes)


def fused_model(
    model: nn.Module, config: BackendConfig, *, leaves: tuple[type, ...] = (), preserved: Sequence[str] = ()
) -> GraphModule:
    """Trace a model in eval mode and fuse it; modules of the classes `leaves` stay whole, as in prepare. (CUS-02)"""
    traced = trace(model, leaf_classes=leaves)
    fuse(traced, config, is_qat=False)
    kept = {name: getattr(model, name) for name in preserved if hasattr(model, name)}
    return finished(traced, traced.graph, traced, kept)


def _callees(match: Match, places: Places) -> tuple[Any, ...]:
    """Return what a match calls: two matches with the same callees become calls of one fused module."""
    return tuple(places.module(node) or (node.target, str(node.args[1:]), str(node.kwargs)) for node in match.nodes)


def _shared(match: Match, places: Places, alike: int) -> str | None:
    """Say which module a call outside of the `alike` matches needs: one with state, or the one that is replaced."""
    for node in match.nodes:
        is_used = node is match.root or places.is_shared_state(node)
        if is_used and places.calls[id(places.module(node))] > alike:  # rule: FUS-07
            return f"FUS-07: module {str(node.target)!r} is called at more than one place"
    return None


def _inexpressible(match: Match) -> str | None:
    """Say which keyword argument of a call would be lost: a fuser gets functions and methods without arguments."""
    for node in (node for node in match.nodes if node.op in ("call_function", "call_method")):
        _, parameters = _MODULE_OF_FUNCTION.get(node.target, (None, ()))
        known = {"input", "other", "inplace", *(name for name, _, _ in parameters)}
        lost = {name: value for name, value in node.kwargs.items() if name not in known}
        if any(_NEUTRAL.get(name, lost) != value for name, value in lost.items()):  # rule: LOW-03
            return f"LOW-03: the fused module cannot express {node.name}'s arguments {lost}"
    return None


def _linear_bn(match: Match, places: Places) -> tuple[Node, nn.BatchNorm1d] | None:
    """Return the linear layer's node and the batch norm that follows it in a match, if there are any."""
    for layer, follower in pairwise(match.nodes):
        norm = places.module(follower)
        if isinstance(places.module(layer), nn.Linear) and isinstance(norm, nn.BatchNorm1d):
            return layer, norm
    return None


def _unfoldable(match: Match, places: Places, examples: Examples) -> str | None:
    found = _linear_bn(match, places)
    if found is None or not examples.are_given:
        return None
    seen = examples.seen.get(found[0])
    rank = seen.rank if isinstance(seen, Seen) else None
    if linear_bn_is_foldable(found[1], -1 if rank is None else rank):
        return None
    if rank is None and examples.failure and not found[1].training:  # rule: FUS-06
        raise ModelError(
            f"{match.name} at {found[0].name}: the rank of the linear layer's output decides whether the batch norm "
            f"can be folded, and example_inputs do not tell it: {examples.failure}. Give inputs that the model can be "
            "run on, or None if the rank is 2"
        )
    told = "unknown" if rank is None else rank
    return f"FUS-06: BatchNorm1d normalises axis 1, not the last, of an output of rank {told}"  # rule: FUS-06


def fuse(model: Draft, config: BackendConfig, *, is_qat: bool, examples: Examples | None = None) -> None:
    """Fuse a traced model, in place: ``model.meta`` says under "fusions" what was, and under "not_fused" what not.

    All is decided before anything is changed. Without example inputs ranks are not known, and a batch norm is folded
    into a linear layer as if its rank were 2.
    """
    places = Places(model)
    entries = [entry for entry in config.configs if entry.fuser_method is not None]  # rule: FUS-01
    matches = find_matches(model.graph, places, entries)
    examples = Examples(model, None) if examples is None else examples
    callees = [_callees(match, places) for match in matches]
    alike = Counter(callees)
    refused = {
        key: refusal
        for m, key in zip(matches, callees, strict=True)
        if (refusal := _shared(m, places, alike[key]) or _inexpressible(m) or _unfoldable(m, places, examples))
    }
    found = [(f"{m.name} at {m.root.name}", m, refused.get(key)) for m, key in zip(matches, callees, strict=True)]
    replaced: dict[Node, Node] = {}
    fused: dict[tuple[Any, ...], nn.Module] = {}
    for (_, match, refusal), key in zip(found, callees, strict=True):
        if refusal is None:
            fused[key] = fused.get(key) or _fused_module(places, match, is_qat)
            _apply(model, places, match, fused[key], replaced)
            examples.replace(match.last, match.root)
    model.meta["fusions"] = tuple(name for name, _, refusal in found if refusal is None)
    model.meta["not_fused"] = tuple(f"{name}: {refusal}" for name, _, refusal in found if refusal is not None)
    check_graph(model, "fuse")


def _apply(model: GraphModule, places: Places, match: Match, fused: nn.Module, replaced: dict[Node, Node]) -> None:
    """Put the fused module in the root's place, rewire the users, and erase the other nodes. (FUS-03, FUS-04)

    `replaced` maps the last nodes of earlier fusions to what stands for them: an extra input may be one of those.
    """
    root, last, others = match.root, match.last, [node for node in match.nodes if node is not match.root]
    getter = match.entry._extra_inputs_getter
    extra = [] if getter is None else ask(getter, "extra inputs getter", match.entry, match.nested, _EXTRA_INPUTS)
    extra = [replaced.get(each, each) if isinstance(each, Node) else each for each in extra]  # rule: FUS-04
    parts = tuple(FusedPart(places.object_type(part), places.name(part)) for part in (root, *others))
    model.set_submodule(str(root.target), fused)
    places.modules[str(root.target)] = fused
    root.meta[FUSED_PARTS] = parts
    replaced[last] = root
    if last is not root:  # rule: FUS-03
        last.replace_all_uses_with(root)
        last.append(root)
    root.args = (*root.args, *extra)
    for old in reversed(others):
        model.graph.erase_node(old)


def _fused_module(places: Places, match: Match, is_qat: bool) -> nn.Module:
    """Call the entry's fuser method on the matched modules. (FUS-02)

    Raises ConfigError when it fails or returns something else than the entry says, ModelError when it fails on modules
    in train mode though this is not QAT.
    """
    method, root = match.entry.fuser_method, match.root
    assert method is not None
    lost = [node.name for node in root.all_input_nodes if node in match.nodes]
    if root.op != "call_module" or lost:
        why = f"takes {lost[0]!r}, which goes away" if lost else "calls no module to be replaced"
        raise ConfigError(f"pattern {match.name}: the root node {root.name!r} {why}")
    is_train = any(m.training for node in match.nodes if (m := places.module(node)) is not None)
    to_module = partial(_as_module, places, is_train)
    if match.entry.pattern is not None:
        arguments: Any = tuple(map(to_module, match.nodes))
    else:
        arguments = _map_nested(match.nested, match.entry.normal_pattern, to_module)
    if not isinstance(arguments, tuple):
        arguments = (arguments,)
    parts = tree_leaves(arguments)
    shown = ", ".join(getattr(part, "__name__", type(part).__name__) for part in parts)
    where = f"fuser method of {match.name}, called at {match.root.name!r} with (is_qat={is_qat}, {shown})"
    is_early = is_train and not is_qat  # rule: FUS-06
    advice = "; the modules are in train mode: call .eval()" if is_early else ""
    with blaming(ModelError if is_early else ConfigError, where, "it", advice):
        fused: object = method(is_qat, *arguments)  # rule: FUS-02
    expected = match.entry.fused_module or nn.Module
    if isinstance(fused, expected) or (not is_qat and isinstance(fused, nn.Module) and _is_folded(fused, parts)):
        return fused
    raise ConfigError(f"{where} returned {type(fused).__name__}; expected {expected.__module__}.{expected.__name__}")


def _is_folded(fused: nn.Module, parts: list[Any]) -> bool:
    """Tell whether a module is what the fused class is in eval mode: all of the parts but the batch norms. (FUS-06)"""
    kept = [part if isinstance(part, type) else module_type(part) for part in parts if not isinstance(part, _BatchNorm)]
    return len(kept) < len(parts) and kept in ([module_type(fused)], [module_type(child) for child in fused.children()])


def _as_module(places: Places, is_train: bool, node: Node) -> Any:
    """Return a matched node's module; for a function that has one, a module that does the same. (FUS-05)"""
    module = places.module(node)
    if module is not None:
        return module
    if node.target not in _MODULE_OF_FUNCTION:
        return node.target
    kind, parameters = _MODULE_OF_FUNCTION[node.target]  # rule: FUS-05
    given = dict(enumerate(node.args))
    arguments = {name: given.get(at, node.kwargs.get(name, default)) for name, at, default in parameters}
    return kind(**arguments).train(is_train)


def _map_nested(nested: Nested, pattern: Any, to_module: Callable[[Node], Any]) -> Any:
    if is_match_all(pattern):
        return MatchAllNode
    if isinstance(pattern, tuple):
        return tuple(_map_nested(n, p, to_module) for n, p in zip(nested, pattern, strict=True))
    return to_module(nested)
