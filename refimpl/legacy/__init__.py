"""What torch takes away, under names that stay: torch's own as long as it has them, else classes of this room.

Torch announces that ``torch.ao.nn``, the quantized dtypes and quantized tensors go. Patterns, roots and dtype configs
name them. They are written ``nni.ConvReLU2d``, ``nnqr.Linear`` and ``quint8``, imported from here. With a torch that
has them these *are* torch's, so that configs written with either are equal; without, they are classes and dtypes of
this room, which compute the same numbers. Only this room, ``refimpl.lower`` and ``backends.torch_engines`` name
torch's.
"""

from __future__ import annotations

from importlib import import_module
from types import SimpleNamespace
from typing import Any

from torch import nn

from fx_quant_conformance.refimpl.legacy.dtypes import QUANTIZED_DTYPES, find_dtype, is_dtype
from fx_quant_conformance.refimpl.releases import find_torchs

__all__ = [
    "QUANTIZATION",
    "FloatFunctional",
    "QuantizableLSTM",
    "QuantizableLSTMCell",
    "find_dtype",
    "is_dtype",
    "is_reference",
    "is_torchs",
    "nni",
    "nniqat",
    "nnqat",
    "nnqatd",
    "nnqr",
    "qint8",
    "qint32",
    "quint4x2",
    "quint8",
]
_HERE = __name__
QUANTIZATION = "torch.ao.quantization"
"""The package of torch's own flow, observers and configs."""


def choose(torchs: str, own: str) -> Any:
    """Return torch's module of that name; where it is gone, the classes of a module of this room.

    ``own``: the module's name in this room.
    """
    found = find_torchs(torchs)
    return own_classes(own) if found is None else found


def own_classes(own: str) -> SimpleNamespace:
    """Return the classes and functions that a module of this room gives in torch's place, by name."""
    module = import_module(f"{_HERE}.{own}")
    return SimpleNamespace(**{name: getattr(module, name) for name in module.__all__})


nni: Any = choose("torch.ao.nn.intrinsic", "fused")
"""Fused float modules."""
nnqat: Any = choose("torch.ao.nn.qat", "qat")
"""Modules that train with a fake-quantized weight."""
nnqatd: Any = choose("torch.ao.nn.qat.dynamic", "qat_dynamic")
"""The same, of layers whose input is quantized dynamically."""
nniqat: Any = choose("torch.ao.nn.intrinsic.qat", "fused_qat")
"""The same, of fused modules."""
nnqr: Any = choose("torch.ao.nn.quantized.reference", "reference")
"""Reference modules: a float weight with its qparams."""

quint8, qint8, qint32, quint4x2 = (QUANTIZED_DTYPES[name] for name in ("quint8", "qint8", "qint32", "quint4x2"))


class _Gone(nn.Module):
    """Stands for a class of torch's that is gone and that nothing here replaces: no module is of it."""


def _find_class(module: str, name: str) -> Any:
    return getattr(find_torchs(module), name, type(name, (_Gone,), {"__module__": _HERE}))


FloatFunctional: Any = _find_class("torch.ao.nn.quantized", "FloatFunctional")
"""A user's module whose methods are functions."""
QuantizableLSTM: Any = _find_class("torch.ao.nn.quantizable", "LSTM")
"""The float class of an observed LSTM, which takes quantized tensors."""
QuantizableLSTMCell: Any = _find_class("torch.ao.nn.quantizable", "LSTMCell")


def is_torchs(value: object) -> bool:
    """Tell whether a module's class, or a method of it, is torch's, or stands for torch's."""
    return str(getattr(value, "__module__", "")).startswith(("torch.nn", "torch.ao.nn", _HERE))


def is_reference(module: nn.Module) -> bool:
    """Tell whether a module is of one of the reference classes, and of no class derived from one."""
    return getattr(nnqr, type(module).__name__, None) is type(module)
