"""The default BackendConfig of the front doors: torch's "native" one (CFG-05, CFG-06, CFG-09, DTY-02).

It has the claims of torch's, in the same order: families of ops, each a tuple of rows in order of registration, which
decides ties between patterns of equal size (PAT-07), with the dtype configs of each in order of preference (DTY-02). A
vendor's tables can be made of the same rows.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Final, TypeAlias

import torch
import torch.nn.functional as F
from torch import nn

from fx_quant_conformance.refimpl.config.backend_config import (
    DIFFERENT,
    NOT_OBSERVED,
    SHARE,
    BackendConfig,
    BackendPatternConfig,
    ObservationType,
    as_backend_config,
)
from fx_quant_conformance.refimpl.config.dtype_config import DTypeConfig, DTypeWithConstraints
from fx_quant_conformance.refimpl.config.fusers import FuserMethod, fuse_bn, sequential
from fx_quant_conformance.refimpl.config.patterns import Leaf, Pattern
from fx_quant_conformance.refimpl.legacy import nni, nniqat, nnqat, nnqr, qint8, quint4x2, quint8

Module: TypeAlias = type[nn.Module]
Table: TypeAlias = Mapping[str, tuple[DTypeConfig, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Patterns with the same claims, whatever the dtypes are."""

    patterns: tuple[Pattern, ...]
    getters: tuple[Callable[[Any], Any], Callable[[Any], list[Any]]] | None = None
    """The getters of root and extra inputs; the patterns are then in normal form. (FUS-03, FUS-04)"""
    observe: ObservationType = DIFFERENT
    observe_by_tensor_args: Mapping[int, ObservationType] = field(default_factory=dict)
    root: Module | None = None
    reference: Module | None = None
    qat: Module | None = None
    fused: Module | None = None
    fuser: FuserMethod | None = None
    index: Mapping[str, int] = field(default_factory=dict)
    """The index of weight and bias among a function's arguments."""
    output: DTypeWithConstraints | None = None
    """Constraints for activations of its dtype."""


def make_entries(row: Row, dtype_configs: Iterable[DTypeConfig]) -> Iterator[BackendPatternConfig]:
    """Yield one new BackendConfig entry per pattern of the row, for these dtype configs. (CFG-05, CFG-06)"""
    dtypes = [_constrain(dtype_config, row.output) for dtype_config in dtype_configs]
    for pattern in row.patterns:
        entry = BackendPatternConfig(None if row.getters else pattern)
        if row.getters:
            entry._pattern_complex_format = pattern
            entry._root_node_getter, entry._extra_inputs_getter = row.getters
        entry.observation_type, entry.dtype_configs = row.observe, list(dtypes)
        entry.root_module, entry.reference_quantized_module, entry.qat_module = row.root, row.reference, row.qat
        entry.fused_module, entry.fuser_method = row.fused, row.fuser
        entry._num_tensor_args_to_observation_type = dict(row.observe_by_tensor_args)
        entry._input_type_to_index = dict(row.index)
        yield entry


def _constrain(config: DTypeConfig, bound: DTypeWithConstraints | None) -> DTypeConfig:
    """Put the bound on the activations that have its dtype; others are left as they are. (DTY-05)"""
    if bound is None:
        return config
    activations = (config.input_dtype_with_constraints, config.output_dtype_with_constraints)
    inputs, outputs = (bound if activation.dtype == bound.dtype else activation for activation in activations)
    return DTypeConfig(inputs, outputs, config.weight_dtype_with_constraints, config.bias_dtype, config.is_dynamic)


def config_of(name: str, table: Table, families: Mapping[str, Iterable[Row]]) -> BackendConfig:
    """Return a new BackendConfig of the families that the table names, with its dtype configs. (CFG-09)"""
    config = BackendConfig(name)
    for family, dtype_configs in table.items():
        for row in families[family]:
            config.set_backend_pattern_configs(make_entries(row, dtype_configs))
    return config


def _pick(namespace: Any, names: str) -> tuple[Leaf, ...]:
    return tuple(getattr(namespace, name) for name in names.split())


def _methods(names: str) -> tuple[Leaf, ...]:
    return tuple(names.split())


# ---- layers with weights ----------------------------------------------------------------------------------

_WEIGHT_BIAS = {"weight": 1, "bias": 2}
_FUSED_CONVS = ("ConvReLU", "ConvBn", "ConvBnReLU")


def _rows_of_layer(layer: Module, reference: Module, qat: Module, *functions: Leaf) -> tuple[Row, ...]:
    """Return the rows of a layer with weights: the module, its QAT class, its functions."""
    swap: dict[str, Any] = {"root": layer, "reference": reference}
    by_function = (Row(patterns=(function,), index=_WEIGHT_BIAS) for function in functions)
    return Row(patterns=(layer,), qat=qat, **swap), Row(patterns=(qat,), **swap), *by_function


