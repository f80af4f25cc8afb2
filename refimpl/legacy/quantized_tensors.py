"""Torch's quantized tensors: what makes them, and the engine that computes with them, while torch has them."""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from fx_quant_conformance.refimpl.errors import RefimplError
from fx_quant_conformance.refimpl.releases import find_torchs

LACK = "" if hasattr(torch, "quantize_per_tensor") else f"torch {torch.__version__} has no quantized tensors"
"""What torch lacks; "": nothing."""


def check_torch() -> None:
    """Raise RefimplError if torch has no quantized tensors."""
    if LACK:
        _refuse()


def _refuse(*_: object, **__: object) -> NoReturn:
    raise RefimplError(f"{LACK}: convert with convert_to_reference_decomposed_fx, which makes plain integers")


QUANTIZE: Any = getattr(torch, "quantize_per_tensor", _refuse)
QUANTIZE_PER_CHANNEL: Any = getattr(torch, "quantize_per_channel", _refuse)
QUANTIZE_DYNAMIC: Any = getattr(torch, "quantize_per_tensor_dynamic", _refuse)
MAKERS = frozenset({QUANTIZE, QUANTIZE_PER_CHANNEL, QUANTIZE_DYNAMIC})
"""The functions that make a quantized tensor of a float one."""


class _NoConv:
    """Stands for a class that torch no longer has: nothing is of it."""


QuantizedConv: Any = getattr(find_torchs("torch.ao.nn.quantized.modules.conv"), "_ConvNd", _NoConv)
"""The base of torch's quantized convolutions."""


def engine_saturates() -> bool:
    """Tell whether the engine that torch is set to has kernels whose sums of two products saturate."""
    engine = getattr(getattr(torch.backends, "quantized", None), "engine", "")
    return engine in ("fbgemm", "x86")
