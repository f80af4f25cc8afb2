"""LiteRT: an int8 product beyond 16 bits wraps around where the output has a zero point."""

# finding: 124
# engine: litert
# claimed: mul whose product is beyond 32767 steps of an output that has a zero point
# fault of: kernel (built-in)
# largest error: 255 LSB
# cpu: all
# claims: `operator.mul*/*`, `torch.mul*/*`
# reason: a product of 32767 steps or more, with a zero point added, wraps around in 16 bits

from typing import Any

import flatbuffers
import numpy as np
from ai_edge_litert import schema_py_generated as schema
from ai_edge_litert.interpreter import Interpreter, OpResolverType

SHAPE = (1, 16, 16, 1)


def make_tensor(scale: float, zero_point: int = 0) -> Any:
    """Make an int8 tensor."""
    tensor = schema.TensorT()
    tensor.shape, tensor.type = list(SHAPE), schema.TensorType.INT8
    tensor.quantization = schema.QuantizationParametersT()
    tensor.quantization.scale, tensor.quantization.zeroPoint = [scale], [zero_point]
    return tensor


def write_square(scale: float, zero_point: int) -> bytes:
    """Write a model of x * x, where x has scale 1."""
    code, op, graph, model = schema.OperatorCodeT(), schema.OperatorT(), schema.SubGraphT(), schema.ModelT()
    code.builtinCode = code.deprecatedBuiltinCode = schema.BuiltinOperator.MUL
    code.version = 2
    op.inputs, op.outputs = [0, 0], [1]
    op.builtinOptionsType, op.builtinOptions = schema.BuiltinOptions.MulOptions, schema.MulOptionsT()
    graph.tensors, graph.operators = [make_tensor(1.0), make_tensor(scale, zero_point)], [op]
    graph.inputs, graph.outputs = [0], [1]
    model.version, model.operatorCodes, model.subgraphs, model.buffers = 3, [code], [graph], [schema.BufferT()]
    builder = flatbuffers.Builder(1024)
    builder.Finish(model.Pack(builder), b"TFL3")
    return bytes(builder.Output())


def run(data: bytes, kernels: OpResolverType, integers: Any) -> Any:
    """Return the integers that a model makes of integers."""
    interpreter = Interpreter(model_content=data, num_threads=1, experimental_op_resolver_type=kernels)
    interpreter.allocate_tensors()
    (given,), (made,) = interpreter.get_input_details(), interpreter.get_output_details()
    interpreter.set_tensor(given["index"], integers)
    interpreter.invoke()
    return interpreter.get_tensor(made["index"])


x, shown = np.arange(-128, 128, dtype=np.int8).reshape(SHAPE), True
for kernels, bits, right in (
    (OpResolverType.BUILTIN_WITHOUT_DEFAULT_DELEGATES, 3, [0, 0, 255, 255]),
    (OpResolverType.AUTO, 3, [0, 0, 0, 0]),
    (OpResolverType.AUTO, 9, [0, 0, 255, 255]),  # XNNPACK's delegate declines it
    (OpResolverType.BUILTIN_REF, 3, [0, 0, 0, 0]),
):
    found = {}
    for zero_point in (-34, 0, 1, 34):
        exact = np.clip((x.astype(np.int64) ** 2 << bits) + zero_point, -128, 127)
        found[zero_point] = int(np.abs(run(write_square(2.0**-bits, zero_point), kernels, x) - exact).max())
    print(f"{kernels.name}: s_in² / s_out of 2^{bits}: largest difference, by the output's zero point: {found}")
    shown &= list(found.values()) == right
print("the fault shows" if shown else "the fault does not show")
raise SystemExit(not shown)
