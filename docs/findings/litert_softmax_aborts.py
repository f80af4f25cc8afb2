"""LiteRT's reference kernels: a softmax whose exponentials sum to 512 or more ends the process."""

# finding: 128
# engine: litert, with its reference kernels
# claimed: softmax of 512 elements or more that are nearly equal
# fault of: kernel (reference)
# largest error: process dies
# cpu: all
# claims: none of the backend, whose kernels are others: `nn.Softmax/*` of the example's `reference.toml`
# reason: a softmax whose exponentials sum to 512 or more ends the process

import multiprocessing
from typing import Any

import flatbuffers
import numpy as np
from ai_edge_litert import schema_py_generated as schema
from ai_edge_litert.interpreter import Interpreter, OpResolverType


def make_tensor(elements: int, scale: float, zero_point: int) -> Any:
    """Make an int8 tensor of one row."""
    tensor = schema.TensorT()
    tensor.shape, tensor.type = [1, elements], schema.TensorType.INT8
    tensor.quantization = schema.QuantizationParametersT()
    tensor.quantization.scale, tensor.quantization.zeroPoint = [scale], [zero_point]
    return tensor


def write_softmax(elements: int) -> bytes:
    """Write a model of a softmax."""
    code, op, graph, model = schema.OperatorCodeT(), schema.OperatorT(), schema.SubGraphT(), schema.ModelT()
    code.builtinCode = code.deprecatedBuiltinCode = schema.BuiltinOperator.SOFTMAX
    code.version = 2
    options = schema.SoftmaxOptionsT()
    options.beta = 1.0
    op.inputs, op.outputs = [0], [1]
    op.builtinOptionsType, op.builtinOptions = schema.BuiltinOptions.SoftmaxOptions, options
    graph.tensors = [make_tensor(elements, 1 / 16, 0), make_tensor(elements, 1 / 256, -128)]
    graph.operators, graph.inputs, graph.outputs = [op], [0], [1]
    model.version, model.operatorCodes, model.subgraphs, model.buffers = 3, [code], [graph], [schema.BufferT()]
    builder = flatbuffers.Builder(1024)
    builder.Finish(model.Pack(builder), b"TFL3")
    return bytes(builder.Output())


def run(elements: int, kernels: OpResolverType) -> None:
    """Run it on zeros."""
    data = write_softmax(elements)
    interpreter = Interpreter(model_content=data, num_threads=1, experimental_op_resolver_type=kernels)
    interpreter.allocate_tensors()
    interpreter.set_tensor(0, np.zeros((1, elements), np.int8))
    interpreter.invoke()


def run_alone(elements: int, kernels: OpResolverType) -> int | None:
    """Run it in a process of its own; return how that ends."""
    child = multiprocessing.get_context("fork").Process(target=run, args=(elements, kernels))
    child.start()
    child.join(60)
    child.kill()
    return child.exitcode


sizes, shown = (64, 511, 512, 4096), True
for kernels, right in (
    (OpResolverType.BUILTIN_WITHOUT_DEFAULT_DELEGATES, [0, 0, 0, 0]),
    (OpResolverType.BUILTIN_REF, [0, 0, -6, -6]),
):
    found = {elements: run_alone(elements, kernels) for elements in sizes}
    print(f"{kernels.name}: exit status by the number of equal elements: {found}")
    shown &= list(found.values()) == right
print("the fault shows" if shown else "the fault does not show")
raise SystemExit(not shown)
