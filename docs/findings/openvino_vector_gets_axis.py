"""OpenVINO: a linear layer on integers, scales per channel, gives a vector an axis too many."""

# finding: 51
# engine: openvino
# claimed: linear of one vector, weights per channel
# fault of: plugin
# largest error: wrong shape
# cpu: all
# claims: `*Linear*/*`, `F.linear*/*`
# reason: a vector gets an axis too many

import numpy
import onnx
import openvino
from onnx import TensorProto, helper, numpy_helper

LINEAR = [
    helper.make_node("Transpose", ["wd"], ["wt"], perm=[1, 0]),
    helper.make_node("MatMul", ["xd", "wt"], ["product"]),
    helper.make_node("Add", ["product", "b"], ["c"]),
]


def compiled(*shape: int) -> openvino.CompiledModel:
    """Compile a linear layer between DequantizeLinear of the input, and QuantizeLinear of the output."""
    values = {
        "s": numpy.float32(1),
        "z": numpy.uint8(28),
        "b": numpy.ones(7, numpy.float32),
        "w": numpy.ones((7, 8), numpy.int8),
        "ws": numpy.arange(1, 8, dtype=numpy.float32),
        "wz": numpy.zeros(7, numpy.int8),
    }
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "s", "z"], ["xq"]),
        helper.make_node("DequantizeLinear", ["xq", "s", "z"], ["xd"]),
        helper.make_node("DequantizeLinear", ["w", "ws", "wz"], ["wd"], axis=0),
        *LINEAR,
        helper.make_node("QuantizeLinear", ["c", "s", "z"], ["yq"]),
        helper.make_node("DequantizeLinear", ["yq", "s", "z"], ["y"]),
    ]
    ends = [
        helper.make_tensor_value_info("x", TensorProto.FLOAT, [None] * len(shape)),
        helper.make_tensor_value_info("y", TensorProto.FLOAT, [None] * len(shape)),
    ]
    constants = [numpy_helper.from_array(numpy.asarray(value), name) for name, value in values.items()]
    graph = helper.make_graph(nodes, "vectors", ends[:1], ends[1:], constants)
    model: onnx.ModelProto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    core, settings = openvino.Core(), {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": 1}
    return core.compile_model(core.read_model(model.SerializeToString()), "CPU", settings)


shapes = [compiled(*shape)(numpy.ones(shape, numpy.float32))[0].shape for shape in ((1, 8), (8,))]
print(f"a linear layer of a row and of a vector: {shapes}; right is [(1, 7), (7,)]")
shown = shapes == [(1, 7), (1, 7)]
print("the fault shows" if shown else "the fault does not show with this version")
raise SystemExit(not shown)
