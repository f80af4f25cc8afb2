"""Has a backend lower reference models: the one place where a model is brought to the form EXPORTED.

Several models can be lowered as one, a pack. In it the names of a model's nodes begin with that of its part, ``part0_``
and so on, and paths of its modules with ``part0.``; in an exported program, the paths of the modules of nodes do.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import nn
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from backends.base import Backend, Representation, UnsupportedPattern
from refimpl import ModelError, export_reference
from refimpl.exported import export_open, find_batch_axes, fold_weights
from refimpl.invariants import is_dequantize, is_quantize

PART = "part"
"""How the names of a pack's parts begin; then comes their number."""
Part = tuple[GraphModule, tuple[Any, ...]]
"""A reference model, and its example inputs."""


def lower_reference(
    backend: Backend, reference_model: GraphModule, example_inputs: tuple[Any, ...]
) -> Callable[..., Any]:
    """Return what the backend's ``lower`` makes of a reference model of the form ``representation.of_models``.

    A backend of the form EXPORTED gets the model's program, its batch dynamic if its Capabilities say so. Raises
    UnsupportedPattern for a model that has no program, and what ``lower`` raises.
    """
    if backend.representation is not Representation.EXPORTED:
        return backend.lower(reference_model, example_inputs)
    is_dynamic = backend.capabilities().dynamic_batch
    try:
        program = export_reference(reference_model, example_inputs, dynamic_batch=is_dynamic)
    except ModelError as error:
        raise UnsupportedPattern(f"it takes exported programs, and {error}") from error
    return backend.lower(program, example_inputs)


def lower_pack(backend: Backend, parts: Sequence[Part]) -> Callable[..., Any]:
    """Return what the backend's ``lower`` makes of several reference models as one.

    That takes the inputs of all models, in order, and returns a tuple with what each of them returns. Raises what
    torch.export raises, and what ``lower`` raises.
    """
    models = [model for model, _ in parts]
    inputs = tuple(value for _, own in parts for value in own)
    if backend.representation is not Representation.EXPORTED:
        return backend.lower(join_graphs(models), inputs)
    is_dynamic = backend.capabilities().dynamic_batch
    axes = [is_dynamic and is_batch for _, own in parts for is_batch in find_batch_axes(own)]
    pack = join_graphs([fold_weights(model) for model in models], has_only_modules=True)
    return backend.lower(export_open(pack, inputs, dynamic_batch=axes), inputs)


def join_graphs(models: Sequence[GraphModule], *, has_only_modules: bool = False) -> GraphModule:
    """Return one flat graph module of several, whose modules it copies.

    ``has_only_modules``: between dequantize and quantize it calls modules alone. An exported program keeps the names of
    these, where it gives functions names of its own.
    """
    graph, root, outputs = Graph(), nn.Module(), list[Any]()
    parts = list[tuple[str, GraphModule, dict[Node, Node]]]()
    for number, model in enumerate(models):
        name = f"{PART}{number}"
        root.add_module(name, copy.deepcopy(model))
        ends = (node for node in model.graph.nodes if node.op == "placeholder")
        parts.append((name, model, {node: graph.placeholder(f"{name}_{node.target}") for node in ends}))
    for name, model, made in parts:
        for node in model.graph.nodes:
            if node.op == "output":
                outputs.append(map_arg(node.args[0], made.__getitem__))
            elif node.op != "placeholder":
                made[node] = _copy_node(graph, node, name, made)
                if has_only_modules and node.op in ("call_function", "call_method"):
                    _call_as_module(root, made[node])
    graph.output(tuple(outputs))
    return GraphModule(root, graph).eval()


def _copy_node(graph: Graph, node: Node, part: str, made: dict[Node, Node]) -> Node:
    """Copy a node of a part, under the part's name."""
    target = f"{part}.{node.target}" if node.op in ("call_module", "get_attr") else node.target
    args: Any = map_arg(node.args, made.__getitem__)
    kwargs: Any = map_arg(node.kwargs, made.__getitem__)
    copied = graph.create_node(node.op, target, args, kwargs, f"{part}_{node.name}", node.type)
    copied.meta = dict(node.meta)
    stack = node.meta.get("nn_module_stack")
    if stack is not None:
        copied.meta["nn_module_stack"] = {key: (f"{part}.{path}", kind) for key, (path, kind) in stack.items()}
    return copied


def _call_as_module(root: nn.Module, node: Node) -> None:
    """Let a node that calls a function or a method call a module that does so, unless it quantizes or dequantizes."""
    if not is_quantize(node) and not is_dequantize(node):
        root.add_module(node.name, _Call(node.op, node.target))
        node.op, node.target = "call_module", node.name


class _Call(nn.Module):
    """Calls a function, or a method of its first argument."""

    def __init__(self, op: str, target: Any) -> None:
        super().__init__()
        self._call: Callable[..., Any] = target if op == "call_function" else partial(_call_method, target)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return what it returns."""
        return self._call(*args, **kwargs)


def _call_method(name: str, value: Any, *args: Any, **kwargs: Any) -> Any:
    return getattr(value, name)(*args, **kwargs)
