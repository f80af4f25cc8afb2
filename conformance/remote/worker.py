"""The backend's process, seen from the process that makes it: it is started, warmed, and asked what the backend is."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

from fx_quant_conformance.conformance.machine.child import Child, ChildLost, Ending, Recipe, StartError
from fx_quant_conformance.conformance.machine.frames import Frame


def make_worker(spec: str, *, limit: float, needs_lower: bool = True) -> Child:
    """Return a process that has imported the backend. Raises StartError.

    ``limit``: seconds for the import. ``needs_lower``: whether it is to lower models.
    """
    worker = Child(
        Recipe(
            open="fx_quant_conformance.conformance.remote.server:open_worker",
            arguments=(spec, needs_lower),
            is_guarded=True,
        )
    )
    try:
        answer = _ask_first(worker, "import", spec, limit, "the backend could not be imported")
        if "error" in answer:
            raise StartError(str(answer["error"]))
    except BaseException:
        worker.end()
        raise
    return worker


def describe_backend(spec: str, *, limit: float, needs_lower: bool = True) -> dict[str, Any]:
    """Return what a backend says of itself, as data (`read_description`). Raises StartError."""
    worker = make_worker(spec, limit=limit, needs_lower=needs_lower)
    try:
        return ask_description(worker, spec, limit=limit)
    finally:
        worker.end()


def ask_description(worker: Child, spec: str, *, limit: float) -> dict[str, Any]:
    """Return what the backend in a worker says of itself, which is work. Raises StartError."""
    worker.begin()
    answer = _ask_first(worker, "describe", spec, limit, "the backend could not say what it is")
    if "error" in answer:
        raise StartError(str(answer["error"]))
    said = answer.get("said")
    return said if isinstance(said, dict) else {}


def make_warm_workers(spec: str, *, limit: float, first: Child | None = None) -> Callable[[], Child]:
    """Return a function that makes workers as `make_worker` does, and has the backend warm up in each.

    Where it does not, there is a warning, and no worker is warmed from then on. ``first``: the worker to begin with.
    """
    is_warmed = True

    def make() -> Child:
        nonlocal is_warmed, first
        worker, first = first or make_worker(spec, limit=limit), None
        if not is_warmed:
            return worker
        try:
            said = _ask_first(worker, "warm up", spec, limit, "warm_up() did not return").get("error")
        except StartError as error:
            if worker.served:
                return make()  # what a used process does not do, a new one may
            said, worker = f"{error}; the claims start cold", make_worker(spec, limit=limit)
        if said is not None:
            is_warmed = False
            warnings.warn(str(said), stacklevel=2)
        return worker

    return make


def _ask_first(worker: Child, what: str, spec: str, limit: float, during: str) -> dict[str, Any]:
    """Return the answer of a new worker. Raises StartError, and ends the worker, if there is none."""
    try:
        return worker.ask(Frame(head={"do": what}), limit=limit).head
    except ChildLost as lost:
        worker.end()
        text = f"did not answer within {limit:g} s (--claim-timeout)" if lost.ending is Ending.TIMEOUT else str(lost)
        shown = f"; it printed:\n{lost.text.strip()}" if lost.text.strip() else ""
        raise StartError(f"backend {spec}: {during}: the process {text}{shown}") from lost
