"""Verdicts of claims and models, and outcomes of runs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from fx_quant_conformance.reports.text_enum import TextEnum


class Verdict(TextEnum):
    """The suite's judgement of a claim, worst first; compared by ``rank``, not as text. VERDICT_TEXTS explains them."""

    CRASHED = "CRASHED"
    TIMEOUT = "TIMEOUT"
    REFUTED = "REFUTED"
    FALLBACK = "FALLBACK"
    UNEXERCISED = "UNEXERCISED"
    UNSHOWN = "UNSHOWN"
    TOLERATED = "TOLERATED"
    VERIFIED = "VERIFIED"

    @property
    def rank(self) -> int:
        """0 for the worst verdict; sorting by it puts the worst first."""
        return VERDICTS.index(self)

    def may_be(self, other: Verdict) -> bool:
        """Tell whether a rerun may give `other`: an out-of-bounds kernel may crash or merely give wrong numbers."""
        return other is self or (self is Verdict.CRASHED and other is Verdict.REFUTED)

    @classmethod
    def worst(cls, verdicts: Iterable[Verdict | str]) -> Verdict:
        """Return the worst of `verdicts`; UNEXERCISED if there are none."""
        return min((cls(v) for v in verdicts), key=lambda v: v.rank, default=cls.UNEXERCISED)


VERDICTS: tuple[Verdict, ...] = tuple(Verdict)
"""All verdicts, worst first."""

PASSING = frozenset({Verdict.TOLERATED, Verdict.VERIFIED})
"""The verdicts that let a run pass without a waiver. UNSHOWN does so where the run accepts it (`Judged.accepted`)."""

FAULTY = frozenset({Verdict.FALLBACK, Verdict.REFUTED, Verdict.TIMEOUT, Verdict.CRASHED})
"""The verdicts that show a fault; only these count as found in the detection power."""


class Outcome(TextEnum):
    """How a whole run ended."""

    PASS = "PASS"
    """The run is complete, and everything passes."""
    FAIL = "FAIL"
    """The run is complete, and something does not pass, or the run has problems."""
    INCOMPLETE = "INCOMPLETE"
    """The run did not complete: it shows nothing."""


class VerdictText(NamedTuple):
    """What is said of a verdict, in reports and documents."""

    glyph: str
    """Tells verdicts apart where there is room for one character, and where there is no colour."""
    meaning: str
    passing: str
    """What it does to a run."""
    one: str
    """What a reader is told of one row with the verdict."""
    many: str
    """What a reader is told of several rows with it."""


VERDICT_TEXTS: Mapping[Verdict, VerdictText] = {
    Verdict.CRASHED: VerdictText("‼", "The process died in the backend's code.", "Fails.", "crashed", "crashed"),
    Verdict.TIMEOUT: VerdictText(
        "…", "The backend's code did not end in time.", "Fails.", "did not end in time", "did not end in time"
    ),
    Verdict.REFUTED: VerdictText(
        "✗",
        "A rule is broken: a wrong number, a wrong structure, or an error.",
        "Fails.",
        "is refuted",
        "are refuted",
    ),
    Verdict.FALLBACK: VerdictText(
        "ƒ",
        "Right numbers, but the pattern ran in float.",
        "Fails.",
        "fell back to float",
        "fell back to float",
    ),
    Verdict.UNEXERCISED: VerdictText(
        "○",
        "Nothing is known: no case could be built or run, the numbers decide nothing, or the flow changed a model.",
        "Fails.",
        "is unexercised",
        "are unexercised",
    ),
    Verdict.UNSHOWN: VerdictText(
        "?",
        "Right numbers, but nothing shows that integers computed them.",
        "Fails without --without-execution-evidence.",
        "does not show its execution",
        "do not show their execution",
    ),
    Verdict.TOLERATED: VerdictText(
        "≈",
        "Within a step, as the backend declares of these ops, but not correctly rounded.",
        "Passes, not green.",
        "is tolerated",
        "are tolerated",
    ),
    Verdict.VERIFIED: VerdictText(
        "✓",
        "Every stage holds, and every output is within the derived bound.",
        "Passes.",
        "is verified",
        "are verified",
    ),
}
"""The one table of verdicts: reports take it as their legend, README and glossary are made of it."""
