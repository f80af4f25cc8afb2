"""Reference models for the tests of backends on other people's runtimes."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from fx_quant_conformance.backends.torch_engines.tables import native_config
from fx_quant_conformance.refimpl import (
    MinMaxObserver,
    PerChannelMinMaxObserver,
    QConfig,
    QConfigMapping,
    convert_to_reference_decomposed_fx,
    prepare_fx,
    qint8,
)
from fx_quant_conformance.refimpl.observers.default_qconfigs import get_default_qconfig_mapping

CONFIG = native_config("fbgemm")
# Sums of two products stay below 2**15: where a CPU has no VNNI, kernels of several runtimes saturate there.
PER_TENSOR = MinMaxObserver.with_args(dtype=qint8, qscheme=torch.per_tensor_symmetric, quant_min=-63, quant_max=63)
PER_CHANNEL = PerChannelMinMaxObserver.with_args(
    dtype=qint8, qscheme=torch.per_channel_symmetric, quant_min=-63, quant_max=63
)


def reference_of(model: nn.Module, *inputs: Tensor, mapping: QConfigMapping | None = None) -> GraphModule:
    torch.manual_seed(0)
    if mapping is None:
        activation = get_default_qconfig_mapping("qnnpack").global_qconfig.activation  # all 8 bits
        mapping = get_default_qconfig_mapping("qnnpack").set_global(QConfig(activation, PER_TENSOR))
    prepared = prepare_fx(model.eval(), mapping, inputs, backend_config=CONFIG)
    prepared(*inputs)
    return convert_to_reference_decomposed_fx(prepared, backend_config=CONFIG)


def image(*shape: int) -> Tensor:
    return torch.linspace(-1, 1, int(torch.Size(shape).numel())).reshape(shape)


class Flat(nn.Module):
    """A view that is none: of a matrix, its axis 1 flattened by itself."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.flatten(x, 1)
