"""What runs in float is named by the reference model's op, with the reason that the flow or the backend knows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.ao.nn.intrinsic as nni
import torch.nn.functional as F
from torch import nn
from torch.fx import GraphModule, symbolic_trace

from fx_quant_conformance.conformance.stages.float_ops import format_float


def reference_of(*steps: Any) -> GraphModule:
    """A reference model of these modules and functions, between one dequantize and one quantize."""

    class Leaves(torch.fx.Tracer):
        def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
            return True

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for number, step in enumerate(steps):
                if isinstance(step, nn.Module):
                    self.add_module(f"op{number}", step)

        def forward(self, x: Any) -> Any:
            x = torch.quantize_per_tensor(x, 0.5, 0, torch.quint8).dequantize()
            for number, step in enumerate(steps):
                x = getattr(self, f"op{number}")(x) if isinstance(step, nn.Module) else step(x)
            return torch.quantize_per_tensor(x, 0.5, 0, torch.quint8).dequantize()

    model = Model().eval()
    return GraphModule(model, Leaves().trace(model))


CONV, NORM = nn.Conv2d(3, 5, 3), nn.BatchNorm2d(5)
FUSED: Any = nni.ConvBn2d


@pytest.mark.parametrize(
    ("steps", "report", "said"),
    [
        ((nn.Softmax(1),), "op0", "nn.Softmax at op0: left as it is between dequantize and quantize"),
        ((nn.Softmax(1),), "op0 (Softmax)", "nn.Softmax at op0: left as it is between dequantize and quantize"),
        (
            (CONV,),
            "op0 (Convolution f32)",
            "nn.Conv2d at op0 (Convolution f32): left as it is between dequantize and quantize",
        ),
        ((CONV, NORM), "op1", "nn.BatchNorm2d at op1: is not folded into nn.Conv2d at op0 before it"),
        (
            (CONV, NORM),
            "op0",
            "nn.Conv2d at op0: stands between dequantize and quantize with nn.BatchNorm2d at op1: "
            "one kernel must do all of it",
        ),
        (
            (FUSED(CONV, NORM),),
            "op0 (ConvBn2d): LOW-01: torch has no quantized op for it",
            "nni.ConvBn2d at op0: its norm is not folded into the weight (LOW-01: torch has no quantized op for it)",
        ),
        ((NORM,), "op0 (BatchNorm2d): LOW-03: no statistics", "nn.BatchNorm2d at op0: LOW-03: no statistics"),
        (
            (CONV, F.relu),
            "relu",
            "F.relu at relu: stands between dequantize and quantize with nn.Conv2d at op0: one "
            "kernel must do all of it",
        ),
        ((CONV,), "op0: too many groups", "nn.Conv2d at op0: too many groups"),
        ((CONV,), "aten::convolution", "aten::convolution"),
        ((CONV,), "MaxPool_9723 (Pooling f32)", "MaxPool_9723 (Pooling f32)"),
        ((CONV,), "all of it: no quantized op", "all of it: no quantized op"),
        ((CONV,), "", ""),
    ],
)
def test_a_report_is_told_in_words_of_the_flow(steps: tuple[Any, ...], report: str, said: str) -> None:
    """Before, a reader saw ``op0``."""
    assert format_float(reference_of(*steps), report) == said


def test_a_method_and_a_builtin_are_named_as_patterns_name_them() -> None:
    def forward(x: Any) -> Any:
        return torch.add(x.view(2, 3), 1.0)

    model = symbolic_trace(forward)
    assert format_float(model, "view: x") == ".view at view: x"
    assert format_float(model, "add: x") == "torch.add at add: x"
