"""The recorder: writes the results file as reports of tests arrive, and at the end all reports made from it.

It works only in the controlling process (docs/architecture.md, "Results and reports").
"""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import pytest

from fx_quant_conformance.conformance.machine.child import Ending
from fx_quant_conformance.conformance.machine.release import ROOT, find_change
from fx_quant_conformance.conformance.machine.workplace import WorkResult
from fx_quant_conformance.conformance.run.judging import find_problems, rows_of
from fx_quant_conformance.conformance.run.options import raise_usage_error_for
from fx_quant_conformance.conformance.run.outline import Unit
from fx_quant_conformance.conformance.run.report_folder import HTML, RESULTS, WAIVERS, FolderError, ReportFolder
from fx_quant_conformance.conformance.run.resume import Earlier
from fx_quant_conformance.conformance.run.session import Run, param_id
from fx_quant_conformance.reports.codec import line_of
from fx_quant_conformance.reports.diff import Side, make_side, read_baseline
from fx_quant_conformance.reports.digest import verdict_line
from fx_quant_conformance.reports.html import render_html
from fx_quant_conformance.reports.markdown import write_job_summary
from fx_quant_conformance.reports.results import ResultsError, lead_of, read_results
from fx_quant_conformance.reports.schema import Check, Header, Judged
from fx_quant_conformance.reports.terminal import summary
from fx_quant_conformance.reports.text import join_lines
from fx_quant_conformance.reports.verdicts import Outcome, Verdict
from fx_quant_conformance.reports.writer import ResultsWriter

PAYLOAD = pytest.StashKey[str]()
"""Of a test item: the lines of its rows in the results file, and the memory that they took, for the test's report.

They are JSON, because execnet, which carries reports between processes, fails for an integer below -2^31."""
_PHASES = ("setup", "call", "teardown")


