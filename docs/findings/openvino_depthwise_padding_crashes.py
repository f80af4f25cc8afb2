"""OpenVINO: a depthwise convolution of integers whose windows are all padding in some row kills the process."""

# finding: 47
# engine: openvino
# claimed: a depthwise convolution with a row that is all padding
# fault of: kernel
# largest error: process dies
# cpu: all
# claims: `nn.Conv2d/*`, `torch.conv2d/*`
# reason: a depthwise convolution dies where a row is all padding

import subprocess
import sys

CHILD = """
import numpy, openvino
from onnx import TensorProto, helper, numpy_helper

values = {{"s": numpy.float32(1), "z": numpy.uint8(128), "w": numpy.ones((16, 1, 1, 1), numpy.int8),
          "wz": numpy.int8(0)}}
nodes = [
    helper.make_node("QuantizeLinear", ["x", "s", "z"], ["xq"]),
    helper.make_node("DequantizeLinear", ["xq", "s", "z"], ["xd"]),
    helper.make_node("DequantizeLinear", ["w", "s", "wz"], ["wd"]),
    helper.make_node("Conv", ["xd", "wd"], ["c"], kernel_shape=[1, 1], pads={pads}, group=16),
    helper.make_node("QuantizeLinear", ["c", "s", "z"], ["yq"]),
    helper.make_node("DequantizeLinear", ["yq", "s", "z"], ["y"]),
]
ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [None] * 4) for name in "xy"]
constants = [numpy_helper.from_array(numpy.asarray(value), name) for name, value in values.items()]
graph = helper.make_graph(nodes, "conv", ends[:1], ends[1:], constants)
model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
core = openvino.Core()
compiled = core.compile_model(core.read_model(model.SerializeToString()), "CPU", {{"INFERENCE_NUM_THREADS": 1}})
print(compiled(numpy.ones((1, 16, 7, 8), numpy.float32))[0].shape)
"""
statuses = {}
for pads in ([1, 1, 1, 1], [0, 2, 0, 2], [2, 0, 2, 0]):
    command = (sys.executable, "-c", CHILD.format(pads=pads))
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    statuses[pads[0]] = found.returncode
    print(f"16 groups, kernel 1x1, padding {pads}: exit status {found.returncode} {found.stdout.strip()}")
shown = statuses[1] == 0 and statuses[2] < 0
print("the fault shows" if shown else "the fault does not show with this version on this machine")
raise SystemExit(not shown)