def _rows_of_conv(d: int) -> tuple[Row, ...]:
    """Return the rows of convolutions in d dimensions. Fused classes name only their QAT class."""
    conv, bn, transpose = (getattr(nn, f"{name}{d}d") for name in ("Conv", "BatchNorm", "ConvTranspose"))
    fused_relu, fused_bn, fused_bn_relu = (getattr(nni, f"{name}{d}d") for name in _FUSED_CONVS)
    qat_relu, qat_bn, qat_bn_relu = (getattr(nniqat, f"{name}{d}d") for name in _FUSED_CONVS)
    conv_function, transpose_function = getattr(F, f"conv{d}d"), getattr(F, f"conv_transpose{d}d")
    swap = {"root": conv, "reference": getattr(nnqr, f"Conv{d}d")}
    swap_transpose = {"root": transpose, "reference": getattr(nnqr, f"ConvTranspose{d}d")}
    return (
        *_rows_of_layer(conv, swap["reference"], getattr(nnqat, f"Conv{d}d"), conv_function),
        Row(patterns=((conv, nn.ReLU), (conv, F.relu)), fused=fused_relu, fuser=sequential(fused_relu)),
        Row(patterns=(fused_relu,), qat=qat_relu),
        Row(patterns=(qat_relu,), **swap),
        Row(patterns=((conv_function, nn.ReLU), (conv_function, F.relu))),
        Row(patterns=((conv, bn),), fused=fused_bn, fuser=fuse_bn),
        Row(patterns=((conv, bn, nn.ReLU),), fused=fused_bn_relu, fuser=fuse_bn),
        Row(patterns=((conv, bn, F.relu),), fused=fused_bn_relu, fuser=fuse_bn, root=conv),
        Row(patterns=(fused_bn,), qat=qat_bn),
        Row(patterns=(fused_bn_relu,), qat=qat_bn_relu),
        Row(patterns=(qat_bn, qat_bn_relu), **swap),
        Row(patterns=(transpose,), **swap_transpose),
        Row(patterns=((transpose, bn),), fuser=fuse_bn, **swap_transpose),
        Row(patterns=(transpose_function,), index=_WEIGHT_BIAS),
    )


LINEAR_SWAP: dict[str, Any] = {"root": nn.Linear, "reference": nnqr.Linear}
_LINEAR = (
    *_rows_of_layer(nn.Linear, nnqr.Linear, nnqat.Linear, F.linear),
    Row(patterns=((nn.Linear, nn.ReLU), (nn.Linear, F.relu)), fused=nni.LinearReLU, fuser=sequential(nni.LinearReLU)),
    Row(patterns=(nni.LinearReLU,), qat=nniqat.LinearReLU, **LINEAR_SWAP),
    Row(patterns=(nniqat.LinearReLU,), **LINEAR_SWAP),
    Row(patterns=((F.linear, nn.ReLU), (F.linear, F.relu))),
    Row(patterns=((nn.Linear, nn.BatchNorm1d),), fused=nni.LinearBn1d, fuser=fuse_bn),
    Row(patterns=(nni.LinearBn1d,), qat=nniqat.LinearBn1d, **LINEAR_SWAP),
    Row(patterns=(nniqat.LinearBn1d,), **LINEAR_SWAP),
)
_RECURRENT = ("GRUCell", "LSTMCell", "RNNCell", "LSTM", "GRU")
_RNN = (Row(patterns=(getattr(nn, n),), root=getattr(nn, n), reference=getattr(nnqr, n)) for n in _RECURRENT)
_EMBEDDING = (
    *_rows_of_layer(nn.Embedding, nnqr.Embedding, nnqat.Embedding),
    *_rows_of_layer(nn.EmbeddingBag, nnqr.EmbeddingBag, nnqat.EmbeddingBag),
)

# ---- ops without weights, and norms -----------------------------------------------------------------------

_SCALAR = {0: DIFFERENT, 1: SHARE, 2: DIFFERENT}  # one tensor: the other operand is a scalar
_BINARY = (
    *(
        Row(patterns=((op, nn.ReLU), (op, F.relu), (op, torch.relu), op), observe_by_tensor_args=_SCALAR)
        for op in (operator.add, torch.add, operator.mul, torch.mul)
    ),
    Row(patterns=(torch.matmul,)),
)
_DEFAULT = (
    Row(
        patterns=(
            *_pick(nn, "ELU LeakyReLU Hardswish InstanceNorm1d InstanceNorm2d InstanceNorm3d Dropout PReLU"),
            *_pick(F, "elu hardswish leaky_relu dropout"),
        )
    ),
    Row(patterns=(F.group_norm,), index={"weight": 2, "bias": 3}),
    Row(patterns=(F.instance_norm,), index={"weight": 3, "bias": 4}),
)


def _fix_output(width: float, zero_point: int) -> DTypeWithConstraints:
    """Return the constraints of an op whose output range, and so scale and zero point, is known before. (DTY-05)"""
    exact: dict[str, Any] = {"scale_exact_match": width / 256, "zero_point_exact_match": zero_point}
    return DTypeWithConstraints(quint8, quant_min_lower_bound=0, quant_max_upper_bound=255, **exact)


