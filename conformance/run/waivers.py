"""Waivers: the deviations that a vendor accepts, in the vendor's TOML file (docs/architecture.md).

::

    [[waiver]]
    claim = "torch.nn.MaxPool2d/static:in=quint8,…/ptq/no_weight"   # an exact ID; or: glob = "torch.nn.MaxPool?d/*"
    verdict = "REFUTED"                                  # only this verdict is waived
    rule = "NUM-03"                                      # only this rule is waived; or several: ["NUM-03", "NUM-07"]
    max_lsb = 255                                        # the largest error that is waived; without it: 1
    reason = "reads outside of its window with dilation"
    url = "https://example.org/issues/12"                # and/or expires
    expires = 2027-01-31                                 # the last day on which it holds
    where = "groups > 9"                                 # the failing cases that it covers; without it: all
    isa = ["avx2*"]                                      # the levels of --isa at which it counts; without it: all
    torch = ">=2.10,<2.14"                               # the releases of torch for which it counts; without it: all
    may_pass = true                                      # it hangs on what lies in memory: a claim that passes is fine
    findings = ["errata.md#12"]                          # sections that the report shows (conformance.run.findings)

IDs have brackets and stars, so ``claim`` is never read as a glob; in a ``glob``, brackets are a set of characters or
stand for themselves (``reports.selection``). An exact waiver has priority over a glob; two globs on one claim are an
error, because neither has priority.

A waiver covers a claim whose verdict is the waived one, which breaks no rule but those that the waiver names, and whose
error is at most ``max_lsb``. Without ``max_lsb`` that is 1 LSB: the waiver covers a refusal, a crash or a fallback, but
no wrong number beyond one step. CRASHED and TIMEOUT need no rule; a waiver of CRASHED that names one covers REFUTED by
that rule as well: a kernel that reads out of bounds may crash or give wrong numbers. A waiver that matches nothing, has
expired, whose case got worse, or whose case now passes where it does not say that it may, fails the run.
"""

from __future__ import annotations

import datetime
import math
from ast import literal_eval
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from packaging.specifiers import InvalidSpecifier, SpecifierSet

from fx_quant_conformance.conformance.machine.conditions import CaseCondition, read_condition
from fx_quant_conformance.conformance.machine.isa import LEVELS, NAMES
from fx_quant_conformance.conformance.machine.toml import parse_toml
from fx_quant_conformance.reports.coverage import read_rule_texts
from fx_quant_conformance.reports.reading import MOST_TEXT, FileFault, read_bytes
from fx_quant_conformance.reports.schema import Waiver
from fx_quant_conformance.reports.selection import OWN, matches_glob
from fx_quant_conformance.reports.verdicts import PASSING, VERDICTS, Verdict

ONE_STEP = 1.0
"""The error, in LSB, that a waiver covers without ``max_lsb``."""

BY_RULE = frozenset({Verdict.REFUTED, Verdict.FALLBACK})
"""The verdicts that always have a rule, which their waivers name."""

MOST_NAMED = 5
"""Maximal number of claims that a problem names."""


