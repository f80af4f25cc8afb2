"""A run whose units' ends a test makes up: what the recorder takes, without a backend that runs."""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from fx_quant_conformance.backends.reference import ReferenceBackend
from fx_quant_conformance.conformance.machine.child import Ending
from fx_quant_conformance.conformance.machine.messages import Trace
from fx_quant_conformance.conformance.machine.workplace import WorkResult
from fx_quant_conformance.conformance.run.judging import rows_of
from fx_quant_conformance.conformance.run.opening import open_run
from fx_quant_conformance.conformance.run.outline import Outline, Unit
from fx_quant_conformance.conformance.run.recorder import Recorder
from fx_quant_conformance.conformance.run.session import Run, param_id
from fx_quant_conformance.conformance.run.setup import Setup
from fx_quant_conformance.conformance.run.waivers import BY_RULE, WaiverEntry, Waivers
from fx_quant_conformance.conformance.stages.state import stages_of
from fx_quant_conformance.reports.codec import Message, line_of
from fx_quant_conformance.reports.results import Results, digest_ids, read_results
from fx_quant_conformance.reports.schema import Check, ModelResult
from fx_quant_conformance.reports.verdicts import Verdict
from tests.conformance.support.fake_backends import fakes
from tests.conformance.support.suite_runs import options

STAGES = stages_of(ReferenceBackend())  # it gives no Quantizer

PASS = Verdict.VERIFIED
TODAY = datetime.date(2026, 6, 30)


def claim(name: str) -> Unit:
    return Unit(
        id=f"{name}/static:int8", kind="claim", pattern=name, dtype_config="static:int8", flow="ptq", scheme="no_weight"
    )


def job(name: str) -> Unit:
    kind, _, rest = name.partition("/")
    topic, _, subject = rest.partition("/")
    if kind == "fact":
        return Unit(id=name, kind="measurement", topic=topic, subject=subject, is_adaptive=True)
    return Unit(id=name, kind="model", is_adaptive=name.startswith("model/fuzz/"))


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


def check(of: Unit, stage: str, verdict: Verdict = PASS, outcome: str = "pass", **parts: Any) -> Check:
    ended = cast(Any, outcome)
    return Check(claim=of.id, stage=stage, rule="R-1", outcome=ended, verdict=verdict, seconds=0.5, **parts)


def checks(of: Unit, last: Verdict = PASS, outcome: str = "pass", **parts: Any) -> list[Message]:
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
        self,
        folder: Path,
        names: Iterable[str],
        *,
        jobs: Iterable[str] = (),
        selected: int = 99,
        waivers: Iterable[WaiverEntry] = (),
        **changes: Any,
    ) -> None:
        self.claims = tuple(claim(name) for name in names)
        self.jobs = tuple(job(name) for name in jobs)
        units: tuple[Unit, ...] = (*self.claims, *self.jobs)
        given = options(folder, **changes)
        known = [unit.id for unit in units]
        chosen = [unit for unit in (*self.jobs, *self.claims) if unit.id in known[:selected]]
        header = replace(
            open_run(given, fakes.Good()).make_header(),
            config_name="c",
            claims_in_config=len(self.claims),
            claims=sum(unit.kind == "claim" for unit in chosen),
            pairs=len(self.claims),
            claims_sha256=digest_ids(each.id for each in self.claims),
        )
        outline = Outline(
            header=header,
            units=tuple(chosen),
            known=tuple(known),
            claims=tuple(each.id for each in self.claims),
            stages=STAGES,
            sources=(),
            left_out=(),
            waiver_file=None,
        )
        given_waivers = Waivers(tuple(waivers), TODAY, given.is_complete)
        setup = Setup(options=given, text="")
        self.run = Run(setup=setup, outline=outline, waivers=given_waivers, sources_sha256="0" * 64)
        self.path = folder / "results.jsonl"
        self.recorder = Recorder(self.run)
        self.recorder.start(self.node(unit) for unit in self.run.units.values())

    @staticmethod
    def node(of: Unit) -> str:
        return f"conformance/test_claims.py::test_{'claim' if of.kind == 'claim' else 'job'}[{param_id(of.id)}]"

    def report(self, of: Unit, when: str, outcome: str = "passed", text: str = "", **extra: Any) -> None:
        report = pytest.TestReport(self.node(of), ("f", 0, "f"), {}, cast(Any, outcome), text, cast(Any, when), **extra)
        self.recorder.take(report)

    def ended(self, of: Unit, found: WorkResult) -> None:
        """The three reports of a test whose work ended so."""
        self.report(of, "setup")
        lines = [line_of(row) for row in rows_of(self.run, of, found)]
        self.report(of, "call", conformance=json.dumps({"lines": lines, "peak_mib": found.peak_mib}))
        self.report(of, "teardown")

    def whole(self, of: Unit, last: Verdict = PASS, result: str = "pass", **parts: Any) -> None:
        self.ended(of, work(*checks(of, last, result, **parts)))

    def finish(self, pytest_status: int = 0) -> tuple[int, Results]:
        status = self.recorder.finish(pytest_status)
        return status, read_results(self.path)
