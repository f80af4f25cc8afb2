"""Following: the first node at which a derived model computes something else than the model that it was made of.

Both are run in float64, node by node. A node of the derived model gets the values that the node of its name has in the
other: so a rounding is seen once, where it is made, and the bound on it is that of one sum.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Interpreter, Node
from torch.fx.node import map_arg
from torch.nn.modules.conv import _ConvNd
from torch.utils._pytree import tree_leaves

from fx_quant_conformance.backends.names import format_error
from fx_quant_conformance.conformance.stages.meaning import format_difference, in_float64, run_in_float32, tensors_of
from fx_quant_conformance.refimpl import RefimplError
from fx_quant_conformance.refimpl.graph.modules import float_module_of
from fx_quant_conformance.refimpl.graph.tracer import trace
from fx_quant_conformance.refimpl.graph.tracing import OBSERVER_PREFIX, finish, layer_of, notes_of
from fx_quant_conformance.refimpl.prepare.plan import PLAN

ROUNDING = 2.0**-21
"""Relative error of a folded weight: of the norm's sum, root and quotient, of its weight's product and of the layer's;
a float32 operation rounds by 2⁻²⁴, and a bias takes one more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    """Where a derived model differs from the model that it was made of, and how far."""

    node: str
    """The first node of the derived model that differs; "" if none can be named."""
    text: str
    reader: str = ""
    """The node that shows it."""

    def __str__(self) -> str:
        where = f"{self.node}, as {self.reader} reads it" if self.reader else self.node
        return f"the first node that differs is {where}: {self.text}" if self.node else self.text


def find_difference(model: nn.Module, derived: GraphModule, inputs: tuple[Tensor, ...]) -> Divergence | None:
    """Find where a derived model does not compute what the model does; None: it does, but for the rounding of weights.

    Both are in eval mode, and neither rounds values. Bits are compared first; where they differ, the outputs in float64
    (`format_difference`), and where these are too far apart for that bound, each node alone: the bound is then that
    of the sum that the node makes. What cannot be run where the model can, differs.
    """
    expected = run_in_float32(model, inputs)
    try:
        if _are_equal(expected, run_in_float32(derived, inputs)):
            return None
        far = format_difference(model, derived, inputs)
    except Exception as error:
        far = f"it does not run as the model does: {format_error(error)}"
    return _find_node(model, derived, inputs, far) if far else None


def _are_equal(values: list[Tensor], others: list[Tensor]) -> bool:
    return len(values) == len(others) and all(
        value.dtype is other.dtype and value.shape == other.shape and bool(_find_equal(value, other).all())
        for value, other in zip(values, others, strict=True)
    )


def _find_equal(value: Tensor, other: Tensor) -> Tensor:
    """Tell of each element whether it is the other, NaN included."""
    return (value == other) | (value.isnan() & other.isnan())


# -- node by node -----------------------------------------------------------------------------------------------------


def _find_node(model: nn.Module, derived: GraphModule, inputs: tuple[Tensor, ...], far: str) -> Divergence | None:
    """Find the first node that differs; None: each alone does what it should, and only roundings have added up.

    ``far``: what is known of the outputs. A model is traced for its nodes; where it differs as traced, what its modules
    are given tells where.
    """
    if isinstance(model, GraphModule) and PLAN in notes_of(model):
        return _follow(_record_nodes(model, inputs), derived, inputs)
    leaves = tuple(str(node.target) for node in derived.graph.find_nodes(op="call_module", sort=False))
    try:
        draft = trace(model, leaves)
    except RefimplError as error:
        return Divergence(node="", text=f"{far} ({error})")
    traced = finish(draft, draft.graph, draft)
    if far := format_difference(model, traced, inputs):
        found = _follow(_record_calls(model, traced, inputs), traced, inputs) or Divergence(node="", text=far)
        return replace(found, text=f"{found.text}, as soon as it is traced")
    return _follow(_record_nodes(traced, inputs), derived, inputs)


Taken = dict[str, list[Any]]
"""What the nodes are given when they are run, by name: tensors, copied, and anything else."""


def _record_nodes(model: GraphModule, inputs: tuple[Tensor, ...]) -> Taken:
    """Return what the nodes of a model are given."""
    recorder = _TakingInterpreter(model)
    with in_float64(model):
        recorder.run(*_enter(inputs))
    return recorder.taken


def _record_calls(model: nn.Module, traced: GraphModule, inputs: tuple[Tensor, ...]) -> Taken:
    """Return what the modules that a traced model calls are given in the model itself, and what it returns.

    Keyword arguments are left out: tracing may give them by position.
    """
    taken, hooks, names = Taken(), [], dict[str, list[str]]()
    for node in traced.graph.find_nodes(op="call_module"):
        names.setdefault(str(node.target), []).append(node.name)

    def note(target: str, args: Any, kwargs: Any) -> None:
        name = names[target].pop(0) if names[target] else ""
        if not kwargs:
            taken[name] = [_copy(leaf) for leaf in tree_leaves(args) if isinstance(leaf, Tensor)]

    for target in names:
        module = model.get_submodule(target)
        hook = module.register_forward_pre_hook(
            lambda _, args, kwargs, target=target: note(target, args, kwargs), with_kwargs=True
        )
        hooks.append(hook)
    try:
        with in_float64(model):
            taken["output"] = [_copy(value) for value in tensors_of(model(*_enter(inputs)))]
    finally:
        for hook in hooks:
            hook.remove()
    return taken


