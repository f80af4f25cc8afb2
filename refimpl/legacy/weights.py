"""The integers of a reference module's weight, whoever's class that is."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor

from fx_quant_conformance.refimpl.legacy.dtypes import QUANTIZED_DTYPES
from fx_quant_conformance.refimpl.legacy.reference import get_quantized_weight
from fx_quant_conformance.refimpl.releases import find_torchs

_of_torchs: Any = getattr(find_torchs("torch.ao.nn.quantized.reference.modules.rnn"), "get_quantized_weight", None)


def read_integers(module: Any, name: str = "weight") -> Tensor:
    """Return a weight's integers as a plain tensor of its shape, one to an element.

    A weight in half precision is returned as it is. ``name``: of the weight; a recurrent module has several.
    """
    is_recurrent = hasattr(module, f"{name}_qscheme") and not hasattr(module, f"get_quantized_{name}")
    by_name = get_quantized_weight if _of_torchs is None else _of_torchs
    read: Any = partial(by_name, module, name) if is_recurrent else getattr(module, f"get_quantized_{name}")
    quantized: Tensor = read()
    if quantized.dtype is not QUANTIZED_DTYPES["quint4x2"]:
        return to_plain(quantized)
    # torch packs two to a byte: they are read off the values
    scale, zero_point = (getattr(module, f"{name}_{each}").double() for each in ("scale", "zero_point"))
    axis = getattr(module, f"{name}_axis_int")
    shape = [-1 if each == axis else 1 for each in range(quantized.dim())]
    steps: Tensor = quantized.dequantize().double() / scale.reshape(shape) + zero_point.reshape(shape)
    return steps.round().byte()


def to_plain(tensor: Tensor) -> Tensor:
    """Return the integers of a quantized tensor; any other as it is."""
    return tensor.int_repr() if tensor.is_quantized else tensor
