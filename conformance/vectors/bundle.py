"""A bundle: the folder for a device, and the judge's own. docs/vectors.md is the format's description.

``device/`` has the manifest, and for each case its model and its inputs; nothing in it tells the answer. ``judge/``
has what is right, and what the judge needs to take the same way again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from fx_quant_conformance.backends.lowering import in_form
from fx_quant_conformance.backends.names import format_error
from fx_quant_conformance.conformance.machine.whole_files import UNFINISHED
from fx_quant_conformance.conformance.oracle.grids import Grid
from fx_quant_conformance.conformance.remote.model_bytes import dump_model
from fx_quant_conformance.conformance.vectors.files import (
    Array,
    digest_file,
    digest_of,
    format_json,
    pack_arrays,
    read_file,
    read_json,
    write_once,
)
from fx_quant_conformance.conformance.vectors.formats import EXPORTED, OWN, format_extents
from fx_quant_conformance.conformance.vectors.graph_data import Data, as_array, describe_grid, integer_dtype_of
from fx_quant_conformance.conformance.vectors.interval import Interval
from fx_quant_conformance.conformance.vectors.recording import RecordedCase
from fx_quant_conformance.refimpl import export_reference
from fx_quant_conformance.reports.reading import FileFault

SCHEMA = 2
DEVICE, JUDGE = "device", "judge"
MANIFEST, PLAN = "manifest.json", "judge.json"
MISSING = "no "
"""Begins the name of a format in which there is no file, only a text that says why."""


class BundleError(Exception):
    """A folder is no bundle, or not as it was written; one line."""


# -- writing ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class BundleWriter:
    """Writes cases into a folder; several processes may do so at the same time."""

    folder: Path
    formats: Sequence[str]
    """The formats in which the models are written."""
    with_expected: bool = True
    """Whether the judge's side gets what is right."""

    def take(self, work: str, cases: Sequence[RecordedCase]) -> None:
        """Write the cases of a piece of work."""
        for case in cases:
            if case.runs.runs:
                self._write_case(case)

    def _write_case(self, case: RecordedCase) -> None:
        device = self.folder / DEVICE
        inputs = pack_arrays(case.runs.arrays)
        path = f"inputs/{digest_of(inputs)[:16]}.npz"
        write_once(device / path, inputs)
        data = {
            "case": case.name,
            "claim": case.work,
            **self._write_model(case),
            "inputs": path,
            "operands": [None if grid is None else describe_grid(grid) for grid in case.runs.grids],
            "outputs": _describe_outputs(case),
            "runs": case.runs.spell(),
        }
        write_once(device / "cases" / f"{case.name}.json", format_json(data).encode())
        if self.with_expected:
            arrays = dict(_describe_expected(case))
            write_once(self.folder / JUDGE / "expected" / f"{case.name}.npz", pack_arrays(arrays))

    def _write_model(self, case: RecordedCase) -> dict[str, Any]:
        """Write a model in all formats; return its files by kind, and the programs, each with its shapes and files."""
        text = case.data.text.encode()
        weights = pack_arrays(case.data.arrays)
        digest = digest_of(weights)
        place = f"models/{digest_of(text + digest.encode())[:16]}"
        files = {"json": f"{place}/model.json", "weights": f"weights/{digest[:16]}.npz"}
        write_once(self.folder / DEVICE / files["json"], text)
        write_once(self.folder / DEVICE / files["weights"], weights)
        programs: list[Data] = [{"inputs": list(map(list, extents))} for extents in case.examples]
        for name in self.formats:
            if name == OWN:
                model = in_form(case.form, case.model)
                example = next(iter(case.examples.values()))
                files |= self._write_or_say(name, f"{place}/model.{name}", partial(dump_model, model, example))
            elif name in EXPORTED:
                for program, (extents, example) in zip(programs, case.examples.items(), strict=True):
                    path = f"{place}/model-{format_extents(extents)}.{name}"
                    program |= self._write_or_say(name, path, partial(_export, name, case, example))
        return {"model": files, "programs": programs}

    def _write_or_say(self, name: str, path: str, make: Callable[[], bytes]) -> dict[str, str]:
        """Write a file of a model once, or why there is none; return what it is, and where."""
        target, fault = self.folder / DEVICE / path, self.folder / DEVICE / f"{path}.txt"
        if not target.exists() and not fault.exists():
            try:
                data = make()
            except Exception as error:  # an exporter's refusal is for the vendor to see, and costs no other case
                write_once(fault, f"{format_error(error)}\n".encode("ascii", "replace"))
            else:
                write_once(target, data)
        return {name: path} if target.exists() else {f"{MISSING}{name}": f"{path}.txt"}


def _export(name: str, case: RecordedCase, example: tuple[Any, ...]) -> bytes:
    how = {"dynamic_batch": case.dynamic_batch, "fold_weights": case.fold_weights}
    return EXPORTED[name](export_reference(case.model, example, **how))


def _describe_outputs(case: RecordedCase) -> list[Data]:
    """Return dtype and grid of each output."""
    known = next((each for each in case.expected if each is not None), None)
    count = len(case.runs.runs[0].outputs)
    grids: Sequence[Grid | None] = [None] * count if known is None else [each.grid for each in known]
    return [{"dtype": "float32", "grid": None if grid is None else describe_grid(grid)} for grid in grids]


def _describe_expected(case: RecordedCase) -> Any:
    """Yield the arrays of what is right: exact value, lowest and highest, for each run and output.

    A run with the same arrays as an earlier one has nothing of its own.
    """
    seen = set[tuple[str, ...]]()
    for number, (run, outputs) in enumerate(zip(case.runs.runs, case.expected, strict=True)):
        arrays = tuple(operand.array for operand in run.inputs)
        if arrays in seen:
            continue
        seen.add(arrays)
        for place, interval in enumerate(outputs or ()):
            for name, array in _describe_interval(interval).items():
                yield f"{key_of_output(number, place)}_{name}", array


