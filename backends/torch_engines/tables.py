"""The BackendConfigs of torch's native engines by name (CFG-09, DTY-02).

They claim, pair by pair and in the same order, what torch's own configs of these names claim: families of
`refimpl.config.native`, and two that only onednn has. The order of the keys is the order of registration (PAT-07); the
order of the dtype configs is the order of preference (DTY-02).
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from typing import Final, Literal, TypeAlias, get_args

import torch
import torch.nn.functional as F
from torch import nn

from fx_quant_conformance.backends.onednn_fusers import conv_add, extra_inputs_getter, root_node_getter
from fx_quant_conformance.refimpl.config import native
from fx_quant_conformance.refimpl.config.backend_config import BackendConfig
from fx_quant_conformance.refimpl.config.dtype_config import DTypeConfig, DTypeWithConstraints
from fx_quant_conformance.refimpl.config.fusers import fuse_bn, sequential
from fx_quant_conformance.refimpl.config.native import (
    DYNAMIC_F16,
    DYNAMIC_U8_S8,
    LINEAR_SWAP,
    U8,
    U8_F32,
    U8_S8,
    WEIGHT_U4,
    WEIGHT_U8,
    Module,
    Row,
)
from fx_quant_conformance.refimpl.config.patterns import Leaf, MatchAllNode
from fx_quant_conformance.refimpl.errors import ConfigError
from fx_quant_conformance.refimpl.legacy import nni, nnqr, qint8

NativeName: TypeAlias = Literal["native", "qnnpack", "fbgemm", "x86", "onednn"]


def _list_conv_adds() -> Iterator[Row]:
    """Yield conv(+bn) + add (+ relu), the convolution left or right; the other operand is an extra input."""
    for fused, relu in ((nni.ConvAdd2d, False), (nni.ConvAddReLU2d, True)):
        for side in (0, 1):
            for branch in ((nn.BatchNorm2d, nn.Conv2d), nn.Conv2d):
                for add in (torch.add, operator.add):
                    summed = (add, branch, MatchAllNode) if side == 0 else (add, MatchAllNode, branch)
                    pattern = (nn.ReLU, summed) if relu else summed
                    getters = (root_node_getter(pattern), extra_inputs_getter(pattern))
                    fuser = conv_add(conv_side=side, relu=relu)
                    yield Row(patterns=(pattern,), getters=getters, fused=fused, fuser=fuser)
        yield Row(patterns=(fused,), root=nn.Conv2d, reference=nnqr.Conv2d)


def _list_linears(module: Module, function: Leaf, fused: Module) -> tuple[Row, ...]:
    """List a linear layer with an elementwise op after it, as modules and as functions."""
    return (
        Row(patterns=((nn.Linear, module), (nn.Linear, function)), fused=fused, fuser=sequential(fused)),
        Row(patterns=(fused,), **LINEAR_SWAP),
        Row(patterns=((F.linear, module), (F.linear, function))),
    )


FAMILIES: Final[Mapping[str, tuple[Row, ...]]] = {
    **native.FAMILIES,
    "conv + add": tuple(_list_conv_adds()),
    "linear + post op": (
        *_list_linears(nn.LeakyReLU, F.leaky_relu, nni.LinearLeakyReLU),
        Row(patterns=((nn.Linear, nn.BatchNorm1d, nn.LeakyReLU),), fused=nni.LinearLeakyReLU, fuser=fuse_bn),
        *_list_linears(nn.Tanh, torch.tanh, nni.LinearTanh),
    ),
}

# XNNPACK's kernels: symmetric activations and weights, and scales that keep the requantization within range.
_S8_ACTIVATION = DTypeWithConstraints(qint8, scale_min_lower_bound=2**-12)
_S8_WEIGHT = DTypeWithConstraints(
    qint8, quant_min_lower_bound=-127, quant_max_upper_bound=127, scale_min_lower_bound=2**-12
)
S8 = DTypeConfig(_S8_ACTIVATION, _S8_ACTIVATION)
S8_S8 = DTypeConfig(_S8_ACTIVATION, _S8_ACTIVATION, _S8_WEIGHT, torch.float32)
WEIGHT_S8 = DTypeConfig(torch.float32, torch.float32, qint8)

_QNNPACK: native.Table = {
    "conv": (S8_S8, U8_S8),
    "linear": (S8_S8, U8_S8, DYNAMIC_U8_S8, DYNAMIC_F16),
    **dict.fromkeys(("binary", "cat", "default", "fixed qparams", "share qparams", "batch norm"), (S8, U8)),
    "rnn": (DYNAMIC_U8_S8, DYNAMIC_F16),
    "embedding": (WEIGHT_U8, WEIGHT_U4),
}
_FBGEMM: native.Table = {family: dtypes for family, dtypes in native.NATIVE.items() if family != "layer norm"}
# Ops without a weight name a weight dtype all the same, as in torch's config.
_X86: native.Table = {**_FBGEMM, "binary": (U8_S8,), "fixed qparams": (U8_S8,)}
_ONEDNN: native.Table = {
    "conv": (U8_S8,),
    "conv + add": (U8_S8,),
    "linear": (U8_S8, DYNAMIC_U8_S8),
    "linear + post op": (U8_S8, DYNAMIC_U8_S8),
    **dict.fromkeys(("binary", "cat", "default", "fixed qparams", "share qparams", "batch norm"), (U8,)),
    "layer norm": (U8_F32,),
    "rnn": (DYNAMIC_U8_S8,),
    "embedding": (WEIGHT_S8,),
}
TABLES: Final[Mapping[NativeName, native.Table]] = {
    "native": native.NATIVE,
    "qnnpack": _QNNPACK,
    "fbgemm": _FBGEMM,
    "x86": _X86,
    "onednn": _ONEDNN,
}


def native_config(name: NativeName) -> BackendConfig:
    """Return a new BackendConfig of a native engine, or torch's default "native" for all engines. (CFG-09)

    Raises ConfigError, with the choices, for any other name.
    """
    if name not in TABLES:
        raise ConfigError(f"unknown native backend {name!r}; expected one of {', '.join(get_args(NativeName))}")
    return native.config_of(name, TABLES[name], FAMILIES)
