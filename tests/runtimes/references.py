"""Reference models for the tests of backends on other people's runtimes."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.ao.quantization import default_per_channel_weight_observer
from torch.fx import GraphModule

from backends.base import Backend
from backends.lowering import lower_pack, lower_reference
from backends.native_tables import native_config
from refimpl import QConfig, QConfigMapping, convert_to_reference_decomposed_fx, prepare_fx
from refimpl.default_qconfigs import get_default_qconfig_mapping

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


class Three(nn.Module):
    """A convolution, a sum and a linear layer: what the runtimes run on integers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.fc = nn.Conv2d(3, 4, 3), nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        return torch.flatten(self.fc(x + x), 1)


def check_pack(backend: Backend) -> None:
    """Check that a backend's report of a pack names each of its parts, and that each gives what it gives alone."""
    activation = get_default_qconfig_mapping("qnnpack").global_qconfig.activation
    mapping = QConfigMapping().set_global(QConfig(activation, default_per_channel_weight_observer))
    inputs = [image(rows, 3, 6, 8) for rows in (2, 5, 1)]
    references = [reference_of(Three(), x, mapping=mapping) for x in inputs]
    pack = lower_pack(backend, [(reference, (x,)) for reference, x in zip(references, inputs, strict=True)])
    execution = backend.execution(pack)
    assert execution is not None
    parts = {name.partition("_")[0] for name in execution.quantized_ops}
    assert {"part0", "part1", "part2"} <= parts, execution
    for found, reference, x in zip(pack(*inputs), references, inputs, strict=True):
        assert torch.equal(found, lower_reference(backend, reference, (x,))(x))
