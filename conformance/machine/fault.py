"""Faults: what is wrong with a claim or a model, by which rule, where, and how it shows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from fx_quant_conformance.reports.schema import Where
from fx_quant_conformance.reports.verdicts import Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A broken rule, or, with the verdict UNEXERCISED, why nothing can be said."""

    rule: str
    message: str
    verdict: Verdict = Verdict.REFUTED
    where: Where = field(default_factory=Where)
    """The case and run that show it."""
    evidence: Mapping[str, object] = field(default_factory=dict)
    """What a reader needs to believe it, by name."""
    size: float = 0.0
    """By how much a bound is passed: of faults with one verdict, the largest leads."""

    @property
    def has_place(self) -> bool:
        """Whether it belongs to a case or a run; else it is that of the whole."""
        return self.where != Where()

    @property
    def line(self) -> str:
        """The message with its place, which the message itself may name."""
        place = str(self.where)
        return self.message if place in self.message else f"{place}: {self.message}"


class FaultFound(Exception):
    """Ends the work on a case or model with a fault: what comes after it cannot be tried."""

    def __init__(self, fault: Fault) -> None:
        super().__init__(fault.message)
        self.fault = fault


def raise_first(faults: Iterable[Fault]) -> None:
    """Raise FaultFound for the first of several faults; nothing happens without one."""
    for fault in faults:
        raise FaultFound(fault)
