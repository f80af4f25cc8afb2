"""ONNX Runtime: QLinearSoftmax gives 0 for 1.0 along an axis of one element, at the usual scale of 1/256."""

# finding: 44
# engine: onnxruntime
# claimed: softmax along an axis of one element
# fault of: kernel
# largest error: 255 LSB
# cpu: all
# claims: `nn.Softmax/*`
# reason: softmax of one element is 0

import numpy
import onnxruntime
from onnx import TensorProto, helper, numpy_helper


def softmax(x: list[float]) -> list[int]:
    """The integers that softmax gives of one row, quantized at scale 1/256 and zero point 0."""
    constants = {
        "scale": numpy.float32(0.1),
        "zero": numpy.uint8(0),
        "out_scale": numpy.float32(1 / 256),
    }
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "scale", "zero"], ["xq"]),
        helper.make_node("DequantizeLinear", ["xq", "scale", "zero"], ["xd"]),
        helper.make_node("Softmax", ["xd"], ["s"], axis=1),
        helper.make_node("QuantizeLinear", ["s", "out_scale", "zero"], ["y"]),
    ]
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, (1, len(x)))]
    outputs = [helper.make_tensor_value_info("y", TensorProto.UINT8, (1, len(x)))]
    values = [numpy_helper.from_array(numpy.asarray(value), name) for name, value in constants.items()]
    graph = helper.make_graph(nodes, "softmax", inputs, outputs, values)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    found: list[int] = session.run(None, {"x": numpy.asarray([x], numpy.float32)})[0].flatten().tolist()
    return found


print(f"softmax of 0, 0, 25: found {softmax([0.0, 0.0, 25.0])} right [0, 0, 255]")
found = softmax([0.0])
print(f"softmax of one number: found {found} right [255], the nearest to 256 that there is")
print("the fault shows" if found != [255] else "the fault does not show with this torch on this machine")
raise SystemExit(found == [255])
