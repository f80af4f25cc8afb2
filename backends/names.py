"""The names of backends, and how errors are told in one line: what needs neither torch nor a backend."""

from __future__ import annotations

from importlib.metadata import entry_points

ENTRY_POINT_GROUP = "fx_quant_conformance.backends"
SHIPPED = {
    "reference": "fx_quant_conformance.backends.reference:ReferenceBackend",
    **{
        f"reference-{name}": f"fx_quant_conformance.backends.reference:Reference{name.capitalize()}"
        for name in ("native", "fbgemm", "x86", "onednn", "tensorrt", "executorch")
    },
    "qnnpack": "fx_quant_conformance.backends.torch_engines.qnnpack:QnnpackBackend",
    "fbgemm": "fx_quant_conformance.backends.torch_engines.fbgemm:FbgemmBackend",
    "x86": "fx_quant_conformance.backends.torch_engines.x86:X86Backend",
    "onednn": "fx_quant_conformance.backends.torch_engines.onednn:OnednnBackend",
    "onnxruntime": "fx_quant_conformance.backends.onnxruntime:OnnxRuntimeBackend",
    "onnx-reference": "fx_quant_conformance.backends.onnx_reference:OnnxReferenceBackend",
    "openvino": "fx_quant_conformance.backends.openvino:OpenVinoBackend",
    "inductor": "fx_quant_conformance.backends.inductor:InductorBackend",
    "litert": "fx_quant_conformance.backends.litert:LiteRTBackend",
    "ncnn": "fx_quant_conformance.backends.ncnn:NcnnBackend",
    "executorch": "fx_quant_conformance.backends.executorch:ExecuTorchBackend",
    "pt2e-x86": "fx_quant_conformance.backends.pt2e_x86:Pt2eX86Backend",
    "pt2e-xnnpack": "fx_quant_conformance.backends.pt2e_xnnpack:Pt2eXnnpackBackend",
}


class BackendNotFound(Exception):
    """``--backend`` names no usable backend; the message is one line."""


def list_names() -> list[str]:
    """Return the names of shipped and installed backends."""
    return sorted({*SHIPPED, *entry_points(group=ENTRY_POINT_GROUP).names})


def format_error(error: BaseException) -> str:
    """Return an error's class and text on one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
