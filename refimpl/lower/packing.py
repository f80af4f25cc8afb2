"""Making torch's quantized modules in less time; the modules are the same. (LOW-01)

Torch's constructors pack zeros, which the real weight replaces at once.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch.ao.nn.quantized as nnq
from torch import Tensor, nn
from torch.ao.nn.quantized.modules import conv as nnq_conv


def pack_native(native: Any, *arguments: Any) -> nn.Module:
    """Return ``native.from_reference(*arguments)``, with the weight packed once. (LOW-01)"""
    late = _make_late_class(native)
    module: Any = late.from_reference(*arguments)
    if late is not native:
        weight_bias = module.__dict__.pop("_weight_bias_given", None)
        module.__class__ = native
        if weight_bias is not None:
            module.set_weight_bias(*weight_bias)
    return module  # type: ignore[no-any-return]


@cache
def _make_late_class(native: Any) -> Any:
    """Return a subclass whose constructor packs nothing of the weight's size."""
    if issubclass(native, nnq_conv._ConvNd):
        return type(native.__name__, (_LateConv, native), {})
    return type(native.__name__, (_LateLinear, native), {}) if issubclass(native, nnq.Linear) else native


class _LateConv:
    """Keeps the last weight and bias, unpacked."""

    def set_weight_bias(self, weight: Tensor, bias: Tensor | None) -> None:
        self.__dict__["_weight_bias_given"] = (weight, bias)


class _LateLinear(nnq.Linear):
    """Has one feature until it gets its weight."""

    def __init__(self, in_features: int, out_features: int, *args: Any, **kwargs: Any) -> None:
        super().__init__(1, 1, *args, **kwargs)  # type: ignore[no-untyped-call]
        self.in_features, self.out_features = in_features, out_features
