"""Faults of a config and of the modules and fuser methods that it names: what no kernel is to blame for."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.ao.nn.intrinsic as nni
import torch.ao.nn.intrinsic.qat as nniqat
import torch.ao.nn.quantized.reference as nnqr
from torch import nn
from torch.fx import GraphModule

from fx_quant_conformance.backends.base import UnsupportedPattern
from fx_quant_conformance.refimpl import BackendPatternConfig, DTypeConfig, DTypeWithConstraints, MatchAllNode
from fx_quant_conformance.refimpl.config.dtype_config import DTypeWithConstraints as Constraints
from fx_quant_conformance.refimpl.config.patterns import pattern_name
from tests.mutants.own_modules import OwnModules, RoundedDown
from tests.mutants.reference_faults import seed
from tests.mutants.reference_kernels import Edited, SmallReference, Stepped, config_with, weighted

BN, BN_RELU = "nn.Conv2d+nn.BatchNorm2d", "nn.Conv2d+nn.BatchNorm2d+nn.ReLU"


def entry(
    group: str,
    name: str,
    pattern: str,
    change: Callable[[BackendPatternConfig], object],
    *rules: str,
    claimed: str = "",
) -> None:
    """Enter a fault of one entry; ``claimed``: the pattern under which its claims go, if the fault changes it."""
    claims = (f"{claimed or pattern}/*", "model/residual/ptq/*", "torch.flatten/*/ptq/*")
    seed(group, name, lambda: SmallReference(config_with(pattern, change)), *rules, claims=claims)


# -- fuser methods ----------------------------------------------------------------------------------------------------


def _fused(conv: nn.Conv2d, norm: nn.BatchNorm2d, eps: float) -> nn.Conv2d:
    assert norm.running_mean is not None and norm.running_var is not None
    factor = norm.weight / (norm.running_var + eps).sqrt()
    bias = torch.zeros_like(norm.running_mean) if conv.bias is None else conv.bias
    conv.weight = nn.Parameter(conv.weight * factor.reshape(-1, 1, 1, 1))
    conv.bias = nn.Parameter((bias - norm.running_mean) * factor + norm.bias)
    return conv


def _other_eps(is_qat: bool, conv: Any, norm: Any) -> Any:
    del is_qat
    return _fused(conv, norm, 0.0)


def _no_norm(is_qat: bool, conv: Any, norm: Any) -> Any:
    del is_qat, norm
    return conv


def _not_folded(is_qat: bool, conv: Any, norm: Any) -> Any:
    del is_qat
    return nn.Sequential(conv, norm)


def _no_relu(is_qat: bool, conv: Any, norm: Any, relu: Any) -> Any:
    del is_qat, relu
    fused: Any = nni.ConvReLU2d
    return fused(_fused(conv, norm, norm.eps), nn.Identity())


def _raises(is_qat: bool, conv: Any, norm: Any) -> Any:
    raise RuntimeError("no fusion today")


entry("structure", "batch norm folded with another eps", BN, lambda e: e.set_fuser_method(_other_eps), "FUS-06")
entry("structure", "batch norm dropped", BN, lambda e: e.set_fuser_method(_no_norm), "FUS-06")
entry("structure", "batch norm not folded", BN, lambda e: e.set_fuser_method(_not_folded), "FUS-02")
entry("structure", "relu dropped by a fuser method", BN_RELU, lambda e: e.set_fuser_method(_no_relu), "FUS-06")
entry("structure", "fuser method raises", BN, lambda e: e.set_fuser_method(_raises), "FUS-02")
entry("claims", "fuser method takes too few modules", BN_RELU, lambda e: e.set_fuser_method(_no_norm), "FUS-02")
entry(
    "claims",
    "fused module without a fuser method",
    "nn.Hardswish",
    lambda e: e.set_fused_module(nn.Hardswish),
    "FUS-08",
)

# -- modules ----------------------------------------------------------------------------------------------------------


class Unquantized(nnqr.Conv1d):
    """A reference module that forgets to quantize."""

    @classmethod
    def from_float(cls, float_conv: Any, weight_qparams: dict[str, Any]) -> Any:  # type: ignore[override]
        del weight_qparams
        return float_conv


class Unmade(nn.Conv1d):
    """A class that cannot be made of the float one."""


class Unbiased(nnqr.Conv1d):
    """Makes a reference module that has lost the bias on the way."""

    @classmethod
    def from_float(cls, float_conv: Any, weight_qparams: dict[str, Any]) -> Any:  # type: ignore[override]
        make: Any = nnqr.Conv1d.from_float
        found = make(float_conv, weight_qparams)
        found.bias = None
        return found


class Reversed(nnqr.Conv1d):
    """Makes a reference module whose channels are in another order: the range of the result is the same.

    Not of groups, where other inputs would meet other weights.
    """

    @classmethod
    def from_float(cls, float_conv: Any, weight_qparams: dict[str, Any]) -> Any:  # type: ignore[override]
        make: Any = nnqr.Conv1d.from_float
        found = make(float_conv, weight_qparams)
        for values in (found.weight, found.bias, found.weight_scale, found.weight_zero_point):
            if values is not None and values.dim() and found.groups == 1:
                values.data = values.flip(0)
        return found


class PlainQat(torch.ao.nn.qat.Linear):
    """A class for training that scales its weight."""

    @classmethod
    def from_float(cls, mod: Any, use_precomputed_fake_quant: bool = False) -> Any:
        make: Any = super().from_float
        found = make(mod, use_precomputed_fake_quant)
        with torch.no_grad():
            found.weight.mul_(1.0625)
        return found


class OtherEps(nniqat.ConvBnReLU2d):
    """A class for training whose batch norm has another eps."""

    @classmethod
    def from_float(cls, mod: Any, use_precomputed_fake_quant: bool = False) -> Any:
        make: Any = super().from_float
        found = make(mod, use_precomputed_fake_quant)
        found.bn.eps = 1e-5
        return found


def _trained_by(kind: type[nn.Module], pattern: str, trained: str) -> SmallReference:
    """Claims in which a class for training, and its own entry, have another one in their place."""
    config = config_with(pattern, lambda e: e.set_qat_module(kind))
    entry = next(each for each in config.configs if pattern_name(each.normal_pattern) == trained)
    return SmallReference(config.set_backend_pattern_config(entry.set_pattern(kind)))


seed(
    "structure",
    "class for training with another eps",
    lambda: _trained_by(OtherEps, "nni.ConvBnReLU2d", "nniqat.ConvBnReLU2d"),
    "QAT-01",
    claims=("nni.ConvBnReLU2d/*", "torch.flatten/*"),
)
entry(
    "claims",
    "no reference module",
    "nn.Conv1d",
    lambda e: setattr(e, "reference_quantized_module", None),
    "CVT-02",
    "CFG-11",
)
entry(
    "structure",
    "reference module loses the bias",
    "nn.Conv1d",
    lambda e: e.set_reference_quantized_module(Unbiased),
    "CVT-02",
    "FUS-06",
)
entry(
    "structure",
    "reference module reverses its channels",
    "nn.Conv1d",
    lambda e: e.set_reference_quantized_module(Reversed),
    "CVT-02",
    "FUS-06",
)
entry(
    "structure",
    "reference module forgets to quantize",
    "nn.Conv1d",
    lambda e: e.set_reference_quantized_module(Unquantized),
    "CVT-02",
)
entry(
    "claims",
    "reference module that cannot be made",
    "nn.Conv1d",
    lambda e: e.set_reference_quantized_module(Unmade),
    "CVT-02",
)
seed(
    "structure",
    "own reference module rounds its weight down",
    partial(OwnModules, "independent reference", reference=RoundedDown),
    "CVT-02",
    claims=("nn.Linear/*",),
)
entry(
    "claims", "class for training that no entry quantizes", "nn.Linear", lambda e: e.set_qat_module(PlainQat), "QAT-01"
)

# -- constraints and dtypes -------------------------------------------------------------------------------------------


def _repatterned(e: Any, pattern: Any) -> None:
    e.pattern = None
    e._set_pattern_complex_format(pattern)


EMPTY = DTypeConfig(Constraints(dtype=torch.quint8, quant_min_lower_bound=9, quant_max_upper_bound=3), torch.quint8)
FIXED = DTypeWithConstraints(torch.quint8, 0, 255, scale_exact_match=-0.5, zero_point_exact_match=0)

entry("claims", "bounds that leave no integer", "torch.cat", lambda e: e.set_dtype_configs([EMPTY]), "CFG-02")
entry("claims", "a negative scale", "nn.Softmax", lambda e: e.set_dtype_configs([DTypeConfig(FIXED, FIXED)]), "CFG-02")
entry(
    "claims",
    "output dtype that the input's observer excludes",
    "nn.Identity",
    lambda e: e.set_dtype_configs([DTypeConfig(torch.quint8, torch.qint8)]),
    "CFG-02",
    "DTY-01",
)
entry(
    "claims",
    "an op that is a wildcard",
    "nn.Hardswish",
    lambda e: _repatterned(e, (MatchAllNode, nn.ReLU)),
    "PAT-05",
    claimed="nn.ReLU+[*]",
)


def _only(kind: Any, then: Callable[[GraphModule], object]) -> Callable[[GraphModule], None]:
    def edit(model: GraphModule) -> None:
        if any(isinstance(module, kind) for module in model.modules()):
            then(model)

    return edit


def _decline(model: GraphModule) -> None:
    raise UnsupportedPattern("no kernel for a hardswish")


def _raise(model: GraphModule) -> None:
    raise RuntimeError("assertion failed in the compiler")


def _signed(honest: Any, node: Any, value: Any, scale: Any, zero: Any, low: int, high: int, dtype: Any) -> Any:
    """A kernel of unsigned integers alone: signed ones are cut off at zero."""
    found = honest(node, value, scale, zero, low, high, dtype)
    return found.clamp(min=0) if dtype is torch.int8 and isinstance(scale, float) else found


def _scale_floor(honest: Any, node: Any, value: Any, scale: Any, *rest: Any) -> Any:
    """A kernel whose scales are 2^-12 at least, though the config says nothing of it."""
    return honest(node, value, max(scale, 2.0**-12) if isinstance(scale, float) else scale, *rest)


def _per_tensor(model: GraphModule) -> None:
    """Says that it takes a scale for each channel, and has one for all."""
    for module in weighted(model):
        if module.weight_scale.numel() > 1:
            module.weight_scale.fill_(float(module.weight_scale.max()))


def _die(model: GraphModule) -> None:
    import os

    os.abort()


def _hang(honest: Any, module: Any, *arguments: Any, **keywords: Any) -> Any:
    while isinstance(module, nn.Softmax):
        pass
    return honest(module, *arguments, **keywords)


seed(
    "claims",
    "declines what it claims",
    partial(Edited, _only(nn.Hardswish, _decline)),
    "LOW-01",
    claims=("nn.Hardswish/*", "torch.flatten/*"),
)
seed(
    "claims",
    "cannot compile what it claims",
    partial(Edited, _only(nn.Sigmoid, _raise)),
    "LOW-01",
    claims=("nn.Sigmoid/*", "torch.flatten/*"),
)
seed(
    "claims",
    "claims signed integers, takes unsigned ones",
    partial(Stepped, "quantize", _signed),
    "NUM-03",
    claims=("nn.Conv1d/*", "nn.Softmax/*"),
)
seed("claims", "takes scales from 2^-12 on, unsaid", partial(Stepped, "quantize", _scale_floor), "NUM-03", "NUM-05")
seed("claims", "claims per-channel scales, has one for all", partial(Edited, _per_tensor), "NUM-03")
seed(
    "claims",
    "dies on one op",
    partial(Edited, _only(nn.ReLU6, _die)),
    "CRASHED",
    claims=("nn.ReLU6/*", "torch.flatten/*"),
)
seed(
    "claims",
    "hangs on one op",
    partial(Stepped, "called", _hang),
    "TIMEOUT",
    claims=("nn.Softmax/static:in=quint8*/ptq/*", "torch.flatten/*/ptq/*"),
)
