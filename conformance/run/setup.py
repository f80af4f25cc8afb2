"""What a judge's process is made for, and is asked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from fx_quant_conformance.conformance.machine.frames import Frame
from fx_quant_conformance.conformance.run.options import Options
from fx_quant_conformance.reports.codec import line_of
from fx_quant_conformance.reports.schema import Check, ClaimResult

OUTLINE, JUDGE, REPRODUCE = "outline", "judge", "reproduce"
"""What a judge is asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What a judge needs to open a run; it can be sent there."""

    options: Options
    text: str
    """What the backend says of itself."""
    remake: Callable[..., Any] | None = None
    """Makes a backend that runs elsewhere (`conformance.remote.client.Remake`); None: a worker runs it."""
    imports_vendor: bool = False
    """Whether the vendor's classes and functions are imported, as claims on these need them."""


def make_request(unit: str) -> Frame:
    """Return the request to judge a claim or job, by its ID."""
    return Frame(head={"do": JUDGE, "unit": unit})


def make_reproducing_request(result: ClaimResult, checks: Sequence[Check]) -> Frame:
    """Return the request to give a failing claim's result its script and graphs."""
    head = {"do": REPRODUCE, "unit": result.claim, "result": line_of(result), "checks": list(map(line_of, checks))}
    return Frame(head=head)
