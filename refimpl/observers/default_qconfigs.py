"""The QConfigs and QConfigMappings that users start from, by torch's names (rules QCM-01, QCM-02, DTY-05).

Tables: observers, fake quantizes, their QConfigs; then, per engine, the defaults of post-training quantization and of
training (QAT), and the QConfigs of particular ops in the default mappings.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from fx_quant_conformance.refimpl.config.qconfig import QConfig, QConfigMapping
from fx_quant_conformance.refimpl.errors import QConfigError
from fx_quant_conformance.refimpl.legacy import qint8, quint4x2, quint8
from fx_quant_conformance.refimpl.observers.fake_quantize import (
    FakeQuantize,
    FixedQParamsFakeQuantize,
    FusedMovingAvgObsFakeQuantize,
)
from fx_quant_conformance.refimpl.observers.histogram import HistogramObserver
from fx_quant_conformance.refimpl.observers.observers import (
    FixedQParamsObserver,
    MinMaxObserver,
    MovingAverageMinMaxObserver,
    MovingAveragePerChannelMinMaxObserver,
    NoopObserver,
    PerChannelMinMaxObserver,
    PlaceholderObserver,
    ReuseInputObserver,
)

_TENSOR: dict[str, Any] = {"dtype": qint8, "qscheme": torch.per_tensor_symmetric}
_CHANNEL: dict[str, Any] = {"dtype": qint8, "qscheme": torch.per_channel_symmetric}
_ROWS: dict[str, Any] = {"qscheme": torch.per_channel_affine_float_qparams, "ch_axis": 0}
_NO_128: dict[str, Any] = {"quant_min": -127, "quant_max": 127, "eps": 2**-12}  # xnnpack's range
_UNSIGNED: dict[str, Any] = {"quant_min": 0, "quant_max": 255}
_SIGNED: dict[str, Any] = {"quant_min": -128, "quant_max": 127}

default_observer = MinMaxObserver.with_args(quant_min=0, quant_max=127)
default_placeholder_observer = PlaceholderObserver
default_weight_observer = MinMaxObserver.with_args(**_TENSOR)
weight_observer_range_neg_127_to_127 = MinMaxObserver.with_args(**_TENSOR, **_NO_128)
default_histogram_observer = HistogramObserver.with_args(quant_min=0, quant_max=127)
default_per_channel_weight_observer = PerChannelMinMaxObserver.with_args(**_CHANNEL)
per_channel_weight_observer_range_neg_127_to_127 = PerChannelMinMaxObserver.with_args(**_CHANNEL, **_NO_128)
default_dynamic_quant_observer = PlaceholderObserver.with_args(dtype=quint8, is_dynamic=True, **_UNSIGNED)
default_float_qparams_observer = PerChannelMinMaxObserver.with_args(dtype=quint8, **_ROWS)
default_float_qparams_observer_4bit = PerChannelMinMaxObserver.with_args(dtype=quint4x2, **_ROWS)
default_fixed_qparams_range_neg1to1_observer = FixedQParamsObserver.with_args(scale=2 / 256, zero_point=128)
default_fixed_qparams_range_0to1_observer = FixedQParamsObserver.with_args(scale=1 / 256, zero_point=0)
default_reuse_input_observer = ReuseInputObserver

_Average, _ChannelAverage = MovingAverageMinMaxObserver, MovingAveragePerChannelMinMaxObserver
_Fused = FusedMovingAvgObsFakeQuantize
_LAST: dict[str, Any] = {"averaging_constant": 1}  # memoryless
default_fake_quant = FakeQuantize.with_args(observer=_Average, reduce_range=True, **_UNSIGNED)
default_weight_fake_quant = FakeQuantize.with_args(observer=_Average, **_TENSOR, **_SIGNED)
default_dynamic_fake_quant = FakeQuantize.with_args(observer=_Average, is_dynamic=True, **_LAST, **_UNSIGNED)
default_per_channel_weight_fake_quant = FakeQuantize.with_args(observer=_ChannelAverage, **_CHANNEL, **_SIGNED)
_embedding = FakeQuantize.with_args(observer=_ChannelAverage, **_ROWS, **_LAST)
default_embedding_fake_quant = _embedding.with_args(**_UNSIGNED)
default_embedding_fake_quant_4bit = _embedding.with_args(dtype=quint4x2)
default_histogram_fake_quant = FakeQuantize.with_args(observer=HistogramObserver, reduce_range=True, **_UNSIGNED)
_fixed = FixedQParamsFakeQuantize.with_args
default_fixed_qparams_range_neg1to1_fake_quant = _fixed(observer=default_fixed_qparams_range_neg1to1_observer)
default_fixed_qparams_range_0to1_fake_quant = _fixed(observer=default_fixed_qparams_range_0to1_observer)
default_fused_act_fake_quant = _Fused.with_args(observer=_Average, **_UNSIGNED)
default_fused_wt_fake_quant = _Fused.with_args(observer=_Average, **_TENSOR, **_SIGNED)
default_fused_per_channel_wt_fake_quant = _Fused.with_args(observer=_ChannelAverage, **_CHANNEL, **_SIGNED)
fused_wt_fake_quant_range_neg_127_to_127 = _Fused.with_args(observer=_Average, **_TENSOR, **_NO_128)
fused_per_channel_wt_fake_quant_range_neg_127_to_127 = _Fused.with_args(observer=_ChannelAverage, **_CHANNEL, **_NO_128)

default_qconfig = QConfig(default_observer, default_weight_observer)
default_per_channel_qconfig = QConfig(default_observer, default_per_channel_weight_observer)
default_dynamic_qconfig = QConfig(default_dynamic_quant_observer, default_weight_observer)
per_channel_dynamic_qconfig = QConfig(default_dynamic_quant_observer, default_per_channel_weight_observer)
_float16 = PlaceholderObserver.with_args(dtype=torch.float16)
float16_dynamic_qconfig = QConfig(_float16.with_args(is_dynamic=True), _float16)
float16_static_qconfig = QConfig(_float16, _float16)
float_qparams_weight_only_qconfig = QConfig(default_placeholder_observer, default_float_qparams_observer)
float_qparams_weight_only_qconfig_4bit = QConfig(default_placeholder_observer, default_float_qparams_observer_4bit)
default_qat_qconfig = QConfig(default_fake_quant, default_weight_fake_quant)
default_qat_qconfig_v2 = QConfig(default_fused_act_fake_quant, default_fused_wt_fake_quant)
default_dynamic_qat_qconfig = QConfig(default_dynamic_fake_quant, default_weight_fake_quant)
default_weight_only_qconfig = QConfig(nn.Identity, default_weight_fake_quant)
default_activation_only_qconfig = QConfig(default_fake_quant, nn.Identity)
default_reuse_input_qconfig = QConfig(default_reuse_input_observer, NoopObserver)
default_quint8_weight_qconfig = QConfig(HistogramObserver, MinMaxObserver)
_float32 = NoopObserver.with_args(dtype=torch.float32)
default_embedding_qat_qconfig = QConfig(_float32, default_embedding_fake_quant)
default_embedding_qat_qconfig_4bit = QConfig(_float32, default_embedding_fake_quant_4bit)
_signed = HistogramObserver.with_args(dtype=qint8, eps=2**-12)
_signed_fake = _Fused.with_args(observer=_Average, dtype=qint8, eps=2**-12, **_SIGNED)
default_symmetric_qnnpack_qconfig = QConfig(_signed, weight_observer_range_neg_127_to_127)
default_per_channel_symmetric_qnnpack_qconfig = QConfig(_signed, per_channel_weight_observer_range_neg_127_to_127)
default_symmetric_qnnpack_qat_qconfig = QConfig(_signed_fake, fused_wt_fake_quant_range_neg_127_to_127)
default_per_channel_symmetric_qnnpack_qat_qconfig = QConfig(
    _signed_fake, fused_per_channel_wt_fake_quant_range_neg_127_to_127
)

# engine: (7-bit activations, weights per channel); the sums of two 8-bit products overflow 16 bits on fbgemm and x86
_ENGINES = {"fbgemm": (True, True), "x86": (True, True), "qnnpack": (False, False), "onednn": (False, True)}
_WEIGHTS = {  # (training, version): constructor for the tensor, and per channel
    (False, 0): (default_weight_observer, default_per_channel_weight_observer),
    (True, 0): (default_weight_fake_quant, default_per_channel_weight_fake_quant),
    (True, 1): (default_fused_wt_fake_quant, default_fused_per_channel_wt_fake_quant),
}
_ACTIVATIONS = {
    (False, 0): HistogramObserver.with_args(),
    (True, 0): FakeQuantize.with_args(observer=_Average, **_UNSIGNED),
    (True, 1): default_fused_act_fake_quant,
}
_FIXED = {  # training: of a result in 0..1, and in -1..1
    False: (default_fixed_qparams_range_0to1_observer, default_fixed_qparams_range_neg1to1_observer),
    True: (default_fixed_qparams_range_0to1_fake_quant, default_fixed_qparams_range_neg1to1_fake_quant),
}
_RANGE_0_TO_1 = (
    nn.Hardsigmoid,
    F.hardsigmoid,
    "hardsigmoid",
    "hardsigmoid_",
    nn.Sigmoid,
    torch.sigmoid,
    "sigmoid",
    "sigmoid_",
    nn.Softmax,
)
_RANGE_NEG1_TO_1 = (nn.Tanh, torch.tanh, "tanh", "tanh_")
_TRANSPOSED = (
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
    F.conv_transpose1d,
    F.conv_transpose2d,
    F.conv_transpose3d,
)


def _choose_default(backend: str, version: int, is_qat: bool) -> QConfig:
    versions = [number for training, number in _WEIGHTS if training == is_qat]
    for role, value, choices in (("backend", backend, list(_ENGINES)), ("version", version, versions)):
        if not isinstance(value, type(choices[0])) or value not in choices:
            raise QConfigError(f"no default QConfig for {role} {value!r}; expected one of {choices}")
    reduce_range, per_channel = _ENGINES[backend]
    activation = _ACTIVATIONS[is_qat, version].with_args(reduce_range=reduce_range)
    return QConfig(activation, _WEIGHTS[is_qat, version][per_channel])


def get_default_qconfig(backend: str = "x86", version: int = 0) -> QConfig:
    """Return an engine's QConfig for post-training quantization. (QCM-01)

    `backend`: ``x86``, ``fbgemm``, ``qnnpack`` or ``onednn``; `version`: 0. Activations are quint8 by a histogram, with
    7 bits for x86 and fbgemm; weights are symmetric qint8, per tensor for qnnpack, else per channel. Raises
    QConfigError for another engine or version.
    """
    return _choose_default(backend, version, False)


def get_default_qat_qconfig(backend: str = "x86", version: int = 1) -> QConfig:
    """Return an engine's QConfig for quantization-aware training. (QCM-01)

    `version`: 1 for fused fake quantizes, 0 for plain ones; both average the range over batches. Dtypes and schemes are
    those of get_default_qconfig. Raises QConfigError for another engine or version.
    """
    return _choose_default(backend, version, True)


def _make_mapping(backend: str, version: int, is_qat: bool) -> QConfigMapping:
    qconfig = _choose_default(backend, version, is_qat)
    weight, _ = _WEIGHTS[is_qat, 0]
    zero_to_one, minus_one_to_one = _FIXED[is_qat]
    reduce_range, _ = _ENGINES[backend]
    transposed = QConfig(qconfig.activation, weight) if reduce_range else qconfig  # fbgemm has no channels there
    norm = QConfig(qconfig.activation, default_placeholder_observer)  # its weight stays float
    rows: list[tuple[tuple[Any, ...], QConfig]] = [
        (("reshape",), default_reuse_input_qconfig),
        (_TRANSPOSED, transposed),
        ((F.layer_norm, nn.LayerNorm), norm),
        ((nn.PReLU,), default_quint8_weight_qconfig),
        (_RANGE_0_TO_1, QConfig(zero_to_one, weight)),
        (_RANGE_NEG1_TO_1, QConfig(minus_one_to_one, weight)),
    ]
    mapping = QConfigMapping().set_global(qconfig)
    mapping.object_type_qconfigs = {kind: special for kinds, special in rows for kind in kinds}
    return mapping


def get_default_qconfig_mapping(backend: str = "x86", version: int = 0) -> QConfigMapping:
    """Return an engine's mapping for post-training quantization: its QConfig for all, and special ones by op. (QCM-02)

    Ops with a result in 0…1 or −1…1, such as sigmoid and tanh, have fixed qparams; reshape reuses its input's observer;
    the weight of layer norm stays float; transposed convolutions have weights per tensor on x86 and fbgemm; PReLU's
    weight is quint8. Raises QConfigError for an unknown engine or version.
    """
    return _make_mapping(backend, version, False)


def get_default_qat_qconfig_mapping(backend: str = "x86", version: int = 1) -> QConfigMapping:
    """Return an engine's mapping for quantization-aware training, with the special QConfigs of post-training. (QCM-02)

    Raises QConfigError for an unknown engine or version.
    """
    return _make_mapping(backend, version, True)
