"""OpenVINO: a pool of no rows gives the shape of the batch before; max pools with ceil_mode keep a window that begins
behind the image."""

from typing import Any

import numpy
import onnx
import openvino
from onnx import TensorProto, helper


def pool(kind: str, **options: Any) -> Any:
    """Compile a pool, with a batch of any size."""
    node = helper.make_node(kind, ["x"], ["y"], **options)
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [None] * 4) for name in "xy"]
    graph = helper.make_graph([node], "pool", ends[:1], ends[1:])
    model: onnx.ModelProto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    core = openvino.Core()
    return core.compile_model(core.read_model(model.SerializeToString()), "CPU", {"INFERENCE_NUM_THREADS": 1})


shown = []
for kind in ("MaxPool", "AveragePool"):
    plain = pool(kind, kernel_shape=[2, 2], strides=[2, 2])
    before, empty = (plain(numpy.ones((rows, 1, 4, 4), numpy.float32))[0].shape for rows in (5, 0))
    print(f"{kind} of 5 rows: {before}; then of no rows: {empty}")
    shown.append(empty == before)
options = {"kernel_shape": [2, 2], "strides": [2, 2], "pads": [1, 1, 1, 1], "ceil_mode": 1}
for kind, width in (("AveragePool", 3), ("MaxPool", 4)):
    shape = pool(kind, **options)(numpy.ones((1, 1, 5, 5), numpy.float32))[0].shape
    print(f"{kind} of 5x5, kernel and stride 2, padding 1, ceil_mode: {shape}; a fourth window begins behind the image")
    shown.append(shape == (1, 1, width, width))
print("the fault shows" if all(shown) else "the fault does not show with this version")
raise SystemExit(not all(shown))
