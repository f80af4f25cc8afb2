"""What a child process does: one claim through the pipeline, or one job, message by message."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Protocol, TypeAlias

from backends.base import Backend, Representation
from backends.discovery import find_backend
from backends.reference import ReferenceBackend
from conformance.claims.claim import Claim, enumerate_claims
from conformance.claims.preparation import Preparation
from conformance.machine.foreign import list_foreign_code
from conformance.machine.isolation import Ending, Forked, Isolation, LostProcess, Serve, WorkResult
from conformance.machine.messages import Tally
from conformance.machine.process import freeze_memory
from conformance.pipeline.claim_run import run_claim
from conformance.pipeline.job import Job
from conformance.remote.client import RemoteBackend
from conformance.remote.host import Host
from conformance.reproducers.of_claim import with_reproducer
from conformance.run.session import Run, Unit, open_run
from conformance.stages.bench import Bench
from refimpl.backend_config import as_backend_config
from reports.codec import Message
from reports.schema import Check, ClaimResult

SHARES = {"quick": 32, "full": 1, "stress": 1}
"""How many claims one process of the backend may run, by profile. To make one costs about 25 ms: little compared with a
claim in full, but half of one in quick; shared by 32 claims it is about 2 ms."""
JUDGED_BY_ONE = 256
"""How many claims one process of the judge may take: no vendor's code runs in it that would leave something behind."""
GRACE = 10.0
"""Seconds after the limit in which the judge's process itself says that the backend's process hangs: longer than a
host that was stopped can hold it (`conformance.remote.host.ANSWERS_WITHIN`)."""
WORTH_WARMING = 16
"""Number of children from which on warming saves more than it costs."""
WARMING = (
    "nn.Linear", "nn.Conv2d+nn.BatchNorm2d+nn.ReLU", "torch.conv2d", "nn.ConvTranspose2d", "torch.add", "torch.cat",
    "nn.AvgPool2d", "nn.Hardswish", "nn.LSTM", "nn.EmbeddingBag",
)  # fmt: skip
"""The patterns whose claims warm the suite's own code."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reproduce:
    """Work: give a failing claim's result its script and graphs."""

    claim: str
    result: ClaimResult
    checks: tuple[Check, ...]


Work: TypeAlias = str | Reproduce
"""The ID of a claim or job to run, or a claim to reproduce."""


class Court(Protocol):
    """Has each piece of work done."""

    def run(self, name: str) -> WorkResult:
        """Run a claim or job by its ID."""

    def reproduce(self, claim: Claim, result: ClaimResult, checks: Sequence[Check]) -> ClaimResult:
        """Return a failing claim's result with a script and graphs, as far as they can be had."""

    def close(self) -> None:
        """End all processes."""


class Bailiff:
    """Has each piece of work done where it belongs.

    ``plain``: in processes that import no code of the vendor's or a user's. ``others``: by IDs, in processes that do.
    """

    def __init__(
        self, plain: Isolation[Work], others: Mapping[str, Isolation[Work]] | None = None, host: Host | None = None
    ) -> None:
        self._plain = plain
        self._others = others or {}
        self._host = host

    def run(self, name: str) -> WorkResult:
        """Run a claim or job by its ID."""
        return self._place_of(name).run(name)

    def reproduce(self, claim: Claim, result: ClaimResult, checks: Sequence[Check]) -> ClaimResult:
        """Return a failing claim's result with a script and graphs, as far as they can be had."""
        done = self._place_of(claim.id).run(Reproduce(claim=claim.id, result=result, checks=tuple(checks)))
        made = next((message for message in done.messages if isinstance(message, ClaimResult)), None)
        if made is not None:
            return made
        return result if done.ending is Ending.DONE else replace(result, script=f"# no script: {done.message}\n")

    def close(self) -> None:
        """End all processes."""
        for place in (self._plain, *set(self._others.values())):
            place.close()
        if self._host is not None:
            self._host.close()

    def _place_of(self, name: str) -> Isolation[Work]:
        return self._others.get(name, self._plain)


