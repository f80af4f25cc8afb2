"""The decision on a run: its outcome with the reason, and what the run does not show. Every report begins with it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from fx_quant_conformance.reports.handed_in import HANDED_IN
from fx_quant_conformance.reports.results import Results, counts_of
from fx_quant_conformance.reports.schema import ClaimResult, Judged
from fx_quant_conformance.reports.text import format_count, pluralize
from fx_quant_conformance.reports.verdicts import VERDICT_TEXTS, Outcome, Verdict


def format_decision(results: Results) -> str:
    """Return the outcome, why it is so, and how much is verified, in a line.

    ``PASS with 380 waivers (first expires 2027-11-30), 485 of 853 claims verified (57 %)``
    """
    separator = ", " if results.outcome is Outcome.PASS else "; "
    return f"{results.outcome}{_format_reason(results)}{separator}{format_verified(results)}"


def passes_by_leave(results: Results) -> bool:
    """Tell whether a run passes by waivers or tolerances, or as it accepts UNSHOWN: such a pass is not green."""
    return results.outcome is Outcome.PASS and any(row.verdict is not Verdict.VERIFIED for row in results.judged)


def format_verified(results: Results) -> str:
    """Return how many of the claims to be judged are VERIFIED: ``485 of 853 claims verified (57 %)``."""
    verified, total = results.counts.get(Verdict.VERIFIED, 0), results.header.claims
    return f"{format_count(verified)} of {pluralize(total, 'claim')} verified ({format_share(verified, total)})"


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifiedShare:
    """Some claims, and how many of them are VERIFIED."""

    verified: int
    claims: int

    @property
    def percent(self) -> str:
        """The share in percent; "-" if nothing is claimed."""
        return format_share(self.verified, self.claims)

    @property
    def words(self) -> str:
        """The share as two counts."""
        return f"{self.verified} of {pluralize(self.claims, 'claim')} verified" if self.claims else "not claimed"


def count_verified(claims: Iterable[ClaimResult]) -> VerifiedShare:
    """Count the claims, and those that are VERIFIED."""
    verdicts = [claim.verdict for claim in claims]
    return VerifiedShare(verified=verdicts.count(Verdict.VERIFIED), claims=len(verdicts))


def pass_by_waiver(claims: Sequence[ClaimResult]) -> bool:
    """Tell whether all of several claims pass, and some of them by a waiver alone."""
    return any(claim.waived for claim in claims) and all(claim.passes for claim in claims)


def format_share(part: int, whole: int) -> str:
    """Return a share in percent; what is not all or nothing is not rounded to it; "-" of nothing."""
    if not whole:
        return "-"
    rounded = round(100 * part / whole)
    return f"{min(max(rounded, 1), 99) if 0 < part < whole else rounded} %"


def format_work(results: Results) -> str:
    """Say what the backend's process did for claims and models: `4,142 lowerings · 10,370 runs`; "" if nothing did."""
    if not (results.lowerings or results.runs):
        return ""
    return f"{pluralize(results.lowerings, 'lowering')} · {pluralize(results.runs, 'run')}"


def _format_reason(results: Results) -> str:
    if results.outcome is Outcome.PASS:
        return _format_let(results)
    causes = [*_format_failing(results), *_format_problems(results)]
    if results.outcome is Outcome.INCOMPLETE and (count_unreached(results) or not causes):
        reached = f"{format_count(len(results.claims))} of {pluralize(results.header.claims, 'claim')}"
        told = results.footer.problems if results.footer else []
        return f" because {reached} were judged: {told[0]}" if told else f" because the run stopped after {reached}"
    return f" because {_enumerate(causes)}" if causes else ""


def _format_let(results: Results) -> str:
    """Return what lets a run pass besides VERIFIED claims and models."""
    waived = results.waived + results.waived_models
    waivers = (row.waiver for row in results.judged if row.waived)
    expires = min((waiver.expires for waiver in waivers if waiver and waiver.expires), default=None)
    accepted = sum(row.accepted for row in results.judged)
    parts = []
    if waived:
        parts.append(pluralize(waived, "waiver") + (f" (first expires {expires})" if expires else ""))
    tolerated = sum(row.verdict is Verdict.TOLERATED and not row.waived for row in results.judged)
    parts += [f"{format_count(tolerated)} TOLERATED"] if tolerated else []
    parts += [f"{format_count(accepted)} UNSHOWN accepted"] if accepted else []
    return f" with {_enumerate(parts)}" if parts else ""


