"""Spelling: modules, calls and whole patterns as Python, for scripts and for readers.

Names are those that a config uses: ``nn.Conv2d(16, 16, 7, padding=3, groups=16)``. A vendor's own classes and functions
have the name of their module before them.
"""

from __future__ import annotations

import importlib
import inspect
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.fx import GraphModule, Node

from fx_quant_conformance.conformance.reproducers import python_text
from fx_quant_conformance.refimpl.config.patterns import leaf_name
from fx_quant_conformance.refimpl.legacy import is_reference

_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
_PLAIN = (int, float, str, bool, type(None), torch.dtype)
_PER_AXIS = ("kernel_size", "stride", "padding", "output_padding", "dilation")
"""Arguments of torch's modules that are one number, or one for each axis."""
_OF_MODULES = frozenset({*vars(nn.Module()), "qconfig"})
"""Attributes that every module has, and the one that the flow gives it."""
_INPUTS = ("x", "y", "z")
_KNOWN = ("torch.", "F.", "nn.", "nni.", "operator.", "builtins.")


class NoScriptError(Exception):
    """No script can be written; the message says why."""


def flatten(target: str) -> str:
    """Return a module's path as one name; a number, as Sequential has them, gets a letter before it."""
    name = target.replace(".", "_")
    return name if name.isidentifier() else f"m{name}"


def name_class(module: nn.Module) -> str:
    """Name a module's class as a config does."""
    kind: Any = type(module)
    return leaf_name(kind)


def is_vendors(value: Any) -> bool:
    """Tell whether a class or function is a vendor's own, which is imported from its module."""
    return not leaf_name(value).startswith(_KNOWN)


def check_importable(value: Any) -> None:
    """Raise NoScriptError for an own class or function that cannot be imported from its module by its name."""
    home, name = getattr(value, "__module__", None), getattr(value, "__qualname__", "")
    try:
        found = reduce(getattr, name.split("."), importlib.import_module(str(home)))
    except (ImportError, AttributeError):
        found = None
    if found is not value or home == "__main__":
        raise NoScriptError(f"{leaf_name(value)} cannot be imported: define it at the top level of a module")


# -- modules ----------------------------------------------------------------------------------------------------------


def format_constructor(module: nn.Module) -> str:
    """Spell the call of a module's constructor; for a reference module, that of its float class."""
    kind: Any = getattr(nn, type(module).__name__) if is_reference(module) else type(module)
    required, optional = _read_arguments(kind, module)
    words = [*map(repr, required.values()), *(f"{name}={value!r}" for name, value in optional.items())]
    return f"{leaf_name(kind)}({', '.join(words)})"


def format_own_constructor(module: nn.Module) -> str | None:
    """Spell the call that makes an own module again, but for its parameters; None: its constructor does not show how.

    The constructor is tried: what it makes must have the same modules, state and plain attributes.
    """
    try:
        required, optional = _read_arguments(type(module), module)
        if not all(map(_is_plain, (*required.values(), *optional.values()))):
            return None
        made = type(module)(*required.values(), **optional)
    except Exception:  # a vendor's constructor, with other arguments than its module's attributes
        return None
    made.train(module.training)
    pairs = list(zip(made.modules(), module.modules(), strict=False))
    counts = {sum(1 for _ in each.modules()) for each in (made, module)}
    return format_constructor(module) if len(counts) == 1 and all(_are_alike(*pair) for pair in pairs) else None


