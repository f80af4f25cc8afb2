"""The BackendConfigs of torch's native engines: which dtypes each family of ops takes (CFG-09, DTY-02).

They claim, pair by pair and in the same order, what torch's own configs of qnnpack, fbgemm, x86 and onednn
claim. The key of a row is a family of `backends.native_ops`; the order of the keys is the order of
registration (PAT-07), and the order of the dtype configs is the order of preference (DTY-02).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal, TypeAlias, get_args

import torch

from backends.native_ops import FAMILIES, entries
from refimpl.backend_config import BackendConfig
from refimpl.dtype_config import DTypeConfig, DTypeWithConstraints
from refimpl.errors import ConfigError

NativeName: TypeAlias = Literal["qnnpack", "fbgemm", "x86", "onednn"]
Table: TypeAlias = Mapping[str, tuple[DTypeConfig, ...]]

_F32, _F16, _U8, _S8 = torch.float32, torch.float16, torch.quint8, torch.qint8

# XNNPACK's kernels: symmetric activations and weights, and scales that keep the requantization in its range.
_S8_ACTIVATION = DTypeWithConstraints(dtype=_S8, scale_min_lower_bound=2**-12)
_S8_WEIGHT = DTypeWithConstraints(
    dtype=_S8, quant_min_lower_bound=-127, quant_max_upper_bound=127, scale_min_lower_bound=2**-12
)

#                         input           output          weight          bias
U8 = DTypeConfig(_U8, _U8)
U8_S8 = DTypeConfig(_U8, _U8, _S8, _F32)
U8_F32 = DTypeConfig(_U8, _U8, _F32, _F32)
S8 = DTypeConfig(_S8_ACTIVATION, _S8_ACTIVATION)
S8_S8 = DTypeConfig(_S8_ACTIVATION, _S8_ACTIVATION, _S8_WEIGHT, _F32)
DYNAMIC_U8_S8 = DTypeConfig(_U8, _F32, _S8, _F32, is_dynamic=True)
DYNAMIC_F16 = DTypeConfig(_F16, _F32, _F16, _F32, is_dynamic=True)
WEIGHT_U8 = DTypeConfig(_F32, _F32, _U8)
WEIGHT_U4 = DTypeConfig(_F32, _F32, torch.quint4x2)
WEIGHT_S8 = DTypeConfig(_F32, _F32, _S8)

_QNNPACK: Table = {
    "conv": (S8_S8, U8_S8),
    "linear": (S8_S8, U8_S8, DYNAMIC_U8_S8, DYNAMIC_F16),
    "binary": (S8, U8),
    "cat": (S8, U8),
    "default": (S8, U8),
    "fixed qparams": (S8, U8),
    "share qparams": (S8, U8),
    "batch norm": (S8, U8),
    "rnn": (DYNAMIC_U8_S8, DYNAMIC_F16),
    "embedding": (WEIGHT_U8, WEIGHT_U4),
}
_FBGEMM: Table = {
    "conv": (U8_S8,),
    "linear": (U8_S8, DYNAMIC_U8_S8, DYNAMIC_F16),
    "binary": (U8,),
    "cat": (U8,),
    "default": (U8,),
    "fixed qparams": (U8,),
    "share qparams": (U8,),
    "tensor info": (U8,),
    "batch norm": (U8,),
    "rnn": (DYNAMIC_U8_S8, DYNAMIC_F16),
    "embedding": (WEIGHT_U8, WEIGHT_U4),
}
# Ops without a weight that name a weight dtype all the same: so does torch's config.
_X86: Table = {**_FBGEMM, "binary": (U8_S8,), "fixed qparams": (U8_S8,)}
_ONEDNN: Table = {
    "conv": (U8_S8,),
    "conv + add": (U8_S8,),
    "linear": (U8_S8, DYNAMIC_U8_S8),
    "linear + post op": (U8_S8, DYNAMIC_U8_S8),
    "binary": (U8,),
    "cat": (U8,),
    "default": (U8,),
    "fixed qparams": (U8,),
    "share qparams": (U8,),
    "batch norm": (U8,),
    "layer norm": (U8_F32,),
    "rnn": (DYNAMIC_U8_S8,),
    "embedding": (WEIGHT_S8,),
}
TABLES: Final[Mapping[NativeName, Table]] = {
    "qnnpack": _QNNPACK,
    "fbgemm": _FBGEMM,
    "x86": _X86,
    "onednn": _ONEDNN,
}


def native_config(name: NativeName) -> BackendConfig:
    """Return a new BackendConfig of the native engine `name`. (CFG-09)

    Raises ConfigError, with the choices, for any other name.
    """
    if name not in TABLES:
        raise ConfigError(f"unknown native backend {name!r}; expected one of {', '.join(get_args(NativeName))}")
    config = BackendConfig(name)
    for family, dtype_configs in TABLES[name].items():
        for row in FAMILIES[family]:
            config.set_backend_pattern_configs(entries(row, dtype_configs))
    return config
