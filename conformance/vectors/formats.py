"""The formats in which a bundle holds a model, beside the plain graph that it always has."""

from __future__ import annotations

import io
from collections.abc import Callable, Collection, Iterable, Mapping
from importlib.util import find_spec
from typing import Any, TypeAlias

import torch
from torch.fx import GraphModule

from fx_quant_conformance.backends.base import Representation
from fx_quant_conformance.conformance.remote.model_bytes import dump_model
from fx_quant_conformance.refimpl import export_reference

Export: TypeAlias = Callable[[GraphModule, tuple[Any, ...]], bytes]


def _export_program(model: GraphModule, example: tuple[Any, ...]) -> bytes:
    buffer = io.BytesIO()
    torch.export.save(export_reference(model, example), buffer)
    return buffer.getvalue()


def _export_onnx(model: GraphModule, example: tuple[Any, ...]) -> bytes:
    from fx_quant_conformance.backends._onnx import onnx_bytes

    return onnx_bytes(export_reference(model, example))


FORMATS: Mapping[str, Export] = {
    "pt2": _export_program,
    "onnx": _export_onnx,
    "fx": dump_model,
}
"""Makes the bytes of a model, by format, beside the plain graph; ``fx`` is for backends of the suite's contract."""
PLAIN = "json"
"""The format of the plain graph, which every bundle has."""
NEEDS: Mapping[str, tuple[str, ...]] = {"onnx": ("onnx", "onnxscript")}
"""The packages that a format needs."""


class FormatError(Exception):
    """A bundle cannot have the formats that are asked for; one line."""


def choose_formats(names: Iterable[str]) -> tuple[str, ...]:
    """Return the formats of a bundle, the plain graph first. Raises FormatError for others, or a missing package."""
    asked = tuple(dict.fromkeys(names))
    if unknown := [str(name) for name in asked if name not in (PLAIN, *FORMATS)]:
        raise FormatError(f"found {', '.join(unknown)}; choose from {', '.join((PLAIN, *FORMATS))}")
    for name in asked:
        if absent := [each for each in NEEDS.get(name, ()) if find_spec(each) is None]:
            raise FormatError(f"{name} needs {', '.join(absent)}: pip install {' '.join(absent)}")
    return (PLAIN, *(name for name in asked if name != PLAIN))


def choose_form(own: Representation, formats: Collection[str]) -> Representation:
    """Return the form of the models in a bundle: the decomposed one, or for ``fx`` that which ``lower`` takes."""
    is_own = "fx" in formats and own is Representation.QUANTIZED
    return own if is_own else Representation.DECOMPOSED