_FIXED_QPARAMS = (
    Row(patterns=(nn.Hardsigmoid, F.hardsigmoid, "hardsigmoid", "hardsigmoid_"), output=_fix_output(1.0, 0)),
    Row(patterns=(nn.Sigmoid, torch.sigmoid, "sigmoid", "sigmoid_", nn.Softmax), output=_fix_output(1.0, 0)),
    Row(patterns=(nn.Tanh, torch.tanh, "tanh", "tanh_"), output=_fix_output(2.0, 128)),
)

_SHARE_QPARAMS = Row(
    observe=SHARE,
    patterns=(
        *_pick(nn, "AdaptiveAvgPool1d AdaptiveAvgPool2d AdaptiveAvgPool3d AvgPool1d AvgPool2d AvgPool3d Hardtanh"),
        *_pick(nn, "Identity MaxPool1d MaxPool2d MaxPool3d PixelShuffle PixelUnshuffle ReLU ReLU6"),
        *_pick(F, "adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d hardtanh hardtanh_ interpolate"),
        *_pick(F, "max_pool1d max_pool2d max_pool3d pixel_shuffle pixel_unshuffle relu relu6"),
        *_pick(F, "avg_pool1d avg_pool2d avg_pool3d"),
        *_pick(torch, "clamp flatten mean narrow repeat_interleave transpose squeeze stack unsqueeze"),
        operator.floordiv,
        *_methods("contiguous clamp detach detach_ mean permute repeat repeat_interleave reshape resize_"),
        *_methods("relu relu_ squeeze squeeze_ transpose unsqueeze unsqueeze_ view"),
    ),
)


def _rows_of_batch_norm() -> Iterator[Row]:
    fused_by_norm: dict[Module, Module] = {nn.BatchNorm2d: nni.BNReLU2d, nn.BatchNorm3d: nni.BNReLU3d}
    for norm, fused in fused_by_norm.items():
        yield Row(patterns=((norm, nn.ReLU), (norm, F.relu)), fused=fused, fuser=sequential(fused))
        yield Row(patterns=(norm,))
    yield Row(patterns=tuple(fused_by_norm.values()))


FAMILIES: Final[Mapping[str, tuple[Row, ...]]] = {
    "conv": (*_rows_of_conv(1), *_rows_of_conv(2), *_rows_of_conv(3)),
    "linear": _LINEAR,
    "binary": _BINARY,
    "cat": (Row(patterns=(torch.cat,), observe=SHARE),),
    "default": _DEFAULT,
    "fixed qparams": _FIXED_QPARAMS,
    "share qparams": (_SHARE_QPARAMS,),
    "tensor info": (Row(patterns=("shape", "size"), observe=NOT_OBSERVED),),
    "batch norm": tuple(_rows_of_batch_norm()),
    "layer norm": (Row(patterns=(nn.LayerNorm,)), Row(patterns=(F.layer_norm,), index={"weight": 2, "bias": 3})),
    "rnn": tuple(_RNN),
    "embedding": _EMBEDDING,
}

# ---- dtypes -----------------------------------------------------------------------------------------------

_F32, _F16, _U8, _S8 = torch.float32, torch.float16, quint8, qint8
#                         input           output          weight          bias
U8 = DTypeConfig(_U8, _U8)
U8_S8 = DTypeConfig(_U8, _U8, _S8, _F32)
U8_F32 = DTypeConfig(_U8, _U8, _F32, _F32)
DYNAMIC_U8_S8 = DTypeConfig(_U8, _F32, _S8, _F32, is_dynamic=True)
DYNAMIC_F16 = DTypeConfig(_F16, _F32, _F16, _F32, is_dynamic=True)
WEIGHT_U8 = DTypeConfig(_F32, _F32, _U8)
WEIGHT_U4 = DTypeConfig(_F32, _F32, quint4x2)

NATIVE: Final[Table] = {
    "conv": (U8_S8,),
    "linear": (U8_S8, DYNAMIC_U8_S8, DYNAMIC_F16),
    **dict.fromkeys(("binary", "cat", "default", "fixed qparams", "share qparams", "tensor info", "batch norm"), (U8,)),
    "layer norm": (U8_F32,),
    "rnn": (DYNAMIC_U8_S8, DYNAMIC_F16),
    "embedding": (WEIGHT_U8, WEIGHT_U4),
}


def default_backend_config() -> BackendConfig:
    """Return a new BackendConfig with the claims of torch's "native" one; every default is this one. (CFG-09)"""
    return config_of("native", NATIVE, FAMILIES)


_shared = cache(default_backend_config)


def config_or_native(backend_config: object) -> BackendConfig:
    """Return a pass's config, torch's and dict forms as refimpl's (CFG-14); for None the native one.

    That is made once and shared by the passes, which change nothing in it.
    """
    return _shared() if backend_config is None else as_backend_config(backend_config)
