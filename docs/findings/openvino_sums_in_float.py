"""OpenVINO: a sum of quantized vectors runs in float."""

# finding: 52
# engine: openvino
# claimed: sums of vectors
# fault of: plugin
# largest error: runs in float
# cpu: all
# claims: `operator.add*/*`, `torch.add*/*`
# reason: a sum of vectors runs in float

import numpy
import onnx
import openvino
from onnx import TensorProto, helper, numpy_helper


def precision(*shape: int) -> str:
    """The precision of the layer that a sum became."""
    values = {"s": numpy.float32(1), "z": numpy.uint8(128), "t": numpy.float32(2), "u": numpy.uint8(100)}
    nodes = [helper.make_node("QuantizeLinear", [name, "s", "z"], [f"{name}q"]) for name in "xy"]
    nodes += [helper.make_node("DequantizeLinear", [f"{name}q", "s", "z"], [f"{name}d"]) for name in "xy"]
    nodes += [
        helper.make_node("Add", ["xd", "yd"], ["sum"], name="sum"),
        helper.make_node("QuantizeLinear", ["sum", "t", "u"], ["q"]),
        helper.make_node("DequantizeLinear", ["q", "t", "u"], ["done"]),
    ]
    sizes = [None, *shape[1:]]
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, sizes) for name in ("x", "y", "done")]
    constants = [numpy_helper.from_array(numpy.asarray(value), name) for name, value in values.items()]
    graph = helper.make_graph(nodes, "sum", ends[:2], ends[2:], constants)
    model: onnx.ModelProto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    core, settings = openvino.Core(), {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": 1}
    compiled = core.compile_model(core.read_model(model.SerializeToString()), "CPU", settings)
    told = [layer.get_rt_info() for layer in compiled.get_runtime_model().get_ordered_ops()]
    found = [each for each in told if "sum" in each["originalLayersNames"].astype(str).split(",")]
    return str(found[0]["runtimePrecision"].astype(str))


row, vector = precision(1, 65), precision(65)
print(f"sum of rows: {row}; of vectors: {vector}")
shown = (row, vector) == ("u8", "f32")
print("the fault shows" if shown else "the fault does not show with this version")
raise SystemExit(not shown)
