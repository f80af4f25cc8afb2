"""The ONNX package's own evaluator, in NumPy: a third opinion on the bytes that ONNX Runtime and OpenVINO read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.export import ExportedProgram

from fx_quant_conformance.backends._onnx_backend import OnnxBackend
from fx_quant_conformance.backends.base import Capabilities, Execution
from fx_quant_conformance.backends.exporting import LIMITS, Compiled, Tensors
from fx_quant_conformance.backends.onnxruntime import PATTERNS, TABLE


class Evaluated(Compiled):
    """An ONNX model under ``onnx.reference.ReferenceEvaluator``; ``op_types``: the kinds of its nodes.

    ``products``: those on integers, by the reference model's nodes. It takes and returns tensors of the shapes and
    dtypes of the reference model's. Raises what the evaluator raises.
    """

    def __init__(self, model: bytes, program: ExportedProgram) -> None:
        super().__init__(program, self._run)
        from onnx.reference import ReferenceEvaluator

        from fx_quant_conformance.backends._onnx import origins

        self._evaluator = ReferenceEvaluator(model)
        nodes = self._evaluator.proto_.graph.node
        self.op_types, owners = tuple(node.op_type for node in nodes), origins(model)
        products = [node for node in nodes if node.op_type == "MatMulInteger"]
        self.products = tuple(f"{owners[node.name]} ({node.op_type})" for node in products)

    def _run(self, inputs: Tensors) -> list[Tensor]:
        feed = {name: value.numpy() for name, value in zip(self._evaluator.input_names, inputs, strict=True)}
        return [torch.from_numpy(numpy.array(output)) for output in self._evaluator.run(None, feed)]


class OnnxReferenceBackend(OnnxBackend):
    """``onnx.reference``: claims what ``onnxruntime`` claims, and computes it in float between q and dq.

    It fuses nothing. What it and ``onnxruntime`` get wrong in the same way is a fault of the exporter; what one of them
    alone gets wrong is its own.
    """

    name = "onnx-reference"
    packages = ("onnx", "onnxscript")
    table, patterns, load = TABLE, PATTERNS, Evaluated
    settings = "onnx.reference.ReferenceEvaluator, as it comes"
    waivers = Path(__file__).with_name("onnx_reference.waivers.toml")

    def capabilities(self) -> Capabilities:
        """Both symmetric schemes; the bias stays float32, products are summed in float32, and so is the rescale."""
        schemes = ("per_tensor_symmetric", "per_channel_symmetric")
        return Capabilities(weight_schemes=schemes, float_accumulation=True, limits=LIMITS)

    def execution(self, lowered: Callable[..., Any]) -> Execution | None:
        """Report MatMulInteger, of dynamic linear layers: NumPy sums integers there. (LOW-04)

        A model with DequantizeLinear computes in float, as the backend ``reference`` does. As there, nothing is said of
        it, so that what holds is UNSHOWN: it is an oracle, not a kernel that fell back.
        """
        if not isinstance(lowered, Evaluated):
            return None
        if not lowered.products or "DequantizeLinear" in lowered.op_types:
            return None
        return Execution(quantized_ops=lowered.products, float_fallbacks=())
