"""Building torch's reference and quantized modules in less time; the modules are the same. (CVT-02, LOW-01)

Torch's constructors fill weights with random numbers, or pack zeros, which the real weight replaces at once.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch.ao.nn.quantized as nnq
import torch.ao.nn.quantized.reference as nnqr
from torch import Tensor, nn
from torch.ao.nn.quantized.modules import conv as nnq_conv

_GEOMETRY = ("kernel_size", "stride", "padding", "dilation", "output_padding")
_CONV = ("in_channels", "out_channels", *_GEOMETRY, "groups", "padding_mode", "transposed")
_CONVS = ("Conv1d", "Conv2d", "Conv3d", "ConvTranspose1d", "ConvTranspose2d", "ConvTranspose3d")
# torch's reference classes that can be built from their float class, with its attributes
_ATTRIBUTES: dict[type, tuple[type, tuple[str, ...]]] = {
    nnqr.Linear: (nn.Linear, ("in_features", "out_features")),
    **{getattr(nnqr, name): (getattr(nn, name), _CONV) for name in _CONVS},
}


def build_reference(reference: Any, root: Any, qparams: dict[str, Any]) -> nn.Module:
    """Return ``reference.from_float(root, qparams)``, without filling the weight with random numbers before. (CVT-02)

    It is called for a class that is not torch's, or a float module of another than the plain class.
    """
    plain, names = _ATTRIBUTES.get(reference, (None, ()))
    is_plain = type(root) is plain and all(isinstance(getattr(root, name, ()), tuple) for name in _GEOMETRY)
    if not is_plain:
        return reference.from_float(root, qparams)  # type: ignore[no-any-return]
    module = reference.__new__(reference)
    nn.Module.__init__(module)
    module.__dict__.update({name: root.__dict__[name] for name in names})
    if "padding" in names:
        module._reversed_padding_repeated_twice = tuple(size for size in reversed(root.padding) for _ in range(2))
    for name in ("weight", "bias"):
        value = getattr(root, name)
        module.register_parameter(name, None if value is None else nn.Parameter(value.detach()))
    module._init_weight_qparams(qparams, root.weight.device)
    return module  # type: ignore[no-any-return]


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