def _format_failing(results: Results) -> Iterator[str]:
    groups: tuple[tuple[str, Sequence[Judged]], ...] = (("claim", results.claims), ("model", results.models))
    for noun, rows in groups:
        for verdict, count in counts_of(row.verdict for row in rows if not row.passes).items():
            yield f"{pluralize(count, noun)} {VERDICT_TEXTS[verdict].many if count > 1 else VERDICT_TEXTS[verdict].one}"


def _format_problems(results: Results) -> Iterator[str]:
    first, *others = [*results.problems, ""]
    if first:
        yield first if len(others) == 1 else f"{first} (and {pluralize(len(others) - 1, 'further problem')})"


def _enumerate(parts: Sequence[str]) -> str:
    """Join parts as a sentence does: ``a, b and c``."""
    return " and ".join(filter(None, (", ".join(parts[:-1]), parts[-1])))


def list_untried(results: Results) -> Iterator[str]:
    """Yield what the run does not show, a line each: claims that it did not reach or select, values out of limits."""
    header = results.header
    if handed_in := header.versions.get(HANDED_IN):
        yield f"that a device computed the outputs, and left its inputs as they are: files were handed in ({handed_in})"
    yield from (f"that the suite judged alone: {line}" for line in list_company(results))
    if header.resumed:
        yield f"anything new of {format_count(header.resumed)} claims and models: an earlier run judged them (--resume)"
    if header.shard:
        yield f"the claims of the other shards: this is shard {header.shard}"
    elif header.claims < header.claims_in_config:
        left = header.claims_in_config - header.claims
        yield f"{pluralize(left, 'claim')} of the config: {'it is' if left == 1 else 'they are'} not selected"
    if unreached := count_unreached(results):
        yield f"{pluralize(unreached, 'claim')} that the run did not reach"
    if header.limits:
        yield f"argument values beyond the limits that the backend declares for {pluralize(len(header.limits), 'op')}"
    if header.profile == "quick":
        yield "most cases of each claim: profile quick tries a few; full and stress try more"


def list_company(results: Results) -> Iterator[str]:
    """Yield beside what the claims were judged, a line each."""
    if results.foreign_code:
        yield f"beside it ran {'; '.join(results.foreign_code)}"
    if results.beside_own_code:
        yield f"{pluralize(results.beside_own_code, 'claim')} judged beside the vendor's own code"


def format_waived(claims: Sequence[ClaimResult]) -> str:
    """Return how many of several claims are waived: ``all waived``, ``3 waived``; "" if none is."""
    waived = sum(claim.waived for claim in claims)
    return f"{'all' if waived == len(claims) else format_count(waived)} waived" if waived else ""


def format_no_failure(results: Results) -> str:
    """Say what it means that no claim is listed as a failure, for a run in which none is."""
    grouped = sum(not claim.passes for claim in results.claims)
    parts = ["No claim that was judged is refuted" if grouped else "No claim that was judged fails"]
    if results.waived:
        parts.append(f"{format_count(results.waived)} would, but for a waiver")
    if grouped:
        parts.append(f"{format_count(grouped)} of unexercised or unshown claims stand below")
    if models := results.failing_models():
        parts.append(
            f"{pluralize(len(models), 'model')} {'does' if len(models) == 1 else 'do'} not pass and stand below"
        )
    elif not grouped and results.outcome is Outcome.FAIL:
        parts.append("the run fails all the same: its first lines say why")
    if count_unreached(results):
        parts.append("not all were reached")
    return f"{'; '.join(parts)}."


def count_unreached(results: Results) -> int:
    """Return how many of the claims to be judged have no verdict."""
    return max(results.header.claims - len(results.claims), 0)
