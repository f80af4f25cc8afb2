"""Tracing a model to an fx graph whose leaves are the modules that a BackendConfig can name (rule CUS-02).

Also the small facts about a traced graph that every later stage needs: the module behind a node, the full name of the
module that encloses it, and its arguments with keywords put in their place (PAT-08).
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch
import torch.ao.nn.intrinsic as nni
from torch import nn
from torch.fx import GraphModule, Node, Tracer
from torch.fx.operator_schemas import get_signature_for_torch_op
from torch.nn.utils.parametrize import type_before_parametrizations

from refimpl.errors import ModelError

# Built-ins without a signature or schema that inspect can read: the names of their positional parameters.
_PARAMETERS: Mapping[str, tuple[str, ...]] = {
    "conv1d": ("input", "weight", "bias", "stride", "padding", "dilation", "groups"),
    "conv2d": ("input", "weight", "bias", "stride", "padding", "dilation", "groups"),
    "conv3d": ("input", "weight", "bias", "stride", "padding", "dilation", "groups"),
    "linear": ("input", "weight", "bias"),
    "cat": ("tensors", "dim"),
    "add": ("input", "other"),
    "mul": ("input", "other"),
}


class QuantizationTracer(Tracer):
    """Keeps as leaves: torch's own modules, fused modules, and what the user names. (CUS-02)"""

    def __init__(self, leaf_names: tuple[str, ...] = (), leaf_classes: tuple[type, ...] = ()) -> None:
        super().__init__()
        self.leaf_names = leaf_names
        self.leaf_classes = leaf_classes
        self.record_stack_traces = False

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Tell whether a module stays one node. (CUS-02)"""
        if module_qualified_name in self.leaf_names or type(m) in self.leaf_classes:  # rule: CUS-02
            return True
        if isinstance(m, nni._FusedModule):  # type: ignore[attr-defined]
            return True
        return type(m).__module__.startswith(("torch.nn", "torch.ao.nn")) and not isinstance(m, nn.Sequential)


def trace(model: nn.Module, leaf_names: tuple[str, ...] = (), leaf_classes: tuple[type, ...] = ()) -> GraphModule:
    """Trace a model. The parameters are shared with the original, the modules are the original's.

    Raises ModelError naming the model's class if it cannot be traced.
    """
    tracer = QuantizationTracer(leaf_names, leaf_classes)
    try:
        graph = tracer.trace(model)
    except Exception as error:
        raise ModelError(
            f"{type(model).__name__} cannot be traced by torch.fx: {error}. Make the untraceable part a leaf "
            "(non-traceable module names or classes), or rewrite its data-dependent control flow"
        ) from error
    traced = GraphModule(tracer.root, graph, class_name=type(model).__name__)
    traced.train(model.training)
    return traced


def module_type(module: nn.Module) -> type[nn.Module]:
    """Return a module's class, looking through parametrizations. (PAT-03)"""
    found: type[nn.Module] = type_before_parametrizations(module)
    return found


class Places:
    """Where each node of a graph stands: its module, object type, enclosing module's name, and index among its type."""

    def __init__(self, model: GraphModule) -> None:
        self.modules: dict[str, nn.Module] = dict(model.named_modules(remove_duplicate=False))
        self.calls: Counter[int] = Counter(
            id(self.modules[str(node.target)]) for node in model.graph.nodes if node.op == "call_module"
        )
        self._order: dict[Node, tuple[str, int]] = {}
        counts: Counter[tuple[str, Any]] = Counter()
        for node in model.graph.nodes:
            if node.op in ("call_module", "call_function", "call_method"):
                parent = self.scope(node)
                key = (parent, self.object_type(node))
                self._order[node] = (parent, counts[key])
                counts[key] += 1

    def module(self, node: Node) -> nn.Module | None:
        """The module that a call_module node calls, else None."""
        return self.modules[str(node.target)] if node.op == "call_module" else None

    def object_type(self, node: Node) -> Any:
        """What a pattern's leaf or an object_type key is compared with: class, function or method name. (PAT-03)"""
        module = self.module(node)
        return node.target if module is None else module_type(module)

    def scope(self, node: Node) -> str:
        """Full name of the innermost module that makes this call; "" for the model itself."""
        if node.op == "call_module":
            return str(node.target).rpartition(".")[0]
        stack = node.meta.get("nn_module_stack")
        if not stack:
            return ""
        path, _ = next(reversed(stack.values()))
        return str(path)

    def name(self, node: Node) -> str:
        """Full name that module_name keys are compared with: the called module's, or the calling one's. (QCM-02)"""
        return str(node.target) if node.op == "call_module" else self.scope(node)

    def order(self, node: Node) -> tuple[str, int]:
        """(enclosing module's name, index among the calls of this type in it), for module_name_object_type_order."""
        return self._order[node]

    def is_shared_state(self, node: Node) -> bool:
        """Tell whether a node's module has parameters or buffers and is called at more than one place. (FUS-07)"""
        module = self.module(node)
        if module is None or self.calls[id(module)] < 2:
            return False
        return any(True for _ in module.parameters()) or any(True for _ in module.buffers())


def positional_arguments(node: Node, at_least: int = 0) -> tuple[Any, ...]:
    """Return a node's positional arguments, the first `at_least` of them also when passed by keyword. (PAT-08)"""
    arguments = list(node.args)
    if len(arguments) < at_least and node.kwargs:
        names = _parameter_names(node.op, node.target)
        while len(arguments) < min(at_least, len(names)) and names[len(arguments)] in node.kwargs:  # rule: PAT-08
            arguments.append(node.kwargs[names[len(arguments)]])
    return tuple(arguments)


@cache
def _parameter_names(op: str, target: Callable[..., Any] | str) -> tuple[str, ...]:
    """Names of a callee's positional parameters. Modules and methods here take one tensor, called input or self."""
    if op != "call_function" or not callable(target):
        return ("input",)
    known = _PARAMETERS.get(getattr(target, "__name__", ""))
    if known is not None:
        return known
    try:
        return tuple(inspect.signature(target).parameters)
    except ValueError:
        schemas: Any = get_signature_for_torch_op(target)
        return tuple(schemas[0].parameters) if schemas else ("input",)


def tensor_inputs(arguments: Any) -> list[Node]:
    """List the nodes inside an argument structure, in order, without repeats."""
    found: dict[Node, None] = {}
    torch.fx.node.map_arg(arguments, lambda node: found.setdefault(node))
    return list(found)
