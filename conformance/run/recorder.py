"""The recorder: writes the results file as reports of tests arrive, and everything that is made of it at the end.

It works in the controlling process alone (docs/architecture.md, "Results and reports").
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import pytest

from conformance.machine.isolation import Ending, Outcome
from conformance.pipeline.job import Job
from conformance.run.expected import Judged
from conformance.run.judging import is_green, judged_rows, run_problems, unit_rows
from conformance.run.session import Run, Unit, param_id
from reports.codec import PlainRow
from reports.html import render_html
from reports.markdown import write_job_summary
from reports.results import Claim, Header, Model, Results, ResultsError, Verdict, decode, read_results
from reports.results import Outcome as RunOutcome
from reports.terminal import summary
from reports.writer import ResultsWriter

FINDING = pytest.StashKey[str]()
"""On a test item: the rows of its claim or job, and the memory that they took, on their way to the report; as JSON,
for what carries reports between processes (execnet) fails for an integer below -2^31."""
WAIVERS = "waivers.toml"
"""The copy of the waivers in the report's folder, for a certificate."""
_PHASES = ("setup", "call", "teardown")


class Recorder:
    """Writes ``results.jsonl`` while the run goes on, and everything that is made of it at the end."""

    def __init__(self, run: Run) -> None:
        """Open the results file. Raises UsageError for a report folder or a baseline that cannot be used."""
        folder = run.options.report_dir
        self._baseline = _read(run.options.baseline)
        self._html = folder / "report.html"
        self.summary = "no claim was tested: nothing is shown\n"
        waivers = _copied(run.waiver_file)
        try:
            self._writer = ResultsWriter(folder / "results.jsonl")
            self._html.unlink(missing_ok=True)
            for made in (*folder.glob("scripts/*.py"), folder / WAIVERS):
                made.unlink(missing_ok=True)
            if waivers is not None:
                (folder / WAIVERS).write_bytes(waivers)
        except OSError as error:
            raise pytest.UsageError(f"--report-dir: cannot write to {folder}: {error.strerror}") from error
        self._run = run
        self._started = time.perf_counter()
        self._units = {param_id(unit.id): unit for unit in run.units.values()}
        self._header: Header | None = None
        self._waiting: set[str] = set()
        self._judged: dict[str, Judged] = {}
        self._verdicts = Counter[Verdict]()
        self._total = 0
        self._all_green = True
        self._peak_mib = 0.0

    def start(self, node_ids: Iterable[str]) -> None:
        """Write the header, once the selected tests are known; later calls (of further workers) change nothing."""
        units = [unit for node_id in node_ids if (unit := self._unit(node_id))]
        if self._header is not None or (not units and not self._is_empty_shard):
            return
        row = self._run.header(claims=sum(not isinstance(unit, Job) for unit in units))
        self._writer.write(row)
        header = decode(row)
        assert isinstance(header, Header)
        self._header = header
        self._waiting = {unit.id for unit in units}
        self._total = len(units)

    @property
    def _is_empty_shard(self) -> bool:
        """Whether there is nothing to do since other shards have it all."""
        return self._run.options.shard is not None and not self._run.selected

    def progress(self) -> tuple[Counter[Verdict], int, int]:
        """Return the verdicts so far, how much is done, and of how much."""
        return self._verdicts, self._total - len(self._waiting), self._total

    def take(self, report: pytest.TestReport) -> None:
        """Take one report of a test's set-up, call or tear-down, or of the death of the worker that ran it."""
        unit = self._unit(report.nodeid)
        if unit is None or unit.id not in self._waiting:
            return
        told: str | None = getattr(report, "conformance", None)
        if told is not None:
            finding: PlainRow = json.loads(told)
            self._peak_mib = max(self._peak_mib, finding["peak_mib"])
            self._record(unit, finding["rows"])
        elif report.failed:
            self._record(unit, unit_rows(self._run, unit, _lost(report)))

    def finish(self, pytest_status: int) -> int:
        """Write the footer and the HTML; return the exit status: 0 only if all that was selected is judged green."""
        if self._header is None:
            return int(pytest_status) or 1
        if self._is_empty_shard and pytest_status == pytest.ExitCode.NO_TESTS_COLLECTED:
            pytest_status = pytest.ExitCode.OK
        complete = not self._waiting
        problems, notes = run_problems(self._run, self._header, self._judged)
        status = int(pytest_status) or (0 if complete and self._all_green and not problems else 1)
        outcome = RunOutcome.PASS if status == 0 else RunOutcome.FAIL if complete else RunOutcome.INCOMPLETE
        self._writer.close(
            outcome=outcome,
            exit_status=status,
            seconds=round(time.perf_counter() - self._started, 3),
            problems=problems,
            notes=notes,
            peak_mib=round(self._peak_mib, 1),
        )
        results = read_results(self._writer.path)
        self._html.write_text(render_html(results, self._baseline), encoding="utf-8")
        self.summary = summary(results, self._html) + write_job_summary(results, self._baseline)
        return status

    def _record(self, unit: Unit, rows: Iterable[PlainRow]) -> None:
        rows = list(rows)
        for row in rows:
            self._writer.write(row)
            self._write_script(row)
        for row in judged_rows(rows):
            self._judged[row[row["kind"]]] = Judged(Verdict(row["verdict"]), row.get("failing"))
            self._verdicts[Verdict(row["verdict"])] += 1
            self._all_green &= is_green(self._run, row)
        self._waiting.remove(unit.id)

    def _write_script(self, row: PlainRow) -> None:
        """Write the script of a claim or model that has one, for whoever looks into the report folder."""
        data = decode(row)
        if isinstance(data, Claim | Model) and data.script_path:
            path = self._html.parent / data.script_path
            path.parent.mkdir(exist_ok=True)
            path.write_text(data.script if isinstance(data, Claim) else data.evidence["script"], encoding="utf-8")

    def _unit(self, node_id: str) -> Unit | None:
        return self._units.get(node_id.partition("[")[2].removesuffix("]"))


def _read(baseline: Path | None) -> Results | None:
    try:
        return None if baseline is None else read_results(baseline)
    except ResultsError as error:
        raise pytest.UsageError(f"--baseline: {error}") from error


def _copied(waivers: Path | None) -> bytes | None:
    """Read the waivers before anything is removed: they may be those of an earlier run in the same folder."""
    return None if waivers is None else waivers.read_bytes()


def _lost(report: pytest.TestReport) -> Outcome:
    """What is known of a test that failed without leaving rows."""
    ending, message = Ending.ERROR, f"the test's {report.when} failed"
    if report.when not in _PHASES:
        ending, message = Ending.DIED, "the worker process died; its stderr may say why"
    text = report.longreprtext if ending is Ending.ERROR else ""
    return Outcome(rows=(), ending=ending, seconds=report.duration, peak_mib=0.0, message=message, text=text)
