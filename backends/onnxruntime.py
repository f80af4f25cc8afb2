"""ONNX Runtime on the CPU: static int8 by QDQ, dynamic int8 by DynamicQuantizeLinear and MatMulInteger."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram

from fx_quant_conformance.backends._onnx_backend import OnnxBackend
from fx_quant_conformance.backends.base import Capabilities, Execution
from fx_quant_conformance.backends.exporting import LIMITS, Compiled, Tensors, leave_nothing
from fx_quant_conformance.refimpl.config.native import DYNAMIC_U8_S8, U8, U8_S8, Table

TABLE: Table = {
    "conv": (U8_S8,),
    "linear": (U8_S8, DYNAMIC_U8_S8),
    **dict.fromkeys(("binary", "cat", "default", "fixed qparams", "share qparams"), (U8,)),
}
PATTERNS = (
    "nn.Conv?d*",
    "torch.conv?d*",
    "nni.Conv*",
    "nnqat.Conv*",
    "nniqat.Conv*",
    "*.Linear*",
    "F.linear*",
    "torch.matmul",
    "operator.add*",
    "operator.mul*",
    "torch.add*",
    "torch.mul*",
    "torch.cat",
    "*.LeakyReLU",
    "F.leaky_relu",
    "*.[Ss]igmoid",
    ".sigmoid_",
    "nn.Softmax",
    "nn.MaxPool?d",
    "F.max_pool?d",
    "nn.AvgPool?d",
    "*.avg_pool?d",
    "torch.flatten",
    "torch.narrow",
    "torch.stack",
    "*.*squeeze*",
    "*.transpose",
    ".permute",
    ".reshape",
    ".view",
)
_MADE_FROM = "_token_"
"""What comes after a node's name in that of a node that the optimizer makes from it."""
_INTEGER = ("QLinear", "QGemm", "QAttention", "ConvInteger", "MatMulInteger", "DynamicQuantizeMatMul")


class Session(Compiled):
    """A loaded ONNX model; ``model`` holds its bytes."""

    def __init__(self, model: bytes, program: ExportedProgram) -> None:
        super().__init__(program, self._run)
        self.model = model
        self._session = _load(model)
        self._names = [node.name for node in self._session.get_inputs()]

    def _run(self, inputs: Tensors) -> list[Tensor]:
        feed = {name: value.numpy() for name, value in zip(self._names, inputs, strict=True)}
        return [torch.from_numpy(output) for output in self._session.run(None, feed)]


def _load(model: bytes, optimized: Path | None = None) -> Any:
    """Load a model, with every setting that a result may depend on."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.execution_mode = onnxruntime.ExecutionMode.ORT_SEQUENTIAL
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL
    options.log_severity_level = 3
    if optimized is not None:
        options.optimized_model_filepath = str(optimized)
    return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])


class OnnxRuntimeBackend(OnnxBackend):
    """ONNX Runtime's CPU provider: the reference model as QDQ, in which its optimizer fuses integer kernels."""

    name = "onnxruntime"
    packages = ("onnxruntime", "onnx", "onnxscript")
    table, patterns, load = TABLE, PATTERNS, Session
    settings = "one thread, sequential, all graph optimizations"
    waivers = Path(__file__).with_name("onnxruntime.waivers.toml")

    def capabilities(self) -> Capabilities:
        """Both symmetric schemes; a bias becomes int32 of scale s_x·s_w."""
        schemes = ("per_tensor_symmetric", "per_channel_symmetric")
        return Capabilities(weight_schemes=schemes, int32_bias=True, limits=LIMITS)

    def execution(self, lowered: Callable[..., Any]) -> Execution | None:
        """Read off the optimized model which nodes compute on integers, and which on dequantized values."""
        if not isinstance(lowered, Session):
            return None
        import onnx

        from fx_quant_conformance.backends._onnx import origins, sources

        with TemporaryDirectory() as folder:
            path = Path(folder) / "optimized.onnx"
            _load(lowered.model, path)
            return read_execution(onnx.load(path), sources(lowered.model), origins(lowered.model), lowered.ops)


def read_execution(model: Any, sources: Mapping[str, str], origins: Mapping[str, str], ops: Iterable[str]) -> Execution:
    """Separate ops on integers from ops on floats that were dequantized before and are quantized again after them.

    ``ops``: those of the reference model.
    """
    quantized, floating = list[str](), list[str]()
    floats = {value.name for value in model.graph.input}
    stale = dict[str, tuple[str, ...]]()  # dequantized tensors, and the ops that computed them since
    for node in model.graph.node:
        if node.op_type == "DequantizeLinear":
            stale[node.output[0]] = ()
        elif node.op_type == "QuantizeLinear":
            floating += stale.get(node.input[0], ())
        elif not node.op_type.startswith(_INTEGER) and any(name in stale for name in node.input):
            ops = (*(op for name in node.input for op in stale.get(name, ())), _name_op(node, sources, {}))
            stale.update(dict.fromkeys(node.output, ops))
        elif node.op_type.startswith(_INTEGER) or floats.isdisjoint(node.input):
            quantized.append(_name_op(node, sources, origins))
    if not any(sources.get(name) for node in model.graph.node for name in node.output) and not floating:
        quantized += leave_nothing(ops)
    return Execution(quantized_ops=tuple(quantized), float_fallbacks=tuple(dict.fromkeys(floating)))


def _name_op(node: Any, sources: Mapping[str, str], origins: Mapping[str, str]) -> str:
    """Name an op of the optimized model after the reference model's node that it comes from."""
    name, output = node.name.partition(_MADE_FROM)[0], node.output[0]
    found = (sources.get(output), sources.get(name), origins.get(name), origins.get(output), name, output)
    return f"{next(filter(None, found))} ({node.op_type})"
