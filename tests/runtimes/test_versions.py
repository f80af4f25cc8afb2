"""What the header of a run says of other people's runtimes: their versions, those of the exporters, and settings."""

from __future__ import annotations

import pytest

from fx_quant_conformance.backends.discovery import find_backend


@pytest.mark.parametrize(
    ("name", "packages", "settings"),
    [
        ("onnxruntime", {"onnxruntime", "onnx", "onnxscript"}, ()),
        ("onnx-reference", {"onnx", "onnxscript"}, ()),
        (
            "openvino",
            {"openvino", "onnx", "onnxscript"},
            ("INFERENCE_NUM_THREADS=1", "INFERENCE_PRECISION_HINT=f32"),
        ),
        ("litert", {"litert_torch", "ai_edge_litert", "litert_converter"}, ("XNNPACK delegate", "one thread")),
        ("ncnn", {"ncnn"}, ("one thread",)),
        ("executorch", {"executorch", "torchao"}, ("one thread",)),
    ],
)
def test_versions_name_the_runtime_and_its_settings(name: str, packages: set[str], settings: tuple[str, ...]) -> None:
    backend = find_backend(name)
    if reason := backend.unavailable_reason():
        pytest.skip(reason)
    found = backend.versions()
    assert set(found) == packages | {"torch", "settings"} and all(found.values())
    assert all(setting in found["settings"] for setting in settings)
