"""The lowering table: reference pattern → torch's quantized op or module, and its limits (LOW-01 to LOW-03).

Keys are the callees of nodes: a function, a method's name, or a module's class; for a fused module, the class of the
container and that of the module inside.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.ao.nn.intrinsic as nni
import torch.ao.nn.intrinsic.quantized as nniq
import torch.ao.nn.intrinsic.quantized.dynamic as nniqd
import torch.ao.nn.quantized as nnq
import torch.ao.nn.quantized.dynamic as nnqd
import torch.ao.nn.quantized.reference as nnqr
import torch.nn.functional as F
from torch import nn

from fx_quant_conformance.refimpl.convert.reference_convs import PLAIN
from fx_quant_conformance.refimpl.lower.whole_range import WholeRangeLinear, WholeRangeLinearReLU

OPS: Any = torch.ops.quantized


def _pair_by_name(origin: Any, native: Any, names: str, inner: Any = None) -> dict[Any, Any]:
    pairs = ((getattr(origin, name), getattr(native, name)) for name in names.split())
    return {(kind if inner is None else (kind, inner)): quantized for kind, quantized in pairs}


# Modules, swapped for the class named by its from_reference. Static: with the output's scale and zero point. (LOW-01)
MODULES: Mapping[Any, Any] = {  # rule: LOW-02
    **_pair_by_name(nnqr, nnq, "Linear Conv1d Conv2d Conv3d ConvTranspose1d ConvTranspose2d ConvTranspose3d"),
    **_pair_by_name(nn, nnq, "BatchNorm2d BatchNorm3d InstanceNorm1d InstanceNorm2d InstanceNorm3d LayerNorm"),
    **_pair_by_name(nn, nnq, "ELU LeakyReLU Hardswish PReLU Softmax Dropout"),
    **_pair_by_name(nni, nniq, "LinearReLU LinearLeakyReLU LinearTanh", nnqr.Linear),
    **_pair_by_name(nni, nniq, "ConvReLU1d", nnqr.Conv1d),
    **_pair_by_name(nni, nniq, "ConvReLU2d ConvAdd2d ConvAddReLU2d", nnqr.Conv2d),
    **_pair_by_name(nni, nniq, "ConvReLU3d", nnqr.Conv3d),
    **_pair_by_name(nni, nniq, "BNReLU2d", nn.BatchNorm2d),
    **_pair_by_name(nni, nniq, "BNReLU3d", nn.BatchNorm3d),
}
# Dynamic: the module quantizes its input itself. Weight-only: float in, float out. (LOW-02, CVT-11)
_LINEAR_RELU = (nni.LinearReLU, nnqr.Linear)
DYNAMIC_MODULES = _pair_by_name(nnqr, nnqd, "Linear RNNCell LSTMCell GRUCell LSTM GRU")
DYNAMIC_MODULES[_LINEAR_RELU] = nniqd.LinearReLU
WHOLE_RANGE_LINEARS: Mapping[Any, Any] = {nnqr.Linear: WholeRangeLinear, _LINEAR_RELU: WholeRangeLinearReLU}
WEIGHT_ONLY_MODULES: Mapping[Any, Any] = _pair_by_name(nnqr, nnq, "Embedding EmbeddingBag")

# Parameters after the weight of some function, in the order of the ops that pack it, with defaults.
_DEFAULTS = {"bias": None, "stride": 1, "padding": 0, "output_padding": 0, "dilation": 1, "groups": 1}
_CONV = ("bias", "stride", "padding", "dilation", "groups")
_CONV_T = ("bias", "stride", "padding", "output_padding", "groups", "dilation")


class PackedFunction(NamedTuple):
    """A function whose weight is packed: parameters after the weight, number of axes, pack op, quantized ops."""

    parameters: tuple[str, ...]
    rank: int
    prepack: Callable[..., Any]
    plain: Callable[..., Any]
    with_relu: Callable[..., Any] | None = None

    def pack_arguments(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
        """Return the arguments after the weight in the form that the pack op takes: all of them, lists per axis."""
        arguments = dict(zip(self.parameters, args, strict=False)) | dict(kwargs)
        values = {name: arguments.get(name, default) for name, default in _DEFAULTS.items() if name in self.parameters}
        is_one = {name for name, value in values.items() if isinstance(value, int) and name != "groups"}
        return [[value] * self.rank if name in is_one else value for name, value in values.items()]


def _row(names: str, parameters: tuple[str, ...] = ("bias",), rank: int = 0) -> PackedFunction:
    return PackedFunction(parameters, rank, *(getattr(OPS, name) for name in names.split()))


STATIC_FUNCTIONS: Mapping[Any, PackedFunction] = {
    F.linear: _row("linear_prepack linear linear_relu"),
    **{getattr(F, f"conv{n}d"): _row(f"conv{n}d_prepack conv{n}d conv{n}d_relu", _CONV, n) for n in (1, 2, 3)},
    **{
        getattr(F, f"conv_transpose{n}d"): _row(f"conv_transpose{n}d_prepack conv_transpose{n}d", _CONV_T, n)
        for n in (1, 2, 3)
    },
}
# (function, dtype that the input gets at run time, dtype of the weight) → row. (LOW-02)
DYNAMIC_FUNCTIONS: Mapping[Any, PackedFunction] = {
    (F.linear, torch.quint8, torch.qint8): _row("linear_prepack linear_dynamic linear_relu_dynamic"),
    (F.linear, torch.float16, torch.float16): _row("linear_prepack_fp16 linear_dynamic_fp16 linear_relu_dynamic_fp16"),
}

# The quantized op without and with relu; with a number as one operand it takes no qparams.
_ADD, _MUL = (OPS.add, OPS.add_relu), (OPS.mul, OPS.mul_relu)
BINARY: Mapping[Any, tuple[Callable[..., Any], Callable[..., Any] | None]] = {
    operator.add: _ADD,
    torch.add: _ADD,
    operator.mul: _MUL,
    torch.mul: _MUL,
    torch.matmul: (OPS.matmul, None),
}

# Ops that are fused into an op of the tables above that they follow; into a dynamic op only F.relu and its module.
RELUS: frozenset[Any] = frozenset({nn.ReLU, F.relu, torch.relu, "relu", "relu_"})
DYNAMIC_RELUS: frozenset[Any] = frozenset({nn.ReLU, F.relu})

# Function → (quantized op that takes output_scale and output_zero_point, keywords that it does not have). (LOW-02)
WITH_OUTPUT_QPARAMS: Mapping[Any, tuple[Callable[..., Any], frozenset[str]]] = {
    F.elu: (OPS.elu, frozenset({"inplace"})),
    F.hardswish: (OPS.hardswish, frozenset({"inplace"})),
    F.leaky_relu: (OPS.leaky_relu, frozenset()),
    F.layer_norm: (OPS.layer_norm, frozenset()),
    F.instance_norm: (OPS.instance_norm, frozenset({"running_mean", "running_var", "use_input_stats", "momentum"})),
    F.dropout: (OPS.dropout, frozenset({"inplace"})),
}

# Ops whose quantized kernel has fixed output qparams: (scale, zero point) by dtype. (LOW-02)
_UNIT = {torch.quint8: (1 / 256, 0), torch.qint8: (1 / 256, -128)}
_SYMMETRIC = {torch.quint8: (2 / 256, 128), torch.qint8: (2 / 256, 0)}
FIXED_QPARAMS: Mapping[Any, Mapping[torch.dtype, tuple[float, int]]] = {
    **dict.fromkeys((nn.Sigmoid, torch.sigmoid, "sigmoid", "sigmoid_", nn.Hardsigmoid, F.hardsigmoid), _UNIT),
    **dict.fromkeys((nn.Tanh, torch.tanh, "tanh", "tanh_"), _SYMMETRIC),
}

# Ops that take quantized (and float16) tensors and keep their qparams: they move, select, average or clamp. (LOW-02)
ON_QUANTIZED: frozenset[Any] = frozenset(
    {
        nn.Hardtanh,
        F.hardtanh,
        F.hardtanh_,
        torch.clamp,
        "clamp",
        nn.Identity,
        nn.ReLU,
        nn.ReLU6,
        nn.ChannelShuffle,
        nn.PixelShuffle,
        nn.PixelUnshuffle,
        nn.MaxPool1d,
        nn.MaxPool2d,
        nn.MaxPool3d,
        nn.AvgPool1d,
        nn.AvgPool2d,
        nn.AvgPool3d,
        nn.AdaptiveAvgPool1d,
        nn.AdaptiveAvgPool2d,
        nn.AdaptiveAvgPool3d,
        F.relu,
        F.relu6,
        F.interpolate,
        F.max_pool1d,
        F.max_pool2d,
        F.max_pool3d,
        F.avg_pool1d,
        F.avg_pool2d,
        F.avg_pool3d,
        F.adaptive_avg_pool1d,
        F.adaptive_avg_pool2d,
        F.adaptive_avg_pool3d,
        torch.cat,
        torch.stack,
        torch.mean,
        torch.flatten,
        torch.narrow,
        torch.transpose,
        torch.squeeze,
        torch.unsqueeze,
        torch.repeat_interleave,
        torch.channel_shuffle,
        torch.pixel_shuffle,
        torch.pixel_unshuffle,
        "relu",
        "relu_",
        "mean",
        "contiguous",
        "detach",
        "detach_",
        "permute",
        "repeat",
        "repeat_interleave",
        "reshape",
        "resize_",
        "squeeze",
        "squeeze_",
        "transpose",
        "unsqueeze",
        "unsqueeze_",
        "view",
    }
)

# Methods that read a tensor's shape, which is also the quantized tensor's. (LOW-02)
SHAPE_OF: frozenset[Any] = frozenset({"size", "shape"})
REQUANTIZING = frozenset({torch.cat})  # of these, ops whose kernels take operands on other grids than the result's
WELCOME = ON_QUANTIZED | SHAPE_OF  # lowered without a decision about them
DROPOUTS = frozenset({nn.Dropout, F.dropout})  # their quantized forms return their input
_CONVS = (nnqr.Conv1d, nnqr.Conv2d, nnqr.Conv3d)
_CONVS_TRANSPOSED = (nnqr.ConvTranspose1d, nnqr.ConvTranspose2d, nnqr.ConvTranspose3d)
_INSTANCE_NORMS = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
_EMBEDDINGS = (nnqr.Embedding, nnqr.EmbeddingBag)
_STATISTICS = "track_running_stats: the quantized op takes its input's statistics"
_ZEROS, _KERNELS = ("zeros", "reflect"), ("nearest", "nearest-exact", "area", "bilinear")
_BYTES = (torch.quint8, torch.quint4x2)
_LIMITS: tuple[tuple[tuple[Any, ...], Callable[[Any], bool], str], ...] = (
    (_CONVS, lambda m: m.padding_mode not in _ZEROS, "padding_mode {0.padding_mode!r}: not in the quantized op"),
    (_CONVS, lambda m: isinstance(m.padding, str), "padding {0.padding!r}: the quantized op takes numbers"),
    (_CONVS[2:], lambda m: m.padding_mode != "zeros", "padding_mode {0.padding_mode!r}: not in three dimensions"),
    (_CONVS_TRANSPOSED, lambda m: type(m) in PLAIN, "output_size: the quantized op has output_padding alone"),
    (
        (nn.BatchNorm2d, nn.BatchNorm3d),
        lambda m: m.weight is None or m.bias is None or m.running_mean is None,
        "no affine parameters or no statistics",
    ),
    (_INSTANCE_NORMS, lambda m: m.track_running_stats, _STATISTICS),
    ((F.instance_norm,), lambda node: not node.kwargs.get("use_input_stats", True), _STATISTICS),
    ((nnqr.LSTM, nnqr.GRU), lambda m: not m.bias, "bias=False: the quantized module needs biases"),
    (_EMBEDDINGS, lambda m: m.max_norm is not None, "max_norm {0.max_norm}: the quantized module does not renormalize"),
    (_EMBEDDINGS, lambda m: m.weight_dtype not in _BYTES, "no quantized module for {0.weight_dtype} weights"),
    (
        _EMBEDDINGS,
        lambda m: m.weight_dtype is torch.quint4x2 and m.embedding_dim % 2,
        "embedding_dim {0.embedding_dim}: the quantized module packs two 4-bit columns at a time",
    ),
    (_EMBEDDINGS[1:], lambda m: m.mode != "sum", "mode {0.mode!r}: the quantized module sums"),
    (
        _EMBEDDINGS[1:],
        lambda m: m.padding_idx is not None and bool(m.get_weight()[m.padding_idx].any()),
        "padding_idx {0.padding_idx}: the quantized module adds the padding's row, which is not zero",
    ),
    ((nn.PReLU,), lambda m: not hasattr(m, "qconfig"), "no QConfig on the module says how to quantize its weight"),
    ((F.interpolate,), lambda n: n.kwargs.get("mode", "nearest") not in _KERNELS, "no quantized kernel of this mode"),
    ((F.interpolate,), lambda n: n.kwargs.get("antialias", False), "the quantized kernel has no antialias"),
    (("resize_",), lambda node: node.kwargs.get("memory_format") is not None, "the quantized op has no memory_format"),
    (
        (F.dropout,),
        lambda node: node.kwargs.get("training", True) and node.kwargs.get("p", 0.5) > 0,
        "the quantized op never drops",
    ),
    (
        (torch.clamp, "clamp"),
        lambda node: (
            torch.backends.quantized.engine == "qnnpack"
            and sum(value is not None for value in (*node.args, *node.kwargs.values())) < 3
        ),
        "qnnpack's clamp needs both bounds",
    ),
    ((torch.mean, "mean"), lambda node: "dtype" in node.kwargs, "the mean of a quantized tensor has its dtype"),
)
# Limits of quantized forms, by function, method or class of the (inner) module: [(test, reason)]; the tests take the
# module, or the node that calls. (LOW-03)
LIMITS: Mapping[Any, list[tuple[Callable[[Any], bool], str]]] = {
    kind: [(test, reason) for keys, test, reason in _LIMITS if kind in keys] for kinds, *_ in _LIMITS for kind in kinds
}
