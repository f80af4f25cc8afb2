"""``--cache=DIR``: in which folder answers are kept, and what all of them depend on."""

from __future__ import annotations

import hashlib
import json
import platform
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from conformance.machine.environment import CPUINFO, read_cpu
from conformance.machine.isa import find_current_level
from conformance.machine.isolation import CAN_FORK
from conformance.remote.answers import write_sources
from conformance.remote.client import RemoteBackend
from conformance.remote.host import Host, HostError
from conformance.remote.sources import SUITE, SourcesError, digest_sources, list_installed
from conformance.run.elsewhere import COMMAND, VECTORS
from conformance.run.options import ROOT, Options

_REMEDY = "run without --cache"


def check_cache(options: Options) -> None:
    """Raise UsageError where nothing can be kept: the outputs of a device, or a platform that cannot fork."""
    if options.cache is None:
        return
    if options.backend.startswith((VECTORS, COMMAND)):
        raise pytest.UsageError(f"--cache: what {options.backend} ran lies in files of its own; {_REMEDY}")
    if not CAN_FORK:
        raise pytest.UsageError(f"--cache needs processes that are forked, which this platform cannot; {_REMEDY}")


def find_scope(options: Options, backend: RemoteBackend) -> str:
    """Return the name of the folder for a run's answers, below that of ``--cache``; "" without it.

    It is the digest of all on which an answer depends, beside the question: what the backend says of itself, the
    versions that it names and those of all installed packages, the sources of backend and suite, Python, torch, and the
    processor with its level. Raises UsageError if any of it cannot be had, or if nothing can be written there.
    """
    if options.cache is None:
        return ""
    left_out = [path for path in (options.cache, options.report_dir, backend.waivers) if path is not None]
    try:
        with closing(Host(options.backend, limit=options.claim_timeout)) as host:
            sources = host.list_sources()
        digests = [digest_sources(places, left_out) for places in ([ROOT / name for name in SUITE], sources)]
    except (HostError, SourcesError) as error:
        raise pytest.UsageError(f"--cache: {error}; {_REMEDY}") from error
    description: dict[str, Any] = json.loads(backend.text)
    description.pop("waivers")
    about = {
        "spec": options.backend, "description": description, "sources": digests, "installed": list_installed(),
        "torch": str(torch.__version__), "python": platform.python_version(), "platform": platform.platform(),
        "cpu": read_cpu(CPUINFO), "level": find_current_level(backend.engine),
    }  # fmt: skip
    scope = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()
    try:
        write_sources(options.cache / scope, sources)
    except OSError as error:
        raise pytest.UsageError(f"--cache: cannot write to {options.cache}: {error.strerror}; {_REMEDY}") from error
    return scope


def folder_of(options: Options, scope: str) -> Path:
    """Return the folder of a run's answers."""
    assert options.cache is not None, "a run without --cache keeps no answers"
    return options.cache / scope