class Recorder:
    """Writes ``results.jsonl`` during the run, and at the end all reports made from it."""

    def __init__(self, run: Run, earlier: Earlier = Earlier()) -> None:  # noqa: B008 (it is frozen)
        """Open the results file. Raises UsageError for a report folder or a baseline that cannot be used.

        ``earlier``: what is taken from an earlier run. If its file lies where the new one goes, it is renamed.
        """
        with raise_usage_error_for(ResultsError, "--baseline: "):
            options = run.options
            self._baseline = read_baseline(options.baseline, options.profile, any_profile=options.any_profile)
        with raise_usage_error_for(FolderError, "--report-dir: "):
            self._folder = ReportFolder(options.report_dir)
            target = self._folder.path / RESULTS
            is_there = earlier.path is not None and os.path.realpath(earlier.path) == os.path.realpath(target)
            self._folder.clear(run.outline.waivers.encode() if run.waiver_file else None, keeps_results=is_there)
        self._writer = ResultsWriter(self._folder.results)
        self._html = self._folder.path / HTML
        self.summary = "no claim was tested\n"
        self.verdict = ""
        """The decision on the run in a line; "" if it came to none."""
        self.passes = False
        self._run = run
        self._earlier = earlier
        # Other shards, or the run before this, have all work.
        self._has_no_work = not (run.units.keys() - run.done) and (run.options.shard is not None or bool(run.done))
        self._started = time.perf_counter()
        self._units = {param_id(unit.id): unit for unit in run.units.values()}
        self._header: Header | None = None
        self._waiting: set[str] = set()
        self._left_out: list[str] = []
        self._lost: list[str] = []
        self._seen: dict[str, Side] = {}
        self._verdicts = Counter[Verdict]()
        self._total = 0
        self._all_pass = True
        self._peak_mib = 0.0
        self._foreign_code = set(earlier.foreign_code)

    def note_foreign_code(self, texts: Iterable[str]) -> None:
        """Note the foreign code of one of pytest's processes; what is noted before `start` stands in the header."""
        self._foreign_code.update(texts)

    def start(self, node_ids: Iterable[str]) -> None:
        """Write the header, and what an earlier run has judged, once pytest's tests are known.

        Later calls (of further workers) change nothing.

        What is selected, but not among the tests, stays waiting: such a run is incomplete.
        """
        found = {unit.id for node_id in node_ids if (unit := self._find_unit(node_id))}
        if self._header is not None or (not found and not self._has_no_work):
            return
        units = self._run.units
        header = self._run.make_header()
        sources = "" if self._earlier.is_of_other_sources else header.sources_sha256
        self._header = replace(
            header, resumed=len(self._earlier.rows), sources_sha256=sources, foreign_code=sorted(self._foreign_code)
        )
        self._writer.write(self._header)
        if self._run.waiver_file is not None:
            self._write(WAIVERS, self._run.outline.waivers)
        self._waiting = set(units)
        for name, rows in self._earlier.rows.items():
            self._record(units[name], map(line_of, rows))
        with raise_usage_error_for(FolderError, "--report-dir: "):
            self._folder.put_results()
        self._verdicts.clear()  # those of this run are counted, for its progress
        self._left_out = sorted(self._waiting - found)
        self._total = len(self._waiting)

    def count_progress(self) -> tuple[Counter[Verdict], int, int]:
        """Return the verdicts so far, the number of finished units, and the number of all."""
        return self._verdicts, self._total - len(self._waiting), self._total

    def take(self, report: pytest.TestReport) -> None:
        """Take one report of a test's set-up, call or tear-down, or of the death of the worker that ran it."""
        unit = self._find_unit(report.nodeid)
        if unit is None or unit.id not in self._waiting:
            return
        payload: str | None = getattr(report, "conformance", None)
        if payload is not None:
            content = json.loads(payload)
            self._peak_mib = max(self._peak_mib, content["peak_mib"])
            self._record(unit, content["lines"])
        elif report.failed:
            self._record(unit, map(line_of, rows_of(self._run, unit, _make_lost_work(report))))

    def find_verdict(self, report: pytest.TestReport) -> str:
        """Return the verdict of the claim or model that a report is about, `WAIVED` before it; "" if it has none."""
        unit = self._find_unit(report.nodeid)
        seen = None if unit is None else self._seen.get(unit.id)
        return "" if seen is None else f"WAIVED {seen.verdict}" if seen.waived else str(seen.verdict)

    def finish(self, pytest_status: int) -> int:
        """Write the footer and the HTML; return the exit status: 0 only if all selected claims are judged and pass.

        Then another run may have the folder.
        """
        try:
            return self._finish(pytest_status)
        finally:
            self._folder.release()

    def _finish(self, pytest_status: int) -> int:
        if self._header is None:
            return int(pytest_status) or 1
        if self._has_no_work and pytest_status == pytest.ExitCode.NO_TESTS_COLLECTED:
            pytest_status = pytest.ExitCode.OK
        complete = not self._waiting
        problems, notes = find_problems(self._run, self._header, self._seen)
        problems += [*_format_left_out(self._left_out), *self._lost]
        notes += self._earlier.describe(len(self._run.units))
        if self._earlier.is_of_other_sources:
            complete = False
            problems.append(f"--failed-of: {self._earlier.path} is of other sources; run everything to see what holds")
        if change := find_change(ROOT):
            notes.append(f"the suite is not as its commit has it: {change}")
        status = int(pytest_status) or (0 if complete and self._all_pass and not problems else 1)
        outcome = Outcome.PASS if status == 0 else Outcome.FAIL if complete else Outcome.INCOMPLETE
        self._writer.close(
            outcome=outcome,
            exit_status=status,
            seconds=round(time.perf_counter() - self._started + self._earlier.seconds, 3),
            problems=problems,
            notes=notes,
            peak_mib=round(max(self._peak_mib, self._earlier.peak_mib), 1),
            foreign_code=sorted(self._foreign_code.difference(self._header.foreign_code)),
        )
        results = read_results(self._folder.results)
        self._lost.clear()
        self._write(HTML, render_html(results, self._baseline))
        lost = "".join(f"! {join_lines(line)}\n" for line in self._lost)
        self.summary = summary(results, self._html) + lost + write_job_summary(results, self._baseline)
        status = status or len(self._lost)
        self.verdict, self.passes = verdict_line(results), status == 0
        return status

    def _write(self, name: str, text: str) -> None:
        """Write a file into the report folder; one that cannot be written ends no run, but fails it."""
        try:
            self._folder.write(name, text.encode())
        except OSError as error:
            self._lost.append(f"{self._folder.path / name} cannot be written: {error.strerror}")

    def _record(self, unit: Unit, lines: Iterable[str]) -> None:
        """Write a unit's rows; count its verdicts, and write its scripts into the report folder."""
        checks: list[Check] = []
        for line in lines:
            row = self._writer.write_line(line)
            if isinstance(row, Check):
                checks.append(row)
            if not isinstance(row, Judged):
                continue
            self._seen[row.id] = make_side(row, lead_of(row, checks))
            self._verdicts[row.verdict] += 1
            self._all_pass &= row.passes
            if row.script_path:
                self._write(row.script_path, row.script)
        self._waiting.remove(unit.id)

    def _find_unit(self, node_id: str) -> Unit | None:
        return self._units.get(node_id.partition("[")[2].removesuffix("]"))


def _format_left_out(names: Sequence[str]) -> Iterator[str]:
    """Yield a line if pytest was told to leave out some of what is selected."""
    if names:
        more = f" and {len(names) - 1} more" if names[1:] else ""
        yield f"{names[0]}{more} left out by -k, --deselect, -m or the like; --claim selects what is run"


def _make_lost_work(report: pytest.TestReport) -> WorkResult:
    """Return the result for a test that failed without leaving rows."""
    ending, message = Ending.ERROR, f"the test's {report.when} failed"
    if report.when not in _PHASES:
        ending, message = Ending.LOST, "the worker process died; its stderr may say why"
    text = report.longreprtext if ending is Ending.ERROR else ""
    return WorkResult(messages=(), ending=ending, seconds=report.duration, peak_mib=0.0, message=message, text=text)
