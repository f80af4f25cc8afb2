"""``fx-quant-conformance export``: a bundle of what a run would ask of the backend (docs/vectors.md)."""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fx_quant_conformance.conformance.claims.claim import Claim, config_digest
from fx_quant_conformance.conformance.machine.child import Ending
from fx_quant_conformance.conformance.machine.environment import describe_environment
from fx_quant_conformance.conformance.machine.release import ROOT
from fx_quant_conformance.conformance.machine.workplace import WorkResult
from fx_quant_conformance.conformance.pipeline.job import Job
from fx_quant_conformance.conformance.remote.client import RemoteBackend
from fx_quant_conformance.conformance.run.findings import list_files
from fx_quant_conformance.conformance.run.opening import Opened, describe_limits, find_described, open_run
from fx_quant_conformance.conformance.run.options import Options
from fx_quant_conformance.conformance.run.outline import Unit
from fx_quant_conformance.conformance.run.setup import Setup
from fx_quant_conformance.conformance.run.workplaces import Workplaces
from fx_quant_conformance.conformance.vectors.bundle import (
    DEVICE,
    JUDGE,
    BundleError,
    BundleWriter,
    finish_bundle,
    read_bundle,
)
from fx_quant_conformance.conformance.vectors.files import remove
from fx_quant_conformance.conformance.vectors.formats import choose_form
from fx_quant_conformance.conformance.vectors.recording import RecordingBackend, Sink
from fx_quant_conformance.reports.handed_in import VECTORS
from fx_quant_conformance.reports.schema import Check, ModelResult

_MEASURED_EACH = 16


class ExportError(Exception):
    """There is nothing to export, or not so; one line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """What was written."""

    folder: Path
    cases: int
    claims: int
    size: int
    left_out: Mapping[str, str]
    """The claims without a case, with the reason."""


def describe_form(backend: RemoteBackend, formats: Sequence[str]) -> RemoteBackend:
    """Return the backend with the form of models that the formats hold."""
    form = choose_form(backend.representation, formats)
    text = json.dumps(json.loads(backend.text) | {"representation": form.name})
    return RemoteBackend(replace(backend.description, representation=form), text=text)


def record_units(
    options: Options, units: Iterable[Unit], backend: RemoteBackend, sink: Sink, imports: str
) -> Workplaces:
    """Return where units are recorded. ``imports``: where the vendor's own code is found."""
    recording = RecordingBackend(backend.description, sink=sink, imports=imports, text=backend.text)
    return Workplaces(Setup(options=options, text=backend.text, remake=recording.remake), units)


def list_recordable(run: Opened) -> list[str]:
    """Return the IDs of the selected units that a bundle can hold, claims first."""
    units = sorted(run.units.values(), key=lambda unit: isinstance(unit, Job))
    return [unit.id for unit in units if isinstance(unit, Claim) or not unit.is_adaptive]


