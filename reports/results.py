"""The results file `results.jsonl`, read whole and audited (`reports.writer` writes it).

A file without a footer is an incomplete run; one whose totals or digest disagree with it never passes.
Contract: docs/reports.md, "Results file"; the rows are in `reports.schema`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import itertools
import lzma
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeVar, cast

from fx_quant_conformance.reports.codec import OtherSchemaError, PlainRow, SchemaError, decode, loads
from fx_quant_conformance.reports.numbers import rank_number
from fx_quant_conformance.reports.reading import FileFault, read_bytes, read_most
from fx_quant_conformance.reports.schema import (
    Check,
    ClaimResult,
    Footer,
    Header,
    Judged,
    Measurement,
    ModelResult,
    Row,
)
from fx_quant_conformance.reports.text import format_count, pluralize
from fx_quant_conformance.reports.verdicts import VERDICTS, Outcome, Verdict

Pair = tuple[str, str]
Data = TypeVar("Data", bound=Row)
_GROUPED = (Verdict.UNEXERCISED, Verdict.UNSHOWN)
"""Verdicts whose claims reports list by reason, as they show no fault."""


class ResultsError(Exception):
    """A file that cannot be read or written, or runs that do not go together; the message begins with the file."""


class OtherVersionError(ResultsError):
    """A results file, or a certificate, of a version that this suite does not read."""


class Lead(NamedTuple):
    """The rule that decided a verdict, and the stage of a claim in which it did; "" where nothing is wrong."""

    rule: str = ""
    stage: str = ""

    def __str__(self) -> str:
        return " in ".join(filter(None, self)) or "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class Results:
    """Content of a results file, and the problems found by auditing it."""

    header: Header
    """The header: backend, environment and settings of the run."""
    checks: tuple[Check, ...]
    """All checks by claim; those of one claim in the order of its stages."""
    claims: tuple[ClaimResult, ...]
    """All claims by ID."""
    models: tuple[ModelResult, ...]
    """All models by ID."""
    measurements: tuple[Measurement, ...]
    """All measurements by topic and subject."""
    footer: Footer | None
    """The totals; None: the run did not come to its end."""
    problems: tuple[str, ...] = ()
    """Problems that the run reported, and contradictions in the file."""

    @property
    def outcome(self) -> Outcome:
        """PASS only if the run ended, without problems, and every claim and model is VERIFIED, TOLERATED or waived."""
        if self.footer is None or self.footer.outcome is Outcome.INCOMPLETE:
            return Outcome.INCOMPLETE
        passes = self.footer.outcome is Outcome.PASS and all(judged.passes for judged in self.judged)
        return Outcome.PASS if passes and not self.problems else Outcome.FAIL

    @property
    def judged(self) -> tuple[Judged, ...]:
        """All rows that have a verdict: claims and models."""
        return (*self.claims, *self.models)

    @property
    def counts(self) -> dict[Verdict, int]:
        """Number of claims with each verdict that occurs (waived ones included), worst first."""
        return counts_of(claim.verdict for claim in self.claims)

    @property
    def model_counts(self) -> dict[Verdict, int]:
        """Number of models with each verdict that occurs (waived ones included), worst first."""
        return counts_of(model.verdict for model in self.models)

    @property
    def execution_counts(self) -> dict[str, int]:
        """Number of claims by what shows their execution; kinds that do not occur are left out."""
        kinds = {"reported": "reported by the backend", "numbers": "shown by numbers", "none": "not shown"}
        counts = Counter[str](claim.execution for claim in self.claims)
        return {text: counts[kind] for kind, text in kinds.items() if counts[kind]}

    @property
    def lowerings(self) -> int:
        """Number of lowerings that the backend's process was asked for, for claims and models."""
        return sum(row.lowerings for row in self.judged)

    @property
    def runs(self) -> int:
        """Number of runs that the backend's process made, for claims and models."""
        return sum(row.runs for row in self.judged)

    @property
    def waived(self) -> int:
        """Number of waived claims, whatever their verdicts."""
        return sum(claim.waived for claim in self.claims)

    @property
    def waived_models(self) -> int:
        """Number of waived models."""
        return sum(model.waived for model in self.models)

    @property
    def foreign_code(self) -> list[str]:
        """The foreign code of all processes in which claims were judged."""
        footer = [] if self.footer is None else self.footer.foreign_code
        return sorted({*self.header.foreign_code, *footer, *(text for row in self.judged for text in row.foreign_code)})

    @property
    def beside_own_code(self) -> int:
        """Number of claims that were judged beside the vendor's own code."""
        return sum(claim.beside_own_code for claim in self.claims)

    @property
    def pairs(self) -> tuple[Pair, ...]:
        """The distinct (pattern, dtype config) pairs."""
        return tuple(self.by_pair())

    def by_pair(self) -> dict[Pair, tuple[ClaimResult, ...]]:
        """Return the claims of each pair."""
        groups: dict[Pair, list[ClaimResult]] = {}
        for claim in self.claims:
            groups.setdefault(claim.pair, []).append(claim)
        return {pair: tuple(claims) for pair, claims in groups.items()}

    def checks_by_claim(self) -> dict[str, tuple[Check, ...]]:
        """Return the checks of each claim ID; a claim without any has an empty tuple."""
        groups: dict[str, list[Check]] = {claim.claim: [] for claim in self.claims}
        for check in self.checks:
            groups.setdefault(check.claim, []).append(check)
        return {name: tuple(checks) for name, checks in groups.items()}

    def leads(self) -> dict[str, Lead]:
        """Return, by the ID of each claim and model, what decided its verdict."""
        checks = self.checks_by_claim()
        return {row.id: lead_of(row, checks.get(row.id, ())) for row in self.judged}

    def failures(self) -> tuple[ClaimResult, ...]:
        """Return the claims that show a fault and do not pass, worst first: by verdict, largest error, ID."""
        failing = (c for c in self.claims if not c.passes and c.verdict not in _GROUPED)
        return tuple(sorted(failing, key=rank_row))

    def failing_models(self) -> tuple[ModelResult, ...]:
        """Return the models that show a fault and do not pass, or could not be judged, in the same order."""
        failing = (m for m in self.models if not m.passes and m.verdict is not Verdict.UNSHOWN)
        return tuple(sorted(failing, key=rank_row))

    def unexercised(self) -> dict[str, tuple[ClaimResult, ...]]:
        """Return the claims that could not be exercised, waived or not, by reason, the most frequent first."""
        return self._group_by_reason(Verdict.UNEXERCISED)

    def unshown(self) -> dict[str, tuple[ClaimResult, ...]]:
        """Return the claims of which nothing shows the execution, accepted or not, by reason, most frequent first."""
        return self._group_by_reason(Verdict.UNSHOWN)

    def _group_by_reason(self, verdict: Verdict) -> dict[str, tuple[ClaimResult, ...]]:
        groups: dict[str, list[ClaimResult]] = {}
        for claim in self.claims:
            if claim.verdict is verdict:
                groups.setdefault(claim.reason.strip() or "no reason given", []).append(claim)
        ordered = sorted(groups.items(), key=lambda item: -len(item[1]))
        return {reason: tuple(claims) for reason, claims in ordered}

    def format_execution(self) -> str:
        """Say of how many claims and models nothing shows that integers computed them; "" if of none."""
        groups = (("claim", self.claims), ("model", self.models))
        counts = [(noun, sum(row.execution == "none" for row in rows), len(rows)) for noun, rows in groups]
        parts = [f"{format_count(count)} of {pluralize(total, noun)}" for noun, count, total in counts if count]
        if not parts:
            return ""
        text = f"nothing shows that integers computed {' and '.join(parts)}: they may run in float"
        accepts = bool(self.header.options.get("without_execution_evidence"))
        return f"{text}; the run accepts that (--without-execution-evidence)" if accepts else text


