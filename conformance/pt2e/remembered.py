"""torchao's patterns of convolution and batch norm, exported once.

torchao exports more than a hundred small patterns for each model that has a batch norm and is converted in QAT, and
XNNPACKQuantizer exports some for each model. A pattern's graph depends on its code and on the shapes and dtypes of its
inputs, so one export is enough for all models.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import BuiltinFunctionType, FunctionType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.fx import GraphModule

_NAME = "_get_aten_graph_module_for_pattern"  # torchao's function that exports a pattern
_MEMORY: dict[object, GraphModule] = {}


class _UnknownError(Exception):
    """A part of a pattern is of a kind that no key can be made of."""


@contextmanager
def remember_patterns() -> Iterator[None]:
    """Let torchao export each of its patterns once in this process, and give a copy of the graph module each time.

    The function is replaced in every module that has imported it, and put back at the end. A pattern that holds what no
    key can be made of, such as a module with parameters, is exported each time.
    """
    import torch
    from torchao.quantization.pt2e import utils

    export: Callable[..., GraphModule] = getattr(utils, _NAME)

    def remember(pattern: Any, example_inputs: tuple[Any, ...], is_cuda: bool = False, **kwargs: Any) -> GraphModule:
        try:
            key = (_identify(pattern), _identify(example_inputs), is_cuda, _identify(kwargs), torch.is_grad_enabled())
        except _UnknownError:
            return export(pattern, example_inputs, is_cuda, **kwargs)
        if key not in _MEMORY:
            _MEMORY[key] = export(pattern, example_inputs, is_cuda, **kwargs)
        return copy.deepcopy(_MEMORY[key])

    _replace(export, remember)
    try:
        yield
    finally:
        _replace(remember, export)  # also in modules that were imported meanwhile


def _replace(old: object, new: object) -> None:
    for module in list(sys.modules.values()):
        if getattr(module, "__dict__", {}).get(_NAME) is old:
            setattr(module, _NAME, new)


def _identify(value: Any) -> object:
    """Return a key that two values share if a pattern with either of them has the same graph."""
    import torch
    from torchao.quantization.pt2e.export_utils import WrapperModule

    if isinstance(value, torch.Tensor):
        return torch.Tensor, value.shape, value.dtype, value.device, value.requires_grad
    if isinstance(value, (bool, int, float, str, type(None), torch.dtype, torch.device, BuiltinFunctionType)):
        return type(value), value
    if isinstance(value, (tuple, list)):
        return type(value), *map(_identify, value)
    if isinstance(value, dict):
        return dict, *((name, _identify(each)) for name, each in value.items())
    if isinstance(value, FunctionType):
        held = [cell.cell_contents for cell in value.__closure__ or ()]
        defaults = [value.__defaults__, value.__kwdefaults__]
        return value.__module__, value.__qualname__, value.__code__, _identify(held), _identify(defaults)
    if type(value) is WrapperModule:
        return WrapperModule, value.training, _identify(value.fn)
    raise _UnknownError(type(value).__name__)