def _describe_interval(interval: Interval) -> dict[str, Array]:
    ends = {"low": interval.low, "high": interval.high}
    if interval.grid is not None:
        ends = {name: value.to(integer_dtype_of(interval.grid)) for name, value in ends.items()}
    return {"exact": as_array(interval.exact), **{name: as_array(value) for name, value in ends.items()}}


def list_model_files(case: Mapping[str, Any]) -> list[str]:
    """List the paths of a case's model in all formats."""
    programs = (path for program in case["programs"] for name, path in program.items() if name != "inputs")
    return [*case["model"].values(), *programs]


def key_of_output(run: int, output: int) -> str:
    """Return the name of an output's array in ``outputs.npz``."""
    return f"r{run}_o{output}"


def finish_bundle(
    folder: Path, about: Mapping[str, Any], plan: Mapping[str, Any], works: Mapping[str, str]
) -> dict[str, Any]:
    """Write the manifest over the cases that are there, and the judge's plan; return the manifest.

    ``works``: the claims and models in their order, with the reason for those that may have no case.
    """
    device = folder / DEVICE
    device.mkdir(parents=True, exist_ok=True)
    place = {work: number for number, work in enumerate(works)}
    cases = [read_json(path) for path in sorted((device / "cases").glob("*.json"))]
    cases.sort(key=lambda case: (place[case["claim"]], case["case"]))
    files = {
        path.relative_to(device).as_posix(): {"bytes": path.stat().st_size, "sha256": digest_file(path)}
        for path in sorted(device.rglob("*"))
        if path.is_file() and path.name != MANIFEST and not path.name.startswith(UNFINISHED)
    }
    rows = [{"case": case["case"], "claim": case["claim"], "file": f"cases/{case['case']}.json"} for case in cases]
    having = {row["claim"] for row in rows}
    left_out = {work: reason or "no case of it can be run" for work, reason in works.items() if work not in having}
    manifest = {"schema": SCHEMA, **about, "cases": rows, "left_out": left_out, "files": files}
    text = format_json(manifest)
    (device / MANIFEST).write_text(text, encoding="utf-8")
    judge = folder / JUDGE
    judge.mkdir(parents=True, exist_ok=True)
    own = {**plan, "schema": SCHEMA, "manifest_sha256": digest_of(text.encode())}
    (judge / PLAN).write_text(format_json(own), encoding="utf-8")
    return manifest


# -- reading ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Bundle:
    """A bundle as the judge reads it."""

    folder: Path
    manifest: Mapping[str, Any]
    plan: Mapping[str, Any]
    """The judge's own plan."""
    cases: Mapping[str, str]
    """The claim of each case, by its name."""

    @property
    def digest(self) -> str:
        """The sha256 over manifest and plan: of all that the bundle has."""
        return digest_of("".join(map(digest_file, (self.device / MANIFEST, self.folder / JUDGE / PLAN))).encode())

    @property
    def device(self) -> Path:
        """The folder for the device."""
        return self.folder / DEVICE

    def read_case(self, name: str) -> Mapping[str, Any]:
        """Return a case's data. Raises BundleError if its file is not as it was written."""
        path = f"cases/{name}.json"
        self.check_file(path)
        data: Mapping[str, Any] = read_json(self.device / path)
        return data

    def find_cause(self, case: Mapping[str, Any], format_name: str, run: int | None) -> str:
        """Return why a run, or some of a case, has no file in a format; "" if all have one.

        Raises BundleError, FileFault.
        """
        programs = case["programs"] if run is None else [case["programs"][case["runs"][run]["program"]]]
        key = f"{MISSING}{format_name}"
        path = next((place[key] for place in (case["model"], *programs) if key in place), "")
        if path:
            self.check_file(path)
        return read_file(self.device / path).decode("ascii", "replace").strip() if path else ""

    def check_file(self, path: str) -> None:
        """Hold a file to the manifest. Raises BundleError if it is missing or changed."""
        try:
            found = digest_file(self.device / path)
        except FileFault as fault:
            raise BundleError(f"{self.device / path} {fault}; write the bundle anew") from fault
        if found != self.manifest["files"][path]["sha256"]:
            raise BundleError(f"{self.device / path} was changed: its sha256 is not the manifest's; write it anew")


def read_bundle(folder: Path) -> Bundle:
    """Read a bundle's manifest and plan. Raises BundleError for any other folder."""
    manifest_path, plan_path = folder / DEVICE / MANIFEST, folder / JUDGE / PLAN
    try:
        plan, manifest = read_json(plan_path), read_json(manifest_path)
    except FileFault as error:
        raise BundleError(f"{folder} is no bundle of fx-quant-conformance export: {error}") from error
    try:
        for data, path in ((plan, plan_path), (manifest, manifest_path)):
            if data["schema"] != SCHEMA:
                raise BundleError(f"{path}: schema {data['schema']!r}; this suite reads {SCHEMA}: export again")
        if digest_file(manifest_path) != plan["manifest_sha256"]:
            raise BundleError(f"{manifest_path} is not the one that was written with {plan_path}: export again")
        cases = {str(row["case"]): str(row["claim"]) for row in manifest["cases"]}
        _ = {name: manifest["files"][f"cases/{name}.json"]["sha256"] for name in cases}
        _ = plan["description"], plan["options"]
    except (KeyError, TypeError, AttributeError) as error:
        raise BundleError(f"{folder} is no bundle: {type(error).__name__}: {error}; export again") from error
    return Bundle(folder=folder, manifest=manifest, plan=plan, cases=cases)
