"""The runs of a case as data: which arrays go in, as integers wherever a value lies on a grid, and what comes out."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from fx_quant_conformance.conformance.bounds.error_bounds import flatten
from fx_quant_conformance.conformance.oracle.grids import Grid
from fx_quant_conformance.conformance.remote.wire import extent_of
from fx_quant_conformance.conformance.vectors.files import Array
from fx_quant_conformance.conformance.vectors.graph_data import Data, as_array, integer_dtype_of, name_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Operand:
    """One input of one run."""

    array: str
    """Its name in ``inputs.npz``, in C order."""
    holds: Literal["integers", "values"]
    """``integers`` of the input's grid, or the ``values`` themselves."""
    shape: list[int]
    strides: list[int] | None
    """The strides of the memory in which the input is to lie, in elements; None: it is contiguous."""
    begins_later: bool
    """Whether the input is to begin one element later than its memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunData:
    """One run of a case: its inputs, the shapes of its outputs, its program, and the threads that it is meant for."""

    inputs: list[Operand]
    outputs: list[list[int]]
    program: int
    """The number of the exported program that takes these shapes."""
    threads: int = 1


@dataclass(slots=True, kw_only=True)
class RunsData:
    """The runs of a case, with the arrays that they name; equal arrays are held once."""

    grids: Sequence[Grid | None]
    runs: list[RunData] = field(default_factory=list)
    arrays: dict[str, Array] = field(default_factory=dict)
    _names: dict[str, str] = field(default_factory=dict)

    def add(self, inputs: Sequence[Tensor], output: Any, *, threads: int, program: int) -> None:
        """Add a run."""
        operands = [self._hold(value, grid) for value, grid in zip(inputs, self.grids, strict=True)]
        shapes = [list(each.shape) for each in flatten(output) if isinstance(each, Tensor)]
        self.runs.append(RunData(inputs=operands, outputs=shapes, program=program, threads=threads))

    def spell(self) -> list[Data]:
        """Return the runs as plain data."""
        return [asdict(run) for run in self.runs]

    def _hold(self, value: Tensor, grid: Grid | None) -> Operand:
        integers = None if grid is None else find_integers(value, grid)
        array = as_array(value if integers is None else integers)
        key = hashlib.sha256(f"{array.dtype}{array.shape}".encode() + array.tobytes()).hexdigest()
        name = self._names.setdefault(key, f"a{len(self._names)}")
        if name not in self.arrays:
            self.arrays[name] = array.copy()  # of an input that others may write to
        return Operand(
            array=name,
            holds="values" if integers is None else "integers",
            shape=list(value.shape),
            strides=None if value.is_contiguous() else list(value.stride()),
            begins_later=_begins_later(value),
        )


def find_integers(value: Tensor, grid: Grid) -> Tensor | None:
    """Return the integers whose values are exactly these; None: a value lies between them, or beyond their ends."""
    if value.dtype is not torch.float32:
        return None
    integers = grid.integers(value.contiguous()).round()
    is_inside = (integers >= grid.low) & (integers <= grid.high)  # NaN is not
    if not bool(is_inside.all()) or not torch.equal(_bits(grid.values(integers)), _bits(value.contiguous())):
        return None
    return integers.to(integer_dtype_of(grid))


def _bits(value: Tensor) -> Tensor:
    return value.view(torch.int32)


def _begins_later(value: Tensor) -> bool:
    return value.numel() > 0 and value.storage_offset() > 0


def key_of(inputs: Sequence[Tensor], threads: int) -> str:
    """Return what tells a run from others: the values and the layouts of its inputs, and its threads."""
    digest = hashlib.sha256(str(threads).encode())
    for value in inputs:
        layout = None if value.is_contiguous() else value.stride(), _begins_later(value)
        digest.update(f"{name_of(value.dtype)}{tuple(value.shape)}{layout}".encode())
        digest.update(as_array(value).tobytes())
    return digest.hexdigest()


def read_operand(operand: Mapping[str, Any], arrays: Mapping[str, Any], grid: Grid | None) -> Tensor:
    """Return an input as the device is to feed it."""
    value = torch.from_numpy(arrays[operand["array"]])
    if operand["holds"] == "integers":
        assert grid is not None, "integers lie on a grid"
        value = grid.values(value)
    strides, offset = operand["strides"] or value.stride(), int(operand["begins_later"])
    if not value.numel() or (operand["strides"] is None and not offset):
        return value
    size = offset + extent_of(operand["shape"], strides)
    laid = torch.zeros(size, dtype=value.dtype).as_strided(operand["shape"], strides, offset)
    own = tuple(slice(0, 1) if step == 0 else slice(None) for step in laid.stride())  # an expanded axis is one element
    laid[own].copy_(value[own])
    return laid
