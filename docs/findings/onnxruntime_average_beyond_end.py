"""ONNX Runtime: QLinearAveragePool with ceil_mode divides a window that goes beyond the end by its whole size."""

# finding: 45
# engine: onnxruntime
# claimed: avg_pool with `ceil_mode`, padding counted, a window beyond the end
# fault of: kernel
# largest error: 80 LSB
# cpu: all
# claims: `nn.AvgPool?d/*`, `*.avg_pool?d/*`
# reason: a window beyond the end is divided by its whole size

import numpy
import onnxruntime
from onnx import TensorProto, helper, numpy_helper

constants = {"scale": numpy.float32(1), "zero": numpy.uint8(0)}
pool = {"kernel_shape": [3], "strides": [3], "ceil_mode": 1, "count_include_pad": 1}


def averages(*, is_quantized: bool) -> list[float]:
    """The averages of eight numbers, all 240, in threes: the last window has two of them."""
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "scale", "zero"], ["xq"]),
        helper.make_node("DequantizeLinear", ["xq", "scale", "zero"], ["xd"]),
        helper.make_node("AveragePool", ["xd"], ["m"], **pool),
        helper.make_node("QuantizeLinear", ["m", "scale", "zero"], ["yq"]),
        helper.make_node("DequantizeLinear", ["yq", "scale", "zero"], ["y"]),
    ]
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, (1, 1, 8))]
    outputs = [helper.make_tensor_value_info("y" if is_quantized else "m", TensorProto.FLOAT, (1, 1, 3))]
    values = [numpy_helper.from_array(numpy.asarray(value), name) for name, value in constants.items()]
    graph = helper.make_graph(nodes if is_quantized else nodes[:3], "pool", inputs, outputs, values)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    found: list[float] = session.run(None, {"x": numpy.full((1, 1, 8), 240, numpy.float32)})[0].flatten().tolist()
    return found


right, found = averages(is_quantized=False), averages(is_quantized=True)
print(f"float: {right}; quantized: {found}")
print("the fault shows" if found != right else "the fault does not show with this torch on this machine")
raise SystemExit(found == right)
