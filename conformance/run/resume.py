"""Resuming a run: what an earlier one has judged is taken from its results file, and only the rest is run.

Both are one run in two parts: of the same suite, backend, torch, processor, options and sources. Waivers may have
changed since, as they are applied to what was judged. With ``--failed-of`` only what passes is taken, and the sources
may have changed: then the rows are of two kernels, the file says of no sources, and the run is INCOMPLETE.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from fx_quant_conformance.conformance.run.judging import rule_again
from fx_quant_conformance.conformance.run.outline import Unit
from fx_quant_conformance.conformance.run.session import Run
from fx_quant_conformance.reports.codec import encode
from fx_quant_conformance.reports.results import Results, ResultsError, check_rows, read_results
from fx_quant_conformance.reports.schema import Footer, Header, Judged, Measurement, Row
from fx_quant_conformance.reports.text import format_count
from fx_quant_conformance.reports.verdicts import Outcome

_MAY_DIFFER = frozenset({"started", "platform", "waivers", "findings", "resumed", "foreign_code"})
_RULED_AGAIN = frozenset({"without_execution_evidence"})
"""Options by which a verdict passes."""
"""Header fields in which the two parts may differ."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Earlier:
    """What is taken from an earlier run: the rows of the units that it has finished, by ID, and its footer, if any."""

    path: Path | None = None
    """Its file; None: there is no earlier run."""
    rows: Mapping[str, tuple[Row, ...]] = field(default_factory=dict)
    started: str = ""
    footer: Footer | None = None
    is_of_other_sources: bool = False
    """Whether the sources have changed since."""
    foreign_code: Collection[str] = ()
    """The foreign code that it names of all its processes."""

    @property
    def seconds(self) -> float:
        """Duration of the earlier run; 0 if it was stopped before it could say."""
        return self.footer.seconds if self.footer is not None else 0.0

    @property
    def peak_mib(self) -> float:
        """Largest memory of one process of the earlier run, in MiB; 0 if it did not say."""
        return (self.footer.peak_mib if self.footer is not None else None) or 0.0

    def describe(self, total: int) -> Iterator[str]:
        """Yield a note on what was taken, of how many units."""
        if self.path is not None:
            time = "" if self.footer is not None else ", whose time is not known, as it was stopped"
            yield (
                f"resumed: {len(self.rows)} of {format_count(total)} claims, models and measurements are from the run "
                f"that began at {self.started}{time}"
            )


def read_earlier(run: Run) -> Earlier:
    """Read the results file of ``--resume`` or ``--failed-of``, if there is one.

    Of a run that was killed before its first row the file is empty: nothing is taken. Raises ResultsError for a file
    that cannot be read, that disagrees with itself, or that is of another run.
    """
    path, only_passing = run.options.resume or run.options.failed_of, run.options.failed_of is not None
    if path is None or (path.is_file() and not path.stat().st_size):
        return Earlier()
    results, header = read_results(path), run.make_header()
    _check_same(path, results, header, _MAY_DIFFER | {"sources_sha256"} if only_passing else _MAY_DIFFER)
    taken = _take(run, results, header)
    return Earlier(
        path=path,
        rows={name: rows for name, rows in taken if not only_passing or all(map(_lets_pass, rows))},
        started=results.header.started,
        footer=results.footer,
        is_of_other_sources=results.header.sources_sha256 != header.sources_sha256,
        foreign_code=results.foreign_code,
    )


def _lets_pass(row: Row) -> bool:
    return not isinstance(row, Judged) or row.passes


def _check_same(path: Path, results: Results, header: Header, may_differ: Collection[str]) -> None:
    totals = (each for each in results.problems if each.startswith("the footer's "))  # the header's are of a whole run
    for problem in (*check_rows(results), *totals):
        raise ResultsError(f"{path}: disagrees with itself: {problem}")
    if not results.header.sources_sha256 and "sources_sha256" not in may_differ:
        raise ResultsError(f"{path}: does not say which sources it is of; run everything, without --resume")
    earlier, now = encode(results.header), encode(header)
    for key in sorted({*earlier, *now}.difference(may_differ)):
        if found := next(_list_differences(key, earlier.get(key), now.get(key)), ""):
            raise ResultsError(f"{path}: is of another run: {found}; run everything, without --resume")


def _list_differences(name: str, was: object, now: object) -> Iterator[str]:
    """Yield what differs, an entry each of what has names; what lets a row pass is ruled on again."""
    if isinstance(was, dict) and isinstance(now, dict):
        for key in sorted({*was, *now} - _RULED_AGAIN):
            yield from _list_differences(f"{name}.{key}", was.get(key), now.get(key))
    elif was != now:
        yield f"{name} is {was!r}, and {now!r} in this run"


def _take(run: Run, results: Results, header: Header) -> Iterator[tuple[str, tuple[Row, ...]]]:
    """Yield the finished units with their rows, as today's waivers rule on them.

    Left out is a claim that has not a check of each stage, and a unit that waivers no longer cover: its run writes the
    script. So is a fuzz job if the waivers differ, as it draws no pattern that they cover, and a measuring job of a run
    that was stopped: no row says that it ended.
    """
    checks, units, stages = results.checks_by_claim(), run.units, list(run.outline.stages)
    measured = _group(results.measurements, units)
    has_same_waivers = results.header.waivers == header.waivers
    for claim in results.claims:
        if claim.claim in units and [check.stage for check in checks[claim.claim]] == stages:
            ruled = rule_again(run, claim, checks[claim.claim])
            if ruled.passes or not claim.passes:
                yield claim.claim, (*checks[claim.claim], *measured.get(claim.claim, ()), ruled)
    for model in results.models:
        job = units.get(model.model)
        if job is not None and (has_same_waivers or not job.is_adaptive):
            yield model.model, (*measured.get(model.model, ()), rule_again(run, model))
    if results.footer is not None and results.outcome is not Outcome.INCOMPLETE:
        rows = measured.get("", ())
        for unit in units.values():
            if unit.kind == "measurement":
                yield unit.id, rows
                rows = ()


def _group(rows: Iterable[Measurement], units: Mapping[str, Unit]) -> dict[str, tuple[Measurement, ...]]:
    """Group measurements by the claim or model that they are of; those of measuring jobs are under ""."""
    groups = dict[str, tuple[Measurement, ...]]()
    for row in rows:
        name = row.subject if row.subject in units else ""
        groups[name] = (*groups.get(name, ()), row)
    return groups
