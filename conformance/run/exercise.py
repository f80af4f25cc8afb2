"""What a child process does: one claim through the pipeline, or one job, row by row.

The rows of a claim are those of its checks, as soon as each is done, then ``{"decisions": [...], "graphs": {...}}``,
graphs only of a claim that is not verified, and then facts; before each piece of work ``{"at": [stage, case]}`` says
which it is (docs/architecture.md, "Isolation").
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator, Mapping

from backends.base import Backend
from backends.reference import ReferenceBackend
from conformance.claims.claim import Claim, enumerate_claims
from conformance.machine.isolation import CAN_FORK, Forked, InProcess, Isolation, Serve
from conformance.pipeline.claim_run import At
from conformance.pipeline.job import Job
from conformance.pipeline.workbench import Workbench
from conformance.run.session import Run
from conformance.stages.check import plain
from reports.codec import PlainRow
from reports.results import Verdict, decode

SHARES = {"quick": 32, "full": 1, "stress": 1}
"""How many claims one child may take, by profile. A fork, and the pages that the child then writes to, cost about
25 ms: little beside a claim in full, but half of one in quick; shared by 32 it is about 2 ms."""
WORTH_WARMING = 16
"""With fewer children than this, what they would save is less than the warming costs."""
WARMING = (
    "nn.Linear", "nn.Conv2d+nn.BatchNorm2d+nn.ReLU", "torch.conv2d", "nn.ConvTranspose2d", "torch.add", "torch.cat",
    "nn.AvgPool2d", "nn.Hardswish", "nn.LSTM", "nn.EmbeddingBag",
)  # fmt: skip


def isolation_for(run: Run) -> Isolation:
    """Return what does a run's units in isolation, by their IDs."""
    serve = server(run.workbench(), run.units)
    if not CAN_FORK:
        return InProcess(serve)
    if len(run.units) >= WORTH_WARMING:
        warm(run.backend)
    options = run.options
    return Forked(serve, limit=options.claim_timeout, share=SHARES[options.profile])


def server(workbench: Workbench, units: Mapping[str, Claim | Job]) -> Serve:
    """Return the work of each ID."""

    def serve(name: str) -> Iterator[PlainRow]:
        unit = units[name]
        return claim_rows(workbench, unit) if isinstance(unit, Claim) else job_rows(workbench, unit)

    return serve


def claim_rows(workbench: Workbench, claim: Claim) -> Iterator[PlainRow]:
    """Take a claim through the pipeline. Raises SchemaError, TypeError, ValueError for a row that no file can hold."""
    verdicts = set[str]()
    for step in workbench.steps(claim):
        if isinstance(step, At):
            yield {"at": [step.stage, step.case]}
            continue
        row = plain(step.row(claim.id))
        decode(row)
        verdicts.add(row["verdict"])
        yield row
    found = [plain(decision) for decision in workbench.decisions(claim)]
    decisions = [{key: _scalar(value) for key, value in decision.items()} for decision in found]
    yield {"decisions": decisions, "graphs": plain(workbench.graphs(claim)) if verdicts != {Verdict.VERIFIED} else {}}
    yield from map(plain, workbench.facts(claim))


def job_rows(workbench: Workbench, job: Job) -> Iterator[PlainRow]:
    """Do a job. Raises SchemaError, TypeError, ValueError for a row that no file can hold."""
    for found in job.run(workbench):
        row = plain(found)
        decode(row)
        yield row


def warm(backend: Backend) -> None:
    """Run a few claims of the reference backend right here, so that children find the suite's own code warm.

    The backend under test lends the form of its models, and its ``warm_up``: no other code of its own runs.
    """
    try:
        backend.warm_up()
    except Exception as error:  # what is wrong shows in its claims
        told = f"backend {backend.name}: warm_up() raised {type(error).__name__}: {error}; the claims start cold"
        warnings.warn(told, stacklevel=2)
    trusted = ReferenceBackend()
    trusted.representation = backend.representation
    workbench = Workbench(trusted, seed=0, profile="quick")
    every = enumerate_claims(workbench.config, workbench.capabilities)
    claims = {claim.pattern: claim for claim in reversed(every)}  # the first of each pattern
    for pattern in WARMING:
        for _ in workbench.run(claims[pattern]):
            pass
    gc.collect()
    gc.freeze()  # what is there stays: no child's garbage collector touches its pages
    gc.set_threshold(50_000, 20, 20)  # or it looks for garbage all the time: an export makes millions of objects


def _scalar(value: object) -> object:
    return value if value is None or isinstance(value, (str, int, float)) else str(value)