def export(options: Options, folder: Path, formats: Sequence[str], most_bytes: int | None) -> Exported:
    """Write a bundle; one that is there is replaced when the new one is whole.

    Raises ExportError, FormatError, pytest.UsageError for a backend that cannot be had, OSError.
    """
    if options.backend.startswith(VECTORS):
        raise ExportError(f"--backend={options.backend} is a bundle already")
    described = find_described(options, needs_lower=False)
    if reason := described.unavailable_reason():
        raise ExportError(f"backend {described.name}: {reason}")
    backend = describe_form(described, formats)
    run = open_run(options, backend)
    _check_target(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        reasons = _record(run, backend, BundleWriter(folder=unfinished, formats=formats), options.backend, most_bytes)
        about, plan = _describe(run, backend, formats), _plan(run, backend, unfinished)
        manifest = finish_bundle(unfinished, about, plan, reasons)
        unfinished.chmod(0o755)
        _check_target(folder)
        remove(folder)
        unfinished.rename(folder)
    finally:
        remove(unfinished)
    having = {row["claim"] for row in manifest["cases"]}
    return Exported(
        folder=folder,
        cases=len(manifest["cases"]),
        claims=len(having),
        size=_check_size(folder / DEVICE, None),
        left_out=manifest["left_out"],
    )


def _check_target(folder: Path) -> None:
    """Raise ExportError for a folder that has anything but a bundle: nothing else is ever removed."""
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return
    names = {path.name for path in folder.iterdir()} if folder.is_dir() else {""}
    try:
        read_bundle(folder)
    except BundleError as error:
        raise ExportError(f"{folder} is not empty, and no bundle; name a new folder") from error
    if names != {DEVICE, JUDGE}:
        raise ExportError(f"{folder} has more than a bundle: {min(names - {DEVICE, JUDGE})}; name a new folder")


def _record(
    run: Opened, backend: RemoteBackend, writer: BundleWriter, imports: str, most_bytes: int | None
) -> dict[str, str]:
    """Record the selected claims and models; return why any of them may have no case."""
    names, device = list_recordable(run), writer.folder / DEVICE
    reasons = dict.fromkeys(names, "")
    with closing(record_units(run.options, run.outlined, backend, writer, imports)) as places:
        for number, name in enumerate(names, 1):
            reasons[name] = format_absence(places.run(name))
            _show_progress(number, len(names))
            if number % _MEASURED_EACH == 0:
                _check_size(device, most_bytes, f" after {number} of {len(names)} claims and models")
    _check_size(device, most_bytes)
    return reasons


def _check_size(folder: Path, most_bytes: int | None, when: str = "") -> int:
    """Return the size of a folder in bytes. Raises ExportError if it is too large."""
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    if most_bytes is not None and size > most_bytes:
        raise ExportError(
            f"the bundle has {size} bytes{when}; --max-bytes is {most_bytes}: choose with --claim, or --shard"
        )
    return size


def format_absence(done: WorkResult) -> str:
    """Return why a claim or model may have no case: how its work ended, or what its first check says."""
    if done.ending is not Ending.DONE:
        return f"{done.ending.value}: {done.message}"
    checks = [each for each in done.messages if isinstance(each, Check) and each.outcome in ("fail", "error", "skip")]
    models = [each for each in done.messages if isinstance(each, ModelResult)]
    texts: Iterable[str] = [*(each.message for each in checks), *(each.reason for each in models)]
    return next(filter(None, texts), "")


def _show_progress(done: int, of: int) -> None:
    if sys.stderr.isatty():
        print(f"\r{done} of {of} claims and models", end="" if done < of else "\n", file=sys.stderr, flush=True)


def _describe(run: Opened, backend: RemoteBackend, formats: Sequence[str]) -> dict[str, Any]:
    """Return what the manifest says of the bundle."""
    environment = describe_environment(ROOT)
    return {
        "backend": backend.name,
        "suite_version": environment["suite_version"],
        "suite_commit": environment["suite_commit"],
        "torch": environment["torch"],
        "config_name": run.config_name,
        "config_sha256": config_digest(run.claims),
        "claims": len([unit for unit in run.units.values() if isinstance(unit, Claim)]),
        "profile": run.options.profile,
        "seed": run.options.seed,
        "formats": list(formats),
        "limits": describe_limits(backend.capabilities()),
    }


def _plan(run: Opened, backend: RemoteBackend, folder: Path) -> dict[str, Any]:
    """Return what the judge needs to take the same way again; the waivers are copied, and what they name."""
    description, options = json.loads(backend.text), run.options
    if backend.waivers is not None:
        judge = folder / JUDGE
        judge.mkdir(parents=True, exist_ok=True)
        for path in (backend.waivers, *list_files(run.waivers.entries)):
            shutil.copyfile(path, judge / path.name)
        description["waivers"] = backend.waivers.name
    return {
        "description": description,
        "imports": options.backend,
        "options": {
            "profile": options.profile,
            "seed": options.seed,
            "max_examples": options.max_examples,
            "claim": list(options.claims),
            "shard": None if options.shard is None else str(options.shard),
        },
    }
