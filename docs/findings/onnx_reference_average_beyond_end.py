"""onnx.reference: AveragePool with ceil_mode shifts all windows, if the last one goes beyond the end by two or more."""

# finding: 77
# engine: onnx-reference
# claimed: avg_pool with `ceil_mode`, a window that goes two or more elements beyond the end
# fault of: evaluator
# largest error: 80 LSB
# cpu: all
# claims: `nn.AvgPool[23]d/*`, `F.avg_pool[23]d/*`
# reason: windows are shifted where the last goes beyond the end

import numpy
import onnx
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator


def averages(*values: int) -> list[float]:
    """The averages of numbers in threes."""
    node = helper.make_node("AveragePool", ["x"], ["y"], kernel_shape=[3], strides=[3], ceil_mode=1)
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, 1, None]) for name in "xy"]
    graph = helper.make_graph([node], "pool", ends[:1], ends[1:])
    model: onnx.ModelProto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    x = numpy.array([[values]], numpy.float32)
    found: list[float] = ReferenceEvaluator(model).run(None, {"x": x})[0].flatten().tolist()
    return found


seven = (0, 0, 240, 240, 240, 0, 0)
found, longer, right = averages(*seven), averages(*seven, 0), [80.0, 160.0, 0.0]
print(f"seven numbers: {found}; eight: {longer}; right are, in both cases, {right}")
print("the fault shows" if found != right == longer else "the fault does not show with this version")
raise SystemExit(not found != right == longer)
