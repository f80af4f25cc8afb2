"""ONNX Runtime: a convolution of integers whose batch norm was not folded into the weight before runs in float."""

import tempfile
from pathlib import Path

import numpy
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper


def ops(*, has_norm: bool) -> list[str]:
    """The ops of the optimized model of quantize, dequantize, conv (and batch norm), quantize, dequantize."""
    constants = {
        "scale": numpy.float32(0.01), "zero": numpy.uint8(128), "weight": numpy.ones((4, 4, 1, 1), numpy.int8),
        "weight_zero": numpy.int8(0), "ones": numpy.ones(4, numpy.float32),
    }  # fmt: skip
    norm = helper.make_node("BatchNormalization", ["c", "ones", "ones", "ones", "ones"], ["n"])
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "scale", "zero"], ["xq"]),
        helper.make_node("DequantizeLinear", ["xq", "scale", "zero"], ["xd"]),
        helper.make_node("DequantizeLinear", ["weight", "scale", "weight_zero"], ["wd"]),
        helper.make_node("Conv", ["xd", "wd"], ["c"]),
        *[norm] * has_norm,
        helper.make_node("QuantizeLinear", ["n" if has_norm else "c", "scale", "zero"], ["yq"]),
        helper.make_node("DequantizeLinear", ["yq", "scale", "zero"], ["y"]),
    ]
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, (1, 4, 2, 2)) for name in ("x", "y")]
    values = [numpy_helper.from_array(numpy.asarray(value), name) for name, value in constants.items()]
    graph = helper.make_graph(nodes, "conv_norm", ends[:1], ends[1:], values)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    with tempfile.TemporaryDirectory() as folder:
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4
        options.optimized_model_filepath = str(Path(folder) / "optimized.onnx")
        onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
        return [node.op_type for node in onnx.load(options.optimized_model_filepath).graph.node]


plain, normed = ops(has_norm=False), ops(has_norm=True)
print(f"convolution: {', '.join(plain)}")
print(f"convolution and batch norm: {', '.join(normed)}")
shown = "QLinearConv" in plain and "QLinearConv" not in normed
print("the fault shows" if shown else "the fault does not show with this torch on this machine")
raise SystemExit(not shown)
