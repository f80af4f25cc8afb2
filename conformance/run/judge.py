"""What a judge's process does: one claim through the pipeline, or one job, message by message.

It opens the run anew, from the options and from what the backend says of itself.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from backends.discovery import find_backend
from conformance.claims.claim import Claim
from conformance.claims.preparation import Preparation
from conformance.machine.child import Answer, Parent
from conformance.machine.foreign import list_foreign_code
from conformance.machine.frames import Frame
from conformance.machine.workplace import LostProcess, Serve, ask_worker, make_answer
from conformance.pipeline.claim_run import run_claim
from conformance.remote.client import Ask, Remake, RemoteBackend
from conformance.reproducers.of_claim import with_reproducer
from conformance.run.options import Options
from conformance.run.session import Run, Unit, open_run
from conformance.stages.bench import Bench
from refimpl.backend_config import as_backend_config
from reports.codec import Message, line_of, row_of
from reports.schema import Check, ClaimResult

JUDGE, REPRODUCE = "judge", "reproduce"
"""What a judge is asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What a judge's process is made for, as it can be sent there.

    ``make_backend`` makes the backend. ``imports_own``: whether the vendor's classes and
    functions are imported, as claims on these need them.
    """

    options: Options
    make_backend: Remake
    imports_own: bool = False


def make_request(unit: str) -> Frame:
    """Return the request to judge a claim or job, by its ID."""
    return Frame(head={"do": JUDGE, "unit": unit})


def make_reproducing_request(result: ClaimResult, checks: Sequence[Check]) -> Frame:
    """Return the request to give a failing claim's result its script and graphs."""
    head = {"do": REPRODUCE, "unit": result.claim, "result": line_of(result), "checks": list(map(line_of, checks))}
    return Frame(head=head)


def open_judge(parent: Parent, setup: Setup) -> Answer:
    """Return what answers in a judge's process."""
    opened: list[tuple[RemoteBackend, Serve, frozenset[str], Sequence[str]]] = []

    def ask(request: Frame, limit: float) -> Frame:
        return ask_worker(parent, request, limit)

    def serve(request: Frame) -> Iterator[Message]:
        if not opened:  # here, so that what it raises is said
            before = frozenset(sys.modules)
            run = _open(setup, ask)
            assert isinstance(run.backend, RemoteBackend)
            server, places = make_server(run.make_bench(), run.units), () if setup.imports_own else run.vendor_places
            opened.append((run.backend, server, before, places))
        ((backend, serve_here, before, vendors),) = opened
        backend.begin(request.head["unit"])
        try:
            yield from serve_here(request)
        except (Exception, LostProcess):
            yield _finish_tally(backend, before, vendors)
            raise
        yield _finish_tally(backend, before, vendors)
        backend.conclude()

    return make_answer(parent, serve)


def _open(setup: Setup, ask: Ask) -> Run:
    backend = setup.make_backend(ask, setup.options.claim_timeout)
    if not setup.imports_own:
        return open_run(setup.options, backend)
    real = find_backend(backend.imports or setup.options.backend, needs_lower=not backend.runs_elsewhere)
    config, capabilities = as_backend_config(real.backend_config()), real.capabilities()
    description = replace(
        backend.description, config=config, capabilities=capabilities, preparation=Preparation.of(real)
    )
    return open_run(setup.options, backend.described_as(description))


def _finish_tally(backend: RemoteBackend, before: frozenset[str], vendors: Sequence[str]) -> Message:
    backend.tally.foreign_code = list_foreign_code(sys.modules.keys() - before, vendors=vendors)
    return backend.tally


def make_server(bench: Bench, units: Mapping[str, Unit]) -> Serve:
    """Return a function that does a piece of work."""

    def serve(request: Frame) -> Iterator[Message]:
        unit = units[request.head["unit"]]
        if request.head["do"] == REPRODUCE:
            assert isinstance(unit, Claim)
            result, *checks = (row_of(line) for line in (request.head["result"], *request.head["checks"]))
            assert isinstance(result, ClaimResult)
            yield with_reproducer(bench, unit, result, [each for each in checks if isinstance(each, Check)])
        else:
            yield from run_claim(bench, unit) if isinstance(unit, Claim) else unit.run(bench)

    return serve
