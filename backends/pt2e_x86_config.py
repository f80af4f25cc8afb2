"""The BackendConfig that a Quantizer amounts to, to be read before it is claimed.

Quantizer: torchao.quantization.pt2e.quantizer.x86_inductor_quantizer.X86InductorQuantizer
Command: fx-quant-conformance claims-of --name=pt2e-x86 --line-length=120
  fx_quant_conformance.backends.pt2e_x86:make_quantizer fx_quant_conformance.backends.pt2e_x86:make_dynamic --qat
  fx_quant_conformance.backends.pt2e_x86:make_qat --qat fx_quant_conformance.backends.pt2e_x86:make_dynamic_qat
Versions: torch 2.13.0+cpu, torchao 0.18.0, fx-quant-conformance 0.3.0
Flow of make_quantizer: prepare_pt2e, in eval mode; 55 of 268 patterns are annotated.
Flow of make_dynamic: prepare_pt2e, in eval mode; 26 of 268 patterns are annotated.
Flow of make_qat: prepare_qat_pt2e, in train mode; 57 of 285 patterns are annotated.
Flow of make_dynamic_qat: prepare_qat_pt2e, in train mode; 22 of 285 patterns are annotated.
Together: 62 of 285 patterns.
"""

import operator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from fx_quant_conformance.backends.onednn_fusers import conv_add, extra_inputs_getter, root_node_getter
from fx_quant_conformance.refimpl import (
    BackendConfig,
    BackendPatternConfig,
    DTypeConfig,
    DTypeWithConstraints,
    MatchAllNode,
    ObservationType,
    nni,
    nniqat,
    nnqat,
    nnqr,
    qint8,
    quint8,
)
from fx_quant_conformance.refimpl.config.fusers import fuse_bn, sequential

NAME = "pt2e-x86"
WEIGHT_SCHEMES = ("per_channel_symmetric",)
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

U8_S8 = DTypeConfig(
    input_dtype=DTypeWithConstraints(quint8, scale_min_lower_bound=2**-12),
    output_dtype=DTypeWithConstraints(quint8, scale_min_lower_bound=2**-12),
    weight_dtype=DTypeWithConstraints(qint8, scale_min_lower_bound=2**-12),
    bias_dtype=torch.float32,
)
DYNAMIC_U8_S8 = DTypeConfig(
    input_dtype=DTypeWithConstraints(quint8, scale_min_lower_bound=2**-12),
    output_dtype=torch.float32,
    weight_dtype=DTypeWithConstraints(qint8, scale_min_lower_bound=2**-12),
    bias_dtype=torch.float32,
    is_dynamic=True,
)
U8 = DTypeConfig(
    input_dtype=DTypeWithConstraints(quint8, scale_min_lower_bound=2**-12),
    output_dtype=DTypeWithConstraints(quint8, scale_min_lower_bound=2**-12),
)


def _entry(
    pattern: Any, *dtype_configs: DTypeConfig, observe: ObservationType = DIFFERENT, **parts: Any
) -> BackendPatternConfig:
    """Return an entry; `parts`: by the names in PARTS, or of the dict form."""
    form = {"observation_type": observe, "dtype_configs": [*dtype_configs]}
    named = {PARTS.get(name, name): value for name, value in parts.items()}
    return BackendPatternConfig.from_dict({"pattern": pattern, **form, **named})


def _entry_of_two(pattern: Any, *dtype_configs: DTypeConfig, **parts: Any) -> BackendPatternConfig:
    """Return an entry of a complex pattern, whose wildcard is a second input."""
    return _entry(
        None,
        *dtype_configs,
        pattern_complex_format=pattern,
        root_node_getter=root_node_getter(pattern),
        extra_inputs_getter=extra_inputs_getter(pattern),
        **parts,
    )


