"""Writes TFLite files: tensors and ops of one graph, by the classes of the file's schema and no converter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import flatbuffers
import numpy as np
from ai_edge_litert import schema_py_generated as schema

Array: TypeAlias = np.ndarray[Any, Any]
VERSIONS = {"CONV_2D": 3, "DEPTHWISE_CONV_2D": 3, "FULLY_CONNECTED": 5, "RESHAPE": 1}
"""The version of an op that takes int8; of all others it is 2."""
OPTIONS = {
    "ADD": "AddOptions",
    "AVERAGE_POOL_2D": "Pool2DOptions",
    "CONCATENATION": "ConcatenationOptions",
    "CONV_2D": "Conv2DOptions",
    "DEPTHWISE_CONV_2D": "DepthwiseConv2DOptions",
    "FULLY_CONNECTED": "FullyConnectedOptions",
    "LEAKY_RELU": "LeakyReluOptions",
    "MAX_POOL_2D": "Pool2DOptions",
    "MEAN": "ReducerOptions",
    "MUL": "MulOptions",
    "SOFTMAX": "SoftmaxOptions",
}
"""The options of an op; all others have none."""
TYPES = {"int8": schema.TensorType.INT8, "int32": schema.TensorType.INT32}


@dataclass(frozen=True)
class Grid:
    """Scales and zero points: one, or one for each index of an axis."""

    scale: Array
    zero_point: Array
    axis: int = 0


@dataclass(frozen=True)
class Value:
    """A tensor of the file; a constant that counts has no grid."""

    index: int
    shape: tuple[int, ...]
    grid: Grid | None


class Writer:
    """A graph that grows by one tensor or op after the other."""

    def __init__(self) -> None:
        self.names = list[str]()
        self._tensors, self._buffers, self._ops = list[Any](), [schema.BufferT()], list[Any]()
        self._codes = dict[str, Any]()

    def add_tensor(self, shape: Sequence[int], grid: Grid | None, data: Array | None = None) -> Value:
        """Add a tensor: of int8, or with the values and the dtype of its data."""
        tensor = schema.TensorT()
        tensor.shape, tensor.hasRank = np.array(shape, np.int32), True
        tensor.type = TYPES["int8" if data is None else data.dtype.name]
        tensor.name = f"tensor_{len(self._tensors)}"
        if grid is not None:
            about = tensor.quantization = schema.QuantizationParametersT()
            about.scale, about.zeroPoint = grid.scale.astype(np.float32), grid.zero_point.astype(np.int64)
            about.quantizedDimension = grid.axis
        if data is not None:
            tensor.buffer = len(self._buffers)
            self._buffers.append(schema.BufferT())
            self._buffers[-1].data = np.frombuffer(data.tobytes(), np.uint8)
        self._tensors.append(tensor)
        return Value(len(self._tensors) - 1, tuple(map(int, shape)), grid)

    def add_constant(self, values: Any, grid: Grid | None = None) -> Value:
        """Add a tensor with values: int8 as they are, or others as int32."""
        data = values if grid is not None else np.array(values, np.int32)
        return self.add_tensor(data.shape, grid, data)

    def add_op(
        self, name: str, inputs: Sequence[Value], shape: Sequence[int], grid: Grid | None, **given: Any
    ) -> Value:
        """Add an op by its name in the schema, with its options; return the tensor that it makes."""
        made, op = self.add_tensor(shape, grid), schema.OperatorT()
        self.names.append(name)
        if name not in self._codes:
            code = self._codes[name] = schema.OperatorCodeT()
            code.builtinCode, code.version = getattr(schema.BuiltinOperator, name), VERSIONS.get(name, 2)
            code.deprecatedBuiltinCode = min(code.builtinCode, 127)
        op.opcodeIndex = list(self._codes).index(name)
        op.inputs, op.outputs = [value.index for value in inputs], [made.index]
        if name in OPTIONS:
            op.builtinOptionsType = getattr(schema.BuiltinOptions, OPTIONS[name])
            op.builtinOptions = getattr(schema, f"{OPTIONS[name]}T")()
            vars(op.builtinOptions).update(given)
        self._ops.append(op)
        return made

    def pack(self, inputs: Sequence[Value], outputs: Sequence[Value]) -> bytes:
        """Return the file."""
        graph, model, builder = schema.SubGraphT(), schema.ModelT(), flatbuffers.Builder(1024)
        graph.tensors, graph.operators = self._tensors, self._ops
        graph.inputs, graph.outputs = ([value.index for value in ends] for ends in (inputs, outputs))
        model.version, model.subgraphs, model.buffers = 3, [graph], self._buffers
        model.operatorCodes = list(self._codes.values())
        builder.Finish(model.Pack(builder), b"TFL3")
        return bytes(builder.Output())
