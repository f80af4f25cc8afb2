"""ONNX Runtime: products of uint8 and int8 are added in pairs in 16 bits, with saturation, on a CPU without VNNI."""

# finding: 122
# engine: onnxruntime
# claimed: linear layers, convolutions and matmul of uint8 and int8
# fault of: kernel
# largest error: 255 LSB
# cpu: without VNNI
# claims: `*Linear*/*`, `F.linear*/*`, `*Conv*/*`, `torch.conv*/*`
# reason: sums of two products saturate in 16 bits without VNNI

import numpy as np
import onnxruntime
import torch
from onnx import TensorProto, helper, numpy_helper

if torch.cpu._is_vnni_supported():
    print("this CPU has VNNI, which adds in 32 bits")
    raise SystemExit(77)

x, weight = np.full((1, 8), 255, dtype=np.uint8), np.full((8, 4), 127, dtype=np.int8)
node = helper.make_node("MatMulInteger", ["x", "w"], ["y"])
graph = helper.make_graph(
    [node],
    "product",
    [helper.make_tensor_value_info("x", TensorProto.UINT8, [1, 8])],
    [helper.make_tensor_value_info("y", TensorProto.INT32, [1, 4])],
    [numpy_helper.from_array(weight, "w")],
)
model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
(found,) = session.run(None, {"x": x})
right = 8 * 255 * 127
print(f"eight products of 255 and 127: found {found[0].tolist()}, right {right}, 4 · (2¹⁵ - 1) = {4 * 32767}")
shown = bool((found == 4 * 32767).all())
print("the fault shows" if shown else "the fault does not show")
raise SystemExit(not shown)
