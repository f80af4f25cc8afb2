"""Making a module of one class of a module of another one, with its parameters and settings."""

from __future__ import annotations

from typing import Any

from torch import nn

_OF_MODULES = frozenset({*vars(nn.Module()), "qconfig"})


def take_over(kind: type[nn.Module], module: nn.Module) -> Any:
    """Return a module of a class derived from another module's, with its settings and its own parameters and buffers.

    It has no hooks, no parts and no QConfig of the other's.
    """
    made: Any = kind.__new__(kind)
    nn.Module.__init__(made)
    vars(made).update({name: value for name, value in vars(module).items() if name not in _OF_MODULES})
    made._parameters.update(module._parameters)
    made._buffers.update(module._buffers)
    return made.train(module.training)


def take_copies(kind: type[nn.Module], module: nn.Module) -> Any:
    """Return the same with parameters of its own, of the other's values: no training of the other reaches them."""
    made = take_over(kind, module)
    for name, value in made._parameters.items():
        made._parameters[name] = None if value is None else nn.Parameter(value.detach())
    return made
