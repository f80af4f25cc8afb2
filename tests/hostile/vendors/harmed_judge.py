"""Harms the process in which a claim is judged, as a fault of the suite itself would (../site).

HARMED_CLAIM: a part of the claim's ID. HARMED_WAY: how. HARMED_ONCE: a file; while it is not there, the first try is.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from fx_quant_conformance.conformance.claims.claim import Claim
from fx_quant_conformance.conformance.machine.messages import Begin
from fx_quant_conformance.conformance.pipeline.claim_run import ClaimMessage, run_claim
from fx_quant_conformance.conformance.remote.client import RemoteBackend
from fx_quant_conformance.conformance.stages.bench import Bench

WAYS: dict[str, Callable[[], object]] = {
    "segfault": lambda: ctypes.string_at(0),
    "hang": lambda: time.sleep(1000),
}


def run_harmed(bench: Bench, claim: Claim) -> Iterator[ClaimMessage]:
    """Judge a claim; the one that is named ends its process when it has begun."""
    is_meant = os.environ["HARMED_CLAIM"] in claim.id and isinstance(bench.backend, RemoteBackend)
    once = os.environ.get("HARMED_ONCE")
    for message in run_claim(bench, claim):
        yield message
        if is_meant and isinstance(message, Begin) and not (once and Path(once).exists()):
            if once:
                Path(once).touch()
            WAYS[os.environ["HARMED_WAY"]]()


def patch(judge: Any) -> None:
    """Have the judge run claims so."""
    judge.run_claim = run_harmed
