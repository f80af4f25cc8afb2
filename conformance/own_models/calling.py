"""How a model is called by its owner: with keywords, dicts, dataclasses, None and numbers.

The flow gives it tensors alone. So a model is given another ``forward``, which takes the tensors of the owner's
arguments, in order, and returns those of what the model returns. All else in the arguments is constant: it is what the
example inputs have.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from fx_quant_conformance.conformance.claims.inputs import Batch


class CallingError(Exception):
    """Arguments that cannot be given to the flow; the message says why."""


class _Hole:
    """Where a tensor stands."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Structure:
    """A nested value whose tensors are taken out."""

    spec: Any
    leaves: tuple[Any, ...]

    @classmethod
    def of(cls, value: Any) -> Structure:
        """Return that of a value, of which dataclasses are made known to torch."""
        _register(value)
        leaves, spec = tree_flatten(value)
        return cls(spec=spec, leaves=tuple(_Hole if isinstance(leaf, Tensor) else leaf for leaf in leaves))

    def fill(self, tensors: Sequence[Any]) -> Any:
        """Return the value with these tensors in it."""
        feed = iter(tensors)
        return tree_unflatten([next(feed) if leaf is _Hole else leaf for leaf in self.leaves], self.spec)

    def take(self, value: Any) -> tuple[Any, ...]:
        """Return what stands in a value of the same structure where tensors stood."""
        return tuple(leaf for leaf, own in zip(tree_leaves(value), self.leaves, strict=True) if own is _Hole)

    def read(self, value: Any) -> Batch:
        """Return the tensors of a value. Raises CallingError if its structure or something else in it is another."""
        other = Structure.of(value)
        if other.spec != self.spec or list(map(_spell, other.leaves)) != list(map(_spell, self.leaves)):
            raise CallingError("has another structure, or other constants, than the example inputs")
        return self.take(value)

    @property
    def holds_tensors(self) -> bool:
        """Whether there is a tensor in it."""
        return any(leaf is _Hole for leaf in self.leaves)

    @property
    def is_plain(self) -> bool:
        """Whether it is a tuple of tensors, or a tensor."""
        return all(leaf is _Hole for leaf in self.leaves) and self.spec.type in (tuple, list, None)


def _spell(leaf: Any) -> str:
    return f"{type(leaf).__name__} {leaf!r}"


def _register(value: Any) -> None:
    """Make the dataclasses within a value known to torch, so that their fields are found."""
    inner: Iterable[Any] = ()
    if is_dataclass(value) and not isinstance(value, type):
        if type(value) not in torch.utils._pytree.SUPPORTED_NODES:
            torch.export.register_dataclass(type(value))
        inner = [getattr(value, each.name) for each in fields(value)]
    elif isinstance(value, Mapping):
        inner = value.values()
    elif isinstance(value, (tuple, list)):
        inner = value
    for each in inner:
        _register(each)


@dataclass(frozen=True, slots=True, kw_only=True)
class Calling:
    """How a model is called, and what it returns."""

    arguments: Structure
    """Of its arguments and keywords."""
    results: Structure

    def fit(self, model: nn.Module) -> nn.Module:
        """Return the model with a forward that takes tensors, and returns a tensor or a tuple of them.

        Optional arguments that the owner leaves out have their defaults: the flow would trace them as inputs.
        """
        forward = type(model).forward
        count = sum(leaf is _Hole for leaf in self.arguments.leaves)
        parameters = list(signature(forward).parameters.values())[1:]
        is_positional = all(each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD) for each in parameters)
        args, kwargs = self.arguments.fill([_Hole] * count)
        takes_tensors = not kwargs and list(args) == [_Hole] * count and self.results.is_plain
        if takes_tensors and is_positional and len(parameters) == count:
            return model
        named = [each.name for each in parameters if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]
        if not takes_tensors:
            named = []
        names = ", ".join([*named[:count], *(f"input_{number}" for number in range(len(named), count))])
        made: dict[str, Any] = {}
        # fx reads the number of arguments off the function's code: it must have as many
        scope = {"whole": self._make_forward(forward)}
        exec(f"def forward(self, {names}):\n    return whole(self, {names})", scope, made)
        model.__class__ = type(type(model).__name__, (type(model),), made)
        return model

    def _make_forward(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        def whole(model: nn.Module, *tensors: Any) -> Any:
            args, kwargs = self.arguments.fill(tensors)
            returned = forward(model, *args, **kwargs)
            if self.results.is_plain:
                return returned
            taken = self.results.take(returned)
            return taken[0] if len(taken) == 1 else taken

        return whole

    def restore(self, model: nn.Module) -> nn.Module:
        """Return a module that is called as the owner's model is, and calls one that takes and returns tensors."""
        return _Restored(model, self)


class _Restored(nn.Module):
    """Is called as the owner's model is."""

    def __init__(self, model: nn.Module, calling: Calling) -> None:
        super().__init__()
        self._model = model
        self._calling = calling

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model. Raises CallingError for arguments of another structure than the example inputs have."""
        returned = self._model(*self._calling.arguments.read((args, kwargs)))
        return self._calling.results.fill(tree_leaves(returned))
