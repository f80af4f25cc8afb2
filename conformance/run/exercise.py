"""What a child process does: one claim through the pipeline, or one job, message by message."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator, Mapping

from backends.base import Backend
from backends.reference import ReferenceBackend
from conformance.claims.claim import Claim, enumerate_claims
from conformance.machine.isolation import CAN_FORK, Forked, InProcess, Isolation, Serve
from conformance.pipeline.claim_run import run_claim
from conformance.run.session import Run, Unit
from conformance.stages.bench import Bench
from reports.codec import Message

SHARES = {"quick": 32, "full": 1, "stress": 1}
"""How many claims one child may run, by profile. A fork, and the pages that the child then writes to, cost about 25 ms:
little compared with a claim in full, but half of one in quick; shared by 32 claims it is about 2 ms."""
WORTH_WARMING = 16
"""Number of children from which on warming saves more than it costs."""
WARMING = (
    "nn.Linear", "nn.Conv2d+nn.BatchNorm2d+nn.ReLU", "torch.conv2d", "nn.ConvTranspose2d", "torch.add", "torch.cat",
    "nn.AvgPool2d", "nn.Hardswish", "nn.LSTM", "nn.EmbeddingBag",
)  # fmt: skip
"""The patterns whose claims warm the suite's own code."""


def make_isolation(run: Run) -> Isolation[str]:
    """Return the isolation in which a run's units run, by their IDs."""
    serve = make_server(run.make_bench(), run.units)
    if not CAN_FORK:
        return InProcess(serve)
    if len(run.units) >= WORTH_WARMING:
        warm(run.backend)
    options = run.options
    return Forked(serve, limit=options.claim_timeout, share=SHARES[options.profile])


def make_server(bench: Bench, units: Mapping[str, Unit]) -> Serve[str]:
    """Return a function that runs a unit by its ID."""

    def serve(name: str) -> Iterator[Message]:
        unit = units[name]
        yield from run_claim(bench, unit) if isinstance(unit, Claim) else unit.run(bench)

    return serve


def warm(backend: Backend) -> None:
    """Run a few claims of the reference backend in this process, so that children find the suite's own code warm.

    The backend under test determines the representation; only its ``warm_up`` runs.
    """
    try:
        backend.warm_up()
    except Exception as error:  # its claims show what is wrong
        text = f"backend {backend.name}: warm_up() raised {type(error).__name__}: {error}; the claims start cold"
        warnings.warn(text, stacklevel=2)
    trusted = ReferenceBackend()
    trusted.representation = backend.representation
    bench = Bench(trusted, seed=0, profile="quick")
    claims = reversed(enumerate_claims(bench.config, bench.capabilities))
    first = {claim.pattern: claim for claim in claims}
    for pattern in WARMING:
        for _ in run_claim(bench, first[pattern]):
            pass
    gc.collect()
    gc.freeze()  # no child's garbage collector touches the pages of existing objects
    gc.set_threshold(50_000, 20, 20)  # or it looks for garbage all the time: an export makes millions of objects
