"""Reference models through TorchInductor: what is computed, for which shapes, and what is said of it."""

from __future__ import annotations

import shutil
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.ao.quantization import PlaceholderObserver
from torch.fx import GraphModule

from fx_quant_conformance.backends.base import Backend, Execution
from fx_quant_conformance.backends.discovery import find_backend
from fx_quant_conformance.backends.inductor import read_execution
from fx_quant_conformance.backends.lowering import lower_reference
from fx_quant_conformance.refimpl import QConfig, QConfigMapping
from fx_quant_conformance.refimpl.observers.default_qconfigs import get_default_qconfig_mapping
from tests.runtimes.references import PER_CHANNEL, PER_TENSOR, Flat, image, reference_of

pytestmark = pytest.mark.slow

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++: apt-get install g++")


@pytest.fixture
def backend() -> Backend:
    return find_backend("inductor")


def executed(backend: Backend, reference: GraphModule, *inputs: Tensor) -> Execution:
    execution = backend.execution(lower_reference(backend, reference, inputs))
    assert execution is not None
    return execution


@needs_compiler
@pytest.mark.rule("LOW-04")
@pytest.mark.parametrize("weight", (PER_TENSOR, PER_CHANNEL))
def test_a_small_network_runs_for_batches_of_any_size(backend: Backend, weight: Any) -> None:
    """On kernels of integers where a weight has a scale per channel: the fusions look for that dequantize alone."""
    x = image(2, 3, 6, 6)
    activation = get_default_qconfig_mapping("qnnpack").global_qconfig.activation
    mapping = QConfigMapping().set_global(QConfig(activation, weight))
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(16, 5))
    reference = reference_of(model, x, mapping=mapping)
    lowered = lower_reference(backend, reference, (x,))
    for rows in (2, 1, 0, 5):
        given = image(rows, 3, 6, 6)
        assert lowered(given).shape == (rows, 5) and torch.allclose(lowered(given), reference(given), atol=1e-6)
    execution = backend.execution(lowered)
    assert execution is not None
    kernels = list(dict.fromkeys(each.split(".")[3] for each in execution.quantized_ops if " (torch.ops." in each))
    if weight is PER_CHANNEL:
        assert execution.float_fallbacks == ()
        assert kernels == ["qconv_pointwise", "max_pool2d", "qlinear_pointwise"]
    else:
        assert [each.partition(" ")[0] for each in execution.float_fallbacks] == ["_0", "_4"], "reported by their nodes"
        assert kernels == ["max_pool2d"]


@needs_compiler
@pytest.mark.rule("CVT-03")
def test_dynamic_linear_runs_on_integers(backend: Backend) -> None:
    x = torch.randn(3, 6, generator=torch.Generator().manual_seed(0))
    activation = PlaceholderObserver.with_args(dtype=torch.quint8, is_dynamic=True)
    mapping = QConfigMapping().set_global(QConfig(activation, PER_CHANNEL))
    reference = reference_of(nn.Sequential(nn.Linear(6, 5)), x, mapping=mapping)
    lowered = lower_reference(backend, reference, (x,))
    assert torch.allclose(lowered(x), reference(x), rtol=1e-5, atol=1e-6)
    execution = backend.execution(lowered)
    assert execution is not None and execution.float_fallbacks == ()
    assert any("qlinear" in each for each in execution.quantized_ops)


class Two(nn.Module):
    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"flat": x.flatten(1), "double": x + x}


@needs_compiler
def test_outputs_have_the_structure_of_the_model_in_any_layout(backend: Backend) -> None:
    x = image(2, 3, 4, 4)
    reference = reference_of(Two(), x)
    lowered, right = lower_reference(backend, reference, (x,)), reference(x)
    for given in (x, x.contiguous(memory_format=torch.channels_last)):
        found = lowered(given)
        assert list(found) == list(right) == ["flat", "double"]
        assert all(torch.equal(found[name], right[name]) for name in right)


@needs_compiler
@pytest.mark.rule("LOW-04")
def test_what_runs_in_float_is_named_after_the_reference_model(backend: Backend) -> None:
    x = image(2, 3, 5, 5, 5)
    reference = reference_of(nn.Sequential(nn.Conv3d(3, 4, 2), nn.Sigmoid(), nn.Conv3d(4, 4, 2)), x)
    convolutions = [node.name for node in reference.graph.nodes if node.target in ("0", "2")]
    execution = executed(backend, reference, x)
    assert execution.float_fallbacks == tuple(f"{name} (extern_kernels.convolution)" for name in convolutions)
    assert any("sigmoid" in each for each in execution.quantized_ops), "a loop between integers"


@needs_compiler
@pytest.mark.rule("LOW-04")
def test_where_nothing_is_left_to_run_that_is_said(backend: Backend) -> None:
    x = image(4, 9)
    execution = executed(backend, reference_of(Flat(), x), x)
    assert execution.float_fallbacks == ()
    assert execution.quantized_ops == ("flatten: nothing is left to be done between quantize and dequantize",)


def test_a_library_is_told_from_what_only_quantizes_by_the_buffers_that_it_takes() -> None:
    code = """
cpp_fused_relu_9 = async_compile.cpp_pybinding(['float*'])
    def call(self, args):
        buf0 = empty_strided_cpu((4, 8), (8, 1), torch.float32)
        buf1 = empty_strided_cpu((4, 8), (8, 1), torch.uint8)
        cpp_fused_quantize_per_tensor_0(arg0_1, buf0, buf1)
        # Topologically Sorted Source Nodes: [quantize_per_tensor, cat], Original ATen: []
        buf2 = torch.ops.aten.cat.default([buf1, buf1], 0)
        buf3 = buf0; del buf0  # reuse
        # Topologically Sorted Source Nodes: [dequantize_per_tensor, linear_3, x], Original ATen: []
        extern_kernels.addmm(_frozen_param1, buf3, _frozen_param2, alpha=1, beta=1, out=buf4)
        buf5 = torch.ops.onednn.qlinear_pointwise.tensor(buf2, x_scale)
        cpp_fused_dequantize_per_tensor_1(buf4, buf5)
"""
    execution = read_execution(code, {"linear_3": "fc", "x": "last"}, ())
    assert execution.quantized_ops == (
        "cat (torch.ops.aten.cat.default)",
        "fc (torch.ops.onednn.qlinear_pointwise.tensor)",
        "last (torch.ops.onednn.qlinear_pointwise.tensor)",
    )
    assert execution.float_fallbacks == ("last (extern_kernels.addmm)",), "of several nodes it is the last"


def test_without_a_compiler_it_is_said_what_to_install(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert backend.unavailable_reason() == "no C++ compiler 'no-such-compiler' found: apt-get install g++"


@needs_compiler
def test_versions_name_the_compiler_and_the_settings(backend: Backend) -> None:
    assert backend.unavailable_reason() is None
    found = backend.versions()
    assert set(found) == {"g++", "torch", "settings"} and "12." not in found["settings"]
    assert "freezing=True" in found["settings"] and "g++" in found["g++"]
