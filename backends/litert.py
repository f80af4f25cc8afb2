"""LiteRT (formerly TensorFlow Lite) on the CPU: the reference model by litert-torch's converter, whose kernels compute.

XNNPACK's delegate takes what it can, and the runtime's own kernels compute the rest, as by default.
"""

from __future__ import annotations

import contextlib
import io
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.fx import symbolic_trace

from fx_quant_conformance.backends.base import Capabilities, Execution, Requantize, RoundingMode, UnsupportedPattern
from fx_quant_conformance.backends.exporting import LIMITS as SHARED_LIMITS
from fx_quant_conformance.backends.exporting import (
    Compiled,
    ExportingBackend,
    Tensors,
    decompose_sparingly,
    leave_nothing,
    owner_of,
    separate,
)
from fx_quant_conformance.refimpl import BackendConfig, BackendPatternConfig, export_reference
from fx_quant_conformance.refimpl.config.dtype_config import DTypeConfig, DTypeWithConstraints
from fx_quant_conformance.refimpl.config.native import Table
from fx_quant_conformance.refimpl.exported.exported import open_module
from fx_quant_conformance.refimpl.graph.invariants import is_quantize
from fx_quant_conformance.refimpl.legacy import qint8
from fx_quant_conformance.refimpl.observers.decomposed import OPS

S8 = DTypeConfig(qint8, qint8)
S8_S8 = DTypeConfig(qint8, qint8, DTypeWithConstraints(qint8, -127, 127), torch.float32)
"""TFLite's weights have no -128, so that a kernel may add two products in 16 bits."""
SOFTMAX = DTypeConfig(qint8, DTypeWithConstraints(qint8, scale_exact_match=1 / 256, zero_point_exact_match=-128))
TABLE: Table = {
    **dict.fromkeys(("conv", "linear"), (S8_S8,)),
    **dict.fromkeys(("binary", "cat", "default", "fixed qparams", "share qparams"), (S8,)),
}
PATTERNS = (
    "nn.Conv[12]d*",
    "torch.conv[12]d*",
    "nni.ConvReLU[12]d",
    "nni.LinearReLU",
    "nnqat.Conv[12]d",
    "nniqat.Conv*[12]d",
    "nn.Linear*",
    "nnqat.Linear",
    "nniqat.Linear*",
    "F.linear*",
    "operator.add*",
    "operator.mul*",
    "torch.add*",
    "torch.mul*",
    "torch.cat",
    "*.LeakyReLU",
    "F.leaky_relu",
    "*.[Ss]igmoid",
    "*.[Tt]anh",
    "nn.ReLU",
    "nn.ReLU6",
    "F.relu*",
    ".relu",
    "nn.MaxPool2d",
    "F.max_pool2d",
    "nn.AvgPool2d",
    "F.avg_pool2d",
    "torch.mean",
    ".mean",
    "torch.flatten",
    "*.*squeeze",
    "*.transpose",
    ".permute",
    ".reshape",
    ".view",
)
LIMITS = SHARED_LIMITS | {
    **{op: {"dilation": (1,)} for op in ("nn.MaxPool2d", "F.max_pool2d")},
    **{op: {"divisor_override": (None,)} for op in ("nn.AvgPool2d", "F.avg_pool2d")},
}
WHERE = {"nn.Softmax": "dim in (-1, rank - 1)", "*[Aa]vg*": "count_include_pad or padding == 0"}
"""What TFLite has no op for: the converter leaves it in float."""
_EDGES = ("QUANTIZE", "DEQUANTIZE", "DELEGATE")


class Model(Compiled):
    """A converted and loaded program.

    The converter lets inputs and outputs be integers where the program quantizes them at once; they are quantized here
    as `quantize_per_tensor` does.
    """

    def __init__(self, program: ExportedProgram, example_inputs: tuple[Any, ...]) -> None:
        from ai_edge_litert.interpreter import Interpreter

        super().__init__(program, self._run)
        self._data = convert(program, example_inputs)
        with _quiet():
            self._interpreter = Interpreter(model_content=self._data, num_threads=1)
            self._interpreter.allocate_tensors()
        names = self._interpreter.get_signature_list()["serving_default"]
        runner = self._interpreter.get_signature_runner("serving_default")
        inputs, outputs = runner.get_input_details(), runner.get_output_details()
        self._inputs = [inputs[name] for name in sorted(names["inputs"], key=_number)]
        self._outputs = [outputs[name] for name in sorted(names["outputs"], key=_number)]

    def _run(self, inputs: Tensors) -> list[Tensor]:
        for detail, value in zip(self._inputs, inputs, strict=True):
            self._interpreter.set_tensor(detail["index"], _quantize(value, detail))
        self._interpreter.invoke()
        return [_dequantize(self._interpreter.get_tensor(detail["index"]), detail) for detail in self._outputs]

    def read_ops(self) -> Iterator[tuple[list[str], str, bool]]:
        """Yield the owners, the kind, and whether it takes integers, of each op that does not only convert.

        The tensor that an op makes is named by all that were fused in it; an output has a name of its own, and its op
        the owners that nobody else has. An op without an owner changes a layout.
        """
        tensors = {detail["index"]: detail for detail in self._interpreter.get_tensor_details()}
        ops = [op for op in self._interpreter._get_ops_details() if op["op_name"] not in _EDGES]
        made = [tensors[op["outputs"][0]]["name"] for op in ops]
        named = [[op for op in self.ops if f"{op}_{op}" in name.split(";")] for name in made]
        left = [op for op in self.ops if all(op not in own for own in named)]
        for op, name, own in zip(ops, made, named, strict=True):
            owners = left if name.startswith("serving_default") else own
            yield owners, op["op_name"], _holds_integers(tensors[op["inputs"][0]])


