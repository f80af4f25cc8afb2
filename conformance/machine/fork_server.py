"""The process from which a run's processes are made: the standard library's fork server, started and shared."""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.process
import os
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import forkserver
from typing import Any

from fx_quant_conformance.conformance.machine.release import ROOT, find_package

HAS_CHILDREN = "forkserver" in multiprocessing.get_all_start_methods()
"""Whether this platform makes processes as the suite needs them: Linux and macOS do."""
PRELOADED = (
    "fx_quant_conformance.conformance.machine.compiled",
    "fx_quant_conformance.conformance.run.judge",
    "fx_quant_conformance.conformance.remote.server",
)
"""The modules that all children of a run have, in the order of their import."""


def start_server(modules: Sequence[str] = PRELOADED) -> None:
    """Start the process from which children are made, unless it runs; it imports modules while this process goes on.

    The standard library passes over those that cannot be imported: each child imports what it needs itself.
    """
    if HAS_CHILDREN:
        forkserver.set_forkserver_preload(list(modules))
        _ensure_running()


def start_server_early() -> None:
    """Start the server before it is needed, but not in a worker of xdist's, which is told of one later."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        start_server()


def name_server() -> str:
    """Return where other processes of this machine reach the server, for `join_server`; "": they cannot."""
    server: Any = forkserver._forkserver
    has_key = hasattr(server, "_forkserver_authkey")  # later releases of Python ask for one
    return "" if has_key or not server._forkserver_address else str(server._forkserver_address)


def join_server(address: str, modules: Sequence[str] = PRELOADED) -> None:
    """Have children made by another process's server, as long as it makes them; "": by a server of this process's.

    ``modules``: what this process's would import, if there is to be one.
    """
    server: Any = forkserver._forkserver
    if address and os.path.exists(address):
        server._forkserver_address = address
        server._forkserver_alive_fd = os.open(os.devnull, os.O_RDONLY)  # the server lives as long as who has started it
        server.ensure_running = lambda: None
        forkserver.set_forkserver_preload(list(modules))
    else:
        start_server(modules)


def start_process(
    context: Any, target: Callable[..., object], given: tuple[Any, ...]
) -> multiprocessing.process.BaseProcess:
    """Start a child; where the server that was joined makes none any more, by one of this process's."""
    try:
        if context.get_start_method() == "forkserver":
            _ensure_running()  # a server that was lost is started anew
        process: multiprocessing.process.BaseProcess = context.Process(target=target, args=given, daemon=True)
        process.start()
    except (OSError, EOFError):
        server: Any = forkserver._forkserver
        if vars(server).pop("ensure_running", None) is None:
            raise
        server._forkserver_address = None
        _ensure_running()
        process = context.Process(target=target, args=given, daemon=True)
        process.start()
    return process


def _ensure_running() -> None:
    """Start the server, unless it runs."""
    with _have_suite_found():
        forkserver._forkserver.ensure_running()


@contextlib.contextmanager
def _have_suite_found() -> Iterator[None]:
    """Have a server that starts find this suite, and no other one that lies in the current folder.

    Before Python 3.11 it looks in the current folder first; a child of another suite ends (`child.Child`).
    """
    names, holder = ("PYTHONPATH", "PYTHONSAFEPATH"), str(find_package(ROOT).parent)
    kept = {name: os.environ[name] for name in names if name in os.environ}
    if holder not in (sysconfig.get_path("purelib"), sysconfig.get_path("platlib")):
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [holder, kept.get("PYTHONPATH")]))
    os.environ["PYTHONSAFEPATH"] = "1"
    try:
        yield
    finally:
        for name in names:
            os.environ.pop(name, None)
        os.environ.update(kept)
