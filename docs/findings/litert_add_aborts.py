"""LiteRT: a model with an int8 add whose inputs are far coarser than its output ends the process that loads it."""

# finding: 126
# engine: litert
# claimed: add where a scale of an input is 524288 times that of the output, or more
# fault of: kernel (built-in and reference)
# largest error: process dies
# cpu: all
# claims: `operator.add*/*`, `torch.add*/*`
# reason: a model ends the process where an input's scale is 524288 times the output's, or more

import multiprocessing
from typing import Any

import flatbuffers
from ai_edge_litert import schema_py_generated as schema
from ai_edge_litert.interpreter import Interpreter, OpResolverType


def make_tensor(scale: float) -> Any:
    """Make an int8 tensor of zero point 0."""
    tensor = schema.TensorT()
    tensor.shape, tensor.type = [1, 4], schema.TensorType.INT8
    tensor.quantization = schema.QuantizationParametersT()
    tensor.quantization.scale, tensor.quantization.zeroPoint = [scale], [0]
    return tensor


def write_double(scale: float) -> bytes:
    """Write a model of x + x, where x has scale 1."""
    code, op, graph, model = schema.OperatorCodeT(), schema.OperatorT(), schema.SubGraphT(), schema.ModelT()
    code.builtinCode = code.deprecatedBuiltinCode = schema.BuiltinOperator.ADD
    code.version = 2
    op.inputs, op.outputs = [0, 0], [1]
    op.builtinOptionsType, op.builtinOptions = schema.BuiltinOptions.AddOptions, schema.AddOptionsT()
    graph.tensors, graph.operators = [make_tensor(1.0), make_tensor(scale)], [op]
    graph.inputs, graph.outputs = [0], [1]
    model.version, model.operatorCodes, model.subgraphs, model.buffers = 3, [code], [graph], [schema.BufferT()]
    builder = flatbuffers.Builder(1024)
    builder.Finish(model.Pack(builder), b"TFL3")
    return bytes(builder.Output())


def load(bits: int, kernels: OpResolverType) -> None:
    """Load a model whose output is finer by so many bits."""
    data = write_double(2.0**-bits)
    Interpreter(model_content=data, num_threads=1, experimental_op_resolver_type=kernels).allocate_tensors()


def load_alone(bits: int, kernels: OpResolverType) -> int | None:
    """Load it in a process of its own; return how that ends."""
    child = multiprocessing.get_context("fork").Process(target=load, args=(bits, kernels))
    child.start()
    child.join(60)
    child.kill()
    return child.exitcode


shown = True
for kernels in (OpResolverType.AUTO, OpResolverType.BUILTIN_WITHOUT_DEFAULT_DELEGATES, OpResolverType.BUILTIN_REF):
    found = {bits: load_alone(bits, kernels) for bits in (4, 18, 19, 24)}
    print(f"{kernels.name}: s_in / s_out as a power of two: exit status of the process that loads the model: {found}")
    shown &= list(found.values()) == [0, 0, -6, -6]
print("the fault shows" if shown else "the fault does not show")
raise SystemExit(not shown)
