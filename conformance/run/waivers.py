"""Waivers: the deviations that a vendor answers for, in a TOML file of the vendor's own (docs/architecture.md).

::

    [[waiver]]
    claim = "torch.nn.MaxPool2d/static:in=quint8,…/ptq/no_weight"   # an exact ID; or: glob = "torch.nn.MaxPool?d/*"
    verdict = "REFUTED"                                  # exactly this one is waived
    max_lsb = 255                                        # the largest error that is waived; without it: 1
    reason = "reads outside of its window with dilation"
    url = "https://example.org/issues/12"                # and/or expires
    expires = 2027-01-31                                 # the last day on which it holds
    isa = ["avx2*"]                                      # at which levels of --isa it is there; without it: at all

IDs have brackets and stars, so ``claim`` is never read as a glob; in a ``glob``, ``[[]`` is a bracket. An exact
waiver goes before a glob; two globs on one claim are an error, for nobody could say which holds.

A waiver covers a claim whose verdict is the waived one and whose error is at most ``max_lsb``. Without ``max_lsb``
that is the 1 LSB which QUALITY grants to all: it covers a refusal, a crash or a fallback, but no wrong number. A
waiver that matches nothing, has expired, whose case got worse, or whose case now passes, fails the run.
"""

from __future__ import annotations

import datetime
import math
import tomllib
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from conformance.machine.isa import LEVELS
from refimpl.errors import nearest
from reports.schema import Waiver
from reports.verdicts import PASSING, VERDICTS, Verdict

QUALITY_LSB = 1.0
"""The error that QUALITY stands for, which needs no waiver (NUM-03)."""

MOST_NAMED = 5
"""Claims that a problem names at most."""


class WaiverError(Exception):
    """A waiver file that cannot be used; the message is one line: file, waiver, what is wrong, what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WaiverEntry:
    """One [[waiver]] table of the file; ``source`` says which. Exactly one of ``claim`` and ``glob`` is given.

    ``max_lsb`` is in steps of the output's scale; ``expires`` is the last day on which the waiver holds; ``isa`` are
    globs of the levels (conformance.machine.isa) at which it counts, none: at every one.
    """

    source: str
    verdict: Verdict
    reason: str
    claim: str = ""
    glob: str = ""
    url: str = ""
    expires: datetime.date | None = None
    max_lsb: float | None = None
    isa: tuple[str, ...] = ()

    def matches(self, claim_id: str) -> bool:
        """Tell whether the waiver is about a claim."""
        return fnmatchcase(claim_id, self.glob) if self.glob else claim_id == self.claim

    def counts_at(self, level: str) -> bool:
        """Tell whether the waiver is there at a level of instruction sets."""
        return not self.isa or any(fnmatchcase(level, each) for each in self.isa)

    @property
    def allowed_lsb(self) -> float:
        """The largest error, in LSB, that the waiver covers."""
        return QUALITY_LSB if self.max_lsb is None else self.max_lsb

    def shown(self) -> Waiver:
        """Return what the results file keeps of it; infinity is spelled out."""
        return Waiver(
            reason=self.reason,
            url=self.url or None,
            expires=None if self.expires is None else self.expires.isoformat(),
            max_lsb="inf" if self.max_lsb == math.inf else self.max_lsb,
        )

    def __str__(self) -> str:
        return f"{self.source} ({self.glob or self.claim})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ruling:
    """What the waivers make of one claim: ``problem`` says why the matching ones do not cover it."""

    waived: bool = False
    entry: WaiverEntry | None = None
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Waivers:
    """The waivers of one run, on the day ``today``.

    ``complete``: each claim is tried with every case of profile full. Where it is not, a milder verdict than the waived
    one is covered, and a pass means little.
    """

    entries: tuple[WaiverEntry, ...]
    today: datetime.date
    complete: bool = True

    def judge(self, claim_id: str, verdict: Verdict, max_lsb: float | None) -> Ruling:
        """Rule on one claim: its verdict and largest error in LSB (None: nothing was measured)."""
        found = self._about(claim_id)
        if not found or (verdict in PASSING and all(waiver.verdict is not verdict for waiver in found)):
            return Ruling()
        if len(found) > 1:
            return Ruling(problem=_ambiguous(found[0], found[1], [claim_id]))
        waiver = found[0]
        is_milder = not self.complete and verdict.rank > waiver.verdict.rank
        why = _uncovered(waiver, waiver.verdict if is_milder else verdict, max_lsb) or self._expiry(waiver)
        return Ruling(waived=not why, entry=waiver, problem=f"{waiver}: {why}" if why else "")

    def problems(self, known_ids: Collection[str], judged: Mapping[str, Verdict]) -> list[str]:
        """List what is wrong with the waivers themselves, one line each; any fails the run.

        ``known_ids``: every ID that the backend has, whether it was run or not. ``judged``: the verdicts of those
        that were.
        """
        found = self._ambiguities(known_ids)
        for waiver, covered in self.covered(known_ids).items():
            passing = [name for name in covered if self.complete and _passes(waiver, judged.get(name))]
            reasons = (self._expiry(waiver), _unused(waiver, covered, known_ids), _passing(waiver, passing))
            found += [f"{waiver}: {why}" for why in reasons if why]
        return found

    def covered(self, known_ids: Iterable[str]) -> dict[WaiverEntry, list[str]]:
        """Say which of the backend's claims each waiver is about; a claim of two globs is left out."""
        claims: dict[WaiverEntry, list[str]] = {waiver: [] for waiver in self.entries}
        for claim_id in known_ids:
            found = self._about(claim_id)
            if len(found) == 1:
                claims[found[0]].append(claim_id)
        return claims

    def _ambiguities(self, known_ids: Iterable[str]) -> list[str]:
        pairs: dict[tuple[WaiverEntry, ...], list[str]] = {}
        for claim_id in known_ids:
            found = self._about(claim_id)
            if len(found) > 1:
                pairs.setdefault(found[:2], []).append(claim_id)
        return [_ambiguous(one, other, ids) for (one, other), ids in pairs.items()]

    def _about(self, claim_id: str) -> tuple[WaiverEntry, ...]:
        """The waivers that count for a claim: the exact one, or else every glob; more than one is an error."""
        found = tuple(waiver for waiver in self.entries if waiver.matches(claim_id))
        return tuple(waiver for waiver in found if waiver.claim) or found

    def _expiry(self, waiver: WaiverEntry) -> str:
        if waiver.expires is None or self.today <= waiver.expires:
            return ""
        return f"expired on {waiver.expires}; fix the deviation, or renew the date and the reason"


