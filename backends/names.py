"""The names of backends, and how errors are told in one line: what needs neither torch nor a backend."""

from __future__ import annotations

from importlib.metadata import entry_points

ENTRY_POINT_GROUP = "fx_quant_conformance.backends"
SHIPPED = {
    "reference": "backends.reference:ReferenceBackend",
    **{
        f"reference-{name}": f"backends.reference:Reference{name.capitalize()}"
        for name in ("native", "fbgemm", "x86", "onednn", "tensorrt", "executorch")
    },
    "qnnpack": "backends.qnnpack:QnnpackBackend",
    "fbgemm": "backends.fbgemm:FbgemmBackend",
    "x86": "backends.x86:X86Backend",
    "onednn": "backends.onednn:OnednnBackend",
    "onnxruntime": "backends.onnxruntime:OnnxRuntimeBackend",
    "onnx-reference": "backends.onnx_reference:OnnxReferenceBackend",
    "openvino": "backends.openvino:OpenVinoBackend",
    "inductor": "backends.inductor:InductorBackend",
    "executorch": "backends.executorch:ExecuTorchBackend",
    "pt2e-x86": "backends.pt2e_x86:Pt2eX86Backend",
    "pt2e-xnnpack": "backends.pt2e_xnnpack:Pt2eXnnpackBackend",
}


class BackendNotFound(Exception):
    """``--backend`` names no usable backend; the message is one line."""


def list_names() -> list[str]:
    """Return the names of shipped and installed backends."""
    return sorted({*SHIPPED, *entry_points(group=ENTRY_POINT_GROUP).names})


def format_error(error: BaseException) -> str:
    """Return an error's class and text on one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