def make_bailiff(run: Run, host: Host | None = None) -> Bailiff:
    """Return where units are judged; ``host``: the backend's process, if it has one."""
    options, limit = run.options, run.options.claim_timeout
    plain = Forked(
        _serve_remote(lambda: run, run.vendor_places), limit=limit, grace=GRACE, share=JUDGED_BY_ONE, helper=host
    )
    own = Forked(
        _serve_remote(lambda: _import_own(run)), limit=limit, grace=GRACE, share=SHARES[options.profile], helper=host,
        holds="the vendor's code", is_guarded=True,
    )  # fmt: skip
    given = Forked(
        _serve_remote(lambda: run), limit=limit, grace=GRACE, share=1, helper=host, holds="the user's model",
        is_guarded=True,
    )  # fmt: skip  # what a user's model changes in its process, no other model finds
    places = dict[str, Isolation[Work]]()
    for name, unit in run.units.items():
        if run.needs_own_code(unit):
            places[name] = own
        elif isinstance(unit, Job) and unit.is_own:
            places[name] = given
    return Bailiff(plain, places, host)


def _import_own(run: Run) -> Run:
    """Return the run with the vendor's classes and functions in its config: the vendor's code is imported here."""
    assert isinstance(run.backend, RemoteBackend)
    spec, needs_lower = run.backend.imports or run.options.backend, not run.backend.runs_elsewhere
    real = find_backend(spec, needs_lower=needs_lower)
    config, capabilities = as_backend_config(real.backend_config()), real.capabilities()
    description = replace(
        run.backend.description, config=config, capabilities=capabilities, preparation=Preparation.of(real)
    )
    return open_run(run.options, run.backend.described_as(description))


def _serve_remote(make_run: Callable[[], Run], vendors: Sequence[str] = ()) -> Serve[Work]:
    """Return a function that does work, with the backend's models elsewhere; the run is made in the child.

    ``vendors``: where code lies that the child should not import.
    """
    made: list[tuple[RemoteBackend, Serve[Work], frozenset[str]]] = []

    def serve(work: Work) -> Iterator[Message]:
        if not made:
            before = frozenset(sys.modules)
            run = make_run()
            assert isinstance(run.backend, RemoteBackend)
            made.append((run.backend, make_server(run.make_bench(), run.units), before))
        ((backend, serve_here, before),) = made
        backend.begin(work if isinstance(work, str) else work.claim)
        try:
            yield from serve_here(work)
        except (Exception, LostProcess):
            yield finish_tally(backend, before)
            raise
        yield finish_tally(backend, before)
        backend.conclude()

    def finish_tally(backend: RemoteBackend, before: Set[str]) -> Tally:
        backend.tally.foreign_code = list_foreign_code(sys.modules.keys() - before, vendors=vendors)
        return backend.tally

    return serve


def make_server(bench: Bench, units: Mapping[str, Unit]) -> Serve[Work]:
    """Return a function that does a piece of work."""

    def serve(work: Work) -> Iterator[Message]:
        unit = units[work if isinstance(work, str) else work.claim]
        if isinstance(work, Reproduce):
            assert isinstance(unit, Claim)
            yield with_reproducer(bench, unit, work.result, work.checks)
        else:
            yield from run_claim(bench, unit) if isinstance(unit, Claim) else unit.run(bench)

    return serve


def warm(representation: Representation) -> None:
    """Run a few claims of the reference backend in this process, so that children find the suite's own code warm."""
    trusted: Backend = ReferenceBackend()
    trusted.representation = representation.of_models
    bench = Bench(trusted, seed=0, profile="quick")
    claims = reversed(enumerate_claims(bench.config, bench.capabilities))
    first = {claim.pattern: claim for claim in claims}
    for pattern in WARMING:
        for _ in run_claim(bench, first[pattern]):
            pass
    freeze_memory()
