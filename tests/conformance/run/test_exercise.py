"""What a child process does: the messages of a claim or job, as the file takes them; and how a process is warmed."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, cast

import pytest

from backends.base import Representation
from backends.reference import ReferenceBackend
from conformance.claims.claim import Claim, enumerate_claims
from conformance.machine.isolation import Ending, Forked, InProcess, Isolation, Serve
from conformance.machine.messages import Begin, Trace
from conformance.pipeline.job import Job
from conformance.run import exercise
from conformance.stages.bench import Bench
from conformance.stages.state import ExecutionEvidence, stages_of
from reports.codec import Message
from reports.numbers import Scalar
from reports.schema import Check, Measurement, evidence
from reports.verdicts import Verdict

STAGES = stages_of(ReferenceBackend())  # it gives no Quantizer

CLAIM = Claim(
    id="a", pattern="a", dtype_config="static", flow="ptq", scheme="x", index=0, entry=cast(Any, 0),
    dtypes=cast(Any, 0),
)  # fmt: skip
CHECK = Check(claim="a", stage="fuse", rule="R-1", outcome="pass", verdict=Verdict.VERIFIED)
MEASUREMENT = Measurement(topic="t", subject="s", values={"x": 1})
GRAPHS = {"float model": "x = input"}
Serving = Callable[..., Serve[str]]
isolated = pytest.mark.parametrize("isolate", [InProcess, lambda serve: Forked(serve, limit=60, share=1)])


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

    def serve(*given: Check | Begin, **found: Any) -> Serve[str]:
        run = Given(given=given, **found)
        monkeypatch.setattr("conformance.pipeline.claim_run.ClaimRun", lambda bench, claim: run)
        return exercise.make_server(cast(Bench, None), {CLAIM.id: CLAIM})

    return serve


def without_begin(messages: Iterable[Message]) -> list[Message]:
    return [message for message in messages if not isinstance(message, Begin)]


def test_checks_come_one_by_one_and_then_the_decisions_and_what_was_measured(serving: Serving) -> None:
    given = (replace(CHECK, seconds=0.25), Begin(stage="lower", case="default"), replace(CHECK, stage="lower"))
    decisions: list[dict[str, Scalar]] = [{"a": 1, "b": "(1, 2)", "c": None}]
    messages = serving(*given, found=decisions, measurements=[MEASUREMENT])("a")
    assert list(messages) == [*given, Trace(decisions=decisions, graphs={}), MEASUREMENT]


@isolated
@pytest.mark.parametrize("values", [{"x": object()}, {"x": float("nan")}, {"graph": 3}])
def test_a_message_that_the_file_cannot_hold_is_refused_where_it_is_made(
    serving: Serving, values: Mapping[str, object], isolate: Callable[[Serve[str]], Isolation[str]]
) -> None:
    """It is an error of the suite, and costs nothing that came before."""
    isolation = isolate(serving(CHECK, replace(CHECK, evidence=evidence(values))))
    result = isolation.run("a")
    isolation.close()
    assert (result.messages, result.ending) == ((CHECK,), Ending.ERROR)
    assert any(key in result.message for key in values)


@isolated
def test_messages_of_a_job_are_checked_too(isolate: Callable[[Serve[str]], Isolation[str]]) -> None:
    def run(bench: Bench) -> Iterator[Measurement]:
        yield MEASUREMENT
        yield replace(MEASUREMENT, values=cast(Any, {"x": [1]}))

    job = Job(id="fact/t/s", run=run)
    isolation = isolate(exercise.make_server(cast(Bench, None), {job.id: job}))
    result = isolation.run(job.id)
    isolation.close()
    assert (result.messages, result.ending) == ((MEASUREMENT,), Ending.ERROR)
    assert "'values.x' is [1]; expected a string or an integer" in result.message


def test_a_process_is_warmed_by_claims_that_the_reference_backend_passes() -> None:
    reference = ReferenceBackend()
    claims = enumerate_claims(reference.backend_config(), reference.capabilities())
    assert set(exercise.WARMING) <= {claim.pattern for claim in claims}


@pytest.mark.slow
def test_warming_leaves_what_it_made_to_all_children(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exercise, "WARMING", exercise.WARMING[:1])
    exercise.warm(Representation.DECOMPOSED)
    assert gc.get_freeze_count() > 0
    gc.unfreeze()
