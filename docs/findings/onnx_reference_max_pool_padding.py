"""onnx.reference: MaxPool of stride 1, with padding, raises or has a wrong shape, where one of stride 2 is right."""

# finding: 76
# engine: onnx-reference
# claimed: max pools of stride 1 and dilation 1, with padding
# fault of: evaluator
# largest error: raises; wrong shape
# cpu: all
# claims: `nn.MaxPool?d/*`, `F.max_pool?d/*`
# reason: padding of a max pool of stride 1

from typing import Any

import numpy
import onnx
import torch
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator


def pool(*shape: int, **options: Any) -> str:
    """What the evaluator makes of the numbers 0, 1, 2 … in a shape."""
    node = helper.make_node("MaxPool", ["x"], ["y"], **options)
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [None] * len(shape)) for name in "xy"]
    graph = helper.make_graph([node], "pool", ends[:1], ends[1:])
    model: onnx.ModelProto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    x = numpy.arange(numpy.prod(shape), dtype=numpy.float32).reshape(shape)
    try:
        [found] = ReferenceEvaluator(model).run(None, {"x": x})
    except Exception as error:
        return f"raises {type(error).__name__}: {error}"
    padding, ceil_mode = options["pads"][: len(shape) - 2], bool(options.get("ceil_mode"))
    by_rank = {3: torch.max_pool1d, 4: torch.max_pool2d, 5: torch.max_pool3d}
    right = by_rank[len(shape)](
        torch.from_numpy(x), options["kernel_shape"], options["strides"], padding, ceil_mode=ceil_mode
    ).numpy()
    if found.shape != right.shape:
        return f"has shape {found.shape}; {right.shape} is right"
    return "is right" if numpy.array_equal(found, right) else "has wrong values"


wrong = {
    "one axis, padding 1": pool(1, 1, 6, kernel_shape=[3], strides=[1], pads=[1, 1]),
    "one axis, padding 1, ceil_mode": pool(1, 1, 6, kernel_shape=[3], strides=[1], pads=[1, 1], ceil_mode=1),
    "two axes, padding 1, ceil_mode": pool(
        1, 1, 6, 6, kernel_shape=[3, 3], strides=[1, 1], pads=[1, 1, 1, 1], ceil_mode=1
    ),
    "two axes, rows padded by 1": pool(1, 1, 6, 6, kernel_shape=[3, 3], strides=[1, 1], pads=[1, 0, 1, 0]),
    "three axes, padding 1": pool(1, 1, 6, 6, 6, kernel_shape=[3] * 3, strides=[1] * 3, pads=[1] * 6),
}
same = {
    "one axis, padding 1, stride 2": pool(1, 1, 6, kernel_shape=[3], strides=[2], pads=[1, 1]),
    "two axes, rows padded by 1, stride 2": pool(1, 1, 6, 6, kernel_shape=[3, 3], strides=[2, 2], pads=[1, 0, 1, 0]),
}
for name, text in {**wrong, **same}.items():
    print(f"{name}: {text}")
shows = "is right" not in wrong.values() and {*same.values()} == {"is right"}
print("the fault shows" if shows else "the fault does not show with this version")
raise SystemExit(not shows)