def digest_ids(ids: Iterable[str]) -> str:
    """Return the sha256 of claim IDs in any order, as the header has it for all claims of its config."""
    return hashlib.sha256("".join(f"{name}\n" for name in sorted(ids)).encode(errors="surrogatepass")).hexdigest()


def leading_check(checks: Sequence[Check]) -> Check | None:
    """Return the check that decides a claim's verdict: the first of the worst ones that did not simply pass."""
    notable = [c for c in checks if c.failed or c.verdict is not Verdict.VERIFIED]
    return min(notable, key=lambda c: (c.verdict.rank, not c.failed), default=None)


def message_of(claim: ClaimResult, lead: Check | None) -> str:
    """Return what is wrong with a claim: the message of its leading check, or its own reason."""
    return (lead.message if lead else "") or claim.reason


def lead_of(row: Judged, checks: Sequence[Check]) -> Lead:
    """Return what decided the verdict of a model, or of a claim that has these checks."""
    if isinstance(row, ModelResult):
        return Lead(row.rule)
    check = leading_check(checks)
    return Lead(check.rule, check.stage) if check else Lead()


def read_results(path: str | os.PathLike[str]) -> Results:
    """Read and audit a results file, plain or `.xz`. A last line without its newline was cut by a kill: it is dropped.

    The order of rows does not depend on workers or shards: by claim, model, topic and subject. A file that
    disagrees with itself is read, says so in ``problems``, and never passes. Raises ResultsError, with file and line,
    for a file that cannot be read or is none.
    """
    return parse_results(_read(Path(path)), path)