def _read_arguments(kind: type, module: nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the constructor's arguments that a module holds: those without a default, and those away from theirs."""
    required, optional = dict[str, Any](), dict[str, Any]()
    for name, parameter in inspect.signature(kind).parameters.items():
        default, value = parameter.default, _argument_of(module, name)
        if value is inspect.Parameter.empty or parameter.kind not in _NAMED or _is_default(value, default):
            continue
        (required if default is inspect.Parameter.empty else optional)[name] = value
    return required, optional


def _argument_of(module: nn.Module, name: str) -> Any:
    """Return the constructor argument that a module holds; for a bias, whether it has one."""
    value = getattr(module, name, inspect.Parameter.empty)
    if name == "bias":
        return value is not None or getattr(module, "weight", None) is None
    if name in _PER_AXIS and isinstance(value, tuple) and len({*value}) == 1 and not is_vendors(type(module)):
        return value[0]
    return tuple(value) if isinstance(value, (tuple, list)) else value


def _is_default(value: Any, default: Any) -> bool:
    is_repeated = isinstance(value, tuple) and value == (default,) * len(value)
    return _is_plain(value) and bool(is_repeated or value == default)


def _is_plain(value: Any) -> bool:
    return all(map(_is_plain, value)) if isinstance(value, tuple) else isinstance(value, _PLAIN)


def _are_alike(made: nn.Module, module: nn.Module) -> bool:
    """Tell whether two modules differ at most in the values of their floating-point parameters and buffers."""
    if type(made) is not type(module):
        return False
    states = [
        dict((*each.named_parameters(recurse=False), *each.named_buffers(recurse=False))) for each in (made, module)
    ]
    if states[0].keys() != states[1].keys():
        return False
    if not all(_are_alike_tensors(states[0][name], states[1][name]) for name in states[0]):
        return False
    attributes = [{name: v for name, v in vars(each).items() if name not in _OF_MODULES} for each in (made, module)]
    return all(map(_is_plain, attributes[1].values())) and attributes[0] == attributes[1]


def _are_alike_tensors(made: Tensor, tensor: Tensor) -> bool:
    is_same = made.shape == tensor.shape and made.dtype == tensor.dtype
    return is_same and (tensor.is_floating_point() or torch.equal(made, tensor))


# -- calls ------------------------------------------------------------------------------------------------------------


def format_call(node: Node, names: dict[Node, str], *, only_away: bool = False) -> str:
    """Spell a node's call, its operands by ``names``; ``only_away``: without options that have their default."""
    defaults = _defaults_of(node.target) if only_away else {}
    options = {key: value for key, value in node.kwargs.items() if key not in defaults or defaults[key] != value}
    words = [spell(value, names) for value in node.args]
    words += [f"{key}={spell(value, names)}" for key, value in options.items()]
    if node.op == "call_method":
        return f"{words[0]}.{node.target}({', '.join(words[1:])})"
    if node.op == "call_module":
        return f"self.{flatten(str(node.target))}({', '.join(words)})"
    target: Any = node.target
    name = f"torch.ops.{target}" if isinstance(target, OpOverload) else leaf_name(target)
    return f"{name.removeprefix('builtins.')}({', '.join(words)})"


def _defaults_of(function: Any) -> dict[str, Any]:
    """Return a function's default arguments; none where Python does not know them."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # builtins, methods' names
        return {}
    return {name: parameter.default for name, parameter in parameters.items()}


def spell(value: Any, names: dict[Node, str]) -> str:
    """Spell an argument of a call."""
    return python_text.spell(value, lambda other: names[other] if isinstance(other, Node) else repr(other))


def format_pattern(model: GraphModule) -> str:
    """Spell a float model of one pattern as an expression of its inputs: ``F.relu(nn.Linear(8, 7)(x))``.

    A model's own tensors have their names without numbers: ``torch.conv2d(x, weight, bias, padding=1)``.
    """
    names: dict[Node, str] = {}
    for node in model.graph.nodes:
        if node.op == "output":
            return spell(node.args[0], names)
        if node.op == "placeholder":
            names[node] = _INPUTS[len(names)] if len(names) < len(_INPUTS) else node.name
        elif node.op == "get_attr":
            names[node] = str(node.target).rpartition(".")[2].rstrip("0123456789")
        elif node.op == "call_module":
            call = format_call(node, names)
            names[node] = _format_module(model.get_submodule(str(node.target))) + call[call.index("(") :]
        else:
            names[node] = format_call(node, names, only_away=True)
    return ""


def _format_module(module: nn.Module) -> str:
    """Spell a module as a reader would make it; ``(…)`` if its constructor does not show how."""
    if isinstance(module, nn.Sequential):
        return f"{name_class(module)}({', '.join(map(_format_module, module.children()))})"
    if is_vendors(type(module)):
        return format_own_constructor(module) or f"{name_class(module)}(…)"
    return format_constructor(module)
