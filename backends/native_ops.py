"""The ops that torch's native engines quantize: pattern, observation, modules, fusion (CFG-05, CFG-06).

A family is a list of rows in registration order, which decides ties between patterns of equal size (PAT-07).
What is missing here are the dtypes: `backends.native_tables` gives them per backend and family.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.ao.nn.intrinsic as nni
import torch.ao.nn.intrinsic.qat as nniqat
import torch.ao.nn.qat as nnqat
import torch.ao.nn.quantized.reference as nnqr
import torch.nn.functional as F
from torch import nn

from refimpl import fusers
from refimpl.backend_config import BackendPatternConfig, ObservationType
from refimpl.dtype_config import DTypeConfig, DTypeWithConstraints
from refimpl.patterns import Leaf, MatchAllNode, Pattern

Module = type[nn.Module]

DIFFERENT = ObservationType.OUTPUT_USE_DIFFERENT_OBSERVER_AS_INPUT
SHARE = ObservationType.OUTPUT_SHARE_OBSERVER_WITH_INPUT
NOT_OBSERVED = ObservationType.INPUT_OUTPUT_NOT_OBSERVED


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Patterns that make the same claims, whatever the dtypes are."""

    patterns: tuple[Pattern, ...]
    complex: bool = False  # the patterns are given in normal form, with a wildcard for the extra input
    observe: ObservationType = DIFFERENT
    observe_by_tensor_args: Mapping[int, ObservationType] = field(default_factory=dict)
    root: Module | None = None
    reference: Module | None = None
    qat: Module | None = None
    fused: Module | None = None
    fuser: fusers.FuserMethod | None = None
    index: Mapping[str, int] = field(default_factory=dict)  # of weight and bias among a function's arguments
    output: DTypeWithConstraints | None = None  # what activations of this dtype must keep


def entries(row: Row, dtype_configs: Iterable[DTypeConfig]) -> Iterator[BackendPatternConfig]:
    """Yield one new BackendConfig entry per pattern of the row, for the dtypes given. (CFG-05, CFG-06)"""
    dtypes = [_constrained(dtype_config, row.output) for dtype_config in dtype_configs]
    for pattern in row.patterns:
        entry = _entry_for(pattern, row.complex).set_observation_type(row.observe).set_dtype_configs(dtypes)
        entry.root_module = row.root
        entry.reference_quantized_module = row.reference
        entry.qat_module = row.qat
        entry.fused_module = row.fused
        entry.fuser_method = row.fuser
        entry._set_num_tensor_args_to_observation_type(dict(row.observe_by_tensor_args))
        entry._set_input_type_to_index(dict(row.index))
        yield entry


def _entry_for(pattern: Pattern, is_complex: bool) -> BackendPatternConfig:
    """Return an entry with nothing but its pattern; a complex one brings its getters. (FUS-03, FUS-04)"""
    if not is_complex:
        return BackendPatternConfig(pattern)
    entry = BackendPatternConfig()._set_pattern_complex_format(pattern)
    entry._set_root_node_getter(fusers.root_node_getter(pattern))
    return entry._set_extra_inputs_getter(fusers.extra_inputs_getter(pattern))


def _constrained(dtype_config: DTypeConfig, bound: DTypeWithConstraints | None) -> DTypeConfig:
    """Put the bound on the activations that have its dtype; others are left as they are. (DTY-05)"""
    if bound is None:
        return dtype_config
    given, made = dtype_config.input_dtype_with_constraints, dtype_config.output_dtype_with_constraints
    return DTypeConfig(
        input_dtype=bound if given.dtype == bound.dtype else given,
        output_dtype=bound if made.dtype == bound.dtype else made,
        weight_dtype=dtype_config.weight_dtype_with_constraints,
        bias_dtype=dtype_config.bias_dtype,
        is_dynamic=dtype_config.is_dynamic,
    )


def _named(namespace: Any, names: str) -> tuple[Leaf, ...]:
    return tuple(getattr(namespace, name) for name in names.split())


def _methods(names: str) -> tuple[Leaf, ...]:
    return tuple(names.split())


# ---- layers with weights ----------------------------------------------------------------------------------

_WEIGHT_BIAS = {"weight": 1, "bias": 2}
_FUSED_CONVS = ("ConvReLU", "ConvBn", "ConvBnReLU")


def _weighted(layer: Module, reference: Module, qat: Module, function: Leaf) -> tuple[Row, ...]:
    """A layer with weights: the module, its QAT class, its function."""
    return (
        Row(patterns=(layer,), root=layer, reference=reference, qat=qat),
        Row(patterns=(qat,), root=layer, reference=reference),
        Row(patterns=(function,), index=_WEIGHT_BIAS),
    )


