"""What a judge's process does: one claim through the pipeline, or one job, message by message.

It opens the run anew, from the options and from what the backend says of itself.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial

import pytest

from fx_quant_conformance.backends.discovery import find_backend
from fx_quant_conformance.conformance.claims.claim import Claim
from fx_quant_conformance.conformance.claims.preparation import Preparation
from fx_quant_conformance.conformance.machine.child import Answer, Parent
from fx_quant_conformance.conformance.machine.foreign import list_foreign_code
from fx_quant_conformance.conformance.machine.frames import Frame
from fx_quant_conformance.conformance.machine.workplace import LostProcess, Serve, ask_worker, make_answer
from fx_quant_conformance.conformance.pipeline.claim_run import run_claim
from fx_quant_conformance.conformance.pipeline.job import Job
from fx_quant_conformance.conformance.remote.client import Ask, RemoteBackend, remake
from fx_quant_conformance.conformance.remote.description import DescriptionError
from fx_quant_conformance.conformance.reproducers.of_claim import with_reproducer
from fx_quant_conformance.conformance.run.opening import Opened, open_run
from fx_quant_conformance.conformance.run.options import raise_usage_error_for
from fx_quant_conformance.conformance.run.setup import OUTLINE, REPRODUCE, Setup
from fx_quant_conformance.conformance.stages.bench import Bench
from fx_quant_conformance.refimpl.config.backend_config import as_backend_config
from fx_quant_conformance.reports.codec import Message, row_of
from fx_quant_conformance.reports.schema import Check, ClaimResult


def open_judge(parent: Parent, setup: Setup) -> Answer:
    """Return what answers in a judge's process."""

    @cache
    def open_once() -> tuple[Opened, frozenset[str]]:
        """Open the run where it is first needed, so that what it raises is said; return what was imported before."""
        before = frozenset(sys.modules)
        return _open(setup, partial(ask_worker, parent)), before

    @cache
    def make_server_once() -> Serve:
        run, _ = open_once()
        return make_server(run.make_bench(), run.units)

    def serve(request: Frame) -> Iterator[Message]:
        run, before = open_once()
        backend = run.backend
        assert isinstance(backend, RemoteBackend)
        serve_unit = make_server_once()
        vendors = () if setup.imports_vendor else run.vendor_places
        backend.begin(request.head["unit"])
        try:
            yield from serve_unit(request)
        except (Exception, LostProcess):
            yield _finish_tally(backend, before, vendors)
            raise
        yield _finish_tally(backend, before, vendors)
        backend.conclude()

    judge = make_answer(parent, serve)

    def answer(request: Frame) -> Frame:
        if request.head["do"] != OUTLINE:
            return judge(request)
        try:
            run, _ = open_once()
            outline = run.make_outline(counts_cases=bool(request.head.get("counts_cases")))
            foreign = tuple(list_foreign_code(list(sys.modules), vendors=run.vendor_places))
            return Frame(head={"outline": replace(outline, foreign_code=foreign).to_data()})
        except pytest.UsageError as error:
            return Frame(head={"refused": str(error)})

    return answer


def _open(setup: Setup, ask: Ask) -> Opened:
    make = setup.remake or partial(remake, RemoteBackend, setup.text, {})
    with raise_usage_error_for(DescriptionError):
        backend: RemoteBackend = make(ask, setup.options.claim_timeout)
    if not setup.imports_vendor:
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


def make_server(bench: Bench, units: Mapping[str, Claim | Job]) -> Serve:
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
