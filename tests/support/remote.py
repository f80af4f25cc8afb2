"""A backend in a process of its own that a test asks: the test's process is the judge, and the judge's parent too."""

from __future__ import annotations

import json
from functools import partial

from conformance.machine.child import Answer, Parent, Recipe, start_server
from conformance.machine.frames import Frame
from conformance.machine.workplace import Workplace, ask_worker
from conformance.remote.client import RemoteBackend
from conformance.remote.description import read_description
from conformance.remote.worker import describe_backend, make_worker

STARTS_WITHIN = 60.0
"""Seconds for an import of a backend, and for what it says of itself."""


class WorkersBackend(RemoteBackend):
    """A backend that asks its worker as a judge does, through a place, which replaces a worker that is lost.

    A first piece of work has begun. The worker is started where it is first asked, and lives until `close`.
    """

    def __init__(self, spec: str, limit: float) -> None:
        said = describe_backend(spec, limit=STARTS_WITHIN)
        self._place = Workplace(
            Recipe(open=_judge_nothing), partial(make_worker, spec, limit=STARTS_WITHIN), limit=limit
        )
        ask = partial(ask_worker, _Relay(self._place))
        super().__init__(read_description(said), ask, limit=limit, text=json.dumps(said))

    def close(self) -> None:
        """End the worker, if there is one; the next request starts another."""
        self._place.close()

    def __enter__(self) -> WorkersBackend:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def remote_backend(spec: str, limit: float = 20.0) -> WorkersBackend:
    """Return the backend that ``spec`` names, as ``--backend`` does; its worker ends with a ``with`` block, or `close`.

    ``limit``: seconds for one piece of work.
    """
    start_server(["tests.support.preloaded"])
    return WorkersBackend(spec, limit)


class _Relay(Parent):
    """A judge's parent that needs no channel."""

    def __init__(self, place: Workplace) -> None:
        self._place = place

    def call(self, request: Frame) -> Frame:
        """Ask the worker as the parent of a judge does."""
        return self._place._ask_worker(request)


def _judge_nothing(parent: Parent) -> Answer:
    raise AssertionError("the test is the judge")
