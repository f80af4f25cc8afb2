"""onednn: what its config claims and the engine, or torch's flow for it, refuses."""

# finding: 31
# engine: onednn
# claimed: affine weights, output_padding, qint8 embeddings, QAT of conv + bn + add, conv + number
# fault of: config
# largest error: raises
# cpu: all
# claims: `nn.Linear*/*`, `nn.ConvTranspose?d*/*`, `nn.Embedding*/*`, `*.add(*Conv2d*/*`
# reason: no kernel for what is claimed, such as qint8 embeddings

from collections.abc import Callable
from typing import Any

import torch
import torch.ao.nn.quantized as nnq
from torch import nn
from torch.ao.quantization import QConfig, backend_config, quantize_fx

torch.backends.quantized.engine = "onednn"
ops = torch.ops.quantized


class Sum(nn.Module):
    """A convolution with batch norm (or none), and a sum."""

    def __init__(self, other: float | None, norm: nn.Module) -> None:
        super().__init__()
        self.conv, self.norm, self.other = nn.Conv2d(4, 4, 1), norm, other

    def forward(self, x: torch.Tensor) -> Any:
        return self.norm(self.conv(x)) + (x if self.other is None else self.other)


def prepare(model: nn.Module, is_qat: bool) -> Any:
    """Prepare a model with torch under onednn's config."""
    mapping = torch.ao.quantization.get_default_qat_qconfig_mapping("onednn")
    flow = quantize_fx.prepare_qat_fx if is_qat else quantize_fx.prepare_fx
    config = backend_config.get_onednn_backend_config()
    return flow(model.train(is_qat), mapping, (torch.randn(1, 4, 3, 3),), backend_config=config)


def embedding(dtype: torch.dtype) -> Any:
    """Quantize an Embedding's weight to a dtype."""
    module = nn.Embedding(4, 4)
    kind, qscheme = torch.ao.quantization.PerChannelMinMaxObserver, torch.per_channel_affine_float_qparams
    weight = kind.with_args(dtype=dtype, qscheme=qscheme, ch_axis=0)
    module.qconfig = QConfig(None, weight)  # type: ignore[assignment, no-untyped-call]
    return nnq.Embedding.from_float(module)  # type: ignore[no-untyped-call]


affine = torch.quantize_per_tensor(torch.ones(4, 4, 1, 1), 0.1, 3, torch.qint8)
symmetric = torch.quantize_per_tensor(torch.ones(4, 4, 1, 1), 0.1, 0, torch.qint8)
one, none = [1, 1], [0, 0]
cases: tuple[tuple[str, Callable[[], Any]], ...] = (
    ("linear, affine weight", lambda: ops.linear_prepack(affine[:, :, 0, 0], None)),
    ("conv2d, affine weight", lambda: ops.conv2d_prepack(affine, None, one, none, one, 1)),
    ("conv2d, symmetric weight", lambda: ops.conv2d_prepack(symmetric, None, one, none, one, 1)),
    (
        "conv_transpose2d, output_padding",
        lambda: ops.conv_transpose2d_prepack(symmetric, None, [2, 2], none, one, one, 1),
    ),
    ("Embedding, qint8 weight (claimed)", lambda: embedding(torch.qint8)),
    ("Embedding, quint8 weight (not claimed)", lambda: embedding(torch.quint8)),
    ("conv + bn + add, PTQ", lambda: prepare(Sum(None, nn.BatchNorm2d(4)), False)),
    ("conv + bn + add, QAT", lambda: prepare(Sum(None, nn.BatchNorm2d(4)), True)),
    ("conv + number, PTQ", lambda: prepare(Sum(1.5, nn.Sequential()), False)),
)
shown = False
for name, call in cases:
    try:
        print(f"{name}: gives a {type(call()).__name__}")
    except Exception as error:
        print(f"{name}: raised {type(error).__name__}: {str(error).splitlines()[0][:90]}")
        shown = True
print("the fault shows" if shown else "the fault does not show with this torch on this machine")
raise SystemExit(not shown)
