"""ncnn on the CPU: each convolution and linear layer as a model of ncnn, with the scales that ncnn2int8 would write.

ncnn has no zero points. A layer quantizes its input by itself. Its result becomes integers in it, or in a layer after
it, and is dequantized here, so that the reference model's quantize, which stands after it, changes nothing.
"""

from __future__ import annotations

import copy
import struct
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from fx_quant_conformance.backends.base import (
    Capabilities,
    Execution,
    Representation,
    Requantize,
    RoundingMode,
    Taken,
    UnsupportedPattern,
)
from fx_quant_conformance.backends.exporting import RuntimeBackend
from fx_quant_conformance.refimpl import MinMaxObserver, PerChannelMinMaxObserver, QConfig, nnqr
from fx_quant_conformance.refimpl.config.dtype_config import DTypeConfig, DTypeWithConstraints
from fx_quant_conformance.refimpl.config.native import Table
from fx_quant_conformance.refimpl.graph.invariants import is_dequantize, is_quantize
from fx_quant_conformance.refimpl.legacy import qint8

SYMMETRIC = DTypeWithConstraints(qint8, -127, 127)
S8_S8 = DTypeConfig(SYMMETRIC, SYMMETRIC, SYMMETRIC, torch.float32)
TABLE: Table = {"conv": (S8_S8,), "linear": (S8_S8,)}
PATTERNS = (
    "nn.Conv2d*",
    "nni.ConvReLU2d",
    "nnqat.Conv2d",
    "nniqat.Conv*2d",
    "nn.Linear*",
    "nni.LinearReLU",
    "nnqat.Linear",
    "nniqat.Linear*",
)
LIMITS: dict[str, dict[str, Taken]] = {
    "nn.Conv2d": {
        "_unbatched": (False,),
        "padding_mode": ("zeros",),
        "padding": lambda value: not isinstance(value, str),
    },
}
WHERE = {"nn.Conv2d": "groups in (1, out_channels) or s_w[0] == s_w[1]"}
"""A layer of groups has one scale for the weights of each."""
INT8 = 0x000D4B38
"""What stands before integers in a file of weights."""


def read_scale(model: GraphModule, node: Any) -> float:
    """Return the scale of a quantize or dequantize, which has no zero point."""
    scale, zero_point = (
        model.get_buffer(str(each.target)) if isinstance(each, Node) else each for each in node.args[1:3]
    )
    if zero_point != 0:
        raise UnsupportedPattern(f"{node.name} has zero point {zero_point}: ncnn has none")
    return float(scale)


class Kernel(nn.Module):
    """A layer as a network of ncnn, from and to float tensors that lie on the grids of its input and its output."""

    def __init__(self, layer: Any, *, has_relu: bool, s_in: float, s_out: float) -> None:
        super().__init__()
        import ncnn

        self.layer, self.s_out, self.mat = layer, s_out, ncnn.Mat
        self.kind, lines, weights = write(layer, has_relu, s_in, s_out)
        self.net = ncnn.Net()
        self.net.opt.num_threads = 1
        with TemporaryDirectory() as folder:
            param, model = Path(folder) / "net.param", Path(folder) / "net.bin"
            param.write_text(f"7767517\n{len(lines)} {len(lines)}\n" + "\n".join(lines) + "\n")
            model.write_bytes(weights)
            if self.net.load_param(str(param)) or self.net.load_model(str(model)):
                raise RuntimeError(f"ncnn does not load what was written: {lines}")

    def forward(self, x: Tensor) -> Tensor:
        """Run it on each row: ncnn has no batches."""
        is_image = self.kind != "InnerProduct"
        rows = x if is_image else x.reshape(-1, x.shape[-1])
        if not len(rows):
            return self.layer(x)  # type: ignore[no-any-return]  # for its shape
        made = torch.stack([self._run(row) for row in rows]) * self.s_out
        return made if is_image else made.reshape(*x.shape[:-1], -1)

    def _run(self, row: Tensor) -> Tensor:
        """Return the integers of a row, as floats."""
        extractor = self.net.create_extractor()
        values = row.contiguous().numpy()  # a Mat does not keep them alive
        extractor.input("in", self.mat(values).clone())
        status, out = extractor.extract("out")
        if status:
            raise RuntimeError(f"ncnn's extract ended with {status}")
        integers = torch.tensor(out.numpy())
        del out  # before the extractor, whose memory it is in
        return integers


