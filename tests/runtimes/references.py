"""Reference models for the tests of backends on other people's runtimes."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from fx_quant_conformance.backends.torch_engines.tables import native_config
from fx_quant_conformance.refimpl import QConfigMapping, convert_to_reference_decomposed_fx, prepare_fx
from fx_quant_conformance.refimpl.observers.default_qconfigs import get_default_qconfig_mapping

CONFIG = native_config("fbgemm")


def reference_of(model: nn.Module, *inputs: Tensor, mapping: QConfigMapping | None = None) -> GraphModule:
    torch.manual_seed(0)
    mapping = mapping or get_default_qconfig_mapping("qnnpack")  # all 8 bits
    prepared = prepare_fx(model.eval(), mapping, inputs, backend_config=CONFIG)
    prepared(*inputs)
    return convert_to_reference_decomposed_fx(prepared, backend_config=CONFIG)


def image(*shape: int) -> Tensor:
    return torch.linspace(-1, 1, int(torch.Size(shape).numel())).reshape(shape)


class Flat(nn.Module):
    """A view that is none: of a matrix, its axis 1 flattened by itself."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.flatten(x, 1)