def load_waivers(path: Path, level: str) -> tuple[WaiverEntry, ...]:
    """Read the waivers of a file that count at a level of instruction sets.

    Raises WaiverError when the file cannot be read, or says what a waiver cannot say.
    """
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise WaiverError(f"{path}: cannot be read: {error.strerror}") from error
    except ValueError as error:  # bad TOML, or no UTF-8
        raise WaiverError(f"{path}: is not TOML: {error}") from error
    if unknown := sorted(set(content) - {"waiver"}):
        raise WaiverError(f"{path}: unknown key {unknown[0]!r}; the file holds [[waiver]] tables and nothing else")
    tables = content.get("waiver", [])
    if not isinstance(tables, list):
        raise WaiverError(f"{path}: found [waiver]; write [[waiver]], with two brackets")
    every = [_waiver(table, f"{path}: waiver {number}") for number, table in enumerate(tables, start=1)]
    waivers = tuple(waiver for waiver in every if waiver.counts_at(level))
    _refuse_repeats(waivers)
    return waivers


def _waiver(table: object, where: str) -> WaiverEntry:
    if not isinstance(table, dict):
        raise WaiverError(f"{where}: found {table!r}; a waiver is a table: [[waiver]]")
    for key in table:
        if key not in _KEYS:
            raise WaiverError(f"{where}: unknown key {key!r}; {nearest(key, _KEYS)}")
    for keys, most, todo in _NEEDED:
        given = [key for key in keys if key in table]
        if not 1 <= len(given) <= most:
            found = " and ".join(given) or f"no {' and no '.join(keys)}"
            raise WaiverError(f"{where}: found {found}; {todo}")
    values: dict[str, Any] = {}
    for key, value in table.items():
        try:
            values[key] = _KEYS[key](value)
        except ValueError as error:
            raise WaiverError(f"{where}: {key} is {value!r}; {error}") from error
    return WaiverEntry(source=where, **values)


def _refuse_repeats(waivers: Iterable[WaiverEntry]) -> None:
    first: dict[str, WaiverEntry] = {}
    for waiver in waivers:
        if waiver.claim and first.setdefault(waiver.claim, waiver) is not waiver:
            other = first[waiver.claim].source.rpartition(" ")[2]
            raise WaiverError(f"{waiver.source}: waiver {other} is about the same claim {waiver.claim!r}; keep one")


