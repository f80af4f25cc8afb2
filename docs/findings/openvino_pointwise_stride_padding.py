"""OpenVINO: a 1×1 convolution with a stride and padding gives more rows and columns than there are, in float as well.

The stride is moved in front of the convolution, to a pool, and the padding stays behind: the border is not strided.
"""

# finding: 46
# engine: openvino
# claimed: a 1×1 convolution with a stride and padding
# fault of: optimizer
# largest error: wrong shape
# cpu: all
# claims: `nn.Conv?d*/*`, `torch.conv?d*/*`, `nni.Conv*/*`, `nniqat.Conv*/*`, `nnqat.Conv*/*`
# reason: a 1x1 convolution with a stride forgets its padding

import numpy
import onnx
import openvino
from onnx import TensorProto, helper, numpy_helper


def shape_of(*sizes: int | None) -> tuple[int, ...]:
    """The shape of relu and a 1×1 convolution of 9x9, padding 1, stride 2, where the input is declared with sizes."""
    options = {"kernel_shape": [1, 1], "strides": [2, 2], "pads": [1, 1, 1, 1]}
    nodes = [helper.make_node("Relu", ["x"], ["r"]), helper.make_node("Conv", ["r", "w"], ["y"], **options)]
    ends = [
        helper.make_tensor_value_info("x", TensorProto.FLOAT, sizes),
        helper.make_tensor_value_info("y", TensorProto.FLOAT, [None] * 4),
    ]
    weight = numpy_helper.from_array(numpy.ones((4, 4, 1, 1), numpy.float32), "w")
    graph = helper.make_graph(nodes, "conv", ends[:1], ends[1:], [weight])
    model: onnx.ModelProto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    core = openvino.Core()
    compiled = core.compile_model(core.read_model(model.SerializeToString()), "CPU", {"INFERENCE_NUM_THREADS": 1})
    found: tuple[int, ...] = compiled(numpy.ones((1, 4, 9, 9), numpy.float32))[0].shape
    return found


known, unknown = shape_of(1, 4, 9, 9), shape_of(None, None, None, None)
print(f"sizes known when it is compiled: {known}; not known: {unknown}; right is (1, 4, 6, 6)")
shown = known != (1, 4, 6, 6) and unknown == (1, 4, 6, 6)
print("the fault shows" if shown else "the fault does not show with this version")
raise SystemExit(not shown)
