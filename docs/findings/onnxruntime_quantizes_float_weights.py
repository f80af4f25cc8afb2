"""ONNX Runtime: the float weight of a layer between DequantizeLinear and QuantizeLinear is rounded to int8."""

# finding: 132
# engine: onnxruntime
# claimed: nothing (the layer is left in float)
# fault of: optimizer
# largest error: 2.4 LSB
# cpu: all
# claims: none; the models of GPT-2
# reason: float weights of a layer between quantized values become int8, with one scale

import numpy as np
import onnxruntime
from onnx import TensorProto, helper, numpy_helper

RNG = np.random.default_rng(0)
X = RNG.integers(0, 256, (8, 32), dtype=np.uint8)
X_SCALE, X_ZERO = np.float32(0.0234), np.uint8(119)
WEIGHT = (RNG.standard_normal((32, 96)) * 0.02).astype(np.float32)
WEIGHT[0, 0] = 0.3  # an outlier, which sets the scale of all others

EXACT = (X.astype(np.float64) - X_ZERO) * X_SCALE @ WEIGHT.astype(np.float64)
Y_SCALE = np.float32((EXACT.max() - EXACT.min()) / 255)
Y_ZERO = np.uint8(round(float(-EXACT.min() / Y_SCALE)))


def run(op: str, level: str) -> np.ndarray:
    """Run DequantizeLinear, a product with a float weight, QuantizeLinear at a level of optimization."""
    arrays = {"w": WEIGHT, "xs": X_SCALE, "xz": X_ZERO, "ys": Y_SCALE, "yz": Y_ZERO}
    if op == "Gemm":
        arrays["b"] = np.zeros(96, dtype=np.float32)
    nodes = [
        helper.make_node("DequantizeLinear", ["x", "xs", "xz"], ["real"]),
        helper.make_node(op, ["real", "w", "b"] if "b" in arrays else ["real", "w"], ["y"]),
        helper.make_node("QuantizeLinear", ["y", "ys", "yz"], ["q"]),
    ]
    graph = helper.make_graph(
        nodes,
        "layer",
        [helper.make_tensor_value_info("x", TensorProto.UINT8, [8, 32])],
        [helper.make_tensor_value_info("q", TensorProto.UINT8, [8, 96])],
        [numpy_helper.from_array(np.asarray(value), name) for name, value in arrays.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, level)
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    found: np.ndarray = session.run(None, {"x": X})[0]
    return found


errors = {}
for op in ("Gemm", "MatMul"):
    for level in ("ORT_DISABLE_ALL", "ORT_ENABLE_BASIC"):
        found = run(op, level)
        errors[op, level] = float(np.abs(found - np.clip(EXACT / Y_SCALE + Y_ZERO, 0, 255)).max())
        print(f"{op} {level}: at most {errors[op, level]:.3f} steps from the exact result")
shown = errors["Gemm", "ORT_ENABLE_BASIC"] > 1 and errors["Gemm", "ORT_DISABLE_ALL"] < 0.51
print("the fault shows" if shown else "the fault does not show")
raise SystemExit(not shown)
