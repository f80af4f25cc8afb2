"""What a judge does: the messages of a claim or job, as the file takes them, and what it is asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from fx_quant_conformance.conformance.claims.claim import Claim
from fx_quant_conformance.conformance.machine.child import Answer, Ending, Parent, Recipe
from fx_quant_conformance.conformance.machine.frames import Frame
from fx_quant_conformance.conformance.machine.messages import Begin, Tally, Trace, from_line
from fx_quant_conformance.conformance.machine.workplace import LostProcess, Serve, Workplace, make_answer
from fx_quant_conformance.conformance.pipeline.job import Job
from fx_quant_conformance.conformance.remote.client import Ask, RemoteBackend
from fx_quant_conformance.conformance.run import judge
from fx_quant_conformance.conformance.run.judge import make_server, open_judge
from fx_quant_conformance.conformance.run.setup import OUTLINE, Setup, make_reproducing_request, make_request
from fx_quant_conformance.conformance.stages.bench import Bench
from fx_quant_conformance.conformance.stages.state import ExecutionEvidence
from fx_quant_conformance.reports.codec import Message
from fx_quant_conformance.reports.numbers import Scalar
from fx_quant_conformance.reports.schema import Check, ClaimResult, Measurement, evidence
from fx_quant_conformance.reports.verdicts import Verdict
from tests.conformance.support.suite_runs import options

CLAIM = Claim(
    id="a",
    pattern="a",
    dtype_config="static",
    flow="ptq",
    scheme="x",
    index=0,
    entry=cast(Any, 0),
    dtypes=cast(Any, 0),
)
CHECK = Check(claim="a", stage="fuse", rule="R-1", outcome="pass", verdict=Verdict.VERIFIED)
RESULT = ClaimResult(
    claim="a",
    pattern="a",
    dtype_config="static",
    dtypes="é",
    flow="ptq",
    scheme="x",
    verdict=Verdict.REFUTED,
    max_lsb=0.1,
    repro="pytest",
    seconds=0.5,
)
MEASUREMENT = Measurement(topic="t", subject="s", values={"x": 1})
GRAPHS = {"float model": "x = input"}
Serving = Callable[..., Serve]


@dataclass(kw_only=True)
class Given:
    """A claim's run of the steps, decisions and measurements that a test gives it."""

    given: tuple[Check | Begin, ...]
    found: list[dict[str, Scalar]] = field(default_factory=list)
    measurements: list[Measurement] = field(default_factory=list)
    shown: ExecutionEvidence | None = None

    def steps(self) -> Iterator[Check | Begin]:
        yield from self.given

    def decisions(self) -> list[dict[str, Scalar]]:
        return self.found

    def graphs(self) -> dict[str, str]:
        return GRAPHS

    def evidence(self) -> ExecutionEvidence | None:
        return self.shown


@pytest.fixture
def serving(monkeypatch: pytest.MonkeyPatch) -> Serving:
    """Serves a claim "a", whose run is of these steps."""

    def serve(*given: Check | Begin, **found: Any) -> Serve:
        run = Given(given=given, **found)
        monkeypatch.setattr("fx_quant_conformance.conformance.pipeline.claim_run.ClaimRun", lambda bench, claim: run)
        return make_server(cast(Bench, None), {CLAIM.id: CLAIM})

    return serve


class Told(Parent):
    """A parent in the same process: keeps what it is told."""

    def __init__(self) -> None:
        self.messages: list[Message] = []

    def tell(self, line: str) -> None:
        self.messages.append(from_line(line))

    def call(self, request: Frame) -> Frame:
        raise AssertionError("no worker is asked")


def test_checks_come_one_by_one_and_then_the_decisions_and_what_was_measured(serving: Serving) -> None:
    given = (replace(CHECK, seconds=0.25), Begin(stage="lower", case="default"), replace(CHECK, stage="lower"))
    decisions: list[dict[str, Scalar]] = [{"a": 1, "b": "(1, 2)", "c": None}]
    messages = serving(*given, found=decisions, measurements=[MEASUREMENT])(make_request("a"))
    assert list(messages) == [*given, Trace(decisions=decisions, graphs={}), MEASUREMENT]


@pytest.mark.parametrize("values", [{"x": object()}, {"x": float("nan")}, {"graph": 3}])
def test_a_message_that_the_file_cannot_hold_is_refused_where_it_is_made(
    serving: Serving, values: Mapping[str, object]
) -> None:
    """It is an error of the suite, and costs nothing that came before."""
    told = Told()
    answer = make_answer(told, serving(CHECK, replace(CHECK, evidence=evidence(values))))
    end = answer(make_request("a")).head
    assert (told.messages, end["ending"]) == ([CHECK], Ending.ERROR)
    assert any(key in end["message"] for key in values)


def run_half(bench: Bench) -> Iterator[Measurement]:
    yield MEASUREMENT
    yield replace(MEASUREMENT, values=cast(Any, {"x": [1]}))


