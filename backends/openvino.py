"""OpenVINO on the CPU: the reference model as ONNX with QDQ, which its low-precision transformations read."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from backends._export import LIMITS, Compiled, ExportingBackend, Tensors
from backends.base import Capabilities, Execution
from refimpl.native import U8, U8_S8, Table

TABLE: Table = {
    **dict.fromkeys(("conv", "linear"), (U8_S8,)),
    **dict.fromkeys(("binary", "cat", "default", "fixed qparams", "share qparams"), (U8,)),
}
PATTERNS = (
    "nn.Conv?d*", "torch.conv?d*", "nni.Conv*", "nnqat.Conv*", "nniqat.Conv*", "*.ConvTranspose*", "*.conv_transpose*",
    "*.Linear*", "F.linear*", "torch.matmul",
    "operator.add*", "operator.mul*", "torch.add*", "torch.mul*", "torch.cat",
    "nn.MaxPool?d", "F.max_pool?d", "nn.AvgPool?d", "*.avg_pool?d",
    "torch.flatten", "*.*squeeze*", "*.transpose", ".permute", ".reshape", ".view",
)  # fmt: skip
SETTINGS = {
    "INFERENCE_PRECISION_HINT": "f32",
    "DYNAMIC_QUANTIZATION_GROUP_SIZE": 0,
    "INFERENCE_NUM_THREADS": 1,
    "NUM_STREAMS": 1,
}
_TOLD = ("originalLayersNames", "runtimePrecision", "layerType")


@cache
def _core() -> Any:
    import openvino

    return openvino.Core()


class CompiledModel(Compiled):
    """An ONNX model, compiled; ``model`` is what was compiled."""

    def __init__(self, model: bytes, reference_model: GraphModule, example_inputs: tuple[Any, ...]) -> None:
        super().__init__(reference_model, example_inputs, self._run)
        self.model = model
        self.compiled = _core().compile_model(_core().read_model(model), "CPU", SETTINGS)
        self._names = [each.get_any_name() for each in self.compiled.inputs]

    def _run(self, inputs: Tensors) -> list[Tensor]:
        order = sorted(self._names, key=lambda name: int(name.rpartition("_")[2]))  # inputs_0, inputs_1, …
        given = {name: value.contiguous().numpy() for name, value in zip(order, inputs, strict=True)}
        found = self.compiled(given)
        return [torch.from_numpy(found[number].copy()) for number in range(len(self.compiled.outputs))]


class OpenVinoBackend(ExportingBackend):
    """OpenVINO's CPU plugin."""

    name = "openvino"
    packages = ("openvino", "onnx", "onnxscript")
    table, patterns = TABLE, PATTERNS

    def capabilities(self) -> Capabilities:
        """The rescale is in float32, and sums of floats may be."""
        return Capabilities(weight_schemes=("per_tensor_symmetric", "per_channel_symmetric"), limits=LIMITS)

    def warm_up(self) -> None:
        """Have the exporter imported; not the plugin: a forked process would wait for its threads."""
        from backends._onnx import warm_up

        warm_up()

    def lower(self, reference_model: GraphModule, example_inputs: tuple[Any, ...]) -> Callable[..., Any]:
        """Export to ONNX and compile."""
        from backends._onnx import onnx_bytes

        return CompiledModel(onnx_bytes(reference_model, example_inputs), reference_model, example_inputs)

    def execution(self, lowered: Callable[..., Any]) -> Execution | None:
        """Read the precision of each layer off the runtime model."""
        if not isinstance(lowered, CompiledModel):
            return None
        from backends._onnx import sources

        quantized, floating = list[str](), list[str]()
        names = sources(lowered.model, lowered.modules)
        for layer in lowered.compiled.get_runtime_model().get_ordered_ops():
            told = {key: value.astype(str) for key, value in layer.get_rt_info().items() if key in _TOLD}
            originals = [
                each.removeprefix("node_").partition("/")[0] for each in told["originalLayersNames"].split(",")
            ]
            for name in dict.fromkeys(names[each] for each in originals if each in names):
                line = f"{name} ({told['layerType']}, {told['runtimePrecision']})"
                (quantized if told["runtimePrecision"] in ("u8", "i8") else floating).append(line)
        return Execution(quantized_ops=tuple(quantized), float_fallbacks=tuple(floating))