class WaiverError(Exception):
    """A waiver file that cannot be used; the message is one line: file, waiver, what is wrong, what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WaiverEntry:
    """One [[waiver]] table of a file."""

    file: Path
    number: int
    """It counts from 1."""
    verdict: Verdict
    reason: str
    rules: tuple[str, ...] = ()
    """The IDs of all rules that the claims break; none for a verdict that no rule decides."""
    claim: str = ""
    """Exactly one of ``claim`` and ``glob`` is given."""
    glob: str = ""
    url: str = ""
    expires: datetime.date | None = None
    """The last day on which the waiver holds."""
    max_lsb: float | None = None
    """In steps of the output's scale."""
    isa: tuple[str, ...] = ()
    """Globs of the levels (conformance.machine.isa) at which it counts; none: at every one."""
    torch: SpecifierSet | None = None
    """A specifier of versions (PEP 440) for which it counts."""
    may_pass: bool = False
    """Whether a claim that passes is no problem, as the deviation shows in some runs only."""
    findings: tuple[str, ...] = ()
    """The names of texts (conformance.run.findings)."""
    where: CaseCondition | None = None
    """What holds of each case that it covers (docs/limits.md)."""

    def matches(self, claim_id: str) -> bool:
        """Tell whether the waiver is about a claim."""
        return matches_glob(claim_id, self.glob) if self.glob else claim_id == self.claim

    def counts_at(self, level: str, torch: str) -> bool:
        """Tell whether the waiver counts at a level of instruction sets, and for a version of torch."""
        is_at_level = not self.isa or any(fnmatchcase(level, each) for each in self.isa)
        return is_at_level and (self.torch is None or self.torch.contains(torch, prereleases=True))

    @property
    def allowed_lsb(self) -> float:
        """The largest error, in LSB, that the waiver covers."""
        return ONE_STEP if self.max_lsb is None else self.max_lsb

    def to_row(self) -> Waiver:
        """Return the waiver's entry in the results file; infinity is spelled out."""
        return Waiver(
            reason=self.reason,
            url=self.url or None,
            expires=None if self.expires is None else self.expires.isoformat(),
            max_lsb="inf" if self.max_lsb == math.inf else self.max_lsb,
            findings=list(self.findings),
            where="" if self.where is None else self.where.text,
        )

    def __str__(self) -> str:
        return f"{_name_place(self.file, self.number)} ({self.glob or self.claim})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ruling:
    """The waivers' ruling on one claim."""

    waived: bool = False
    entry: WaiverEntry | None = None
    problem: str = ""
    """Says why the matching waivers do not cover it."""


@dataclass(frozen=True, slots=True)
class Waivers:
    """The waivers of one run."""

    entries: tuple[WaiverEntry, ...]
    today: datetime.date
    """The day of the run."""
    complete: bool = True
    """Whether each claim is tried with every case of profile full. Otherwise a milder verdict than the waived one is
    covered as well, but for UNEXERCISED, and a waiver whose claims pass is no problem."""

    def judge(
        self,
        claim_id: str,
        verdict: Verdict,
        rules: Collection[str],
        max_lsb: float | None,
        failing: Mapping[str, str] | None = None,
    ) -> Ruling:
        """Rule on one claim: its verdict, the rules that it breaks, and its largest error in LSB (None: no number).

        ``failing``: its failing cases, as `Check.failing_cases` has them.
        """
        matches = self._find_matches(claim_id)
        if not matches or verdict is Verdict.VERIFIED:
            return Ruling()
        if len(matches) > 1:
            return Ruling(problem=_why_ambiguous(matches, [claim_id]))
        waiver = matches[0]
        is_milder = not self.complete and verdict.rank > waiver.verdict.rank and verdict is not Verdict.UNEXERCISED
        uncovered = _why_uncovered(waiver, waiver.verdict if is_milder else verdict, rules, max_lsb)
        why = uncovered or _why_beyond(waiver, failing or {}) or self._why_expired(waiver)
        return Ruling(waived=not why, entry=waiver, problem=f"{waiver}: {why}" if why else "")

    def problems(self, known_ids: Collection[str], judged: Mapping[str, Verdict]) -> list[str]:
        """List what is wrong with the waivers themselves, one line each; any fails the run.

        ``known_ids``: every ID that the backend has, run or not. ``judged``: the verdicts of those that were run.
        """
        groups = self._group(known_ids)
        problems = [_why_ambiguous(waivers, ids) for waivers, ids in groups.items() if len(waivers) > 1]
        for waiver in self.entries:
            covered = groups.get((waiver,), [])
            has_to_fail = self.complete and not waiver.may_pass
            changed = [name for name in covered if has_to_fail and judged.get(name) is not waiver.verdict]
            passing = [name for name in changed if judged.get(name) in PASSING]
            unused = _why_unused(waiver, covered, known_ids)
            reasons = (self._why_expired(waiver), unused, _why_passing(waiver, passing))
            problems += [f"{waiver}: {why}" for why in reasons if why]
        return problems

    def find_covered(self, known_ids: Iterable[str]) -> dict[WaiverEntry, list[str]]:
        """Return the backend's claims that each waiver is about; a claim of two globs is left out."""
        groups = self._group(known_ids)
        return {waiver: groups.get((waiver,), []) for waiver in self.entries}

    def _group(self, known_ids: Iterable[str]) -> dict[tuple[WaiverEntry, ...], list[str]]:
        """Group claims by the waivers that count for them, at most two."""
        groups: dict[tuple[WaiverEntry, ...], list[str]] = {}
        for claim_id in known_ids:
            groups.setdefault(self._find_matches(claim_id)[:2], []).append(claim_id)
        return groups

    def _find_matches(self, claim_id: str) -> tuple[WaiverEntry, ...]:
        """Return the waivers that count for a claim: the exact one, or else every glob; more than one is an error."""
        matches = tuple(waiver for waiver in self.entries if waiver.matches(claim_id))
        return tuple(waiver for waiver in matches if waiver.claim) or matches

    def _why_expired(self, waiver: WaiverEntry) -> str:
        if waiver.expires is None or self.today <= waiver.expires:
            return ""
        return f"expired on {waiver.expires}; fix the deviation, or renew the date and the reason"


