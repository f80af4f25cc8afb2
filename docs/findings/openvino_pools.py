"""OpenVINO: a pool of no rows gives the shape of the batch before; max pools with ceil_mode keep a window that begins
behind the image. The ONNX package's own evaluator does neither, on the same model."""

# finding: 49
# engine: openvino
# claimed: pools of no rows; max pools with `ceil_mode`
# fault of: plugin; ONNX front end
# largest error: wrong shape
# cpu: all
# claims: `nn.MaxPool?d/*`, `F.max_pool?d/*`, `nn.AvgPool?d/*`, `*.avg_pool?d/*`
# reason: a batch of no rows has the shape of the last one; ceil_mode gives a window too many

from typing import Any

import numpy
import onnx
import openvino
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator


def pool(kind: str, **options: Any) -> tuple[Any, Any]:
    """Return a pool, with a batch of any size: compiled, and under the ONNX package's own evaluator."""
    node = helper.make_node(kind, ["x"], ["y"], **options)
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [None] * 4) for name in "xy"]
    graph = helper.make_graph([node], "pool", ends[:1], ends[1:])
    model: onnx.ModelProto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    core = openvino.Core()
    compiled = core.compile_model(core.read_model(model.SerializeToString()), "CPU", {"INFERENCE_NUM_THREADS": 1})
    return compiled, ReferenceEvaluator(model)


def shapes(pools: tuple[Any, Any], *shape: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The shapes of what both pools make of ones."""
    compiled, evaluator = pools
    x = numpy.ones(shape, numpy.float32)
    return compiled(x)[0].shape, evaluator.run(None, {"x": x})[0].shape


shown = []
for kind in ("MaxPool", "AveragePool"):
    plain = pool(kind, kernel_shape=[2, 2], strides=[2, 2])
    (before, _), (empty, right) = (shapes(plain, rows, 1, 4, 4) for rows in (5, 0))
    print(f"{kind} of 5 rows: {before}; then of no rows: {empty}; onnx.reference: {right}")
    shown.append(empty == before and right == (0, 1, 2, 2))
options = {"kernel_shape": [2, 2], "strides": [2, 2], "pads": [1, 1, 1, 1], "ceil_mode": 1}
for kind, width in (("AveragePool", 3), ("MaxPool", 4)):
    shape, right = shapes(pool(kind, **options), 1, 1, 5, 5)
    print(f"{kind} of 5x5, kernel and stride 2, padding 1, ceil_mode: {shape}; a fourth window begins behind the image")
    print(f"  onnx.reference: {right}")
    shown.append(shape == (1, 1, width, width) and right == (1, 1, 3, 3))
print("the fault shows" if all(shown) else "the fault does not show with this version")
raise SystemExit(not all(shown))
