"""What a device handed in for a case: outputs, what it executed, and how it ended (docs/vectors.md).

Nothing that lies in the folder is trusted: whatever is wrong with it is one line, and the verdict of that case.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fx_quant_conformance.backends.base import Execution
from fx_quant_conformance.conformance.oracle.grids import Grid
from fx_quant_conformance.conformance.vectors.bundle import key_of_output
from fx_quant_conformance.conformance.vectors.files import Array, read_file, read_json, unpack_arrays
from fx_quant_conformance.reports.reading import FileFault

OUTPUTS, EXECUTION, STATUS = "outputs.npz", "execution.json", "status.json"
NO_MODEL = "no_model"
STATUSES = ("done", "refused", "raised", "crashed", "timeout", NO_MODEL)
_RAW = re.compile(r"(r\d+_o\d+)\.(\w+)")
_SHOWN = 200
_MOST_TEXT = 1 << 16
_DTYPES = ("float32", "int8", "uint8", "int16", "uint16", "int32")


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """How a case or a run ended on the device: one of STATUSES, and the reason."""

    status: str
    reason: str = ""
    text: str = ""
    """The end of what it printed, or a traceback."""
    kind: str = ""
    """The name of the error's class, if one was raised."""
    format: str = ""
    """The format in which there is no model."""


class HandedIn:
    """What was handed in for one case. Its methods raise FileFault for what cannot be read."""

    def __init__(self, folder: Path, case: Mapping[str, Any]) -> None:
        self.folder = folder
        self._outputs: Sequence[Mapping[str, Any]] = case["outputs"]
        self._runs: Sequence[Mapping[str, Any]] = case["runs"]
        self._arrays: dict[str, Array] | None = None
        self._status: dict[str, Any] | None = None

    def read_status(self) -> Status:
        """Return how the case ended; without ``status.json`` it is done."""
        data = self._read_status()
        runs = data.get("runs", {})
        if not isinstance(runs, dict):
            raise FileFault(f"{STATUS}: runs is no object")
        known = {str(number) for number in range(len(self._runs))}
        if unknown := sorted({*map(str, runs)} - known):
            raise FileFault(f"{STATUS}: there is no run {unknown[0][:_SHOWN]}; the case has {len(known)}")
        return _make_status(data, STATUS)

    def read_status_of(self, run: int) -> Status:
        """Return how a run ended."""
        runs = self._read_status().get("runs", {})
        return _make_status(runs.get(str(run), {}), f"{STATUS}, run {run}")

    def _read_status(self) -> dict[str, Any]:
        if self._status is None:
            self._check_folder()
            data = read_json(self.folder / STATUS) if os.path.lexists(self.folder / STATUS) else {}
            if not isinstance(data, dict):
                raise FileFault(f"{STATUS} is no object")
            self._status = data
        return self._status

    def read_execution(self) -> Execution | None:
        """Return what the device executed; None: it does not say."""
        if not os.path.lexists(self.folder / EXECUTION):
            return None
        data = read_json(self.folder / EXECUTION)
        names = list(Execution.__dataclass_fields__)
        optional: dict[str, list[str]] = {"kernels": []}
        lists = {name: data.get(name, optional.get(name)) for name in names} if isinstance(data, dict) else {}
        known = {name: each for name, each in lists.items() if isinstance(each, list)}
        if not known or len(known) < len(names) or not all(isinstance(x, str) for each in known.values() for x in each):
            raise FileFault(f"{EXECUTION} is not an object with lists of texts {', '.join(names)}")
        return Execution(**{name: tuple(each) for name, each in known.items()})

    def read_outputs(self, run: int) -> list[Tensor]:
        """Return the outputs of a run, as float32 tensors."""
        arrays = self._read_arrays()
        shapes = self._runs[run]["outputs"]
        return [
            _take(key_of_output(run, place), arrays, shape, about["grid"])
            for place, (shape, about) in enumerate(zip(shapes, self._outputs, strict=True))
        ]

    def check_complete(self) -> None:
        """Read every output that has no status of its own. Raises FileFault for the first that cannot be read."""
        for run in range(len(self._runs)):
            if self.read_status_of(run).status == "done":
                self.read_outputs(run)

    def _names(self) -> list[str]:
        return [
            key_of_output(run, place) for run, data in enumerate(self._runs) for place in range(len(data["outputs"]))
        ]

    def _read_arrays(self) -> dict[str, Array]:
        if self._arrays is None:
            self._arrays = self._read_all()
        return self._arrays

    def _check_folder(self) -> None:
        if self.folder.is_symlink():
            raise FileFault(f"{self.folder.name} is a symbolic link; hand in a folder")

    def _read_all(self) -> dict[str, Array]:
        self._check_folder()
        if not self.folder.is_dir():
            raise FileFault(f"nothing was handed in: there is no folder {self.folder.name}")
        raw = sorted(path for path in self.folder.iterdir() if _RAW.fullmatch(path.name))
        if os.path.lexists(self.folder / OUTPUTS):
            if raw:
                raise FileFault(f"both {OUTPUTS} and {raw[0].name} are there; hand in one of the two")
            arrays = unpack_arrays(self.folder / OUTPUTS)
        elif raw:
            if len({path.name.partition(".")[0] for path in raw}) < len(raw):
                raise FileFault("two raw files are one output; hand in each in one dtype")
            arrays = dict(self._read_raw(path) for path in raw)
        else:
            raise FileFault(f"nothing was handed in: {self.folder.name} has no {OUTPUTS} and no raw files")
        if surplus := sorted({*arrays} - {*self._names()}):
            raise FileFault(f"{surplus[0][:_SHOWN]!r} is no output of the case, which has {len(self._names())}")
        return arrays

    def _read_raw(self, path: Path) -> tuple[str, Array]:
        """Return the name and the array of a raw file, ``r0_o0.int8``: little-endian, in C order."""
        name, dtype_name = path.name.split(".")
        if dtype_name not in _DTYPES:
            raise FileFault(f"{path.name}: {dtype_name[:_SHOWN]!r} is no dtype; write one of {', '.join(_DTYPES)}")
        if name not in self._names():
            return name, np.zeros(0)
        run, place = (int(part[1:]) for part in name.split("_"))
        shape, dtype = self._runs[run]["outputs"][place], np.dtype(dtype_name).newbyteorder("<")
        data, size = read_file(path), math.prod(shape) * dtype.itemsize
        if len(data) != size:
            raise FileFault(f"{path.name} has {len(data)} bytes; {size} are expected for shape {shape}")
        return name, np.frombuffer(data, dtype).reshape(shape)


