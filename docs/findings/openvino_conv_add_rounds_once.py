"""OpenVINO: where a quantized convolution is added to something, its result is not rounded to its own grid first."""

# finding: 50
# engine: openvino
# claimed: a convolution whose result is added to something
# fault of: plugin's fusion
# largest error: 4 LSB
# cpu: all
# claims: none alone; the models branches, mobilenet and resnet
# reason: the result of a convolution is not rounded before something is added

import numpy
import onnx
import openvino
from onnx import TensorProto, helper, numpy_helper


def run(x: numpy.ndarray, y: numpy.ndarray, *, joined: bool) -> numpy.ndarray:
    """A convolution by 1/3 in steps of 1, and y added to it; both as one model, or the sum by itself in numpy."""
    values = {
        "s": numpy.float32(1),
        "z": numpy.uint8(0),
        "t": numpy.float32(1 / 3),
        "wz": numpy.int8(0),
        "w": numpy.ones((1, 1, 1, 1), numpy.int8),
        "fine": numpy.float32(0.25),
    }
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "s", "z"], ["xq"]),
        helper.make_node("DequantizeLinear", ["xq", "s", "z"], ["xd"]),
        helper.make_node("DequantizeLinear", ["w", "t", "wz"], ["wd"]),
        helper.make_node("Conv", ["xd", "wd"], ["c"], kernel_shape=[1, 1]),
        helper.make_node("QuantizeLinear", ["c", "s", "z"], ["cq"]),
        helper.make_node("DequantizeLinear", ["cq", "s", "z"], ["cd"]),
    ]
    if joined:
        nodes += [
            helper.make_node("QuantizeLinear", ["y", "s", "z"], ["yq"]),
            helper.make_node("DequantizeLinear", ["yq", "s", "z"], ["yd"]),
            helper.make_node("Add", ["cd", "yd"], ["sum"]),
            helper.make_node("QuantizeLinear", ["sum", "fine", "z"], ["out"]),
            helper.make_node("DequantizeLinear", ["out", "fine", "z"], ["done"]),
        ]
    names = ("x", "y", "done") if joined else ("x", "cd")
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, 1, 1, 8]) for name in names]
    constants = [numpy_helper.from_array(numpy.asarray(value), name) for name, value in values.items()]
    graph = helper.make_graph(nodes, "sum", ends[:-1], ends[-1:], constants)
    model: onnx.ModelProto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    core = openvino.Core()
    settings = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": 1}
    compiled = core.compile_model(core.read_model(model.SerializeToString()), "CPU", settings)
    found: numpy.ndarray = compiled({"x": x, "y": y} if joined else {"x": x})[0]
    return found if joined else found + y


x, y = numpy.arange(8, dtype=numpy.float32).reshape(1, 1, 1, 8), numpy.full((1, 1, 1, 8), 3, numpy.float32)
together, apart = run(x, y, joined=True), run(x, y, joined=False)
print("round(x / 3) + 3, the sum in numpy:", apart.ravel().tolist())
print("the same as one model:             ", together.ravel().tolist())
shown = not numpy.array_equal(together, apart)
print("the fault shows" if shown else "the fault does not show with this version")
raise SystemExit(not shown)