def _conv(d: int) -> tuple[Row, ...]:
    """Everything about convolutions in d dimensions. Fused classes name their QAT class alone."""
    conv, bn, transpose = (getattr(nn, f"{name}{d}d") for name in ("Conv", "BatchNorm", "ConvTranspose"))
    fused_relu, fused_bn, fused_bn_relu = (getattr(nni, f"{name}{d}d") for name in _FUSED_CONVS)
    qat_relu, qat_bn, qat_bn_relu = (getattr(nniqat, f"{name}{d}d") for name in _FUSED_CONVS)
    conv_function, transpose_function = getattr(F, f"conv{d}d"), getattr(F, f"conv_transpose{d}d")
    swap = {"root": conv, "reference": getattr(nnqr, f"Conv{d}d")}
    swap_transpose = {"root": transpose, "reference": getattr(nnqr, f"ConvTranspose{d}d")}
    relu, bn_relu = fusers.sequential(fused_relu), fusers.fuse_conv_bn_relu
    return (
        *_weighted(conv, swap["reference"], getattr(nnqat, f"Conv{d}d"), conv_function),
        Row(patterns=((conv, nn.ReLU), (conv, F.relu)), fused=fused_relu, fuser=relu),
        Row(patterns=(fused_relu,), qat=qat_relu),
        Row(patterns=(qat_relu,), **swap),
        Row(patterns=((conv_function, nn.ReLU), (conv_function, F.relu))),
        Row(patterns=((conv, bn),), fused=fused_bn, fuser=fusers.fuse_conv_bn),
        Row(patterns=((conv, bn, nn.ReLU),), fused=fused_bn_relu, fuser=bn_relu),
        Row(patterns=((conv, bn, F.relu),), fused=fused_bn_relu, fuser=bn_relu, root=conv),
        Row(patterns=(fused_bn,), qat=qat_bn),
        Row(patterns=(fused_bn_relu,), qat=qat_bn_relu),
        Row(patterns=(qat_bn, qat_bn_relu), **swap),
        Row(patterns=(transpose,), **swap_transpose),
        Row(patterns=((transpose, bn),), fuser=fusers.fuse_convtranspose_bn, **swap_transpose),
        Row(patterns=(transpose_function,), index=_WEIGHT_BIAS),
    )


def _conv_add() -> Iterator[Row]:
    """conv(+bn) + add (+ relu), the convolution left or right; the other operand is an extra input."""
    for fused, relu in ((nni.ConvAdd2d, False), (nni.ConvAddReLU2d, True)):
        for side in (0, 1):
            sums = [
                (add, branch, MatchAllNode) if side == 0 else (add, MatchAllNode, branch)
                for branch in ((nn.BatchNorm2d, nn.Conv2d), nn.Conv2d)
                for add in (torch.add, operator.add)
            ]
            patterns = tuple((nn.ReLU, summed) if relu else summed for summed in sums)
            fuser = fusers.conv_add(conv_side=side, relu=relu)
            yield Row(patterns=patterns, complex=True, fused=fused, fuser=fuser)
        yield Row(patterns=(fused,), root=nn.Conv2d, reference=nnqr.Conv2d)


_LINEAR_SWAP: dict[str, Any] = {"root": nn.Linear, "reference": nnqr.Linear}

_LINEAR = (
    *_weighted(nn.Linear, nnqr.Linear, nnqat.Linear, F.linear),
    Row(
        patterns=((nn.Linear, nn.ReLU), (nn.Linear, F.relu)),
        fused=nni.LinearReLU,
        fuser=fusers.sequential(nni.LinearReLU),
    ),
    Row(patterns=(nni.LinearReLU,), qat=nniqat.LinearReLU, **_LINEAR_SWAP),
    Row(patterns=(nniqat.LinearReLU,), **_LINEAR_SWAP),
    Row(patterns=((F.linear, nn.ReLU), (F.linear, F.relu))),
    Row(patterns=((nn.Linear, nn.BatchNorm1d),), fused=nni.LinearBn1d, fuser=fusers.fuse_linear_bn),
    Row(patterns=(nni.LinearBn1d,), qat=nniqat.LinearBn1d, **_LINEAR_SWAP),
    Row(patterns=(nniqat.LinearBn1d,), **_LINEAR_SWAP),
)


def _linear_then(module: Module, function: Leaf, fused: Module) -> tuple[Row, ...]:
    """A linear layer and an elementwise op after it."""
    return (
        Row(patterns=((nn.Linear, module), (nn.Linear, function)), fused=fused, fuser=fusers.sequential(fused)),
        Row(patterns=(fused,), **_LINEAR_SWAP),
        Row(patterns=((F.linear, module), (F.linear, function))),
    )


_LINEAR_POST_OPS = (
    *_linear_then(nn.LeakyReLU, F.leaky_relu, nni.LinearLeakyReLU),
    Row(
        patterns=((nn.Linear, nn.BatchNorm1d, nn.LeakyReLU),),
        fused=nni.LinearLeakyReLU,
        fuser=fusers.fuse_linear_bn_leaky_relu,
    ),
    *_linear_then(nn.Tanh, torch.tanh, nni.LinearTanh),
)


def _rnn() -> Iterator[Row]:
    for name in ("GRUCell", "LSTMCell", "RNNCell", "LSTM", "GRU"):
        layer = getattr(nn, name)
        yield Row(patterns=(layer,), root=layer, reference=getattr(nnqr, name))


