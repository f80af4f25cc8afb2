"""The formats in which a bundle holds a model, beside the plain graph that it always has."""

from __future__ import annotations

import io
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from importlib.util import find_spec
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.export import ExportedProgram

from fx_quant_conformance.backends.base import Representation
from fx_quant_conformance.refimpl.exported.exported import find_batch_axes

Extent: TypeAlias = tuple[int | None, ...]
"""The shape of an input; None: an axis of any size."""


def _save_program(program: ExportedProgram) -> bytes:
    buffer = io.BytesIO()
    torch.export.save(program, buffer)
    return buffer.getvalue()


def _save_onnx(program: ExportedProgram) -> bytes:
    from fx_quant_conformance.backends._onnx import onnx_bytes

    return onnx_bytes(program)


EXPORTED: Mapping[str, Callable[[ExportedProgram], bytes]] = {"pt2": _save_program, "onnx": _save_onnx}
"""Makes the bytes of an exported program, by format: a file for each shape, but for the rows of a batch."""
PLAIN, OWN = "json", "fx"
"""The format of the plain graph, which every bundle has; that of backends of the suite's contract. Both are for any
shape."""
NEEDS: Mapping[str, tuple[str, ...]] = {"onnx": ("onnx", "onnxscript")}
"""The packages that a format needs."""


class FormatError(Exception):
    """A bundle cannot have the formats that are asked for; one line."""


def choose_formats(names: Iterable[str]) -> tuple[str, ...]:
    """Return the formats of a bundle, the plain graph first. Raises FormatError for others, or a missing package."""
    asked = tuple(dict.fromkeys(names))
    if unknown := [str(name) for name in asked if name not in (PLAIN, *EXPORTED, OWN)]:
        raise FormatError(f"found {', '.join(unknown)}; choose from {', '.join((PLAIN, *EXPORTED, OWN))}")
    for name in asked:
        if absent := [each for each in NEEDS.get(name, ()) if find_spec(each) is None]:
            raise FormatError(f"{name} needs {', '.join(absent)}: pip install {' '.join(absent)}")
    return (PLAIN, *(name for name in asked if name != PLAIN))


def choose_form(own: Representation, formats: Collection[str]) -> Representation:
    """Return the form of the models in a bundle: the decomposed one, or for ``fx`` that which ``lower`` takes."""
    is_own = OWN in formats and own is Representation.QUANTIZED
    return own if is_own else Representation.DECOMPOSED


def extents_of(example: Sequence[Any], *, dynamic_batch: bool) -> tuple[Extent, ...]:
    """Return the shapes that a program takes which is exported with these inputs."""
    is_batch = find_batch_axes(example) if dynamic_batch else [False] * len(example)
    shapes = [tuple(value.shape) if isinstance(value, Tensor) else () for value in example]
    return tuple((None, *shape[1:]) if own else shape for shape, own in zip(shapes, is_batch, strict=True))


def format_extents(extents: Sequence[Extent]) -> str:
    """Return shapes as part of a file's name: ``nx3x8x8``, of several inputs with ``_`` between them."""
    return "_".join("x".join("n" if size is None else str(size) for size in each) or "scalar" for each in extents)
