"""fuse_fx: merge adjacent modules as the config's fuser methods say (rules FUS-01 to FUS-07)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.fx import GraphModule, Node

from refimpl.backend_config import BackendConfig, as_backend_config
from refimpl.errors import ConfigError, ModelError, RefimplError
from refimpl.invariants import check_graph
from refimpl.matching import Match, Nested, find_matches
from refimpl.patterns import MatchAllNode, is_match_all, pattern_name
from refimpl.tracing import Places, trace

# Functions inside a fusable pattern, and the module that stands for each: (attribute, position, default). (FUS-05)
_MODULE_OF_FUNCTION: dict[Any, tuple[type[nn.Module], tuple[tuple[str, int, Any], ...]]] = {
    F.relu: (nn.ReLU, ()),
    torch.relu: (nn.ReLU, ()),
    torch.tanh: (nn.Tanh, ()),
    F.leaky_relu: (nn.LeakyReLU, (("negative_slope", 1, 0.01),)),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Fusion:
    """One decision of the fuse pass: the pattern found, and why it is not fused (None: it is)."""

    match: Match
    refusal: str | None


def fuse_fx(
    model: nn.Module,
    fuse_custom_config: object | None = None,
    backend_config: object | None = None,
) -> GraphModule:
    """Trace a model in eval mode and fuse it, for post-training quantization. (FUS-01)

    The input model is not changed. Raises ModelError for a model in train mode or one that cannot be traced,
    ConfigError for a bad config or fuser method.
    """
    if model.training:  # rule: FUS-01
        raise ModelError(f"fuse_fx needs a model in eval mode; {type(model).__name__} is in train mode: call .eval()")
    if backend_config is None:
        raise ConfigError("fuse_fx: pass backend_config; refimpl has no default backend")
    return fuse(trace(model), as_backend_config(backend_config), is_qat=False)


def decide_fusions(model: GraphModule, places: Places, config: BackendConfig) -> list[Fusion]:
    """Find what can be fused and say for each match whether it is. The graph is not touched."""
    entries = [entry for entry in config.configs if entry.fuser_method is not None]  # rule: FUS-01
    fusions = []
    for match in find_matches(model.graph, places, entries):
        shared = [str(node.target) for node in match.nodes if places.is_shared_state(node)]
        refusal = f"FUS-07: module {shared[0]!r} is called at more than one place" if shared else None  # rule: FUS-07
        fusions.append(Fusion(match=match, refusal=refusal))
    return fusions


def fuse(model: GraphModule, config: BackendConfig, *, is_qat: bool) -> GraphModule:
    """Fuse a traced model; returns a new GraphModule, in which only modules that are still called are left."""
    places = Places(model)
    fusions = [fusion for fusion in decide_fusions(model, places, config) if fusion.refusal is None]
    for fusion in fusions:
        _apply(model, places, fusion.match, is_qat)
    fused = GraphModule(model, model.graph, class_name=type(model).__name__)
    fused.train(model.training)
    fused.meta["fusions"] = tuple(f"{fusion.match.name} at {fusion.match.root.name}" for fusion in fusions)
    check_graph(fused, "fuse")
    return fused


def _apply(model: GraphModule, places: Places, match: Match, is_qat: bool) -> None:
    """Put the fused module in the root's place, rewire the users, and erase the other nodes. (FUS-03, FUS-04)"""
    fused = _fused_module(places, match, is_qat)
    root = match.root
    getter = match.entry._extra_inputs_getter
    extra = () if getter is None else tuple(getter(match.nested))  # rule: FUS-04
    if root.op != "call_module":
        raise ConfigError(f"pattern {match.name}: the root node {root.name!r} calls no module to be replaced")
    model.set_submodule(str(root.target), fused)
    places.modules[str(root.target)] = fused
    last = match.last
    with model.graph.inserting_after(last):  # rule: FUS-03
        node = model.graph.call_module(str(root.target), (*root.args, *extra), dict(root.kwargs))
    node.meta = dict(root.meta)
    last.replace_all_uses_with(node)
    for old in reversed(match.nodes):
        model.graph.erase_node(old)


def _fused_module(places: Places, match: Match, is_qat: bool) -> nn.Module:
    """Call the entry's fuser method on the matched modules. Raises ConfigError when it fails. (FUS-02)"""
    method = match.entry.fuser_method
    assert method is not None
    is_train = any(m.training for node in match.nodes if (m := places.module(node)) is not None)
    if match.entry.pattern is not None:
        arguments: tuple[Any, ...] = tuple(_as_module(places, node, is_train) for node in match.nodes)
    else:
        nested = _map_nested(match.nested, match.entry.normal_pattern, lambda n: _as_module(places, n, is_train))
        arguments = nested if isinstance(nested, tuple) else (nested,)
    where = f"fuser method of {pattern_name(match.entry.normal_pattern)}"
    try:
        fused = method(is_qat, *arguments)  # rule: FUS-02
    except RefimplError as error:
        raise type(error)(f"{where}, at {match.root.name!r}: {error}") from error
    except Exception as error:
        raise ConfigError(f"{where} raised {type(error).__name__}: {error}") from error
    if not isinstance(fused, nn.Module):
        raise ConfigError(f"{where} returned {type(fused).__name__}; expected a torch.nn.Module")
    return fused


def _as_module(places: Places, node: Node, is_train: bool) -> Any:
    """Return a matched node's module; for a function that has one, a module that does the same. (FUS-05)"""
    module = places.module(node)
    if module is not None:
        return module
    if node.target not in _MODULE_OF_FUNCTION:
        return node.target
    kind, parameters = _MODULE_OF_FUNCTION[node.target]  # rule: FUS-05
    arguments = {
        name: node.args[at] if len(node.args) > at else node.kwargs.get(name, default)
        for name, at, default in parameters
    }
    return kind(**arguments).train(is_train)


def _map_nested(nested: Nested, pattern: Any, to_module: Callable[[Node], Any]) -> Any:
    if is_match_all(pattern):
        return MatchAllNode
    if isinstance(pattern, tuple):
        return tuple(_map_nested(n, p, to_module) for n, p in zip(nested, pattern, strict=True))
    return to_module(nested)
