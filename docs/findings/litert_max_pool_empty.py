"""LiteRT: max pooling of a batch without rows, by XNNPACK's delegate, gives a result of any shape."""

# finding: 127
# engine: litert
# claimed: max pooling of an empty batch
# fault of: delegate (XNNPACK)
# largest error: wrong shape, or raises
# cpu: all
# claims: `nn.MaxPool2d/*`, `F.max_pool2d/*`
# reason: max pooling of a batch without rows gives a result of any shape, or raises

from typing import Any

import flatbuffers
import numpy as np
from ai_edge_litert import schema_py_generated as schema
from ai_edge_litert.interpreter import Interpreter, OpResolverType


def make_tensor(*shape: int) -> Any:
    """Make an int8 tensor of scale 1."""
    tensor = schema.TensorT()
    tensor.shape, tensor.type, tensor.hasRank = np.array(shape, np.int32), schema.TensorType.INT8, True
    tensor.quantization = schema.QuantizationParametersT()
    tensor.quantization.scale, tensor.quantization.zeroPoint = [1.0], [0]
    return tensor


def write_pool(rows: int) -> bytes:
    """Write a model that pools images of 6 x 6 by 2 x 2."""
    code, op, graph, model = schema.OperatorCodeT(), schema.OperatorT(), schema.SubGraphT(), schema.ModelT()
    code.builtinCode = code.deprecatedBuiltinCode = schema.BuiltinOperator.MAX_POOL_2D
    code.version = 2
    options = schema.Pool2DOptionsT()
    options.padding = schema.Padding.VALID
    options.strideW = options.strideH = options.filterWidth = options.filterHeight = 2
    op.inputs, op.outputs = [0], [1]
    op.builtinOptionsType, op.builtinOptions = schema.BuiltinOptions.Pool2DOptions, options
    graph.tensors, graph.operators = [make_tensor(rows, 6, 6, 3), make_tensor(rows, 3, 3, 3)], [op]
    graph.inputs, graph.outputs = [0], [1]
    model.version, model.operatorCodes, model.subgraphs, model.buffers = 3, [code], [graph], [schema.BufferT()]
    builder = flatbuffers.Builder(1024)
    builder.Finish(model.Pack(builder), b"TFL3")
    return bytes(builder.Output())


def find_shape(rows: int, kernels: OpResolverType) -> tuple[int, ...] | str:
    """Return the shape of the result."""
    interpreter = Interpreter(model_content=write_pool(rows), num_threads=1, experimental_op_resolver_type=kernels)
    try:
        interpreter.allocate_tensors()
        interpreter.invoke()
    except RuntimeError as error:
        return str(error)
    (made,) = interpreter.get_output_details()
    return tuple(interpreter.get_tensor(made["index"]).shape)


with_rows, builtin, delegate = (
    find_shape(2, OpResolverType.AUTO),
    find_shape(0, OpResolverType.BUILTIN_WITHOUT_DEFAULT_DELEGATES),
    find_shape(0, OpResolverType.AUTO),
)
print(f"two rows, XNNPACK: {with_rows}\nno rows, built-in kernel: {builtin}\nno rows, XNNPACK: {delegate}")
shown = (with_rows, builtin) == ((2, 3, 3, 3), (0, 3, 3, 3)) and delegate != builtin
print("the fault shows" if shown else "the fault does not show")
raise SystemExit(not shown)