def _text(value: object) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ValueError("give a text that is not empty")
    return value.strip()


def _glob(value: object) -> str:
    text = _text(value)
    if not set(text) & set("*?["):
        raise ValueError("a glob has *, ? or [; name a single claim with the key 'claim'")
    return text


def _verdict(value: object) -> Verdict:
    names = [verdict.value for verdict in VERDICTS if verdict is not Verdict.VERIFIED]
    if value not in names:
        raise ValueError(nearest(str(value).upper(), names))
    return Verdict(str(value))


def _url(value: object) -> str:
    text = _text(value)
    if not text.startswith(("https://", "http://")):
        raise ValueError("give an address that begins with https:// or http://")
    return text


def _date(value: object) -> datetime.date:
    if not isinstance(value, datetime.date) or isinstance(value, datetime.datetime):
        raise ValueError("give a date without quotes and without a time, such as 2027-01-31")
    return value


def _lsb(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
        raise ValueError("give a number of LSB above 0 (inf: any error)")
    return float(value)


def _isa(value: object) -> tuple[str, ...]:
    if not isinstance(value, list) or not value or not all(isinstance(each, str) for each in value):
        raise ValueError('give a list of levels, such as ["avx2", "avx512"]')
    for each in value:
        if not any(fnmatchcase(level, each) for level in LEVELS):
            raise ValueError(f"no level is {each!r}; expected of {', '.join(LEVELS)}, or a glob")
    return tuple(value)


_KEYS: dict[str, Callable[[object], Any]] = {
    "claim": _text,
    "glob": _glob,
    "verdict": _verdict,
    "reason": _text,
    "url": _url,
    "expires": _date,
    "max_lsb": _lsb,
    "isa": _isa,
}
# Keys of which at least one and at most so many are given, and what to do else.
_NEEDED = (
    (("claim", "glob"), 1, "give either claim = (an exact ID) or glob ="),
    (("verdict",), 1, "give the verdict that is waived"),
    (("reason",), 1, "say what is wrong, and why it may stay"),
    (("url", "expires"), 2, "give the url of a ticket, or the date on which the waiver expires, or both"),
)


def _uncovered(waiver: WaiverEntry, verdict: Verdict, max_lsb: float | None) -> str:
    """Say why a claim that is not simply green is outside of what its waiver covers; empty: it is covered."""
    if not waiver.verdict.may_be(verdict):
        how = "it got worse" if verdict.rank < waiver.verdict.rank else "the waiver is out of date"
        return f"covers {waiver.verdict}, but the claim is {verdict}: {how}"
    if max_lsb is None or max_lsb <= waiver.allowed_lsb:  # not a number is not covered either
        return ""
    said = "names no max_lsb, so it covers" if waiver.max_lsb is None else "covers"
    return f"{said} errors up to {waiver.allowed_lsb:g} LSB, but the claim is off by {max_lsb:g} LSB"


def _passes(waiver: WaiverEntry, verdict: Verdict | None) -> bool:
    return verdict in PASSING and verdict is not waiver.verdict


def _unused(waiver: WaiverEntry, covered: Collection[str], known_ids: Collection[str]) -> str:
    if covered:
        return ""
    if any(waiver.matches(name) for name in known_ids):
        return "every claim that it matches has another waiver; remove this one"
    return f"matches no claim of the backend; {nearest(waiver.claim or waiver.glob, known_ids, cutoff=0.0)}"


def _passing(waiver: WaiverEntry, passing: Collection[str]) -> str:
    if not passing:
        return ""
    todo = "narrow the glob" if waiver.glob else "remove the waiver"
    return f"{_listed(passing)} now {'passes' if len(passing) == 1 else 'pass'}; {todo}"


def _ambiguous(one: WaiverEntry, other: WaiverEntry, ids: Collection[str]) -> str:
    number = other.source.rpartition(" ")[2]
    return f"{one}: waiver {number} ({other.glob}) matches {_listed(ids)} too; narrow one of the two globs"


def _listed(ids: Collection[str]) -> str:
    shown = ", ".join(sorted(ids)[:MOST_NAMED])
    return f"{shown} and {len(ids) - MOST_NAMED} more" if len(ids) > MOST_NAMED else shown
