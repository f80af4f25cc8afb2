"""A run whose units' ends a test makes up: what the recorder takes, without a backend that runs."""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

import pytest

from backends.reference import ReferenceBackend
from conformance.claims.claim import Claim
from conformance.machine.child import Ending
from conformance.machine.messages import Trace
from conformance.machine.workplace import WorkResult
from conformance.pipeline.job import Job, measuring_job
from conformance.run.judging import rows_of
from conformance.run.recorder import Recorder
from conformance.run.session import Run, Unit, param_id
from conformance.run.waivers import BY_RULE, WaiverEntry, Waivers
from conformance.stages.state import stages_of
from reports.codec import Message, line_of
from reports.results import Results, read_results
from reports.schema import Check, ModelResult
from reports.verdicts import Verdict
from tests.conformance.support.fake_backends import fakes
from tests.conformance.support.suite_runs import options

STAGES = stages_of(ReferenceBackend())  # it gives no Quantizer

PASS = Verdict.VERIFIED
TODAY = datetime.date(2026, 6, 30)


def claim(name: str) -> Claim:
    return Claim(
        id=f"{name}/static:int8", pattern=name, dtype_config="static:int8", flow="ptq", scheme="no_weight", index=0,
        entry=cast(Any, None), dtypes=cast(Any, None),
    )  # fmt: skip


def job(name: str) -> Job:
    kind, _, rest = name.partition("/")
    topic, _, subject = rest.partition("/")
    return measuring_job(topic, subject, cast(Any, None)) if kind == "fact" else Job(id=name, run=cast(Any, None))


def waiver(of: str, verdict: Verdict = Verdict.REFUTED, **changes: Any) -> WaiverEntry:
    values: dict[str, Any] = {
        "file": Path("npu.toml"),
        "number": 1,
        "claim": of,
        "reason": "issue 12",
        "url": "https://a.b",
        "rules": ("R-1",) if verdict in BY_RULE else (),
    }
    return WaiverEntry(**values | {"verdict": verdict} | changes)


def check(of: Claim, stage: str, verdict: Verdict = PASS, outcome: str = "pass", **parts: Any) -> Check:
    ended = cast(Any, outcome)
    return Check(claim=of.id, stage=stage, rule="R-1", outcome=ended, verdict=verdict, seconds=0.5, **parts)


def checks(of: Claim, last: Verdict = PASS, outcome: str = "pass", **parts: Any) -> list[Message]:
    """Checks that pass, but for the last, and a decision log."""
    passed = [check(of, stage) for stage in STAGES[:-1]]
    return [*passed, check(of, STAGES[-1], last, outcome, **parts), Trace(decisions=[{"node": "x"}])]


def model(name: str = "model/resnet/ptq", verdict: Verdict = PASS, **changes: Any) -> ModelResult:
    values: dict[str, Any] = {"reason": "told", "cases": 1, "seconds": 0.5}
    return ModelResult(model=name, verdict=verdict, **values | changes)


def work(*messages: Message, ending: Ending = Ending.DONE, **parts: Any) -> WorkResult:
    return WorkResult(messages=messages, ending=ending, **{"seconds": 9.0, "peak_mib": 300.0} | parts)


class Session:
    """A run with claims of given names, whose tests report what a test says."""

    def __init__(
        self, folder: Path, names: Iterable[str], *, jobs: Iterable[str] = (), selected: int = 99,
        waivers: Iterable[WaiverEntry] = (), **changes: Any,
    ) -> None:  # fmt: skip
        self.claims = tuple(claim(name) for name in names)
        self.jobs = tuple(job(name) for name in jobs)
        units: tuple[Unit, ...] = (*self.claims, *self.jobs)
        given = options(folder, **changes)
        known = [unit.id for unit in units]
        self.run = Run(
            options=given, backend=fakes.Good(), config_name="c", claims=self.claims,
            jobs=self.jobs, selected=known[:selected], known=known,
            waivers=Waivers(tuple(waivers), TODAY, given.is_complete), waiver_file=None,
            sources_sha256="0" * 64,
        )  # fmt: skip
        self.path = folder / "results.jsonl"
        self.recorder = Recorder(self.run)
        self.recorder.start(self.node(unit) for unit in self.run.units.values())

    @staticmethod
    def node(of: Unit) -> str:
        return f"conformance/test_claims.py::test_{type(of).__name__.lower()}[{param_id(of.id)}]"

    def report(self, of: Unit, when: str, outcome: str = "passed", text: str = "", **extra: Any) -> None:
        report = pytest.TestReport(self.node(of), ("f", 0, "f"), {}, cast(Any, outcome), text, cast(Any, when), **extra)
        self.recorder.take(report)

    def ended(self, of: Unit, found: WorkResult) -> None:
        """The three reports of a test whose work ended so."""
        self.report(of, "setup")
        lines = [line_of(row) for row in rows_of(self.run, of, found)]
        self.report(of, "call", conformance=json.dumps({"lines": lines, "peak_mib": found.peak_mib}))
        self.report(of, "teardown")

    def whole(self, of: Claim, last: Verdict = PASS, result: str = "pass", **parts: Any) -> None:
        self.ended(of, work(*checks(of, last, result, **parts)))

    def finish(self, pytest_status: int = 0) -> tuple[int, Results]:
        status = self.recorder.finish(pytest_status)
        return status, read_results(self.path)
