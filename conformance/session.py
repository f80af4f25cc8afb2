"""A run of the suite: opened from the command line in every process, recorded by the controlling process alone.

``Run`` says what is certified. ``Recorder`` turns test reports into the results file as they arrive, decides each
claim when its last stage is in, and ends the run (docs/architecture.md, "Results and reports").
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import pytest

from backends.base import Backend, Capabilities
from backends.discovery import BackendNotFound, find_backend
from conformance.checks import Check
from conformance.claims import Claim, config_digest, enumerate_claims
from conformance.environment import environment_facts
from conformance.options import ROOT, Options, read_options, select_ids
from conformance.pipeline import STAGES
from refimpl.backend_config import as_backend_config
from reports.html import render_html
from reports.results import (
    GREEN,
    SCHEMA,
    Outcome,
    ResultsWriter,
    Verdict,
    decode,
    leading_check,
    read_results,
)
from reports.schema import Check as CheckRow
from reports.terminal import summary

Row = dict[str, Any]
FINDING = pytest.StashKey[Row]()
"""On a test item: what its stage found; on its way to the report."""
_RUN = pytest.StashKey["Run"]()
_RECORDER = pytest.StashKey["Recorder"]()
_FAULTS = (Exception, SystemExit)
_NO_RUN_OPTIONS = ("help", "version", "markers", "cacheshow")


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What is certified, and how: equal in every process of a run."""

    options: Options
    backend: Backend
    config_name: str
    claims: tuple[Claim, ...]
    selected: tuple[Claim, ...]

    def params(self) -> list[Any]:
        """Return pytest's parameters: every stage of every selected claim, in order."""
        return [pytest.param(claim, stage, id=param_id(claim.id, stage)) for claim in self.selected for stage in STAGES]

    def header(self, claims: int) -> Row:
        """Return the results file's first row; ``claims`` of them are to be judged."""
        options, backend = self.options, self.backend
        versions = _ask(backend, "versions")
        return {
            "kind": "header",
            "schema": SCHEMA,
            **environment_facts(ROOT),
            "backend": backend.name,
            "versions": {str(key): str(value) for key, value in dict(versions).items()},
            "engine": str(backend.engine),
            "representation": backend.representation.name,
            "seed": options.seed,
            "profile": options.profile,
            "options": {
                "backend": options.backend,
                "claim": list(options.claims),
                "max_examples": options.max_examples,
                "strict": options.strict,
            },
            "config_name": self.config_name,
            "config_sha256": config_digest(self.claims),
            "claims": claims,
            "claims_in_config": len(self.claims),
            "pairs": len({(claim.pattern, claim.dtype_config) for claim in self.claims}),
            "started": datetime.now(UTC).isoformat(timespec="seconds"),
        }


def preflight(config: pytest.Config) -> int | None:
    """Open the run before pytest starts a session. An exit status means that there is no session to start."""
    if any(getattr(config.option, name, False) for name in _NO_RUN_OPTIONS):
        return None
    options = read_options(config)
    backend = _found(options.backend)
    worker = hasattr(config, "workerinput")
    reason = None if worker else _ask(backend, "unavailable_reason")
    if reason is not None:
        print(f"backend {backend.name} skipped: {reason}")
        return pytest.ExitCode.NO_TESTS_COLLECTED
    run = open_run(options, backend)
    if options.list_claims:
        print("\n".join(claim.id for claim in run.selected))
        return pytest.ExitCode.OK
    config.stash[_RUN] = run
    if not worker and not config.option.collectonly:
        config.stash[_RECORDER] = Recorder(run)
        if getattr(config.option, "maxworkerrestart", "") is None:
            config.option.maxworkerrestart = str(len(run.selected))  # each claim may cost a worker; the run goes on
    return None


def open_run(options: Options, backend: Backend) -> Run:
    """Enumerate the backend's claims. Raises UsageError when its config cannot be had, read or selected from."""
    raw, capabilities = _ask(backend, "backend_config"), _ask(backend, "capabilities")
    if not isinstance(capabilities, Capabilities):
        raise pytest.UsageError(
            f"backend {backend.name}: capabilities() returned {capabilities!r}; return a backends.base.Capabilities"
        )
    try:
        config = as_backend_config(raw)
        claims = enumerate_claims(config, capabilities)
    except Exception as error:
        raise pytest.UsageError(
            f"backend {backend.name}: what backend_config() returned cannot be read: {_told(error)}"
        ) from error
    if not claims:
        raise pytest.UsageError(f"backend {backend.name}: backend_config() claims nothing: no entry has a dtype config")
    chosen = select_ids([claim.id for claim in claims], options.claims)
    selected = tuple(claim for claim in claims if claim.id in chosen)
    return Run(options=options, backend=backend, config_name=str(config.name or ""), claims=claims, selected=selected)


def run_of(config: pytest.Config) -> Run:
    """Return the run that this process works for. Raises UsageError outside of one."""
    run = config.stash.get(_RUN, None)
    if run is None:
        raise pytest.UsageError("the suite runs by its own path: pytest conformance --backend=NAME")
    return run


def recorder_of(config: pytest.Config) -> Recorder | None:
    """Return the recorder; None in a worker process, or when nothing is run."""
    return config.stash.get(_RECORDER, None)


def param_id(claim_id: str, stage: str) -> str:
    """Return the bracketed part of a stage's node ID, in characters that pytest leaves as they are."""
    return f"{claim_id}-{stage}".encode("unicode_escape").decode("ascii").replace("\\", "~")


@dataclass(slots=True, kw_only=True)
class _Progress:
    """What is known of one claim so far."""

    rows: list[Row] = field(default_factory=list)
    decisions: list[Row] = field(default_factory=list)
    ended: set[str] = field(default_factory=set)
    green: bool | None = None


