"""ONNX Runtime: a convolution of integers runs in float before a batch norm, and before a relu whose output has a zero
point that is not the smallest integer."""

# finding: 42
# engine: onnxruntime
# claimed: an op and a relu, where the output's zero point is not its smallest integer
# fault of: optimizer
# largest error: runs in float
# cpu: all
# claims: `*ReLU*/*`, `*relu/*`
# reason: a relu whose output's zero point is not the smallest integer runs in float
#
# finding: 43
# engine: onnxruntime
# claimed: fused modules with a batch norm, in eval mode
# fault of: config
# largest error: runs in float
# cpu: all
# claims: `nni.*Bn*/*` at ptq
# reason: a batch norm that is not folded runs in float

import tempfile
from pathlib import Path

import numpy
import onnx
import onnxruntime
from onnx import NodeProto, TensorProto, helper, numpy_helper


def runs_on_integers(zero_point: int, *behind: NodeProto) -> bool:
    """Print the ops that a convolution, and what is behind it, become; is there QLinearConv among them?"""
    constants = {
        "scale": numpy.float32(0.01),
        "zero": numpy.uint8(128),
        "weight": numpy.ones((4, 4, 1, 1), numpy.int8),
        "weight_zero": numpy.int8(0),
        "out_zero": numpy.uint8(zero_point),
        "ones": numpy.ones(4, numpy.float32),
    }
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "scale", "zero"], ["xq"]),
        helper.make_node("DequantizeLinear", ["xq", "scale", "zero"], ["xd"]),
        helper.make_node("DequantizeLinear", ["weight", "scale", "weight_zero"], ["wd"]),
        helper.make_node("Conv", ["xd", "wd"], ["conv"]),
        *behind,
        helper.make_node("QuantizeLinear", ["done" if behind else "conv", "scale", "out_zero"], ["yq"]),
        helper.make_node("DequantizeLinear", ["yq", "scale", "out_zero"], ["y"]),
    ]
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, (1, 4, 2, 2)) for name in ("x", "y")]
    values = [numpy_helper.from_array(numpy.asarray(value), name) for name, value in constants.items()]
    graph = helper.make_graph(nodes, "convolution", ends[:1], ends[1:], values)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    with tempfile.TemporaryDirectory() as folder:
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4
        options.optimized_model_filepath = str(Path(folder) / "optimized.onnx")
        onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
        ops = [node.op_type for node in onnx.load(options.optimized_model_filepath).graph.node]
    names = ["Conv", *(node.op_type for node in behind)]
    print(f"{' + '.join(names)}, zero point {zero_point}: {', '.join(ops)}")
    return "QLinearConv" in ops


relu = helper.make_node("Relu", ["conv"], ["done"])
norm = helper.make_node("BatchNormalization", ["conv", "ones", "ones", "ones", "ones"], ["done"])
right = runs_on_integers(128) and runs_on_integers(0, relu)
wrong = runs_on_integers(128, relu) or runs_on_integers(128, norm)
print("the fault shows" if right and not wrong else "the fault does not show with this torch on this machine")
raise SystemExit(not right or wrong)
