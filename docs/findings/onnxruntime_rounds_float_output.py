"""ONNX Runtime: a float output is quantized where its transpose is, with the transpose's scale."""

# finding: 134
# engine: onnxruntime
# claimed: nothing (a float output, of which a transposed copy is quantized)
# fault of: optimizer
# largest error: 105 LSB
# cpu: all
# claims: none; the model of CLIP
# reason: a float output gets the quantization of its transposed copy

import numpy as np
import onnxruntime
from onnx import TensorProto, helper, numpy_helper

X = np.random.default_rng(0).standard_normal((2, 64)).astype(np.float32)
SCALE = np.float32(0.02)


def run(level: str) -> np.ndarray:
    """Return the float output 2 · x, of whose transpose a second output is the quantized and dequantized copy."""
    arrays = {"two": np.float32(2), "scale": SCALE, "zero": np.int8(0)}
    nodes = [
        helper.make_node("Mul", ["x", "two"], ["real"]),
        helper.make_node("Transpose", ["real"], ["turned"], perm=[1, 0]),
        helper.make_node("QuantizeLinear", ["turned", "scale", "zero"], ["q"]),
        helper.make_node("DequantizeLinear", ["q", "scale", "zero"], ["copy"]),
    ]
    graph = helper.make_graph(
        nodes,
        "outputs",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [2, 64])],
        [
            helper.make_tensor_value_info("real", TensorProto.FLOAT, [2, 64]),
            helper.make_tensor_value_info("copy", TensorProto.FLOAT, [64, 2]),
        ],
        [numpy_helper.from_array(np.asarray(value), name) for name, value in arrays.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, level)
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    found: np.ndarray = session.run(None, {"x": X})[0]
    return found


errors = {}
for level in ("ORT_DISABLE_ALL", "ORT_ENABLE_BASIC"):
    steps = np.abs(run(level) - 2 * X) / SCALE
    errors[level] = float(steps.max())
    inside = steps[np.abs(2 * X) <= 127 * SCALE]
    print(f"{level}: at most {inside.max():.3f} steps off within the range of int8, {errors[level]:.3f} beyond it")
shown = errors["ORT_ENABLE_BASIC"] > 1 and errors["ORT_DISABLE_ALL"] == 0
print("the fault shows" if shown else "the fault does not show")
raise SystemExit(not shown)