class Recorder:
    """Writes ``results.jsonl`` while the run goes on, and everything that is made of it at the end."""

    def __init__(self, run: Run) -> None:
        """Open the results file. Raises UsageError when the report folder cannot be written."""
        folder = run.options.report_dir
        self._html = folder / "report.html"
        self.summary = "no claim was tested: nothing is shown\n"
        try:
            self._writer = ResultsWriter(folder / "results.jsonl")
            self._html.unlink(missing_ok=True)
        except OSError as error:
            raise pytest.UsageError(f"--report-dir: cannot write to {folder}: {error.strerror}") from error
        self._run = run
        self._started = time.perf_counter()
        self._places = {param_id(claim.id, stage): (claim, stage) for claim in run.selected for stage in STAGES}
        self._progress: dict[str, _Progress] = {}

    def start(self, node_ids: Iterable[str]) -> None:
        """Write the header, once the selected tests are known; later calls (of further workers) change nothing."""
        claims = [place[0] for node_id in node_ids if (place := self._places.get(_bracketed(node_id)))]
        if self._progress or not claims:
            return
        self._progress = {claim.id: _Progress() for claim in claims}
        self._writer.write(self._run.header(claims=len(self._progress)))

    def take(self, report: pytest.TestReport) -> None:
        """Take one report of a stage's set-up, call or tear-down, or of the death of the worker that ran it."""
        place = self._places.get(_bracketed(report.nodeid))
        if place is None or (progress := self._progress[place[0].id]).green is not None:
            return
        claim, stage = place
        finding: Row | None = getattr(report, "conformance", None)
        if finding is not None:
            progress.decisions += finding.get("decisions", ())
            self._record(progress, finding["check"])
        elif report.failed:
            self._record(progress, _lost(report, stage).row(claim.id, report.duration))
        died = report.when not in ("setup", "call", "teardown")
        if report.when == "teardown":
            progress.ended.add(stage)
        if died or progress.ended.issuperset(STAGES):
            self._decide(claim, progress)

    def finish(self, pytest_status: int) -> int:
        """Write the footer and the HTML; return the exit status: 0 only if every selected claim is judged green."""
        judged = [progress.green for progress in self._progress.values()]
        complete = bool(judged) and None not in judged
        status = int(pytest_status) or (0 if complete and all(judged) else 1)
        outcome = Outcome.PASS if status == 0 else Outcome.FAIL if complete else Outcome.INCOMPLETE
        if self._progress:
            seconds = round(time.perf_counter() - self._started, 3)
            self._writer.close(outcome=outcome, exit_status=status, seconds=seconds)
            results = read_results(self._writer.path)
            self._html.write_text(render_html(results), encoding="utf-8")
            self.summary = summary(results, self._html)
        return status

    def _record(self, progress: _Progress, row: Row) -> None:
        progress.rows.append(row)
        self._writer.write(row)

    def _decide(self, claim: Claim, progress: _Progress) -> None:
        """Write the claim's row, if every stage (or the one that killed its process) has left a check."""
        checks = [check for check in map(decode, progress.rows) if isinstance(check, CheckRow)]
        verdict = Verdict.worst(check.verdict for check in checks)
        if verdict is not Verdict.CRASHED and not {check.stage for check in checks}.issuperset(STAGES):
            return
        lead = leading_check(checks)
        green = GREEN - {Verdict.QUALITY} if self._run.options.strict else GREEN
        progress.green = verdict in green
        self._writer.write(
            {
                "kind": "claim",
                "claim": claim.id,
                "pattern": claim.pattern,
                "dtype_config": claim.dtype_config,
                "flow": claim.flow,
                "scheme": claim.scheme,
                "verdict": verdict.value,
                "waived": False,
                "reason": lead.message if lead else "",
                "max_lsb": max((c.max_lsb for c in checks if c.max_lsb is not None), key=_size, default=None),
                "repro": self._run.options.repro(claim.id),
                "decisions": progress.decisions,
                "seconds": round(sum(check.seconds for check in checks), 6),
            }
        )


def _found(spec: str) -> Backend:
    try:
        return find_backend(spec)
    except BackendNotFound as error:
        raise pytest.UsageError(str(error)) from error


def _ask(backend: Backend, method: str) -> Any:
    """Call one of the backend's methods that take nothing. Raises UsageError when it fails."""
    try:
        return getattr(backend, method)()
    except _FAULTS as error:
        raise pytest.UsageError(f"backend {backend.name}: {method}() raised {_told(error)}") from error


def _lost(report: pytest.TestReport, stage: str) -> Check:
    """Return the check for a stage that failed without leaving one."""
    text = report.longreprtext
    verdict, message = Verdict.CRASHED, "the backend left the stage in a way that cannot be caught"
    if report.when in ("setup", "teardown"):
        verdict, message = (
            Verdict.UNEXERCISED,
            f"internal error of the suite: the stage's {report.when} failed",
        )
    elif report.when != "call":
        message = "the process died in this stage (abort, segmentation fault or exit); its stderr may say why"
    elif "Timeout" in text:
        verdict, message = Verdict.TIMEOUT, "the stage did not end in time"
    evidence = {"traceback": text} if report.when in ("setup", "call", "teardown") else {}
    return Check(stage=stage, rule="", outcome="error", verdict=verdict, message=message, evidence=evidence)


def _bracketed(node_id: str) -> str:
    return node_id.partition("[")[2].removesuffix("]")


def _size(value: float | str) -> float:
    """Order distances in LSB: infinities and NaN, which are spelled out, are the largest."""
    return float("inf") if isinstance(value, str) else value


def _told(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
