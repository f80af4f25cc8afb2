"""On a process's path: it finds a torch without ``torch.ao``, quantized dtypes and quantized tensors.

Python imports it when it starts, in children too. ``torch.ao.quantization`` is gone for all. Torch itself, and torchao,
read the other names: only code of the suite and of its tests is told that they are gone. With ``TORCHAO_IS_USED`` in
the environment torchao finds ``torch.ao.quantization``, which registers its operators.
"""

from __future__ import annotations

import builtins
import importlib
import os
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from types import ModuleType
from typing import Any


class Removed(MetaPathFinder):
    """Finds no module of the flow that torch is to remove."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> None:
        """Raise what an import of a missing module raises."""
        if f"{fullname}.".startswith("torch.ao.quantization."):
            raise ModuleNotFoundError(f"No module named {fullname!r}", name=fullname)


if "TORCHAO_IS_USED" in os.environ:
    import torch.ao.quantization.fx._decomposed  # torchao asks for it later, when the suite has registered its own
else:
    sys.meta_path.insert(0, Removed())
    sys.modules["torch.quantization"] = ModuleType("torch.quantization")

import torch  # noqa: E402

GONE = (
    *("ao", "quint8", "qint8", "qint32", "quint4x2", "quint2x4"),
    *("quantize_per_tensor", "quantize_per_channel", "quantize_per_tensor_dynamic"),
)
ASKING = ("fx_quant_conformance", "tests", "conftest")


def asks(depth: int) -> bool:
    """Tell whether the code that asks is of the suite or of its tests."""
    return str(sys._getframe(depth + 1).f_globals.get("__name__", "")).partition(".")[0] in ASKING


def hide(module: ModuleType, names: tuple[str, ...]) -> None:
    """Hide names of a module from the code that asks."""
    found = {name: vars(module).pop(name) for name in names if name in vars(module)}
    before: Any = vars(module).get("__getattr__")

    def read(name: str) -> Any:
        if name in found:
            if asks(1):
                raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}")
            return found[name]
        if before is None:
            raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}")
        return before(name)

    vars(module)["__getattr__"] = read


class Operators:
    """The namespace ``torch.ops.quantized``, which is empty for the code that asks."""

    def __init__(self, namespace: Any) -> None:
        self.__dict__["_namespace"] = namespace

    def __getattr__(self, name: str) -> Any:
        if asks(1):
            raise AttributeError(f"'_OpNamespace' 'quantized' object has no attribute {name!r}")
        return getattr(self._namespace, name)


def is_gone(name: str) -> bool:
    """Tell whether a module is one that is gone."""
    return name.split(".")[:2] == ["torch", "ao"]


def _hide_imports() -> None:
    plain, by_name = builtins.__import__, importlib.import_module

    def find(name: str, *rest: Any, **named: Any) -> Any:
        if is_gone(name) and asks(1):
            raise ModuleNotFoundError(f"No module named {name!r}", name=".".join(name.split(".")[:2]))
        return plain(name, *rest, **named)

    def find_by_name(name: str, package: str | None = None) -> Any:
        if is_gone(name) and asks(1):
            raise ModuleNotFoundError(f"No module named {name!r}", name=".".join(name.split(".")[:2]))
        return by_name(name, package)

    builtins.__import__ = find
    importlib.import_module = find_by_name


hide(torch, GONE)
hide(torch.backends, ("quantized",))
vars(torch.ops)["quantized"] = Operators(torch.ops.quantized)
_hide_imports()