def _make_status(data: Any, where: str) -> Status:
    if not isinstance(data, dict):
        raise FileFault(f"{where}: found {str(data)[:_SHOWN]!r}; write an object with a status")
    found = data.get("status", "done")
    if not isinstance(found, str) or found not in STATUSES:
        raise FileFault(f"{where}: status is {str(found)[:_SHOWN]!r}; write one of {', '.join(STATUSES)}")
    texts = {name: str(data.get(name, ""))[:_MOST_TEXT] for name in ("reason", "text", "kind", "format")}
    return Status(status=found, **texts | {"kind": "".join(c for c in texts["kind"] if c.isalnum() or c in "_.")})


def _take(name: str, arrays: Mapping[str, Array], shape: list[int], grid: Mapping[str, Any] | None) -> Tensor:
    """Return an output as a float32 tensor: of reals as they are, of integers by their grid."""
    if name not in arrays:
        raise FileFault(f"output {name} is missing")
    array = arrays[name]
    if list(array.shape) != shape:
        raise FileFault(f"output {name} has shape {list(array.shape)}; expected {shape}")
    kinds = ["float32", *([] if grid is None else [grid["dtype"]])]
    if array.dtype.name not in kinds:
        raise FileFault(f"output {name} has dtype {array.dtype}; expected {' or '.join(kinds)}")
    value = torch.from_numpy(array.astype(array.dtype.newbyteorder("="), order="C"))
    if array.dtype.name == "float32":
        return value
    assert grid is not None, "integers are taken where there is a grid"
    return Grid(**grid).values(value)