def write(layer: Any, has_relu: bool, s_in: float, s_out: float) -> tuple[str, list[str], bytes]:
    """Return the kind of a reference layer in ncnn, the lines of its network, and the file of its weights."""
    integers = layer.get_quantized_weight().to(torch.int8).contiguous()
    bias, count = layer.bias, integers.numel()
    scales = (1 / layer.weight_scale.double()).reshape(-1).expand(len(integers)).float()
    has_bias = int(bias is not None)
    if isinstance(layer, nnqr.Conv2d):
        (top, left), groups = layer.padding, layer.groups
        kind = "Convolution" if groups == 1 else "ConvolutionDepthWise"
        fields = {
            0: layer.out_channels,
            **dict(zip((11, 1), layer.kernel_size, strict=True)),
            **dict(zip((12, 2), layer.dilation, strict=True)),
            **dict(zip((13, 3), layer.stride, strict=True)),
            4: left,
            14: top,
            15: left,
            16: top,
            5: has_bias,
            6: count,
            8: 101,
            9: int(has_relu),
            **({7: groups} if groups > 1 else {}),
        }
        scales = scales[:: len(integers) // groups] if groups > 1 else scales
    else:
        kind, fields = "InnerProduct", {0: len(integers), 1: has_bias, 2: count, 8: 1, 9: int(has_relu)}
    own = " ".join(f"{key}={value}" for key, value in sorted(fields.items()))
    if kind == "InnerProduct":  # gives floats alone
        lines = [f"{kind} layer 1 1 in sum {own}", "Quantize integers 1 1 sum out 0=1"]
    else:
        lines = [f"{kind} layer 1 1 in out {own}"]
    floats = [scales, torch.tensor([1 / s_in]), torch.tensor([1 / s_out])]
    floats = floats if bias is None else [bias.detach().float(), *floats]
    return kind, ["Input in 0 1 in", *lines], b"".join([pack(integers, INT8), *map(pack, floats)])


def pack(values: Tensor, flag: int | None = None) -> bytes:
    """Return numbers as ncnn's files hold them: in fours of bytes."""
    data = values.numpy().tobytes()
    return (b"" if flag is None else struct.pack("<I", flag)) + data + b"\0" * (-len(data) % 4)


class NcnnBackend(RuntimeBackend):
    """ncnn's int8 layers; what moves or joins stays outside of the claims."""

    name = "ncnn"
    representation = Representation.DECOMPOSED
    packages = ("ncnn",)
    table, patterns = TABLE, PATTERNS
    settings = "one thread"
    waivers = Path(__file__).with_name("ncnn.waivers.toml")

    def capabilities(self) -> Capabilities:
        """Both symmetric schemes, a float bias, results rounded half away from zero."""
        schemes = ("per_tensor_symmetric", "per_channel_symmetric")
        return Capabilities(
            weight_schemes=schemes, requantize=Requantize(rounding=RoundingMode.HALF_AWAY), limits=LIMITS, where=WHERE
        )

    def qconfigs(self) -> list[QConfig]:
        """Observers of ranges that are symmetric: ncnn has no zero points."""
        ends = {"dtype": qint8, "quant_min": -127, "quant_max": 127}
        activation = MinMaxObserver.with_args(**ends, qscheme=torch.per_tensor_symmetric)
        one = MinMaxObserver.with_args(**ends, qscheme=torch.per_tensor_symmetric)
        each = PerChannelMinMaxObserver.with_args(**ends, qscheme=torch.per_channel_symmetric)
        return [QConfig(activation=activation, weight=weight) for weight in (one, each)]

    def lower(self, reference_model: GraphModule, example_inputs: tuple[Any, ...]) -> GraphModule:
        """Put a network of ncnn in the place of each layer between dequantize and quantize."""
        lowered = copy.deepcopy(reference_model)
        for node, layer, has_relu in list(find_layers(lowered)):
            (reader,) = node.users
            s_in, s_out = read_scale(lowered, node.args[0]), read_scale(lowered, reader)
            lowered.add_submodule(f"ncnn_{node.name}", Kernel(layer, has_relu=has_relu, s_in=s_in, s_out=s_out))
            node.target = f"ncnn_{node.name}"
        lowered.recompile()
        return lowered

    def execution(self, lowered: Any) -> Execution:
        """Name the layers that ncnn has taken, and those that it has not."""
        called = {
            node.name: lowered.get_submodule(node.target) for node in lowered.graph.nodes if node.op == "call_module"
        }
        quantized = (f"{name} ({each.kind})" for name, each in called.items() if isinstance(each, Kernel))
        floating = (name for name, each in called.items() if layer_of(each) is not None)
        return Execution(quantized_ops=tuple(quantized), float_fallbacks=tuple(floating))


def layer_of(module: nn.Module) -> Any:
    """Return the reference layer that a module is, or that a relu follows in it; None: there is none."""
    layer = module[0] if isinstance(module, nn.Sequential) else module
    return layer if isinstance(layer, (nnqr.Conv2d, nnqr.Linear)) else None


def find_layers(model: GraphModule) -> Iterator[tuple[Node, Any, bool]]:
    """Yield the node, the reference layer and whether a relu follows, of each layer between dequantize and quantize."""
    for node in model.graph.nodes:
        if node.op != "call_module" or not is_dequantize(node.args[0]) or not all(map(is_quantize, node.users)):
            continue
        module = model.get_submodule(str(node.target))
        if (layer := layer_of(module)) is not None:
            yield node, layer, layer is not module
