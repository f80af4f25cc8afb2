"""onnx.reference: AveragePool with ceil_mode shifts all windows, if the last one goes beyond the end by two or more."""

import numpy
import onnx
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator


def averages(length: int) -> list[float]:
    """The averages of 1, 2, 3 … in threes."""
    node = helper.make_node("AveragePool", ["x"], ["y"], kernel_shape=[3], strides=[3], ceil_mode=1)
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, 1, None]) for name in "xy"]
    graph = helper.make_graph([node], "pool", ends[:1], ends[1:])
    model: onnx.ModelProto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    x = numpy.arange(1, length + 1, dtype=numpy.float32).reshape(1, 1, length)
    found: list[float] = ReferenceEvaluator(model).run(None, {"x": x})[0].flatten().tolist()
    return found


found, right = averages(7), [2.0, 5.0, 7.0]
print(f"seven numbers: {found}; right is {right}; eight: {averages(8)}")
shows = found != right and averages(8) == [2.0, 5.0, 7.5]
print("the fault shows" if shows else "the fault does not show with this version")
raise SystemExit(not shows)