ENTRIES = [
    # static: the output is quantized where its reader is
    _entry((nn.Conv1d, nn.ReLU), U8_S8, DYNAMIC_U8_S8, fused=nni.ConvReLU1d, fuser=sequential(nni.ConvReLU1d)),
    _entry(nni.ConvReLU1d, U8_S8, DYNAMIC_U8_S8, root=nn.Conv1d, qat=nniqat.ConvReLU1d, reference=nnqr.Conv1d),
    # static: the output is quantized where its reader is
    # in training: not annotated
    _entry((nn.Conv1d, nn.BatchNorm1d, nn.ReLU), U8_S8, DYNAMIC_U8_S8, fused=nni.ConvBnReLU1d, fuser=fuse_bn),
    _entry(nni.ConvBnReLU1d, U8_S8, DYNAMIC_U8_S8, root=nn.Conv1d, reference=nnqr.Conv1d),
    # static: the output is quantized where its reader is
    _entry(nn.Conv2d, U8_S8, DYNAMIC_U8_S8, root=nn.Conv2d, qat=nnqat.Conv2d, reference=nnqr.Conv2d),
    _entry((nn.Conv2d, nn.ReLU), U8_S8, DYNAMIC_U8_S8, fused=nni.ConvReLU2d, fuser=sequential(nni.ConvReLU2d)),
    _entry(nni.ConvReLU2d, U8_S8, DYNAMIC_U8_S8, qat=nniqat.ConvReLU2d),
    # make_quantizer: the output is quantized where its reader is
    # in training: static:in=quint8[s>=2^-12],w=qint8[s>=2^-12],b=float32,out=quint8[s>=2^-12]
    _entry((nn.Conv2d, nn.BatchNorm2d), U8_S8, DYNAMIC_U8_S8, fused=nni.ConvBn2d, fuser=fuse_bn),
    _entry((nn.Conv2d, nn.BatchNorm2d, nn.ReLU), U8_S8, DYNAMIC_U8_S8, fused=nni.ConvBnReLU2d, fuser=fuse_bn),
    # make_quantizer: the output is quantized where its reader is
    # in PTQ: static:in=quint8[s>=2^-12],w=qint8[s>=2^-12],b=float32,out=quint8[s>=2^-12] and
    #   dynamic:in=quint8[s>=2^-12],w=qint8[s>=2^-12],b=float32,out=float32
    _entry(nni.ConvBn2d, U8_S8, qat=nniqat.ConvBn2d),
    _entry(nni.ConvBnReLU2d, U8_S8, qat=nniqat.ConvBnReLU2d),
    # static: the output is quantized where its reader is
    _entry(nn.Linear, U8_S8, DYNAMIC_U8_S8, root=nn.Linear, qat=nnqat.Linear, reference=nnqr.Linear),
    _entry((nn.Linear, nn.ReLU), U8_S8, DYNAMIC_U8_S8, fused=nni.LinearReLU, fuser=sequential(nni.LinearReLU)),
    _entry(nni.LinearReLU, U8_S8, DYNAMIC_U8_S8, root=nn.Linear, qat=nniqat.LinearReLU, reference=nnqr.Linear),
    # static: the output is quantized where its reader is
    # in training: not annotated as one: batch_norm left out
    _entry((nn.Linear, nn.BatchNorm1d), U8_S8, DYNAMIC_U8_S8, fused=nni.LinearBn1d, fuser=fuse_bn),
    _entry(nni.LinearBn1d, U8_S8, DYNAMIC_U8_S8, root=nn.Linear, reference=nnqr.Linear),
    # the output is quantized where its reader is
    # with a number as operand: not annotated
    _entry(operator.mul, U8, by_tensors={0: DIFFERENT, 1: SHARE, 2: DIFFERENT}),
    _entry(torch.mul, U8, by_tensors={0: DIFFERENT, 1: SHARE, 2: DIFFERENT}),
    # only between quantized ops
    _entry(torch.cat, U8, observe=SHARE),
    _entry(nn.AdaptiveAvgPool2d, U8, observe=SHARE),
    _entry(nn.AvgPool2d, U8, observe=SHARE),
    _entry(nn.MaxPool2d, U8, observe=SHARE),
    _entry(F.adaptive_avg_pool2d, U8, observe=SHARE),
    _entry(F.max_pool2d, U8, observe=SHARE),
    _entry(F.avg_pool2d, U8, observe=SHARE),
    _entry(torch.flatten, U8, observe=SHARE),
    # make_quantizer: the output is quantized where its reader is
    _entry_of_two(
        (torch.add, (nn.BatchNorm2d, nn.Conv2d), MatchAllNode),
        U8_S8,
        fused=nni.ConvAdd2d,
        fuser=conv_add(conv_side=0, relu=False),
    ),
    _entry_of_two(
        (operator.add, (nn.BatchNorm2d, nn.Conv2d), MatchAllNode),
        U8_S8,
        fused=nni.ConvAdd2d,
        fuser=conv_add(conv_side=0, relu=False),
    ),
    # the output is quantized where its reader is
    _entry_of_two(
        (torch.add, nn.Conv2d, MatchAllNode), U8_S8, fused=nni.ConvAdd2d, fuser=conv_add(conv_side=0, relu=False)
    ),
    _entry_of_two(
        (operator.add, nn.Conv2d, MatchAllNode), U8_S8, fused=nni.ConvAdd2d, fuser=conv_add(conv_side=0, relu=False)
    ),
    # make_quantizer: the output is quantized where its reader is
    _entry_of_two(
        (torch.add, MatchAllNode, (nn.BatchNorm2d, nn.Conv2d)),
        U8_S8,
        fused=nni.ConvAdd2d,
        fuser=conv_add(conv_side=1, relu=False),
    ),
    _entry_of_two(
        (operator.add, MatchAllNode, (nn.BatchNorm2d, nn.Conv2d)),
        U8_S8,
        fused=nni.ConvAdd2d,
        fuser=conv_add(conv_side=1, relu=False),
    ),
    # the output is quantized where its reader is
    _entry_of_two(
        (torch.add, MatchAllNode, nn.Conv2d), U8_S8, fused=nni.ConvAdd2d, fuser=conv_add(conv_side=1, relu=False)
    ),
    _entry_of_two(
        (operator.add, MatchAllNode, nn.Conv2d), U8_S8, fused=nni.ConvAdd2d, fuser=conv_add(conv_side=1, relu=False)
    ),
    _entry(nni.ConvAdd2d, U8_S8, root=nn.Conv2d, reference=nnqr.Conv2d),
    # make_quantizer: the output is quantized where its reader is
    _entry_of_two(
        (nn.ReLU, (torch.add, (nn.BatchNorm2d, nn.Conv2d), MatchAllNode)),
        U8_S8,
        fused=nni.ConvAddReLU2d,
        fuser=conv_add(conv_side=0, relu=True),
    ),
    _entry_of_two(
        (nn.ReLU, (operator.add, (nn.BatchNorm2d, nn.Conv2d), MatchAllNode)),
        U8_S8,
        fused=nni.ConvAddReLU2d,
        fuser=conv_add(conv_side=0, relu=True),
    ),
    # the output is quantized where its reader is
    _entry_of_two(
        (nn.ReLU, (torch.add, nn.Conv2d, MatchAllNode)),
        U8_S8,
        fused=nni.ConvAddReLU2d,
        fuser=conv_add(conv_side=0, relu=True),
    ),
    _entry_of_two(
        (nn.ReLU, (operator.add, nn.Conv2d, MatchAllNode)),
        U8_S8,
        fused=nni.ConvAddReLU2d,
        fuser=conv_add(conv_side=0, relu=True),
    ),
    # make_quantizer: the output is quantized where its reader is
    _entry_of_two(
        (nn.ReLU, (torch.add, MatchAllNode, (nn.BatchNorm2d, nn.Conv2d))),
        U8_S8,
        fused=nni.ConvAddReLU2d,
        fuser=conv_add(conv_side=1, relu=True),
    ),
    _entry_of_two(
        (nn.ReLU, (operator.add, MatchAllNode, (nn.BatchNorm2d, nn.Conv2d))),
        U8_S8,
        fused=nni.ConvAddReLU2d,
        fuser=conv_add(conv_side=1, relu=True),
    ),
    # the output is quantized where its reader is
    _entry_of_two(
        (nn.ReLU, (torch.add, MatchAllNode, nn.Conv2d)),
        U8_S8,
        fused=nni.ConvAddReLU2d,
        fuser=conv_add(conv_side=1, relu=True),
    ),
    _entry_of_two(
        (nn.ReLU, (operator.add, MatchAllNode, nn.Conv2d)),
        U8_S8,
        fused=nni.ConvAddReLU2d,
        fuser=conv_add(conv_side=1, relu=True),
    ),
    _entry(nni.ConvAddReLU2d, U8_S8, root=nn.Conv2d, reference=nnqr.Conv2d),
    # static: the output is quantized where its reader is
    _entry(
        (nn.Linear, nn.LeakyReLU),
        U8_S8,
        DYNAMIC_U8_S8,
        fused=nni.LinearLeakyReLU,
        fuser=sequential(nni.LinearLeakyReLU),
    ),
    _entry(nni.LinearLeakyReLU, U8_S8, DYNAMIC_U8_S8, root=nn.Linear, reference=nnqr.Linear),
    # static: the output is quantized where its reader is
    # in training: not annotated as one: leaky_relu left out
    _entry((nn.Linear, nn.BatchNorm1d, nn.LeakyReLU), U8_S8, DYNAMIC_U8_S8, fused=nni.LinearLeakyReLU, fuser=fuse_bn),
    # static: the output is quantized where its reader is
    _entry((nn.Linear, nn.Tanh), U8_S8, DYNAMIC_U8_S8, fused=nni.LinearTanh, fuser=sequential(nni.LinearTanh)),
    _entry(nni.LinearTanh, U8_S8, DYNAMIC_U8_S8, root=nn.Linear, reference=nnqr.Linear),
    # only between quantized ops
    _entry(nn.Flatten, U8, observe=SHARE),
    # static: the output is quantized where its reader is
    _entry((nn.Linear, nn.GELU), U8_S8, DYNAMIC_U8_S8, root=nn.Linear, reference=nnqr.Linear),
    _entry((nn.Conv2d, nn.ReLU6), U8_S8, DYNAMIC_U8_S8, root=nn.Conv2d, reference=nnqr.Conv2d),
    _entry((nn.Conv2d, nn.Hardswish), U8_S8, DYNAMIC_U8_S8, root=nn.Conv2d, reference=nnqr.Conv2d),
    _entry((nn.Conv2d, nn.SiLU), U8_S8, DYNAMIC_U8_S8, root=nn.Conv2d, reference=nnqr.Conv2d),
    _entry((nn.Conv2d, nn.Hardtanh), U8_S8, DYNAMIC_U8_S8, root=nn.Conv2d, reference=nnqr.Conv2d),
    _entry(nniqat.ConvReLU1d, U8_S8, DYNAMIC_U8_S8, root=nn.Conv1d, reference=nnqr.Conv1d),
    _entry(nnqat.Conv2d, U8_S8, DYNAMIC_U8_S8, root=nn.Conv2d, reference=nnqr.Conv2d),
    _entry(nniqat.ConvReLU2d, U8_S8, DYNAMIC_U8_S8, root=nn.Conv2d, reference=nnqr.Conv2d),
    # without notes:
    _entry(nniqat.ConvBn2d, U8_S8, root=nn.Conv2d, reference=nnqr.Conv2d),
    _entry(nniqat.ConvBnReLU2d, U8_S8, root=nn.Conv2d, reference=nnqr.Conv2d),
    # static: the output is quantized where its reader is
    _entry(nnqat.Linear, U8_S8, DYNAMIC_U8_S8, root=nn.Linear, reference=nnqr.Linear),
    _entry(nniqat.LinearReLU, U8_S8, DYNAMIC_U8_S8, root=nn.Linear, reference=nnqr.Linear),
]


def backend_config() -> BackendConfig:
    """Return a new BackendConfig of these claims."""
    return BackendConfig(NAME).set_backend_pattern_configs(ENTRIES)
