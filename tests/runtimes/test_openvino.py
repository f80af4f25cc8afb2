"""Reference models on OpenVINO: what is computed, and what is said of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fx_quant_conformance.backends.discovery import find_backend
from fx_quant_conformance.backends.lowering import lower_reference
from tests.runtimes.references import Flat, image, reference_of

pytest.importorskip("onnx")
pytest.importorskip("openvino")


class Difference(nn.Module):
    """Of the last of twelve inputs and the second: their order is not that of their names as texts."""

    def forward(
        self,
        a: Tensor,
        b: Tensor,
        c: Tensor,
        d: Tensor,
        e: Tensor,
        f: Tensor,
        g: Tensor,
        h: Tensor,
        i: Tensor,
        j: Tensor,
        k: Tensor,
        m: Tensor,
    ) -> Any:
        rest = a + c + d + e + f + g + h + i + j + k
        return m + b * -1.0, rest


@pytest.mark.slow
def test_convolution_and_linear_run_on_integers_and_are_right_in_batches_of_any_size() -> None:
    backend, layers = find_backend("openvino"), nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(16, 5))
    reference = reference_of(layers, image(2, 3, 4, 4))
    lowered = lower_reference(backend, reference, (image(2, 3, 4, 4),))
    for rows in (1, 2, 5):
        x = image(rows, 3, 4, 4)
        assert lowered(x).shape == (rows, 5)
        assert torch.allclose(lowered(x), reference(x), atol=1e-6)
    execution = backend.execution(lowered)
    assert execution is not None and not execution.float_fallbacks
    assert any("Convolution u8" in each for each in execution.quantized_ops)
    assert any("FullyConnected u8" in each for each in execution.quantized_ops)


@pytest.mark.slow
def test_inputs_are_given_in_their_order() -> None:
    inputs = tuple(torch.full((2, 3), float(number)) for number in range(12))
    reference = reference_of(Difference(), *inputs)
    lowered = lower_reference(find_backend("openvino"), reference, inputs)
    found, right = lowered(*inputs), reference(*inputs)
    assert torch.allclose(found[0], right[0], atol=0.05) and float(found[0].mean()) > 9.5
    assert torch.allclose(found[1], right[1], atol=1.0)


@pytest.mark.rule("LOW-04")
def test_what_runs_in_float_is_named_after_the_reference_model() -> None:
    backend, x = find_backend("openvino"), image(2, 3, 6, 6)
    reference = reference_of(nn.Sequential(nn.Conv2d(3, 4, 3), nn.Tanh(), nn.Conv2d(4, 4, 3)), x)
    execution = backend.execution(lower_reference(backend, reference, (x,)))
    assert execution is not None
    [tanh] = [node.name for node in reference.graph.nodes if node.target == "1"]
    assert [each.split(" ")[0] for each in execution.float_fallbacks] == [tanh]
    assert sum("Convolution u8" in each for each in execution.quantized_ops) == 2


@pytest.mark.slow
@pytest.mark.rule("LOW-04")
def test_where_nothing_is_left_to_run_that_is_said() -> None:
    backend, x = find_backend("openvino"), image(4, 9)
    reference = reference_of(Flat(), x)
    assert "quantize_per_tensor" in reference.code
    execution = backend.execution(lower_reference(backend, reference, (x,)))
    assert execution is not None and not execution.float_fallbacks
    assert execution.quantized_ops == ("flatten: nothing is left to be done between quantize and dequantize",)
