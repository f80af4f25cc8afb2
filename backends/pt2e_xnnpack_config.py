"""The BackendConfig that a Quantizer amounts to, to be read before it is claimed.

Quantizer: executorch.backends.xnnpack.quantizer.xnnpack_quantizer.XNNPACKQuantizer
Command: fx-quant-conformance claims-of --name=pt2e-xnnpack --line-length=120
  fx_quant_conformance.backends.pt2e_xnnpack:make_quantizer fx_quant_conformance.backends.pt2e_xnnpack:make_per_tensor
  fx_quant_conformance.backends.pt2e_xnnpack:make_dynamic
  fx_quant_conformance.backends.pt2e_xnnpack:make_dynamic_per_tensor --qat
  fx_quant_conformance.backends.pt2e_xnnpack:make_qat --qat
  fx_quant_conformance.backends.pt2e_xnnpack:make_qat_per_tensor --qat
  fx_quant_conformance.backends.pt2e_xnnpack:make_dynamic_qat --qat
  fx_quant_conformance.backends.pt2e_xnnpack:make_dynamic_qat_per_tensor
Versions: torch 2.13.0+cpu, torchao 0.18.0, fx-quant-conformance 0.2.0
Flow of make_quantizer: prepare_pt2e, in eval mode; 138 of 307 patterns are annotated.
Flow of make_per_tensor: prepare_pt2e, in eval mode; 138 of 307 patterns are annotated.
Flow of make_dynamic: prepare_pt2e, in eval mode; 11 of 263 patterns are annotated.
Flow of make_dynamic_per_tensor: prepare_pt2e, in eval mode; 11 of 263 patterns are annotated.
Flow of make_qat: prepare_qat_pt2e, in train mode; 110 of 300 patterns are annotated.
Flow of make_qat_per_tensor: prepare_qat_pt2e, in train mode; 142 of 324 patterns are annotated.
Flow of make_dynamic_qat: prepare_qat_pt2e, in train mode; 20 of 280 patterns are annotated.
Flow of make_dynamic_qat_per_tensor: prepare_qat_pt2e, in train mode; 24 of 280 patterns are annotated.
Together: 150 of 324 patterns.
"""

import operator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from fx_quant_conformance.refimpl import (
    BackendConfig,
    BackendPatternConfig,
    DTypeConfig,
    DTypeWithConstraints,
    ObservationType,
    nni,
    nniqat,
    nnqat,
    nnqr,
    qint8,
)
from fx_quant_conformance.refimpl.config.fusers import fuse_bn, sequential

NAME = "pt2e-xnnpack"
WEIGHT_SCHEMES = ("per_channel_symmetric", "per_tensor_symmetric")
"""For Capabilities: a BackendConfig has no words for schemes of weights."""

DIFFERENT = ObservationType.OUTPUT_USE_DIFFERENT_OBSERVER_AS_INPUT
SHARE = ObservationType.OUTPUT_SHARE_OBSERVER_WITH_INPUT

PARTS = {
    "root": "root_module",
    "reference": "reference_quantized_module_for_root",
    "qat": "qat_module",
    "fused": "fused_module",
    "fuser": "fuser_method",
    "by_tensors": "num_tensor_args_to_observation_type",
    "index": "input_type_to_index",
}
"""The names of the parts of an entry below, and in BackendPatternConfig's dict form."""

S8_S8 = DTypeConfig(
    input_dtype=DTypeWithConstraints(qint8, scale_min_lower_bound=2**-12),
    output_dtype=DTypeWithConstraints(qint8, scale_min_lower_bound=2**-12),
    weight_dtype=DTypeWithConstraints(
        qint8, quant_min_lower_bound=-127, quant_max_upper_bound=127, scale_min_lower_bound=2**-12
    ),
    bias_dtype=torch.float32,
)
DYNAMIC_S8_S8 = DTypeConfig(
    input_dtype=DTypeWithConstraints(qint8, scale_min_lower_bound=2**-12),
    output_dtype=torch.float32,
    weight_dtype=DTypeWithConstraints(
        qint8, quant_min_lower_bound=-127, quant_max_upper_bound=127, scale_min_lower_bound=2**-12
    ),
    bias_dtype=torch.float32,
    is_dynamic=True,
)
S8 = DTypeConfig(
    input_dtype=DTypeWithConstraints(qint8, scale_min_lower_bound=2**-12),
    output_dtype=DTypeWithConstraints(qint8, scale_min_lower_bound=2**-12),
)