def _check_text(value: object) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ValueError("give a text that is not empty")
    return value.strip()


def _check_glob(value: object) -> str:
    text = _check_text(value)
    if not set(text) & set("*?["):
        raise ValueError("a glob has *, ? or [; name a single claim with the key 'claim'")
    return text


def _check_verdict(value: object) -> Verdict:
    if value == Verdict.UNSHOWN:
        raise ValueError("UNSHOWN cannot be waived; implement execution(), or run with --without-execution-evidence")
    names = [verdict.value for verdict in VERDICTS if verdict not in (Verdict.VERIFIED, Verdict.UNSHOWN)]
    if value not in names:
        raise ValueError(_suggest_name(str(value).upper(), names))
    return Verdict(str(value))


def _check_rules(value: object) -> tuple[str, ...]:
    rules = value if isinstance(value, list) and value else [value]
    for rule in map(_check_text, rules):
        if rule not in read_rule_texts():
            raise ValueError(_suggest_name(rule, read_rule_texts()))
    return tuple(rules)


def _check_url(value: object) -> str:
    text = _check_text(value)
    if not text.startswith(("https://", "http://")):
        raise ValueError("give an address that begins with https:// or http://")
    return text


def _check_date(value: object) -> datetime.date:
    if not isinstance(value, datetime.date) or isinstance(value, datetime.datetime):
        raise ValueError("give a date without quotes and without a time, such as 2027-01-31")
    return value


