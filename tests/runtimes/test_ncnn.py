"""Reference models on ncnn: what is written, what is computed, and what is said of it."""

from __future__ import annotations

import struct
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from fx_quant_conformance.backends.base import UnsupportedPattern
from fx_quant_conformance.backends.ncnn import NcnnBackend, find_layers, read_scale, write
from fx_quant_conformance.refimpl import QConfigMapping, convert_to_reference_decomposed_fx, prepare_fx
from tests.runtimes.references import image
from tests.runtimes.references import reference_of as with_zero_points


def reference_of(model: nn.Module, x: Tensor, *, per_channel: bool = False) -> GraphModule:
    backend = NcnnBackend()
    config, mapping = backend.backend_config(), QConfigMapping().set_global(backend.qconfigs()[per_channel])
    prepared = prepare_fx(model.eval(), mapping, (x,), backend_config=config)
    prepared(x)
    return convert_to_reference_decomposed_fx(prepared, backend_config=config)


def written(model: nn.Module, x: Tensor, *, per_channel: bool = False) -> tuple[str, list[str], bytes]:
    ((_, layer, has_relu),) = find_layers(reference_of(nn.Sequential(model), x, per_channel=per_channel))
    return write(layer, has_relu, 0.5, 0.25)


def test_a_layer_is_written_with_its_integers_its_bias_and_its_scales() -> None:
    """As ncnn2int8 writes it: a mark, integers in fours of bytes, and floats; scales are reciprocals."""
    layer = nn.Linear(3, 1)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([[127.0, -64.0, 1.0]]) / 64)
        layer.bias.fill_(0.75)
    kind, lines, data = written(layer, image(2, 3))
    assert (kind, lines[0]) == ("InnerProduct", "Input in 0 1 in")
    assert lines[1:] == ["InnerProduct layer 1 1 in sum 0=1 1=1 2=3 8=1 9=0", "Quantize integers 1 1 sum out 0=1"]
    expected = struct.pack("<I3bx", 0x000D4B38, 127, -64, 1) + struct.pack("<4f", 0.75, 64, 2, 4)
    assert data == expected


@pytest.mark.parametrize(("groups", "scales"), [(1, 4), (4, 4)])
def test_a_convolution_has_a_scale_for_each_channel(groups: int, scales: int) -> None:
    kind, lines, data = written(nn.Conv2d(4, 4, (1, 2), groups=groups, bias=False), image(1, 4, 3, 3), per_channel=True)
    assert kind == ("Convolution" if groups == 1 else "ConvolutionDepthWise")
    assert " 1=2 " in lines[1] and " 11=1 " in lines[1] and " 8=101 " in lines[1]
    assert len(data) == 4 + 4 * 4 // groups * 2 + 4 * (scales + 2)


def test_a_zero_point_is_declined() -> None:
    reference = with_zero_points(nn.Sequential(nn.Linear(3, 2)), image(2, 3))
    (node,) = (node for node in reference.graph.nodes if "dequantize" in node.name and "_1" not in node.name)
    with pytest.raises(UnsupportedPattern, match=r"has zero point \d+: ncnn has none"):
        read_scale(reference, node)


class Net(nn.Module):
    """A layer that is called twice, on other grids, and what ncnn is not asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.last = nn.Conv2d(3, 3, 3, padding=1), nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Any:
        y = self.conv(torch.relu(self.conv(x)) * 3.0)
        return self.last(torch.flatten(torch.max_pool2d(y, 2), 1))


@pytest.mark.slow
@pytest.mark.parametrize("per_channel", [False, True])
def test_a_network_runs_on_integers_in_batches_of_any_size(per_channel: bool) -> None:
    pytest.importorskip("ncnn")
    backend, x = NcnnBackend(), image(2, 3, 4, 4)
    reference = reference_of(Net(), x, per_channel=per_channel)
    lowered = backend.lower(reference, (x,))
    for rows in (2, 1, 0, 5):
        given = image(rows, 3, 4, 4)
        assert lowered(given).shape == (rows, 5) and torch.allclose(lowered(given), reference(given), atol=1e-6)
    names = [line.partition(" (")[0] for line in backend.execution(lowered).quantized_ops]
    assert names == ["conv", "conv_1", "last"]
