"""OpenVINO: an average pool on integers counts its padding as integer 0, whatever the zero point is."""

# finding: 48
# engine: openvino
# claimed: averages that count padding, where the zero point is not 0
# fault of: optimizer
# largest error: 75 LSB
# cpu: all
# claims: `nn.AvgPool?d/*`, `*.avg_pool?d/*`
# reason: padding is counted as integer 0

import numpy
import onnx
import openvino
from onnx import TensorProto, helper, numpy_helper


def averaged(zero_point: int, include: int) -> float:
    """The average of a window in a corner, one pixel of value 1 and three of padding."""
    values = {"s": numpy.float32(1 / 64), "z": numpy.uint8(zero_point)}
    options = {"kernel_shape": [2, 2], "pads": [1, 1, 1, 1], "count_include_pad": include}
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "s", "z"], ["xq"]),
        helper.make_node("DequantizeLinear", ["xq", "s", "z"], ["xd"]),
        helper.make_node("AveragePool", ["xd"], ["p"], **options),
        helper.make_node("QuantizeLinear", ["p", "s", "z"], ["yq"]),
        helper.make_node("DequantizeLinear", ["yq", "s", "z"], ["y"]),
    ]
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [None] * 4) for name in "xy"]
    constants = [numpy_helper.from_array(numpy.asarray(value), name) for name, value in values.items()]
    graph = helper.make_graph(nodes, "pool", ends[:1], ends[1:], constants)
    model: onnx.ModelProto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    core = openvino.Core()
    compiled = core.compile_model(core.read_model(model.SerializeToString()), "CPU", {"INFERENCE_NUM_THREADS": 1})
    return float(compiled(numpy.ones((1, 1, 4, 4), numpy.float32))[0][0, 0, 0, 0])


found = {zero_point: averaged(zero_point, 1) for zero_point in (0, 100)}
for zero_point, value in found.items():
    print(f"zero point {zero_point}: {value}; right is 0.25")
print(f"padding not counted, zero point 100: {averaged(100, 0)}; right is 1.0")
shown = found[0] == 0.25 and found[100] < 0
print("the fault shows" if shown else "the fault does not show with this version")
raise SystemExit(not shown)