def _entry(
    pattern: Any, *dtype_configs: DTypeConfig, observe: ObservationType = DIFFERENT, **parts: Any
) -> BackendPatternConfig:
    """Return an entry; `parts`: by the names in PARTS, or of the dict form."""
    form = {"observation_type": observe, "dtype_configs": [*dtype_configs]}
    named = {PARTS.get(name, name): value for name, value in parts.items()}
    return BackendPatternConfig.from_dict({"pattern": pattern, **form, **named})


ENTRIES = [
    _entry(nn.Conv1d, S8_S8, root=nn.Conv1d, qat=nnqat.Conv1d, reference=nnqr.Conv1d),
    _entry(torch.conv1d, S8_S8, index={"weight": 1, "bias": 2}),
    _entry((nn.Conv1d, nn.ReLU), S8_S8, fused=nni.ConvReLU1d, fuser=sequential(nni.ConvReLU1d)),
    _entry((nn.Conv1d, F.relu), S8_S8, fused=nni.ConvReLU1d, fuser=sequential(nni.ConvReLU1d)),
    _entry(nni.ConvReLU1d, S8_S8, qat=nniqat.ConvReLU1d),
    _entry((torch.conv1d, nn.ReLU), S8_S8),
    _entry((torch.conv1d, F.relu), S8_S8),
    # in training: static:in=qint8[s>=2^-12],w=qint8[-127..127,s>=2^-12],b=float32,out=qint8[s>=2^-12] and
    #   dynamic:in=qint8[s>=2^-12],w=qint8[-127..127,s>=2^-12],b=float32,out=float32
    _entry((nn.Conv1d, nn.BatchNorm1d), S8_S8, fused=nni.ConvBn1d, fuser=fuse_bn),
    _entry((nn.Conv1d, nn.BatchNorm1d, nn.ReLU), S8_S8, fused=nni.ConvBnReLU1d, fuser=fuse_bn),
    _entry((nn.Conv1d, nn.BatchNorm1d, F.relu), S8_S8, root=nn.Conv1d, fused=nni.ConvBnReLU1d, fuser=fuse_bn),
    _entry(nni.ConvBn1d, S8_S8, qat=nniqat.ConvBn1d),
    _entry(nni.ConvBnReLU1d, S8_S8, qat=nniqat.ConvBnReLU1d),
    # without notes:
    _entry(nn.ConvTranspose1d, S8_S8, root=nn.ConvTranspose1d, reference=nnqr.ConvTranspose1d),
    # in training: static:in=qint8[s>=2^-12],w=qint8[-127..127,s>=2^-12],b=float32,out=qint8[s>=2^-12] and
    #   dynamic:in=qint8[s>=2^-12],w=qint8[-127..127,s>=2^-12],b=float32,out=float32
    _entry(
        (nn.ConvTranspose1d, nn.BatchNorm1d),
        S8_S8,
        root=nn.ConvTranspose1d,
        reference=nnqr.ConvTranspose1d,
        fuser=fuse_bn,
    ),
    # without notes:
    _entry(torch.conv_transpose1d, S8_S8, index={"weight": 1, "bias": 2}),
    _entry(nn.Conv2d, S8_S8, DYNAMIC_S8_S8, root=nn.Conv2d, qat=nnqat.Conv2d, reference=nnqr.Conv2d),
    _entry(torch.conv2d, S8_S8, DYNAMIC_S8_S8, index={"weight": 1, "bias": 2}),
    _entry((nn.Conv2d, nn.ReLU), S8_S8, fused=nni.ConvReLU2d, fuser=sequential(nni.ConvReLU2d)),
    _entry((nn.Conv2d, F.relu), S8_S8, fused=nni.ConvReLU2d, fuser=sequential(nni.ConvReLU2d)),
    _entry(nni.ConvReLU2d, S8_S8, qat=nniqat.ConvReLU2d),
    _entry((torch.conv2d, nn.ReLU), S8_S8),
    _entry((torch.conv2d, F.relu), S8_S8),
    _entry((nn.Conv2d, nn.BatchNorm2d), S8_S8, DYNAMIC_S8_S8, fused=nni.ConvBn2d, fuser=fuse_bn),
    # in training: static:in=qint8[s>=2^-12],w=qint8[-127..127,s>=2^-12],b=float32,out=qint8[s>=2^-12] and
    #   dynamic:in=qint8[s>=2^-12],w=qint8[-127..127,s>=2^-12],b=float32,out=float32
    _entry((nn.Conv2d, nn.BatchNorm2d, nn.ReLU), S8_S8, fused=nni.ConvBnReLU2d, fuser=fuse_bn),
    _entry((nn.Conv2d, nn.BatchNorm2d, F.relu), S8_S8, root=nn.Conv2d, fused=nni.ConvBnReLU2d, fuser=fuse_bn),
    # without notes:
    _entry(nni.ConvBn2d, S8_S8, DYNAMIC_S8_S8, qat=nniqat.ConvBn2d),
    # in training: static:in=qint8[s>=2^-12],w=qint8[-127..127,s>=2^-12],b=float32,out=qint8[s>=2^-12] and
    #   dynamic:in=qint8[s>=2^-12],w=qint8[-127..127,s>=2^-12],b=float32,out=float32
    _entry(nni.ConvBnReLU2d, S8_S8, qat=nniqat.ConvBnReLU2d),
    # without notes:
    _entry(nn.ConvTranspose2d, S8_S8, DYNAMIC_S8_S8, root=nn.ConvTranspose2d, reference=nnqr.ConvTranspose2d),
    _entry(
        (nn.ConvTranspose2d, nn.BatchNorm2d),
        S8_S8,
        DYNAMIC_S8_S8,
        root=nn.ConvTranspose2d,
        reference=nnqr.ConvTranspose2d,
        fuser=fuse_bn,
    ),
    _entry(torch.conv_transpose2d, S8_S8, DYNAMIC_S8_S8, index={"weight": 1, "bias": 2}),
    _entry(nn.Conv3d, S8_S8, root=nn.Conv3d, qat=nnqat.Conv3d, reference=nnqr.Conv3d),
    _entry(torch.conv3d, S8_S8, index={"weight": 1, "bias": 2}),
    _entry((nn.Conv3d, nn.ReLU), S8_S8, fused=nni.ConvReLU3d, fuser=sequential(nni.ConvReLU3d)),
    _entry((nn.Conv3d, F.relu), S8_S8, fused=nni.ConvReLU3d, fuser=sequential(nni.ConvReLU3d)),
    _entry(nni.ConvReLU3d, S8_S8, qat=nniqat.ConvReLU3d),
    _entry((torch.conv3d, nn.ReLU), S8_S8),
    _entry((torch.conv3d, F.relu), S8_S8),
    # in training: make_qat, make_qat_per_tensor: not annotated as one: observed inside, conv3d → batch_norm;
    #   make_dynamic_qat, make_dynamic_qat_per_tensor: not annotated
    _entry((nn.Conv3d, nn.BatchNorm3d), S8_S8, fused=nni.ConvBn3d, fuser=fuse_bn),
    _entry((nn.Conv3d, nn.BatchNorm3d, nn.ReLU), S8_S8, fused=nni.ConvBnReLU3d, fuser=fuse_bn),
    _entry((nn.Conv3d, nn.BatchNorm3d, F.relu), S8_S8, root=nn.Conv3d, fused=nni.ConvBnReLU3d, fuser=fuse_bn),
    _entry(nni.ConvBn3d, S8_S8),
    _entry(nni.ConvBnReLU3d, S8_S8),
    # without notes:
    _entry(nn.ConvTranspose3d, S8_S8, root=nn.ConvTranspose3d, reference=nnqr.ConvTranspose3d),
    # in training: make_qat, make_qat_per_tensor: not annotated as one: observed inside, conv_transpose3d → batch_norm;
    #   make_dynamic_qat, make_dynamic_qat_per_tensor: not annotated
    _entry(
        (nn.ConvTranspose3d, nn.BatchNorm3d),
        S8_S8,
        root=nn.ConvTranspose3d,
        reference=nnqr.ConvTranspose3d,
        fuser=fuse_bn,
    ),
    # without notes:
    _entry(torch.conv_transpose3d, S8_S8, index={"weight": 1, "bias": 2}),
    _entry(nn.Linear, S8_S8, DYNAMIC_S8_S8, root=nn.Linear, qat=nnqat.Linear, reference=nnqr.Linear),
    _entry(F.linear, S8_S8, DYNAMIC_S8_S8, index={"weight": 1, "bias": 2}),
    _entry((nn.Linear, nn.ReLU), S8_S8, fused=nni.LinearReLU, fuser=sequential(nni.LinearReLU)),
    _entry((nn.Linear, F.relu), S8_S8, fused=nni.LinearReLU, fuser=sequential(nni.LinearReLU)),
    _entry(nni.LinearReLU, S8_S8, root=nn.Linear, qat=nniqat.LinearReLU, reference=nnqr.Linear),
    _entry((F.linear, nn.ReLU), S8_S8),
    _entry((F.linear, F.relu), S8_S8),
    # in training: make_qat, make_qat_per_tensor: not annotated as one: observed inside, linear → batch_norm;
    #   make_dynamic_qat, make_dynamic_qat_per_tensor: not annotated as one: batch_norm left out
    _entry((nn.Linear, nn.BatchNorm1d), S8_S8, DYNAMIC_S8_S8, fused=nni.LinearBn1d, fuser=fuse_bn),
    _entry(nni.LinearBn1d, S8_S8, DYNAMIC_S8_S8, root=nn.Linear, reference=nnqr.Linear),
    # with a number as operand: the argument 'other' is quantized, which is neither weight nor bias
    _entry((operator.add, nn.ReLU), S8, by_tensors={0: DIFFERENT, 1: SHARE, 2: DIFFERENT}),
    _entry((operator.add, F.relu), S8, by_tensors={0: DIFFERENT, 1: SHARE, 2: DIFFERENT}),
    _entry((operator.add, torch.relu), S8, by_tensors={0: DIFFERENT, 1: SHARE, 2: DIFFERENT}),
    _entry(operator.add, S8, by_tensors={0: DIFFERENT, 1: SHARE, 2: DIFFERENT}),
    _entry((torch.add, nn.ReLU), S8, by_tensors={0: DIFFERENT, 1: SHARE, 2: DIFFERENT}),
    _entry((torch.add, F.relu), S8, by_tensors={0: DIFFERENT, 1: SHARE, 2: DIFFERENT}),
    _entry((torch.add, torch.relu), S8, by_tensors={0: DIFFERENT, 1: SHARE, 2: DIFFERENT}),
    _entry(torch.add, S8, by_tensors={0: DIFFERENT, 1: SHARE, 2: DIFFERENT}),
    _entry((operator.mul, nn.ReLU), S8, by_tensors={0: DIFFERENT, 1: SHARE, 2: DIFFERENT}),
    _entry((operator.mul, F.relu), S8, by_tensors={0: DIFFERENT, 1: SHARE, 2: DIFFERENT}),
    _entry((operator.mul, torch.relu), S8, by_tensors={0: DIFFERENT, 1: SHARE, 2: DIFFERENT}),
    _entry(operator.mul, S8, by_tensors={0: DIFFERENT, 1: SHARE, 2: DIFFERENT}),
    _entry((torch.mul, nn.ReLU), S8, by_tensors={0: DIFFERENT, 1: SHARE, 2: DIFFERENT}),
    _entry((torch.mul, F.relu), S8, by_tensors={0: DIFFERENT, 1: SHARE, 2: DIFFERENT}),
    _entry((torch.mul, torch.relu), S8, by_tensors={0: DIFFERENT, 1: SHARE, 2: DIFFERENT}),
    _entry(torch.mul, S8, by_tensors={0: DIFFERENT, 1: SHARE, 2: DIFFERENT}),
    # without notes:
    _entry(torch.cat, S8, observe=SHARE),
    # only between quantized ops
    _entry(nn.Dropout, S8, observe=SHARE),
    _entry(F.dropout, S8, observe=SHARE),
    # without notes:
    _entry(nn.AdaptiveAvgPool2d, S8, observe=SHARE),
    # only between quantized ops
    _entry(nn.Hardtanh, S8, observe=SHARE),
    _entry(nn.MaxPool2d, S8, observe=SHARE),
    _entry(nn.ReLU, S8, observe=SHARE),
    _entry(nn.ReLU6, S8, observe=SHARE),
    _entry(F.adaptive_avg_pool2d, S8, observe=SHARE),
    _entry(F.hardtanh, S8, observe=SHARE),
    _entry(F.hardtanh_, S8, observe=SHARE),
    _entry(F.max_pool2d, S8, observe=SHARE),
    _entry(F.relu, S8, observe=SHARE),
    _entry(torch.flatten, S8, observe=SHARE),
    _entry(torch.transpose, S8, observe=SHARE),
    _entry("permute", S8, observe=SHARE),
    _entry("reshape", S8, observe=SHARE),
    _entry("relu", S8, observe=SHARE),
    _entry("transpose", S8, observe=SHARE),
    _entry("view", S8, observe=SHARE),
    _entry(nn.Flatten, S8, observe=SHARE),
    _entry(torch.permute, S8, observe=SHARE),
    _entry(torch.permute_copy, S8, observe=SHARE),
    _entry(torch.relu, S8, observe=SHARE),
    # without notes:
    _entry((nn.Linear, torch.relu), S8_S8, root=nn.Linear, reference=nnqr.Linear),
    _entry((nn.Linear, "relu"), S8_S8, root=nn.Linear, reference=nnqr.Linear),
    _entry((F.linear, torch.relu), S8_S8),
    _entry((F.linear, "relu"), S8_S8),
    _entry((nn.Conv1d, torch.relu), S8_S8, root=nn.Conv1d, reference=nnqr.Conv1d),
    _entry((nn.Conv1d, "relu"), S8_S8, root=nn.Conv1d, reference=nnqr.Conv1d),
    _entry((torch.conv1d, torch.relu), S8_S8),
    _entry((torch.conv1d, "relu"), S8_S8),
    _entry((nn.ConvTranspose1d, nn.ReLU), S8_S8, root=nn.ConvTranspose1d, reference=nnqr.ConvTranspose1d),
    _entry((nn.ConvTranspose1d, F.relu), S8_S8, root=nn.ConvTranspose1d, reference=nnqr.ConvTranspose1d),
    _entry((nn.ConvTranspose1d, torch.relu), S8_S8, root=nn.ConvTranspose1d, reference=nnqr.ConvTranspose1d),
    _entry((nn.ConvTranspose1d, "relu"), S8_S8, root=nn.ConvTranspose1d, reference=nnqr.ConvTranspose1d),
    _entry((torch.conv_transpose1d, nn.ReLU), S8_S8),
    _entry((torch.conv_transpose1d, F.relu), S8_S8),
    _entry((torch.conv_transpose1d, torch.relu), S8_S8),
    _entry((torch.conv_transpose1d, "relu"), S8_S8),
    _entry((nn.Conv2d, torch.relu), S8_S8, root=nn.Conv2d, reference=nnqr.Conv2d),
    _entry((nn.Conv2d, "relu"), S8_S8, root=nn.Conv2d, reference=nnqr.Conv2d),
    _entry((torch.conv2d, torch.relu), S8_S8),
    _entry((torch.conv2d, "relu"), S8_S8),
    _entry((nn.ConvTranspose2d, nn.ReLU), S8_S8, root=nn.ConvTranspose2d, reference=nnqr.ConvTranspose2d),
    _entry((nn.ConvTranspose2d, F.relu), S8_S8, root=nn.ConvTranspose2d, reference=nnqr.ConvTranspose2d),
    _entry((nn.ConvTranspose2d, torch.relu), S8_S8, root=nn.ConvTranspose2d, reference=nnqr.ConvTranspose2d),
    _entry((nn.ConvTranspose2d, "relu"), S8_S8, root=nn.ConvTranspose2d, reference=nnqr.ConvTranspose2d),
    _entry((torch.conv_transpose2d, nn.ReLU), S8_S8),
    _entry((torch.conv_transpose2d, F.relu), S8_S8),
    _entry((torch.conv_transpose2d, torch.relu), S8_S8),
    _entry((torch.conv_transpose2d, "relu"), S8_S8),
    _entry((nn.Conv3d, torch.relu), S8_S8, root=nn.Conv3d, reference=nnqr.Conv3d),
    _entry((nn.Conv3d, "relu"), S8_S8, root=nn.Conv3d, reference=nnqr.Conv3d),
    _entry((torch.conv3d, torch.relu), S8_S8),
    _entry((torch.conv3d, "relu"), S8_S8),
    _entry((nn.ConvTranspose3d, nn.ReLU), S8_S8, root=nn.ConvTranspose3d, reference=nnqr.ConvTranspose3d),
    _entry((nn.ConvTranspose3d, F.relu), S8_S8, root=nn.ConvTranspose3d, reference=nnqr.ConvTranspose3d),
    _entry((nn.ConvTranspose3d, torch.relu), S8_S8, root=nn.ConvTranspose3d, reference=nnqr.ConvTranspose3d),
    _entry((nn.ConvTranspose3d, "relu"), S8_S8, root=nn.ConvTranspose3d, reference=nnqr.ConvTranspose3d),
    _entry((torch.conv_transpose3d, nn.ReLU), S8_S8),
    _entry((torch.conv_transpose3d, F.relu), S8_S8),
    _entry((torch.conv_transpose3d, torch.relu), S8_S8),
    _entry((torch.conv_transpose3d, "relu"), S8_S8),
    # with a number as operand: the argument 'other' is quantized, which is neither weight nor bias
    _entry((operator.add, "relu"), S8, by_tensors={0: DIFFERENT, 1: SHARE, 2: DIFFERENT}),
    _entry((operator.mul, "relu"), S8, by_tensors={0: DIFFERENT, 1: SHARE, 2: DIFFERENT}),
    _entry((torch.mul, "relu"), S8, by_tensors={0: DIFFERENT, 1: SHARE, 2: DIFFERENT}),
    _entry((torch.add, "relu"), S8, by_tensors={0: DIFFERENT, 1: SHARE, 2: DIFFERENT}),
    # without notes:
    _entry(nnqat.Conv1d, S8_S8, root=nn.Conv1d, reference=nnqr.Conv1d),
    _entry(nniqat.ConvReLU1d, S8_S8, root=nn.Conv1d, reference=nnqr.Conv1d),
    _entry(nniqat.ConvBn1d, S8_S8, DYNAMIC_S8_S8, root=nn.Conv1d, reference=nnqr.Conv1d),
    _entry(nniqat.ConvBnReLU1d, S8_S8, DYNAMIC_S8_S8, root=nn.Conv1d, reference=nnqr.Conv1d),
    _entry(nnqat.Conv2d, S8_S8, DYNAMIC_S8_S8, root=nn.Conv2d, reference=nnqr.Conv2d),
    _entry(nniqat.ConvReLU2d, S8_S8, root=nn.Conv2d, reference=nnqr.Conv2d),
    _entry(nniqat.ConvBn2d, S8_S8, DYNAMIC_S8_S8, root=nn.Conv2d, reference=nnqr.Conv2d),
    _entry(nniqat.ConvBnReLU2d, S8_S8, DYNAMIC_S8_S8, root=nn.Conv2d, reference=nnqr.Conv2d),
    _entry(nnqat.Conv3d, S8_S8, root=nn.Conv3d, reference=nnqr.Conv3d),
    _entry(nniqat.ConvReLU3d, S8_S8, root=nn.Conv3d, reference=nnqr.Conv3d),
    _entry(nnqat.Linear, S8_S8, DYNAMIC_S8_S8, root=nn.Linear, reference=nnqr.Linear),
    _entry(nniqat.LinearReLU, S8_S8, root=nn.Linear, reference=nnqr.Linear),
]


def backend_config() -> BackendConfig:
    """Return a new BackendConfig of these claims."""
    return BackendConfig(NAME).set_backend_pattern_configs(ENTRIES)
