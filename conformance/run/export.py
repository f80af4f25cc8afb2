"""``fx-quant-conformance export``: a bundle of what a run would ask of the backend (docs/vectors.md)."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from backends.base import Representation
from conformance.claims.claim import Claim, config_digest
from conformance.machine.environment import describe_environment
from conformance.machine.isolation import Ending, WorkResult
from conformance.pipeline.job import Job
from conformance.remote.client import RemoteBackend
from conformance.run.exercise import Bailiff, make_bailiff
from conformance.run.findings import list_files
from conformance.run.options import ROOT, Options
from conformance.run.session import Run, describe_limits, find_described, open_run
from conformance.vectors.bundle import DEVICE, JUDGE, BundleWriter, finish_bundle
from conformance.vectors.formats import EXPORTED, FORMATS, NEEDS
from conformance.vectors.recording import RecordingBackend, Sink
from reports.schema import Check, ModelResult

_MEASURED_EACH = 16


class ExportError(Exception):
    """There is nothing to export, or not so; one line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """What was written: ``left_out`` are the claims without a case, with the reason."""

    folder: Path
    cases: int
    claims: int
    size: int
    left_out: Mapping[str, str]


def choose_formats(text: str) -> tuple[str, ...]:
    """Return the formats that a text names. Raises ExportError for others, or where a package is missing."""
    names = tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    if unknown := [name for name in names if name not in FORMATS]:
        raise ExportError(f"--format: found {', '.join(unknown)}; choose from {', '.join(FORMATS)}")
    for name in names:
        if absent := [each for each in NEEDS.get(name, ()) if find_spec(each) is None]:
            packages = " ".join(absent)
            raise ExportError(f"--format={name}: {', '.join(absent)} not installed: pip install {packages}")
    return ("json", *(name for name in names if name != "json"))


def describe_form(backend: RemoteBackend, formats: Sequence[str]) -> RemoteBackend:
    """Return the backend with the form of models that the formats hold. Raises ExportError where they hold two.

    ``fx`` holds the form that the backend's own ``lower`` takes, the others the decomposed one.
    """
    own = backend.representation
    if "fx" in formats and own is not Representation.DECOMPOSED and {*formats} & {*EXPORTED}:
        raise ExportError(
            f"--format: fx holds models in the form {own.value!r} that lower takes, pt2 and onnx only hold "
            f"{Representation.DECOMPOSED.value!r}; export them into two bundles"
        )
    form = own if "fx" in formats else Representation.DECOMPOSED
    text = json.dumps(json.loads(backend.text) | {"representation": form.name})
    return RemoteBackend(replace(backend.description, representation=form), text=text)


def record_units(run: Run, backend: RemoteBackend, sink: Sink, imports: str) -> Bailiff:
    """Return where units of a run are recorded. ``imports``: where the vendor's own code is found."""
    recording = RecordingBackend(backend.description, sink, imports=imports, text=backend.text)
    return make_bailiff(replace(run, backend=recording))


def list_recordable(run: Run) -> list[str]:
    """Return the IDs of the selected units that a bundle can hold, claims first."""
    units = sorted(run.units.values(), key=lambda unit: isinstance(unit, Job))
    return [unit.id for unit in units if isinstance(unit, Claim) or not unit.is_adaptive]


def export(options: Options, folder: Path, formats: Sequence[str], most_bytes: int | None) -> Exported:
    """Write a bundle. Raises ExportError, pytest.UsageError for a backend that cannot be had, OSError.

    An unfinished bundle has no manifest.
    """
    if folder.exists() and any(folder.iterdir()):
        if not (folder / DEVICE).is_dir():
            raise ExportError(f"{folder} is not empty, and no bundle; name a new folder")
        shutil.rmtree(folder / DEVICE)
        shutil.rmtree(folder / JUDGE, ignore_errors=True)
    described = find_described(options, needs_lower=False)
    if not isinstance(described, RemoteBackend):
        raise ExportError("this platform cannot fork, which the export needs")
    if reason := described.unavailable_reason():
        raise ExportError(f"backend {described.name}: {reason}")
    backend = describe_form(described, formats)
    run = open_run(options, backend)
    names = list_recordable(run)
    reasons = dict.fromkeys(names, "")
    bailiff = record_units(run, backend, BundleWriter(folder=folder, formats=formats), options.backend)
    try:
        for number, name in enumerate(names, 1):
            reasons[name] = _explain_absence(bailiff.run(name))
            _show_progress(number, len(names))
            if number % _MEASURED_EACH == 0:
                _check_size(folder / DEVICE, most_bytes, f" after {number} of {len(names)} claims and models")
    finally:
        bailiff.close()
    size = _check_size(folder / DEVICE, most_bytes)
    manifest = finish_bundle(folder, _describe(run, backend, formats), _plan(run, backend, folder), reasons)
    having = {row["claim"] for row in manifest["cases"]}
    return Exported(
        folder=folder, cases=len(manifest["cases"]), claims=len(having), size=size, left_out=manifest["left_out"]
    )


def _check_size(folder: Path, most_bytes: int | None, when: str = "") -> int:
    """Return the size of a folder in bytes. Raises ExportError if it is too large."""
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    if most_bytes is not None and size > most_bytes:
        raise ExportError(
            f"the bundle has {size} bytes{when}; --max-bytes is {most_bytes}: choose with --claim, or --shard"
        )
    return size


def _explain_absence(done: WorkResult) -> str:
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


def _describe(run: Run, backend: RemoteBackend, formats: Sequence[str]) -> dict[str, Any]:
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
        "limits": describe_limits(backend.capabilities().limits),
    }


def _plan(run: Run, backend: RemoteBackend, folder: Path) -> dict[str, Any]:
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
            "profile": options.profile, "seed": options.seed, "max_examples": options.max_examples,
            "claim": list(options.claims), "shard": None if options.shard is None else str(options.shard),
        },
    }  # fmt: skip
