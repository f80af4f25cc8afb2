"""LiteRT: an int8 product whose inputs are far coarser than its output wraps around in 32 bits."""

# finding: 125
# engine: litert
# claimed: mul where the product of the inputs' scales is 65536 times the output's scale, or more
# fault of: kernel (built-in and reference)
# largest error: 255 LSB
# cpu: all
# claims: `operator.mul*/*`, `torch.mul*/*`
# reason: a product wraps around where the inputs' scales give 65536 times the output's, or more

from typing import Any

import flatbuffers
import numpy as np
from ai_edge_litert import schema_py_generated as schema
from ai_edge_litert.interpreter import Interpreter, OpResolverType

SHAPE = (1, 16, 16, 1)


def make_tensor(scale: float) -> Any:
    """Make an int8 tensor of zero point 0."""
    tensor = schema.TensorT()
    tensor.shape, tensor.type = list(SHAPE), schema.TensorType.INT8
    tensor.quantization = schema.QuantizationParametersT()
    tensor.quantization.scale, tensor.quantization.zeroPoint = [scale], [0]
    return tensor


def write_square(scale: float) -> bytes:
    """Write a model of x * x, where x has scale 1."""
    code, op, graph, model = schema.OperatorCodeT(), schema.OperatorT(), schema.SubGraphT(), schema.ModelT()
    code.builtinCode = code.deprecatedBuiltinCode = schema.BuiltinOperator.MUL
    code.version = 2
    op.inputs, op.outputs = [0, 0], [1]
    op.builtinOptionsType, op.builtinOptions = schema.BuiltinOptions.MulOptions, schema.MulOptionsT()
    graph.tensors, graph.operators = [make_tensor(1.0), make_tensor(scale)], [op]
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
for kernels in (OpResolverType.AUTO, OpResolverType.BUILTIN_WITHOUT_DEFAULT_DELEGATES, OpResolverType.BUILTIN_REF):
    found = {}
    for bits in (4, 8, 15, 16, 20):
        exact = np.clip(x.astype(np.int64) ** 2 << bits, -128, 127)
        found[bits] = int(np.abs(run(write_square(2.0**-bits), kernels, x) - exact).max())
    print(f"{kernels.name}: s_in² / s_out as a power of two: largest difference: {found}")
    shown &= list(found.values()) == [0, 0, 0, 255, 255]
print("the fault shows" if shown else "the fault does not show")
raise SystemExit(not shown)
