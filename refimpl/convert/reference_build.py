"""Building reference modules in less time; the modules are the same. (CVT-02)

Torch's constructors fill weights with random numbers, which the real weight replaces at once.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from fx_quant_conformance.refimpl.legacy import nnqr

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
