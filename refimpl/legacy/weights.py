"""The integers of a reference module's weight, whoever's class that is."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor

from fx_quant_conformance.refimpl.legacy.channels import lay_along
from fx_quant_conformance.refimpl.legacy.dtypes import QUANTIZED_DTYPES
from fx_quant_conformance.refimpl.legacy.reference import get_quantized_weight
from fx_quant_conformance.refimpl.releases import find_torchs

_RECURRENT = find_torchs("torch.ao.nn.quantized.reference.modules.rnn")
_read_by_name: Any = getattr(_RECURRENT, "get_quantized_weight", get_quantized_weight)


def read_integers(module: Any, name: str = "weight") -> Tensor:
    """Return a weight's integers as a plain tensor of its shape, one to an element.

    A weight in half precision is returned as it is. ``name``: of the weight; a recurrent module has several.
    """
    quantized: Tensor = getattr(module, f"get_quantized_{name}", partial(_read_by_name, module, name))()
    if quantized.dtype is not QUANTIZED_DTYPES["quint4x2"]:
        return to_plain(quantized)
    # torch packs two to a byte: they are read off the values
    numbers = (getattr(module, f"{name}_{each}").double() for each in ("scale", "zero_point"))
    scale, zero_point = (lay_along(each, getattr(module, f"{name}_axis_int"), quantized.dim()) for each in numbers)
    steps: Tensor = quantized.dequantize().double() / scale + zero_point
    return steps.round().byte()


def to_plain(tensor: Tensor) -> Tensor:
    """Return the integers of a quantized tensor; any other as it is."""
    return tensor.int_repr() if tensor.is_quantized else tensor
