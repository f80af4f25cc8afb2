"""What is said of a run in short, once for the terminal and for a CI job: paragraphs and tables, in their order."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from fx_quant_conformance.reports.decision import format_decision, format_waived, format_work, list_untried
from fx_quant_conformance.reports.diff import Differences, compare_runs
from fx_quant_conformance.reports.findings import collect_waivers
from fx_quant_conformance.reports.handed_in import format_remedy
from fx_quant_conformance.reports.numbers import rank_number
from fx_quant_conformance.reports.results import Results, counts_of, leading_check, message_of
from fx_quant_conformance.reports.schema import Check, ClaimResult, Judged
from fx_quant_conformance.reports.text import (
    format_db,
    format_duration,
    format_lsb,
    join_lines,
    pluralize,
    shorten_commit,
)
from fx_quant_conformance.reports.verdicts import Verdict

WORST = 20
SHORT = 48
"""Most characters of what failing cases share that stand before the message."""
ACCEPTING = "run with --without-execution-evidence: UNSHOWN then passes, and report and certificate say so"
"""What else can be done about claims whose execution is not shown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """A table with a title."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    more: int = 0
    """The number of rows that are left out."""


def verdict_line(results: Results) -> str:
    """Return the decision on a run in a line, with its reason. (`reports.decision.format_decision`)"""
    return join_lines(f"{results.header.backend}: {format_decision(results)}")


def count_line(results: Results) -> str:
    """Return the verdicts in a line: `404 claims: 12 REFUTED, 392 VERIFIED (12 WAIVED); 9 models: 9 VERIFIED`."""
    models = f"; {_format_verdicts('model', results.models)}" if results.models else ""
    return f"{_format_verdicts('claim', results.claims)}{models}"


def _format_verdicts(noun: str, judged: Sequence[Judged]) -> str:
    by_verdict = counts_of(row.verdict for row in judged)
    counts = ", ".join(f"{count} {verdict}" for verdict, count in by_verdict.items()) or "none ran"
    waived = sum(row.waived for row in judged)
    return f"{pluralize(len(judged), noun)}: {counts}" + (f" ({waived} WAIVED)" if waived else "")


def digest(results: Results, baseline: Results | None = None) -> Iterator[str | Listing]:
    """Yield what there is to say of a run: texts of one line, and tables that are not empty.

    ``baseline``: an earlier run, whose differences are listed.
    """
    yield count_line(results)
    yield from (f"! {problem}" for problem in results.problems[:WORST])
    if len(results.problems) > WORST:
        yield f"! {pluralize(len(results.problems) - WORST, 'further problem')}, in the report"
    if text := results.format_execution():
        yield f"! {text}"
        if any(row.verdict is Verdict.UNSHOWN and not row.passes for row in results.judged):
            yield f"next: {format_remedy(results.header)}, or {ACCEPTING}"
    yield from (f"not shown by this run: {line}" for line in list_untried(results))
    differences = None if baseline is None else compare_runs(baseline, results)
    if differences is not None:
        counts = ", ".join(f"{count} {change}" for change, count in differences.counts.items())
        yield f"against the baseline {differences.title}: {counts}"
    yield from (table for table in _list_tables(results, differences) if table.rows)
    yield from (f"note: {note}" for note in (results.footer.notes if results.footer else ()))
    yield _format_run(results)


def _list_tables(results: Results, differences: Differences | None) -> Iterator[Listing]:
    failures, checks = results.failures(), results.checks_by_claim()
    yield _list(
        f"{pluralize(len(failures), 'failing claim')}, worst first",
        ("verdict", "stage", "rule", "LSB", "claim", "what is wrong"),
        [_list_failure(claim, leading_check(checks[claim.claim])) for claim in failures],
    )
    yield _list(
        "models that do not pass, worst first",
        ("verdict", "model", "what is wrong"),
        [(model.verdict.value, model.model, model.reason) for model in results.failing_models()],
    )
    ratios = sorted(
        (rank_number(model.worst_db), format_db(model.worst_db), model.model)
        for model in results.models
        if model.deployment is not None and model.worst_db is not None
    )
    title = "float model to the reference model's error, dB"
    yield _list(title, ("dB", "model"), [(ratio, name) for _, ratio, name in ratios])
    yield _list("unexercised, by reason", ("claims", "reason"), _list_reasons(results.unexercised()))
    yield _list("execution not shown, by reason", ("claims", "reason"), _list_reasons(results.unshown()))
    waivers = sorted(collect_waivers(results).values(), key=lambda row: -row.covered)
    rows = [(str(row.covered), row.expires or "-", row.title) for row in waivers]
    yield _list("waived, by finding or reason", ("covers", "until", "reason"), rows)
    if differences is not None:
        yield _list(
            "differences from the baseline",
            ("change", "was", "is", "claim or model", "what differs"),
            [(row.change.value, *row.states, row.name, row.why) for row in differences.changed_rows],
        )


def _list(title: str, columns: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> Listing:
    """Make a table of the first WORST rows."""
    return Listing(title=title, columns=columns, rows=tuple(rows[:WORST]), more=max(len(rows) - WORST, 0))


def _list_failure(claim: ClaimResult, check: Check | None) -> tuple[str, ...]:
    message = message_of(claim, check)
    shared = check.evidence.get("shared") if check else None
    if shared and len(shared[0]) <= SHORT:
        message = f"only where {shared[0]}: {message}"
    stage, rule = (check.stage, check.rule) if check else ("-", "-")
    return claim.verdict.value, stage, rule, format_lsb(claim.max_lsb), claim.claim, message


def _list_reasons(groups: Mapping[str, Sequence[ClaimResult]]) -> list[tuple[str, ...]]:
    return [
        (str(len(claims)), f"({waived}) {reason}" if (waived := format_waived(claims)) else reason)
        for reason, claims in groups.items()
    ]


def _format_run(results: Results) -> str:
    """Say what was run, where and how long."""
    header, footer = results.header, results.footer
    versions = "".join(f", {name} {text}" for name, text in sorted(header.versions.items()))
    parts = [
        f"suite {header.suite_version} {shorten_commit(header.suite_commit)}",
        f"config {header.config_name} sha256 {header.config_sha256[:12]}{versions}",
        f"torch {header.torch}, Python {header.python}",
        f"{header.cpu} {header.isa}".strip(),
        f"profile {header.profile}, seed {header.seed}",
    ]
    if footer is not None:
        memory = f", largest process {footer.peak_mib:.0f} MiB" if footer.peak_mib else ""
        parts.append(f"{len(results.checks):,} checks in {format_duration(footer.seconds)}{memory}")
    return "; ".join(filter(None, (*parts, format_work(results))))