def _follow(taken: Taken, derived: GraphModule, inputs: tuple[Tensor, ...]) -> Divergence | None:
    """Run a derived model on what the nodes of the other were given; return the first node that differs."""
    epilogue = _Epilogue(derived, taken)
    with in_float64(derived):
        try:
            epilogue.run(*_enter(inputs))
        except _FoundError as found:
            return found.difference
        except Exception as error:
            return Divergence(node=epilogue.at, text=f"it does not run: {format_error(error)}")
    return None


def _enter(inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(value.double() if value.is_floating_point() else value.clone() for value in inputs)


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def _sources_of(node: Node) -> list[Node]:
    """List the nodes that a node reads, each time that it does, in order."""
    sources: list[Node] = []
    map_arg((node.args, node.kwargs), lambda source: sources.append(source))
    return sources


class _TakingInterpreter(Interpreter):
    """Runs a model, and notes what each node is given."""

    def __init__(self, model: GraphModule) -> None:
        super().__init__(model)
        self.extra_traceback = False
        self.taken: Taken = {}

    def run_node(self, n: Node) -> Any:
        self.taken[n.name] = [_copy(self.env[source]) for source in _sources_of(n)]  # an op in place may follow
        return super().run_node(n)


class _FoundError(Exception):
    def __init__(self, difference: Divergence) -> None:
        super().__init__()
        self.difference = difference


class _Epilogue(Interpreter):
    """Runs a model on what the nodes of another were given. Raises _FoundError at a value that is too far from it.

    ``at``: the node that is run. ``_sums``: a bound on the terms of the sums that a node makes, in all.
    """

    def __init__(self, model: GraphModule, taken: Taken) -> None:
        super().__init__(model)
        self.extra_traceback = False
        self.at = ""
        self._taken = taken
        self._sums: dict[Node, float] = {}

    def run_node(self, n: Node) -> Any:
        self.at = n.name
        given, sources = self._taken.get(n.name, []), _sources_of(n)
        if n.op != "placeholder" and len(given) == len(sources):  # else a fused module, which takes what its parts took
            for source, expected in zip(sources, given, strict=True):
                self._compare(source, self.env[source], expected)
        if n.op == "call_module":
            self._sums[n] = self._bound_sums(n)
        return super().run_node(n)

    def _compare(self, source: Node, value: Any, expected: Any) -> None:
        """Hold a value to the other model's; then give it that one, so that a rounding is seen once."""
        if not isinstance(value, Tensor) or not isinstance(expected, Tensor):
            return
        if value.shape != expected.shape:
            self._report(source, f"of shape {tuple(value.shape)}, not {tuple(expected.shape)}")
        is_equal = _find_equal(value, expected)
        if bool(is_equal.all()):
            return
        distance = (value.double() - expected.double()).abs().masked_fill(is_equal, 0.0)
        allowed = ROUNDING * max(self._sums.get(source, 0.0), _find_largest(expected))
        is_far = ~(distance <= allowed)  # NaN is far
        if bool(is_far.any()):
            place = int(distance.nan_to_num(nan=torch.inf).argmax())
            found, right = (float(each.flatten()[place]) for each in (value, expected))
            self._report(source, f"{found:.6g} for {right:.6g}; rounding explains {allowed:.3g}")
        value.copy_(expected)  # in place: views of it follow

    def _report(self, source: Node, text: str) -> NoReturn:
        """Raise what is found of a value; it has the name of the node whose value an observer passes on."""
        while source.name not in self._taken and str(source.target).startswith(OBSERVER_PREFIX):
            source = source.all_input_nodes[0]
        raise _FoundError(Divergence(node=source.name, text=text, reader=self.at))

    def _bound_sums(self, node: Node) -> float:
        """Bound the sum of the absolute terms that a layer adds up: its row of most weight, times the largest input."""
        target, value = str(node.target), self.env[_sources_of(node)[0]]
        layer: Any = layer_of(float_module_of(self.module.get_submodule(target), where=target))
        if not isinstance(layer, _ConvNd | nn.Linear) or not isinstance(value, Tensor):
            return 0.0
        weight: Tensor = layer.get_weight() if hasattr(layer, "get_weight") else layer.weight  # type: ignore[operator]
        rows = [weight.abs().transpose(0, axis).flatten(1).sum(1).max() for axis in (0, 1)]
        bias = 0.0 if layer.bias is None else _find_largest(layer.bias)
        return float(max(rows)) * _find_largest(value) + bias


def _find_largest(value: Tensor) -> float:
    return float(value.abs().max()) if value.numel() else 0.0
