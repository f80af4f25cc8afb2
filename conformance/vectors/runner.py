"""Running a bundle by a backend of the suite's contract, from the bundle's files alone, in a process of its own.

``fx-quant-conformance run DEVICE OUT --backend=NAME`` reads models in the format ``fx``; it is also what a runner for a
device has to do, in Python.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

from fx_quant_conformance.backends.base import Execution, Lowered, UnsupportedPattern
from fx_quant_conformance.conformance.machine.child import Ending
from fx_quant_conformance.conformance.machine.threads import run_with_threads
from fx_quant_conformance.conformance.machine.workplace import KeptWorker, LostProcess
from fx_quant_conformance.conformance.oracle.grids import Grid
from fx_quant_conformance.conformance.remote.client import RemoteBackend, format_trace
from fx_quant_conformance.conformance.remote.description import read_description
from fx_quant_conformance.conformance.remote.model_bytes import load_model
from fx_quant_conformance.conformance.remote.worker import describe_backend, make_warm_workers
from fx_quant_conformance.conformance.vectors.bundle import MANIFEST, key_of_output
from fx_quant_conformance.conformance.vectors.files import (
    Array,
    format_json,
    pack_arrays,
    read_json,
    remove,
    unpack_arrays,
)
from fx_quant_conformance.conformance.vectors.graph_data import as_array
from fx_quant_conformance.conformance.vectors.outputs import EXECUTION, OUTPUTS, STATUS
from fx_quant_conformance.conformance.vectors.runs import read_operand
from fx_quant_conformance.reports.reading import FileFault


def run_bundle(device: Path, out: Path, spec: str, *, limit: float = 60.0) -> int:
    """Run all cases of a bundle's device folder by the backend that ``spec`` names; return their number.

    ``limit``: seconds for one case. They run in a process of their own, whose death or hanging is its case's status.
    Raises FileFault for a bundle that cannot be read, or without models in the format ``fx``; StartError and
    DescriptionError for a backend that cannot be had.
    """
    manifest = read_json(device / MANIFEST)
    try:
        files = {str(row["case"]): str(row["file"]) for row in manifest["cases"]}
        has_models = "fx" in manifest["formats"]
    except (KeyError, TypeError) as error:
        raise FileFault(f"{device / MANIFEST} is no manifest: {type(error).__name__}: {error}") from error
    if not has_models:
        raise FileFault(f"{device} has no models in the format fx: export with --format=fx")
    torch.set_num_threads(1)
    description = read_description(describe_backend(spec, limit=limit))
    with closing(KeptWorker(make_warm_workers(spec, limit=limit))) as worker:
        backend = RemoteBackend(description, worker.ask, limit=math.inf)
        out.mkdir(parents=True, exist_ok=True)
        for name, file in files.items():
            case, folder = read_json(device / file), out / name
            remove(folder)  # what an earlier run has left says nothing of this one
            folder.mkdir()
            backend.begin(name)
            backend.allow(limit)
            try:
                _run_case(device, case, folder, backend)
            except LostProcess as lost:
                status = "timeout" if lost.ending is Ending.TIMEOUT else "crashed"
                _write(folder, {"status": status, "reason": str(lost), "text": lost.text})
    return len(files)


def _run_case(device: Path, case: Mapping[str, Any], folder: Path, backend: RemoteBackend) -> None:
    """Lower a case's model and run it; write what came of it. Raises LostProcess."""
    model, example = load_model((device / case["model"]["fx"]).read_bytes())
    inputs = unpack_arrays(device / case["inputs"])
    try:
        lowered = backend.lower(model, example)
        if not callable(lowered):
            raise TypeError(f"lower returned {type(lowered).__name__}, which cannot be called")
    except Exception as error:
        _write(folder, _describe(error))
        return
    arrays, runs = dict[str, Array](), dict[str, Any]()
    grids = [None if grid is None else Grid(**grid) for grid in case["operands"]]
    for number, run in enumerate(case["runs"]):
        operands = [read_operand(each, inputs, grid) for each, grid in zip(run["inputs"], grids, strict=True)]
        try:
            output = _run(lowered, operands, run["threads"])
        except Exception as error:
            runs[str(number)] = _describe(error)
            continue
        for place, value in enumerate(tree_flatten(output)[0]):
            arrays[key_of_output(number, place)] = as_array(value)
    (folder / OUTPUTS).write_bytes(pack_arrays(arrays))
    _write(folder, {"status": "done", "runs": runs})
    try:
        execution = lowered.execution()
    except Exception as error:
        _write(folder, _describe(error))
        return
    if execution is not None:
        names = {name: list(getattr(execution, name)) for name in Execution.__dataclass_fields__}
        (folder / EXECUTION).write_text(format_json(names), encoding="utf-8")


def _run(lowered: Lowered, operands: list[Tensor], threads: int) -> Any:
    return lowered(*operands) if threads == 1 else run_with_threads(threads, lambda: lowered(*operands))


def _describe(error: Exception) -> dict[str, Any]:
    status = "refused" if isinstance(error, UnsupportedPattern) else "raised"
    return {"status": status, "reason": str(error), "kind": type(error).__name__, "text": format_trace(error)}


def _write(folder: Path, status: Mapping[str, Any]) -> None:
    (folder / STATUS).write_text(format_json(status), encoding="utf-8")
