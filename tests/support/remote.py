"""A backend in a process of its own that a test asks: the test's process is the judge."""

from __future__ import annotations

import json
from functools import partial

from fx_quant_conformance.conformance.machine.workplace import KeptWorker
from fx_quant_conformance.conformance.remote.client import RemoteBackend
from fx_quant_conformance.conformance.remote.description import read_description
from fx_quant_conformance.conformance.remote.worker import describe_backend, make_worker

STARTS_WITHIN = 60.0
"""Seconds for an import of a backend, and for what it says of itself."""


class WorkersBackend(RemoteBackend):
    """A backend that asks its worker as a judge does; a worker that is lost is replaced.

    A first piece of work has begun. The worker is started where it is first asked, and lives until `close`.
    """

    def __init__(self, spec: str, limit: float) -> None:
        said = describe_backend(spec, limit=STARTS_WITHIN)
        self.worker = KeptWorker(partial(make_worker, spec, limit=STARTS_WITHIN))
        super().__init__(read_description(said), self.worker.ask, limit=limit, text=json.dumps(said))

    def close(self) -> None:
        """End the worker, if there is one; the next request starts another."""
        self.worker.close()

    def __enter__(self) -> WorkersBackend:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def remote_backend(spec: str, limit: float = 20.0) -> WorkersBackend:
    """Return the backend that ``spec`` names, as ``--backend`` does; its worker ends with a ``with`` block, or `close`.

    ``limit``: seconds for one piece of work.
    """
    return WorkersBackend(spec, limit)
