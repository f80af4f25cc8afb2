"""``--backend=command:FILE``: claims are recorded, run by calls of a command, and judged, some at a time.

The claims of a run are divided into chunks, the same in every process. The first process that needs a claim of a chunk
records and runs the whole chunk; others wait for it. So one call of the command serves many cases, with any number of
workers. What was handed in stays in the report's folder, below ``device-calls/``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

from fx_quant_conformance.conformance.machine.workplace import WorkResult
from fx_quant_conformance.conformance.reproducers.command_script import format_command_script
from fx_quant_conformance.conformance.run.device import CALLS
from fx_quant_conformance.conformance.run.elsewhere import CommandBackend
from fx_quant_conformance.conformance.run.export import format_absence, record_units
from fx_quant_conformance.conformance.run.session import Run
from fx_quant_conformance.conformance.run.workplaces import Workplaces
from fx_quant_conformance.conformance.vectors.bundle import Bundle, BundleWriter, finish_bundle, read_bundle
from fx_quant_conformance.conformance.vectors.command import CALL, Caller, CommandSettings, describe_call, lock_file
from fx_quant_conformance.conformance.vectors.files import format_json
from fx_quant_conformance.conformance.vectors.recording import RecordedCase
from fx_quant_conformance.conformance.vectors.replay import ReplayBackend

_DONE, _OUTPUTS = "done", "outputs"


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunks:
    """The chunks of a run's claims and models, below a folder."""

    folder: Path
    settings: CommandSettings
    places: Mapping[str, int]
    """The chunk of each claim and model, by its ID."""

    def folder_of(self, work: str) -> Path:
        """Return the folder of the chunk that has a piece of work."""
        return self.folder / f"{self.places[work]:04d}"

    def works_of(self, work: str) -> list[str]:
        """Return the chunk that has a piece of work."""
        return [each for each, place in self.places.items() if place == self.places[work]]

    def take(self, work: str, cases: Sequence[RecordedCase]) -> None:
        """Write the cases of a piece of work into its chunk's bundle."""
        writer = BundleWriter(folder=self.folder_of(work), formats=self.settings.formats, with_expected=False)
        writer.take(work, cases)

    def find(self, work: str) -> tuple[Bundle, Path]:
        """Return the bundle of a piece of work, and the folder of the outputs."""
        folder = self.folder_of(work)
        return _read_done(folder), folder / _OUTPUTS

    def format_script(self, work: str, case: str, heading: str) -> str:
        """Return a script that runs the command on a case."""
        return format_command_script(f"{CALLS}/{self.folder_of(work).name}", case, heading)


@lru_cache(maxsize=1)
def _read_done(folder: Path) -> Bundle:
    """Read a chunk's bundle once, in the child that judges it; it is whole before any of its claims is judged."""
    return read_bundle(folder)


class CommandWorkplaces(Workplaces):
    """Has each piece of work recorded and run with its chunk, and then judged."""

    def __init__(self, run: Run) -> None:
        backend, units = run.elsewhere, run.outline.units
        assert isinstance(backend, CommandBackend)
        self._backend = backend
        self._settings = backend.settings
        self._chunks = Chunks(
            folder=run.options.report_dir / CALLS,
            settings=self._settings,
            places={unit.id: number // self._settings.batch for number, unit in enumerate(units)},
        )
        replay = ReplayBackend(backend.description, source=self._chunks, imports=backend.imports, text=backend.text)
        self._recorder = record_units(run.options, units, backend, self._chunks, backend.imports)
        super().__init__(replace(run.setup, remake=replay.remake), units)

    def run(self, name: str) -> WorkResult:
        """Run a claim or job by its ID."""
        self._ensure(name)
        return super().run(name)

    def close(self) -> None:
        """End all processes."""
        self._recorder.close()
        super().close()

    def _ensure(self, name: str) -> None:
        """Record and run the chunk of a piece of work, unless that was done, here or in another process."""
        folder = self._chunks.folder_of(name)
        folder.mkdir(parents=True, exist_ok=True)
        with lock_file(folder.with_suffix(".lock")):
            if (folder / _DONE).exists():
                return
            works = self._chunks.works_of(name)
            reasons = {work: format_absence(self._recorder.run(work)) for work in works}
            plan = {"description": json.loads(self._backend.text), "imports": self._backend.imports, "options": {}}
            about = {"backend": self._backend.name, "formats": ["json", *self._settings.formats]}
            finish_bundle(folder, about, plan, reasons)
            (folder / CALL).write_text(format_json(describe_call(self._settings)), encoding="utf-8")
            Caller(self._settings, read_bundle(folder), folder / _OUTPUTS, self._chunks.folder).run_all()
            (folder / _DONE).touch()
