"""OpenVINO on the CPU: the reference model as ONNX with QDQ, which its low-precision transformations read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram

from fx_quant_conformance.backends._onnx_backend import OnnxBackend
from fx_quant_conformance.backends.base import Capabilities, Execution
from fx_quant_conformance.backends.exporting import LIMITS, Compiled, Tensors, leave_nothing
from fx_quant_conformance.refimpl.config.native import U8, U8_S8, Table

TABLE: Table = {
    **dict.fromkeys(("conv", "linear"), (U8_S8,)),
    **dict.fromkeys(("binary", "share qparams"), (U8,)),
}
PATTERNS = (
    "nn.Conv?d*",
    "torch.conv?d*",
    "nni.Conv*",
    "nnqat.Conv*",
    "nniqat.Conv*",
    "*.Linear*",
    "F.linear*",
    "operator.add*",
    "torch.add*",
    "nn.MaxPool?d",
    "F.max_pool?d",
    "nn.AvgPool?d",
    "*.avg_pool?d",
    "torch.flatten",
    "*.*squeeze*",
    "*.transpose",
    ".permute",
    ".reshape",
    ".view",
)
SETTINGS = {
    "INFERENCE_PRECISION_HINT": "f32",
    "DYNAMIC_QUANTIZATION_GROUP_SIZE": 0,
    "INFERENCE_NUM_THREADS": 1,
    "NUM_STREAMS": 1,
}
_LAYER_INFO = ("originalLayersNames", "runtimePrecision", "layerType")
_PRODUCTS = ("Convolution", "FullyConnected", "MatMul", "Pooling")
_EDGES = ("Input", "Output", "Const", "Convert", "Reorder", "FakeQuantize")
_STEPS = ("dequantize_per", "Round_")  # in names of layers that quantize or dequantize step by step
_INTEGER = ("u8", "i8")


@cache
def _core() -> Any:
    import openvino

    return openvino.Core()


class CompiledModel(Compiled):
    """A compiled ONNX model; ``model`` holds its bytes."""

    def __init__(self, model: bytes, program: ExportedProgram) -> None:
        super().__init__(program, self._run)
        self.model = model
        self.compiled = _core().compile_model(_core().read_model(model), "CPU", SETTINGS)
        names = [port.get_any_name() for port in self.compiled.inputs]  # inputs_0, inputs_1, … in any order
        self._names = sorted(names, key=lambda name: int(name.rpartition("_")[2]))

    def _run(self, inputs: Tensors) -> list[Tensor]:
        feed = {name: value.contiguous().numpy() for name, value in zip(self._names, inputs, strict=True)}
        outputs = self.compiled(feed)
        return [torch.from_numpy(outputs[number].copy()) for number in range(len(self.compiled.outputs))]


class OpenVinoBackend(OnnxBackend):
    """OpenVINO's CPU plugin."""

    name = "openvino"
    packages = ("openvino", "onnx", "onnxscript")
    table, patterns, load = TABLE, PATTERNS, CompiledModel
    settings = ", ".join(f"{name}={value}" for name, value in SETTINGS.items())
    waivers = Path(__file__).with_name("openvino.waivers.toml")

    def capabilities(self) -> Capabilities:
        """Both symmetric schemes; the rescale is in float32, and sums of floats may be."""
        schemes = ("per_tensor_symmetric", "per_channel_symmetric")
        return Capabilities(weight_schemes=schemes, limits=LIMITS)

    def execution(self, lowered: Callable[..., Any]) -> Execution | None:
        """Read the precision of each layer off the runtime model."""
        if not isinstance(lowered, CompiledModel):
            return None
        from fx_quant_conformance.backends._onnx import results, sources

        layers = lowered.compiled.get_runtime_model().get_ordered_ops()
        return read_execution(layers, sources(lowered.model), results(lowered.model), lowered.ops)


def read_execution(
    layers: Sequence[Any], sources: Mapping[str, str], results: Mapping[str, str], ops: Iterable[str]
) -> Execution:
    """Separate nodes of which a layer takes integers from those whose layers all take floats.

    A node may become several layers: after a product of integers, a bias is added in float. A product that fusions
    left without a name of the model's has that of the op whose result is quantized in it (``results``), or its own.
    ``ops``: those of the reference model.
    """
    layers_of, unknown = dict[str, list[tuple[str, bool]]](), False
    for layer in layers:
        original, precision, kind = (layer.get_rt_info()[key].astype(str) for key in _LAYER_INFO)
        names = [name.partition("/")[0] for name in original.split(",")]
        owners = list(dict.fromkeys(sources[name] for name in names if name in sources))
        if not owners and kind in _PRODUCTS:
            owners = [results[name] for name in names if name in results] or [layer.get_friendly_name()]
        for owner in owners:
            layers_of.setdefault(owner, []).append((f"{kind} {precision}", precision in _INTEGER))
        unknown |= not owners and kind not in _EDGES and not any(step in original for step in _STEPS)
    quantized, floating = list[str](), list[str]()
    for owner, own in layers_of.items():
        line = f"{owner} ({', '.join(text for text, _ in own)})"
        (quantized if any(is_quantized for _, is_quantized in own) else floating).append(line)
    if not layers_of and not unknown:
        quantized += leave_nothing(ops)
    return Execution(quantized_ops=tuple(quantized), float_fallbacks=tuple(floating))
