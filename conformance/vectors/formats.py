"""The formats in which a bundle holds a model, beside the plain graph that it always has."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch
from torch.fx import GraphModule

from conformance.remote.model_bytes import dump_model

Export: TypeAlias = Callable[[GraphModule, tuple[Any, ...]], bytes]


def _export_program(model: GraphModule, example: tuple[Any, ...]) -> bytes:
    from backends._export import export_model

    buffer = io.BytesIO()
    torch.export.save(export_model(model, example), buffer)
    return buffer.getvalue()


def _export_onnx(model: GraphModule, example: tuple[Any, ...]) -> bytes:
    from backends._onnx import onnx_bytes

    return onnx_bytes(model, example)


FORMATS: Mapping[str, Export] = {
    "json": lambda model, example: b"",
    "pt2": _export_program,
    "onnx": _export_onnx,
    "fx": dump_model,
}
"""Makes the bytes of a model, by format: ``json`` is always there; ``fx`` is for backends of the suite's contract."""
NEEDS: Mapping[str, tuple[str, ...]] = {"onnx": ("onnx", "onnxscript")}
"""The packages that a format needs."""
EXPORTED = ("pt2", "onnx")
"""The formats that are made by torch.export, which takes the decomposed form only."""
