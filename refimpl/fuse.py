"""fuse_fx: merge adjacent modules as the config's fuser methods say (rules FUS-01 to FUS-07)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule, Interpreter, Node

from refimpl.backend_config import BackendConfig, as_backend_config
from refimpl.errors import ConfigError, ModelError, RefimplError, reject_unbuilt
from refimpl.fusers import linear_bn_is_foldable
from refimpl.invariants import check_graph
from refimpl.matching import Match, Nested, find_matches
from refimpl.patterns import MatchAllNode, is_match_all, pattern_name
from refimpl.tracing import FUSED_PARTS, Draft, FusedPart, Places, no_collection, trace

# Functions inside a fusable pattern, and the module that stands for each: (attribute, position, default). (FUS-05)
_MODULE_OF_FUNCTION: dict[Any, tuple[type[nn.Module], tuple[tuple[str, int, Any], ...]]] = {
    F.relu: (nn.ReLU, ()),
    torch.relu: (nn.ReLU, ()),
    torch.tanh: (nn.Tanh, ()),
    F.leaky_relu: (nn.LeakyReLU, (("negative_slope", 1, 0.01),)),
}

# Keyword arguments with the values that change nothing.
_NEUTRAL: Mapping[str, Any] = {"alpha": 1, "out": None}


@dataclass(frozen=True, slots=True, kw_only=True)
class Fusion:
    """One decision of the fuse pass: the pattern found, and why it is not fused (None: it is)."""

    match: Match
    refusal: str | None


@no_collection()
def fuse_fx(
    model: nn.Module,
    fuse_custom_config: object | None = None,
    backend_config: object | None = None,
) -> GraphModule:
    """Trace a model in eval mode and fuse it, for post-training quantization. (FUS-01)

    The input model is not changed. There are no example inputs here, hence no ranks: a Linear + BatchNorm1d is folded,
    which is right for inputs of rank 2 alone; prepare_fx, which has them, checks. Raises ModelError for a model in
    train mode or one that cannot be traced, ConfigError for a bad config or fuser method, NotBuiltError for a custom
    config.
    """
    config = checked_config("fuse_fx", model, backend_config)
    reject_unbuilt("fuse_fx", fuse_custom_config=fuse_custom_config)
    traced = trace(model)
    fuse(traced, config, is_qat=False)
    return traced.finish()


def checked_config(where: str, model: nn.Module, backend_config: object | None) -> BackendConfig:
    """Check what the post-training front door asks of its arguments; return the config as ours. (FUS-01)"""
    if model.training:  # rule: FUS-01
        raise ModelError(f"{where} needs a model in eval mode; {type(model).__name__} is in train mode: call .eval()")
    if backend_config is None:
        raise ConfigError(f"{where}: pass backend_config; refimpl has no default backend")
    return as_backend_config(backend_config)


def decide_fusions(
    model: GraphModule, places: Places, config: BackendConfig, example_inputs: tuple[Any, ...] | None = None
) -> list[Fusion]:
    """Find what can be fused and say for each match whether it is. The graph is not touched.

    Without example inputs ranks are not known, and a batch norm is folded into a linear layer as if its rank were 2.
    """
    entries = [entry for entry in config.configs if entry.fuser_method is not None]  # rule: FUS-01
    matches = find_matches(model.graph, places, entries)
    ranks: Mapping[Node, int] | None = None
    if example_inputs is not None and any(_linear_bn(match, places) for match in matches):
        ranks = _ranks(model, example_inputs)
    refusals = (
        _shared(match, places) or _inexpressible(match) or _unfoldable(match, places, ranks) for match in matches
    )
    return [Fusion(match=match, refusal=refusal) for match, refusal in zip(matches, refusals, strict=True)]


def _shared(match: Match, places: Places) -> str | None:
    shared = [str(node.target) for node in match.nodes if places.is_shared_state(node)]
    return f"FUS-07: module {shared[0]!r} is called at more than one place" if shared else None  # rule: FUS-07


def _inexpressible(match: Match) -> str | None:
    """Say which keyword argument of a function would be lost: the fused module gets functions without arguments."""
    for node in match.nodes:
        if node.op != "call_function":
            continue
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


def _unfoldable(match: Match, places: Places, ranks: Mapping[Node, int] | None) -> str | None:
    found = _linear_bn(match, places)
    if ranks is None or found is None:
        return None
    layer, norm = found
    rank = ranks.get(layer, -1)
    if linear_bn_is_foldable(norm, rank):
        return None
    shown = "unknown" if rank < 0 else rank
    return f"FUS-06: BatchNorm1d normalises axis 1, not the last, of an output of rank {shown}"  # rule: FUS-06


class _RankReader(Interpreter):
    """Notes the rank of every tensor that a graph computes."""

    def __init__(self, model: GraphModule) -> None:
        super().__init__(model)
        self.found: dict[Node, int] = {}

    def run_node(self, n: Node) -> Any:
        value = super().run_node(n)
        if isinstance(value, torch.Tensor):
            self.found[n] = value.dim()
        return value


def _ranks(model: GraphModule, example_inputs: tuple[Any, ...]) -> Mapping[Node, int]:
    """Return the ranks of a graph's tensors, from shapes alone: nothing is computed and no state changes.

    A node that cannot be reached so (its shapes depend on data) is left out.
    """
    reader = _RankReader(model)
    with suppress(Exception), torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True):
        reader.run(*example_inputs)
    return reader.found


def fuse(model: Draft, config: BackendConfig, *, is_qat: bool, example_inputs: tuple[Any, ...] | None = None) -> None:
    """Fuse a traced model, in place: ``model.meta`` says under "fusions" what was, and under "not_fused" what not."""
    places = Places(model)
    fusions = decide_fusions(model, places, config, example_inputs)
    replaced: dict[Node, Node] = {}
    for fusion in fusions:
        if fusion.refusal is None:
            _apply(model, places, fusion.match, is_qat, replaced)
    names = [(fusion.refusal, f"{fusion.match.name} at {fusion.match.root.name}") for fusion in fusions]
    model.meta["fusions"] = tuple(name for refusal, name in names if refusal is None)
    model.meta["not_fused"] = tuple(f"{name}: {refusal}" for refusal, name in names if refusal is not None)
    check_graph(model, "fuse")


def _apply(model: GraphModule, places: Places, match: Match, is_qat: bool, replaced: dict[Node, Node]) -> None:
    """Put the fused module in the root's place, rewire the users, and erase the other nodes. (FUS-03, FUS-04)

    `replaced` maps the last nodes of earlier fusions to what stands for them: an extra input may be one of those.
    """
    fused = _fused_module(places, match, is_qat)
    root = match.root
    getter = match.entry._extra_inputs_getter
    extra = () if getter is None else tuple(replaced.get(e, e) for e in getter(match.nested))  # rule: FUS-04
    if root.op != "call_module":
        raise ConfigError(f"pattern {match.name}: the root node {root.name!r} calls no module to be replaced")
    others = (node for node in match.nodes if node is not root)
    parts = tuple(FusedPart(places.object_type(part), places.name(part)) for part in (root, *others))
    model.set_submodule(str(root.target), fused)
    places.modules[str(root.target)] = fused
    last = match.last
    with model.graph.inserting_after(last):  # rule: FUS-03
        node = model.graph.call_module(str(root.target), (*root.args, *extra), dict(root.kwargs))
    node.meta = dict(root.meta) | {FUSED_PARTS: parts}
    last.replace_all_uses_with(node)
    replaced[last] = node
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