JOB = Job(id="fact/t/s", run=run_half)


def open_job(parent: Parent) -> Answer:
    return make_answer(parent, make_server(cast(Bench, None), {JOB.id: JOB}))


@pytest.mark.slow
def test_messages_of_a_job_are_checked_too() -> None:
    place = Workplace(Recipe(open=open_job), limit=60)
    result = place.run(make_request(JOB.id))
    place.close()
    assert (result.messages, result.ending) == ((MEASUREMENT,), Ending.ERROR)
    assert "'values.x' is [1]; expected a string or an integer" in result.message


def test_a_result_is_given_its_script_with_the_checks_that_it_comes_from(
    serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    def give_script(bench: Bench, claim: Claim, result: ClaimResult, checks: Sequence[Check]) -> ClaimResult:
        assert claim is CLAIM
        return replace(result, script=" ".join(check.stage for check in checks))

    monkeypatch.setattr(judge, "with_reproducer", give_script)
    checks = [replace(CHECK, message="é\n", evidence=evidence({"where": {"case": "x"}})), replace(CHECK, stage="lower")]
    request = make_reproducing_request(RESULT, checks)
    assert list(serving()(request)) == [replace(RESULT, script="fuse lower")]


# -- how it is opened -------------------------------------------------------------------------------------------------


def fail_to_make(ask: Ask, limit: float) -> RemoteBackend:
    raise ConnectionRefusedError(f"no device within {limit:g} s")


def test_a_run_that_a_judge_cannot_open_is_an_error_of_the_work_that_asks_for_it(tmp_path: Path) -> None:
    told = Told()
    answer = open_judge(told, Setup(options=options(tmp_path, claim_timeout=7.0), text="", remake=fail_to_make))
    for _ in range(2):
        end = answer(make_request("a")).head
        assert (end["ending"], end["message"]) == (Ending.ERROR, "ConnectionRefusedError: no device within 7 s")
        assert "in fail_to_make" in end["text"] and told.messages == []


class Recorded(RemoteBackend):
    """A backend that notes when work begins and when it came to its end."""

    def __init__(self) -> None:
        self.noted: list[str] = []

    def begin(self, work: str = "") -> None:
        self.noted.append(f"begin {work}")
        self.tally = Tally(runs=len(self.noted))

    def conclude(self) -> None:
        self.noted.append("conclude")


@dataclass(frozen=True)
class Outlined:
    """What the outline of a run says of foreign code."""

    foreign_code: Sequence[str] = ()

    def to_data(self) -> dict[str, object]:
        return {"foreign_code": list(self.foreign_code)}


def do_well(bench: Bench) -> Iterator[Measurement]:
    yield MEASUREMENT


def fail(bench: Bench) -> Iterator[Measurement]:
    yield MEASUREMENT
    raise ValueError("no such op")


def lose(bench: Bench) -> Iterator[Measurement]:
    yield MEASUREMENT
    raise LostProcess(Ending.TIMEOUT, "lower did not end", text="in lower", is_alone=True)


@pytest.mark.parametrize(("imports_vendor", "vendors"), [(False, ["npu"]), (True, [])])
def test_a_judge_opens_its_run_once_and_says_what_each_work_has_counted_however_it_ends(
    monkeypatch: pytest.MonkeyPatch, imports_vendor: bool, vendors: list[str]
) -> None:
    """The run's outline is of the same opening. Foreign code for claims on the vendor's own classes is no news."""
    backend, told, opened = Recorded(), Told(), list[Setup]()
    units = {run.__name__: Job(id=run.__name__, run=run) for run in (do_well, fail, lose)}

    def open_here(setup: Setup, ask: Ask) -> Any:
        opened.append(setup)
        return SimpleNamespace(
            backend=backend,
            make_bench=lambda: None,
            units=units,
            vendor_places=["npu"],
            make_outline=lambda counts_cases: Outlined(),
        )

    monkeypatch.setattr(judge, "_open", open_here)
    monkeypatch.setattr(judge, "list_foreign_code", lambda names, *, vendors: list(vendors))
    setup = Setup(options=cast(Any, None), text="", remake=fail_to_make, imports_vendor=imports_vendor)
    answer = open_judge(told, setup)
    assert answer(Frame(head={"do": OUTLINE})).head["outline"]["foreign_code"] == ["npu"]
    ends = [answer(make_request(name)).head for name in units]
    assert [(end["ending"], end["message"], end["is_final"]) for end in ends] == [
        (Ending.DONE, "", False),
        (Ending.ERROR, "ValueError: no such op", False),
        (Ending.TIMEOUT, "lower did not end", True),
    ]
    assert told.messages == [
        each for runs in (1, 3, 4) for each in (MEASUREMENT, Tally(runs=runs, foreign_code=vendors))
    ]
    assert backend.noted == ["begin do_well", "conclude", "begin fail", "begin lose"] and opened == [setup]
