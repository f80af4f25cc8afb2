"""Verdicts of claims and models, and outcomes of runs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from reports.text_enum import TextEnum


class Verdict(TextEnum):
    """The suite's judgement of a claim, worst first; compared by ``rank``, not as text."""

    CRASHED = "CRASHED"
    """The process died in the backend's code."""
    TIMEOUT = "TIMEOUT"
    """The backend's code did not end in time."""
    REFUTED = "REFUTED"
    """A rule is broken: wrong structure, wrong number, an error where the config claims support."""
    FALLBACK = "FALLBACK"
    """The numbers are right, but the pattern did not run quantized."""
    UNEXERCISED = "UNEXERCISED"
    """The suite could not build or run a case."""
    UNSHOWN = "UNSHOWN"
    """Every stage holds and the numbers are right, but nothing shows that integers computed them."""
    QUALITY = "QUALITY"
    """A function is approximated within one step, but not correctly rounded within the derived slack."""
    VERIFIED = "VERIFIED"
    """Every stage holds, and every output is correctly rounded."""

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

PASSING = frozenset({Verdict.QUALITY, Verdict.VERIFIED})
"""The verdicts that may let a run pass without a waiver: QUALITY only where the run allows it.
UNSHOWN does so where the run accepts it: `reports.schema.Judged.accepted`."""

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
    """What a report says of a verdict, in place: its glyph, what it means, and whether it passes.

    The glyph tells verdicts apart where there is room for one character, and where there is no colour.
    """

    glyph: str
    meaning: str
    passing: str


VERDICT_TEXTS: Mapping[Verdict, VerdictText] = {
    Verdict.CRASHED: VerdictText("‼", "The process died in the backend's code.", "Fails."),
    Verdict.TIMEOUT: VerdictText("…", "The backend's code did not end in time.", "Fails."),
    Verdict.REFUTED: VerdictText("✗", "A rule is broken: a wrong number, a wrong structure, or an error.", "Fails."),
    Verdict.FALLBACK: VerdictText("ƒ", "The numbers are right, but the pattern ran in float.", "Fails."),
    Verdict.UNEXERCISED: VerdictText("○", "The suite could not build or run a case: nothing is known.", "Fails."),
    Verdict.UNSHOWN: VerdictText(
        "?",
        "The numbers are right, but nothing shows that integers computed them.",
        "Fails, unless the run has --without-execution-evidence.",
    ),
    Verdict.QUALITY: VerdictText(
        "≈",
        "A function is within one step of the exact result, but not correctly rounded.",
        "Fails, unless the run has --allow-quality.",
    ),
    Verdict.VERIFIED: VerdictText("✓", "Every stage holds, and every output is within the derived bound.", "Passes."),
}
"""The legend of the reports."""