def parse_results(data: bytes, path: str | os.PathLike[str]) -> Results:
    """Read and audit what a results file holds, as `read_results` does. ``path``: where it lies, for errors."""
    *lines, cut = data.split(b"\n")
    rows = list(_decode_lines(lines, path))
    if not rows or not isinstance(rows[0], Header):
        raise ResultsError(f"{path}:1: no header row; a results file begins with one")
    for number, (before, row) in enumerate(itertools.pairwise(rows), start=2):
        if isinstance(row, Header):
            raise ResultsError(f"{path}:{number}: a second header row; one file holds one run")
        if isinstance(before, Footer):
            raise ResultsError(f"{path}:{number}: a {row.kind} row after the footer; nothing may follow it")
    if cut and isinstance(rows[-1], Footer):
        where = f"{path}:{len(lines) + 1}"
        raise ResultsError(f"{where}: text after the footer: {cut[:40]!r}; nothing may follow it")
    digest = hashlib.sha256(b"".join(line + b"\n" for line in lines[:-1])).hexdigest()
    return _audit(rows[0], rows[1:], digest, cut_at=len(lines) + 1 if cut else None)


def _read(path: Path) -> bytes:
    try:
        data = read_bytes(path)
        if path.suffix != ".xz":
            return data
        with lzma.open(io.BytesIO(data)) as packed:
            return read_most(packed)
    except FileFault as fault:
        raise ResultsError(f"{path}: {fault}") from fault
    except (lzma.LZMAError, EOFError) as error:
        raise ResultsError(f"{path}: is no xz file: {error}") from error


def _decode_lines(lines: Sequence[bytes], path: object) -> Iterator[Row]:
    """Decode each line once."""
    for number, line in enumerate(lines, start=1):
        where = f"{path}:{number}"
        try:
            yield cast("Row", decode(_parse(line, where)))
        except OtherSchemaError as error:
            raise OtherVersionError(f"{where}: {error}") from error
        except SchemaError as error:
            raise ResultsError(f"{where}: {error}") from error


def _parse(line: bytes, where: str) -> PlainRow:
    try:
        row = loads(line.decode())
    except (ValueError, RecursionError) as error:
        raise ResultsError(f"{where}: not a line of JSON: {error}; found {line[:60]!r}") from error
    if not isinstance(row, dict):
        raise ResultsError(f"{where}: expected a JSON object, found {type(row).__name__} {line[:60]!r}")
    return row


def _audit(header: Header, rows: Sequence[Row], digest: str, cut_at: int | None) -> Results:
    footer = rows[-1] if rows and isinstance(rows[-1], Footer) else None
    results = Results(
        header=header,
        checks=tuple(sorted(_select(Check, rows), key=lambda check: check.claim)),
        claims=tuple(sorted(_select(ClaimResult, rows), key=lambda claim: claim.claim)),
        models=tuple(sorted(_select(ModelResult, rows), key=lambda model: model.model)),
        measurements=tuple(sorted(_select(Measurement, rows), key=lambda row: (row.topic, row.subject))),
        footer=footer,
    )
    problems = [*check_rows(results)]
    if footer is not None:
        problems += [*_check_totals(results, footer, digest), *_check_ending(results, footer), *footer.problems]
    else:
        problems.insert(0, f"no footer: the run stopped after {len(results.claims)} of {header.claims} claims")
    if cut_at is not None:
        problems.insert(1, f"line {cut_at} is cut and was left out: the run was killed while it wrote")
    return dataclasses.replace(results, problems=tuple(problems))