def _check_lsb(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
        raise ValueError("give a number of LSB above 0 (inf: any error)")
    return float(value)


def _check_where(value: object) -> CaseCondition:
    return read_condition(_check_text(value))


def _check_isa(value: object) -> tuple[str, ...]:
    if not isinstance(value, list) or not value or not all(isinstance(each, str) for each in value):
        raise ValueError('give a list of levels, such as ["avx2", "avx512"]')
    for each in value:
        if not any(fnmatchcase(name, each) for name in NAMES):
            raise ValueError(f"no level is {each!r}; expected of {', '.join(LEVELS)}, or a glob")
    return tuple(value)


def _check_torch(value: object) -> SpecifierSet:
    try:
        return SpecifierSet(_check_text(value))
    except InvalidSpecifier:
        raise ValueError('give releases of torch as pip takes them, such as ">=2.10,<2.14"') from None


def _check_true(value: object) -> bool:
    if value is not True:
        raise ValueError("give true, or leave it out")
    return True


def _check_findings(value: object) -> tuple[str, ...]:
    if not isinstance(value, list) or not value or not all(isinstance(each, str) for each in value):
        raise ValueError('give a list of Markdown files, such as ["errata.md#12"]')
    for each in value:
        if not each.partition("#")[0].endswith(".md"):
            raise ValueError(f"{each!r} names no Markdown file; write FILE.md, or FILE.md#ANCHOR of a heading")
    return tuple(value)


_KEYS: dict[str, Callable[[object], Any]] = {
    "claim": _check_text,
    "glob": _check_glob,
    "verdict": _check_verdict,
    "rule": _check_rules,
    "reason": _check_text,
    "url": _check_url,
    "expires": _check_date,
    "max_lsb": _check_lsb,
    "where": _check_where,
    "isa": _check_isa,
    "torch": _check_torch,
    "may_pass": _check_true,
    "findings": _check_findings,
}
# Keys, how many of them may be given (at least one must), and what to do otherwise.
_NEEDED = (
    (("claim", "glob"), 1, "give either claim = (an exact ID) or glob ="),
    (("verdict",), 1, "give the verdict that is waived"),
    (("reason",), 1, "say what is wrong, and why it may stay"),
    (("url", "expires"), 2, "give the url of a ticket, or the date on which the waiver expires, or both"),
)


def load_waivers(path: Path, level: str, torch: str) -> tuple[WaiverEntry, ...]:
    """Read the waivers of a file that count at a level and for a version of torch.

    Raises WaiverError if it is unreadable or has a bad one.
    """
    return parse_waivers(read_waivers(path), path, level, torch)


def read_waivers(path: Path) -> bytes:
    """Return the bytes of a file of waivers. Raises WaiverError if it cannot be read."""
    try:
        return read_bytes(path, MOST_TEXT)
    except FileFault as fault:
        raise WaiverError(f"{path}: {fault}") from fault


def parse_waivers(data: bytes, path: Path, level: str, torch: str) -> tuple[WaiverEntry, ...]:
    """Return the waivers in a file's bytes that count at a level and for a version of torch. Raises WaiverError."""
    try:
        content = parse_toml(data.decode())
    except ValueError as error:  # bad TOML, or no UTF-8
        raise WaiverError(f"{path}: is not TOML: {error}") from error
    if unknown := sorted(set(content) - {"waiver"}):
        raise WaiverError(f"{path}: unknown key {unknown[0]!r}; the file holds [[waiver]] tables and nothing else")
    tables = content.get("waiver", [])
    if not isinstance(tables, list):
        raise WaiverError(f"{path}: found [waiver]; write [[waiver]], with two brackets")
    entries = [_read_entry(table, path, number) for number, table in enumerate(tables, start=1)]
    waivers = tuple(waiver for waiver in entries if waiver.counts_at(level, torch))
    _refuse_repeats(waivers)
    return waivers


def _name_place(path: Path, number: int) -> str:
    return f"{path}: waiver {number}"


def _read_entry(table: object, path: Path, number: int) -> WaiverEntry:
    where = _name_place(path, number)
    if not isinstance(table, dict):
        raise WaiverError(f"{where}: found {table!r}; a waiver is a table: [[waiver]]")
    for key in table:
        if key not in _KEYS:
            raise WaiverError(f"{where}: unknown key {key!r}; {_suggest_name(key, _KEYS)}")
    for keys, most, todo in _NEEDED:
        present = [key for key in keys if key in table]
        if not 1 <= len(present) <= most:
            listed = " and ".join(present) or f"no {' and no '.join(keys)}"
            raise WaiverError(f"{where}: found {listed}; {todo}")
    values: dict[str, Any] = {}
    for key, value in table.items():
        try:
            values[key] = _KEYS[key](value)
        except ValueError as error:
            raise WaiverError(f"{where}: {key} is {value!r}; {error}") from error
    if "where" in values and values["verdict"] not in BY_RULE:
        raise WaiverError(f"{where}: where is of failing cases, which {values['verdict']} has none of; leave it out")
    if values["verdict"] in BY_RULE and "rule" not in values:
        raise WaiverError(f'{where}: found no rule; give the one by which the claim fails, such as rule = "NUM-03"')
    return WaiverEntry(file=path, number=number, rules=values.pop("rule", ()), **values)


def _refuse_repeats(waivers: Iterable[WaiverEntry]) -> None:
    first: dict[str, WaiverEntry] = {}
    for waiver in waivers:
        if waiver.claim and first.setdefault(waiver.claim, waiver) is not waiver:
            place, number = _name_place(waiver.file, waiver.number), first[waiver.claim].number
            raise WaiverError(f"{place}: waiver {number} is about the same claim {waiver.claim!r}; keep one")


def _why_uncovered(waiver: WaiverEntry, verdict: Verdict, rules: Collection[str], max_lsb: float | None) -> str:
    """Say why the waiver does not cover a claim with this verdict, rules and error; empty: it does."""
    if not waiver.verdict.may_be(verdict):
        how = "it got worse" if verdict.rank < waiver.verdict.rank else "the waiver is out of date"
        return f"covers {waiver.verdict}, but the claim is {verdict}: {how}"
    if other := sorted(set(rules).difference(waiver.rules)):
        covered = " and ".join(waiver.rules) or "no rule"
        return f"covers {covered}, but the claim breaks {' and '.join(other)} too: it is another deviation"
    if max_lsb is None or max_lsb <= waiver.allowed_lsb:  # NaN is not covered either
        return ""
    covers = "names no max_lsb, so it covers" if waiver.max_lsb is None else "covers"
    return f"{covers} errors up to {waiver.allowed_lsb:g} LSB, but the claim is off by {max_lsb:g} LSB"


def _why_beyond(waiver: WaiverEntry, failing: Mapping[str, str]) -> str:
    """Say which failing case is none of those that the waiver is about; empty: it covers all."""
    if waiver.where is None:
        return ""
    others = [name for name, facts in failing.items() if waiver.where.holds(_read_facts(facts)) is not True]
    if failing and not others:
        return ""
    what = f"{others[0]!r} fails too" if others and others[0] else "the claim fails as a whole"
    return f"covers cases where {waiver.where}, but {what}"


def _read_facts(text: str) -> dict[str, Any]:
    """Return what a results file says of a case; nothing, if it says that in a way that cannot be read."""
    try:
        facts = literal_eval(text)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return {}
    return facts if isinstance(facts, dict) else {}


def _why_unused(waiver: WaiverEntry, covered: Collection[str], known_ids: Collection[str]) -> str:
    if covered or (waiver.claim or waiver.glob).startswith(OWN):  # that model is not handed in: --model
        return ""
    if any(waiver.matches(name) for name in known_ids):
        return "every claim that it matches has another waiver; remove this one"
    return f"matches no claim of the backend; {_suggest_name(waiver.claim or waiver.glob, known_ids, cutoff=0.0)}"


def _why_passing(waiver: WaiverEntry, passing: Collection[str]) -> str:
    if not passing:
        return ""
    todo = "narrow the glob" if waiver.glob else "remove the waiver"
    return f"{_list_ids(passing)} now {'passes' if len(passing) == 1 else 'pass'}; {todo}"


def _why_ambiguous(waivers: Sequence[WaiverEntry], ids: Collection[str]) -> str:
    first, second = waivers[:2]
    return f"{first}: waiver {second.number} ({second.glob}) matches {_list_ids(ids)} too; narrow one of the two globs"


def _list_ids(ids: Collection[str]) -> str:
    shown = ", ".join(sorted(ids)[:MOST_NAMED])
    return f"{shown} and {len(ids) - MOST_NAMED} more" if len(ids) > MOST_NAMED else shown


def _suggest_name(name: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """Return what to give in the place of a name that is none."""
    from fx_quant_conformance.refimpl.errors import suggest_name  # with torch, which pytest's process does not need

    return suggest_name(name, known, cutoff)
