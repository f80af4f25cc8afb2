"""Where the units of a run are judged: in processes, beside which the backend's own run, or after a device has run."""

from __future__ import annotations

import warnings
from dataclasses import replace

from conformance.machine.isolation import CAN_FORK, InProcess
from conformance.remote.client import RemoteBackend
from conformance.remote.host import Host, HostError
from conformance.run.elsewhere import CommandBackend
from conformance.run.exercise import SHARES, WORTH_WARMING, Bailiff, Court, make_bailiff, make_server, warm
from conformance.run.session import Run


def make_isolation(run: Run) -> Court:
    """Return where a run's units run, by their IDs."""
    backend = run.backend
    if not CAN_FORK or not isinstance(backend, RemoteBackend):
        here = InProcess(make_server(run.make_bench(), run.units))
        return Bailiff(here)
    if len(run.units) >= WORTH_WARMING:
        warm(backend.representation)
    if isinstance(backend, CommandBackend):
        from conformance.run.command import CommandBailiff  # it needs a system that can lock files

        return CommandBailiff(run, backend)
    if backend.runs_elsewhere:
        return make_bailiff(run)
    options = run.options
    host = Host(options.backend, limit=options.claim_timeout)
    try:
        text = host.warm()
    except HostError as error:
        text = f"{error}; the claims start cold"
    if text:
        warnings.warn(text, stacklevel=2)
    share, limit = SHARES[options.profile], options.claim_timeout
    remote = RemoteBackend(backend.description, host, share=share, limit=limit)
    return make_bailiff(replace(run, backend=remote), host)