def _embedding() -> Iterator[Row]:
    for name in ("Embedding", "EmbeddingBag"):
        layer, qat, reference = (getattr(namespace, name) for namespace in (nn, nnqat, nnqr))
        yield Row(patterns=(layer,), root=layer, reference=reference, qat=qat)
        yield Row(patterns=(qat,), root=layer, reference=reference)


# ---- ops without weights, and norms -----------------------------------------------------------------------

_BINARY = (
    *(
        Row(
            patterns=((op, nn.ReLU), (op, F.relu), (op, torch.relu), op),
            observe_by_tensor_args={0: DIFFERENT, 1: SHARE, 2: DIFFERENT},  # 1: the other operand is a scalar
        )
        for op in (operator.add, torch.add, operator.mul, torch.mul)
    ),
    Row(patterns=(torch.matmul,)),
)

_DEFAULT = (
    Row(
        patterns=(
            *_named(nn, "ELU LeakyReLU Hardswish InstanceNorm1d InstanceNorm2d InstanceNorm3d Dropout PReLU"),
            *_named(F, "elu hardswish leaky_relu dropout"),
        )
    ),
    Row(patterns=(F.group_norm,), index={"weight": 2, "bias": 3}),
    Row(patterns=(F.instance_norm,), index={"weight": 3, "bias": 4}),
)

# The output range of these ops is known beforehand, and so are scale and zero point.
_ZERO_TO_ONE, _MINUS_ONE_TO_ONE = (
    DTypeWithConstraints(
        dtype=torch.quint8,
        quant_min_lower_bound=0,
        quant_max_upper_bound=255,
        scale_exact_match=width / 256,
        zero_point_exact_match=zero_point,
    )
    for width, zero_point in ((1.0, 0), (2.0, 128))
)
_FIXED_QPARAMS = (
    Row(patterns=(nn.Hardsigmoid, F.hardsigmoid, "hardsigmoid", "hardsigmoid_"), output=_ZERO_TO_ONE),
    Row(patterns=(nn.Sigmoid, torch.sigmoid, "sigmoid", "sigmoid_"), output=_ZERO_TO_ONE),
    Row(patterns=(nn.Softmax,), output=_ZERO_TO_ONE),
    Row(patterns=(nn.Tanh, torch.tanh, "tanh", "tanh_"), output=_MINUS_ONE_TO_ONE),
)

_SHARE_QPARAMS = (
    Row(
        observe=SHARE,
        patterns=(
            *_named(nn, "AdaptiveAvgPool1d AdaptiveAvgPool2d AdaptiveAvgPool3d"),
            *_named(nn, "AvgPool1d AvgPool2d AvgPool3d Hardtanh Identity MaxPool1d MaxPool2d MaxPool3d"),
            *_named(nn, "PixelShuffle PixelUnshuffle ReLU ReLU6"),
            *_named(F, "adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d hardtanh hardtanh_"),
            *_named(F, "interpolate max_pool1d max_pool2d max_pool3d pixel_shuffle pixel_unshuffle"),
            *_named(F, "relu relu6 avg_pool1d avg_pool2d avg_pool3d"),
            *_named(torch, "clamp flatten mean narrow repeat_interleave transpose squeeze stack unsqueeze"),
            operator.floordiv,
            *_methods("contiguous clamp detach detach_ mean permute repeat repeat_interleave reshape resize_"),
            *_methods("relu relu_ squeeze squeeze_ transpose unsqueeze unsqueeze_ view"),
        ),
    ),
)


def _batch_norm() -> Iterator[Row]:
    fused_by_norm: dict[Module, Module] = {nn.BatchNorm2d: nni.BNReLU2d, nn.BatchNorm3d: nni.BNReLU3d}
    for norm, fused in fused_by_norm.items():
        yield Row(patterns=((norm, nn.ReLU), (norm, F.relu)), fused=fused, fuser=fusers.sequential(fused))
        yield Row(patterns=(norm,))
    yield Row(patterns=tuple(fused_by_norm.values()))


FAMILIES: dict[str, tuple[Row, ...]] = {
    "conv": (*_conv(1), *_conv(2), *_conv(3)),
    "conv + add": tuple(_conv_add()),
    "linear": _LINEAR,
    "linear + post op": _LINEAR_POST_OPS,
    "binary": _BINARY,
    "cat": (Row(patterns=(torch.cat,), observe=SHARE),),
    "default": _DEFAULT,
    "fixed qparams": _FIXED_QPARAMS,
    "share qparams": _SHARE_QPARAMS,
    "tensor info": (Row(patterns=("shape", "size"), observe=NOT_OBSERVED),),
    "batch norm": tuple(_batch_norm()),
    "layer norm": (
        Row(patterns=(nn.LayerNorm,)),
        Row(patterns=(F.layer_norm,), index={"weight": 2, "bias": 3}),
    ),
    "rnn": tuple(_rnn()),
    "embedding": tuple(_embedding()),
}
