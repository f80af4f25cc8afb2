"""Meaning: whether two models compute the same function. Both run in float64, so that only rounding may differ."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from fx_quant_conformance.backends.names import format_error

_WRITES = ("__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ipow__")
SWITCHES = ("fake_quant_enabled", "observer_enabled")
"""Attributes that turn a fake quantize, and its observer, on and off."""


def format_difference(model: nn.Module, derived: nn.Module, inputs: tuple[Tensor, ...]) -> str:
    """Say how far a derived model is from computing the float model's function; "" where it does.

    They may differ by the float32 rounding of folded weights: 2⁻¹⁹ of the largest value on the way, for at most some
    hundred terms. What cannot be run where the model can, differs.
    """
    largest = [0.0]

    def note(_module: Any, _inputs: Any, output: Any) -> None:
        largest.extend(float(each.abs().max()) for each in tensors_of(output) if each.numel())

    expected = run_in_float64(model, inputs)
    hooks = [module.register_forward_hook(note) for module in derived.modules()]
    try:
        outputs = run_in_float64(derived, inputs)
    except Exception as error:  # a vendor's fuser may have made anything
        return f"and it does not run any more: {format_error(error)}"
    finally:
        for hook in hooks:
            hook.remove()
    if len(outputs) != len(expected):
        return f"in the number of its outputs: {len(outputs)} for {len(expected)}"
    for right, left in zip(expected, outputs, strict=True):
        if right.shape != left.shape:
            return f"in the shape of an output: {tuple(left.shape)} for {tuple(right.shape)}"
        difference = float((left.double() - right.double()).abs().max()) if right.numel() else 0.0
        allowed = 2.0**-19 * max(largest)
        if not difference <= allowed < math.inf:  # NaN and infinities are no function's results
            return f"by {difference:.3g}; rounding explains {allowed:.3g}"
    return ""


def run_in_float32(model: nn.Module, inputs: tuple[Tensor, ...]) -> list[Tensor]:
    """Return the outputs of a model as it is, run on copies; whatever is random is so each time alike."""
    with torch.no_grad(), _repeatable(model):
        return tensors_of(model(*(value.clone() for value in inputs)))


def run_in_float64(model: nn.Module, inputs: tuple[Tensor, ...]) -> list[Tensor]:
    """Return the outputs of a model in eval mode in float64, with its fake quantizes passing values through."""
    with in_float64(model):
        return tensors_of(model(*(each.double() if each.is_floating_point() else each.clone() for each in inputs)))


@contextmanager
def in_float64(*models: nn.Module) -> Iterator[None]:
    """Let models compute in float64, their fake quantizes passing values through, each time alike (`_repeatable`).

    The models are float32 again afterwards, which saves copies: those would cost more than all else here.
    """
    switches = [
        getattr(module, name)
        for model in models
        for module in model.modules()
        for name in SWITCHES
        if hasattr(module, name)
    ]
    states = [switch.clone() for switch in switches]
    default = torch.get_default_dtype()
    try:
        for switch in switches:
            switch.zero_()
        with torch.no_grad(), _repeatable(*models):
            try:
                for model in models:
                    model.double()
                torch.set_default_dtype(torch.float64)  # of tensors that a module makes
                with _Doubles():
                    yield
            finally:
                torch.set_default_dtype(default)
                for model in models:
                    model.float()
    finally:
        for switch, state in zip(switches, states, strict=True):
            switch.copy_(state)


@contextmanager
def _repeatable(*models: nn.Module) -> Iterator[None]:
    """Leave torch's generator and the models' buffers as they are, so that another run begins as this one does."""
    kept = [[buffer.clone() for buffer in model.buffers()] for model in models]
    with torch.random.fork_rng(devices=[]):
        yield
    for model, states in zip(models, kept, strict=True):
        for buffer, state in zip(model.buffers(), states, strict=True):
            if not torch.equal(buffer, state):
                buffer.copy_(state)


class _Doubles(TorchFunctionMode):
    """Where a model's code names float32, it means float64: a dtype that it asks for, a tensor that is no parameter."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        works_in_place = (name.rstrip("_") != name and not name.endswith("__")) or name in _WRITES or "out" in kwargs
        if not works_in_place:  # such a tensor stays itself
            args, kwargs = tree_map(_as_double, (args, kwargs))
        return (torch.Tensor.double if func is torch.Tensor.float else func)(*args, **kwargs)


def _as_double(value: Any) -> Any:
    if value is torch.float32:
        return torch.float64
    return value.double() if isinstance(value, Tensor) and value.dtype is torch.float32 else value


def tensors_of(output: Any) -> list[Tensor]:
    """Return the tensors of a model's output, in order."""
    return [each for each in tree_leaves(output) if isinstance(each, Tensor)]