def rank_row(row: Judged) -> tuple[int, bool, float, str]:
    """Return a key that puts the worst first: by verdict, without a number (a shape), by largest error, by ID."""
    return row.verdict.rank, row.max_lsb is not None, -rank_number(row.max_lsb or 0.0), row.id


def _select(kind: type[Data], rows: Sequence[Row]) -> tuple[Data, ...]:
    return tuple(row for row in rows if isinstance(row, kind))


def check_rows(results: Results) -> Iterator[str]:
    """Yield how the rows of a file contradict each other."""
    names = [("claim", claim.claim) for claim in results.claims] + [("model", row.model) for row in results.models]
    for (kind, name), count in Counter(names).items():
        if count > 1:
            yield f"{kind} {name!r} has {count} {kind} rows; one is expected"
    accepts = bool(results.header.options.get("without_execution_evidence"))
    for row in results.judged:
        if row.accepted and (row.verdict is not Verdict.UNSHOWN or not accepts):
            what = "UNSHOWN only" if accepts else "nothing"
            yield f"{row.kind} {row.id!r} is {row.verdict} and accepted; the run accepts {what}"
    verdicts = {claim.claim: claim.verdict for claim in results.claims}
    for check in results.checks:
        verdict, name = verdicts.get(check.claim), f"{check.stage}/{check.rule}"
        if verdict is None and results.footer is not None:
            yield f"check {name} names claim {check.claim!r}, which has no claim row"
        elif verdict is not None and verdict.rank > check.verdict.rank:
            yield f"claim {check.claim!r} is {verdict}, but its check {name} says {check.verdict}"


def _check_totals(results: Results, footer: Footer, digest: str) -> Iterator[str]:
    header, claims, pairs = results.header, len(results.claims), len(results.pairs)
    totals: tuple[tuple[str, object, object], ...] = (
        ("the header's claims", header.claims, claims),
        ("the footer's claims", footer.claims, claims),
        ("the footer's checks", footer.checks, len(results.checks)),
        ("the footer's pairs", footer.pairs, pairs),
        ("the footer's counts", format_counts(footer.counts), format_counts(results.counts)),
        ("the footer's models", format_counts(footer.models), format_counts(results.model_counts)),
        ("the footer's measurements", footer.measurements, len(results.measurements)),
        ("the footer's sha256", footer.sha256, digest),
    )
    yield from (f"{name}: {stated}; the rows give {actual}" for name, stated, actual in totals if stated != actual)
    is_whole = header.claims == header.claims_in_config
    if is_whole and header.claims_sha256 not in ("", digest_ids(claim.claim for claim in results.claims)):
        yield "the claims are not those of the config: the sha256 of their IDs is not the header's"
    if pairs > header.pairs or (is_whole and pairs != header.pairs):
        yield f"the header's pairs: {header.pairs}; the rows give {pairs}"


def _check_ending(results: Results, footer: Footer) -> Iterator[str]:
    failing = counts_of(judged.verdict for judged in results.judged if not judged.passes)
    if footer.outcome is Outcome.PASS and (failing or footer.exit_status):
        yield f"the footer says PASS, with exit status {footer.exit_status} and {format_counts(failing)}"
    if not results.judged and not results.header.shard:
        yield "no claim was tested"
    elif footer.outcome is Outcome.FAIL and not failing and not footer.problems:
        status = footer.exit_status
        yield f"every claim passes, yet the run ended as FAIL (exit status {status}): its log says why"


def counts_of(verdicts: Iterable[Verdict]) -> dict[Verdict, int]:
    """Count each verdict that occurs, worst first."""
    counts = Counter(verdicts)
    return {verdict: counts[verdict] for verdict in VERDICTS if counts[verdict]}


def format_counts(counts: Mapping[Verdict, int]) -> str:
    """Spell counts as reports do, worst first: ``12 REFUTED, 392 VERIFIED``."""
    return ", ".join(f"{counts[v]} {v}" for v in VERDICTS if counts.get(v)) or "no such claim"