def _number(name: str) -> int:
    return int(name.rpartition("_")[2])


def _quantize(value: Tensor, detail: dict[str, Any]) -> Any:
    integers = OPS.quantize_per_tensor(value, *_grid(detail)) if _holds_integers(detail) else value
    return integers.contiguous().numpy()


def _dequantize(value: Any, detail: dict[str, Any]) -> Tensor:
    made = torch.as_tensor(value)
    result: Tensor = OPS.dequantize_per_tensor(made, *_grid(detail)) if _holds_integers(detail) else made
    return result


def _holds_integers(detail: dict[str, Any]) -> bool:
    return str(detail["dtype"].__name__) == "int8"


def _grid(detail: dict[str, Any]) -> tuple[Any, ...]:
    """Return the arguments of quantize and dequantize for a tensor: scale, zero point, range, dtype."""
    scale, zero_point = detail["quantization"]
    return float(scale), int(zero_point), -128, 127, torch.int8


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep what the converter prints of its progress, and what it warns of, out of the run's output."""
    root = logging.getLogger()
    level = root.level
    root.setLevel(logging.ERROR)
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        root.setLevel(level)


def lay_weights(program: ExportedProgram) -> None:
    """Put float weights on their grid: the converter rounds ties away from zero (docs/findings.md, 115)."""
    signature = program.graph_signature
    names = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
    names.update(signature.inputs_to_lifted_tensor_constants)
    held = {node: name for node in program.graph.nodes if (name := names.get(node.name))}

    def read(value: Any) -> Any:
        name = held.get(value)
        return value if name is None else program.state_dict.get(name, program.constants.get(name))

    for node in program.graph.nodes:
        if is_quantize(node) and node.args[0] in held:
            (dequantize,) = node.users
            integers = node.target(*map(read, node.args))
            with torch.no_grad():
                read(node.args[0]).copy_(dequantize.target(integers, *map(read, dequantize.args[1:])))


def convert(program: ExportedProgram, example_inputs: tuple[Any, ...]) -> bytes:
    """Convert a program to TFLite, as litert-torch does for a model that torchao's PT2E has quantized.

    Each op is named by its owner, so that the names of tensors tell which op of the reference model they are of.
    """
    import litert_torch
    from litert_torch.quantize.pt2e_quantizer import PT2EQuantizer, get_symmetric_quantization_config
    from litert_torch.quantize.quant_config import QuantConfig

    lay_weights(program)
    for node in program.graph.nodes:
        if node.op == "call_function":
            owner = owner_of(node)
            node.meta["nn_module_stack"] = {owner: (owner, owner)}
    static = QuantConfig(pt2e_quantizer=PT2EQuantizer().set_global(get_symmetric_quantization_config()))
    with _quiet(), decompose_sparingly():
        model = litert_torch.convert(open_module(program), example_inputs, quant_config=static)
        data: bytes = model.model_content()
    return data


class LiteRTBackend(ExportingBackend):
    """LiteRT's interpreter with XNNPACK's delegate, on what litert-torch's converter makes."""

    name = "litert"
    packages = ("litert_torch", "ai_edge_litert", "litert_converter")
    table, patterns = TABLE, PATTERNS
    settings = "XNNPACK delegate, one thread, converted as static PT2E"
    waivers = Path(__file__).with_name("litert.waivers.toml")

    def backend_config(self) -> BackendConfig:
        """Return the claims by ``table`` and ``patterns``, and those of softmax, whose kernel has one output grid."""
        return (
            super()
            .backend_config()
            .set_backend_pattern_config(BackendPatternConfig(nn.Softmax).set_dtype_configs([SOFTMAX]))
        )

    def capabilities(self) -> Capabilities:
        """Both symmetric schemes, weights that the converter folds, a bias of int32, batches of one size."""
        schemes = ("per_tensor_symmetric", "per_channel_symmetric")
        eighths = Requantize(fraction_bits=8, rounding=RoundingMode.HALF_UP)
        twice = Requantize(multiplier_bits=31, rounds_twice=True, rounding=RoundingMode.HALF_AWAY)
        return Capabilities(
            weight_schemes=schemes,
            int32_bias=True,
            requantize_of={"*[Ll]eaky*": eighths, "torch.matmul": twice},  # XNNPACK's, and the runtime's own
            fold_weights=False,
            dynamic_batch=False,
            limits=LIMITS,
            where=WHERE,
        )

    def warm_up(self) -> None:
        """Convert a model; do not load it: the runtime has threads."""
        program = export_reference(symbolic_trace(nn.Sequential(nn.Linear(2, 2))), (torch.zeros(2, 2),))
        convert(program, (torch.zeros(2, 2),))

    def lower(self, program: ExportedProgram, example_inputs: tuple[Any, ...]) -> Callable[..., Any]:
        """Convert and load; decline what the converter has no lowering for."""
        try:
            return Model(program, example_inputs)
        except RuntimeError as error:
            if "Lowering not found" in str(error):
                raise UnsupportedPattern(str(error).partition("\n")[0]) from error
            raise

    def execution(self, lowered: Callable[..., Any]) -> Execution | None:
        """Read the types of tensors off the model."""
        return read_execution(lowered) if isinstance(lowered, Model) else None


def read_execution(lowered: Model) -> Execution:
    """Separate ops of which all parts take integers from others, by the reference model's nodes."""
    layers = dict[str, list[tuple[str, bool]]]()
    for owners, kind, is_quantized in lowered.read_ops():
        for owner in owners:
            layers.setdefault(owner, []).append((kind, is_quantized))
    quantized, floating = separate(layers)
    return Execution(quantized_ops=quantized if layers else leave_nothing(lowered.ops), float_fallbacks=floating)
