"""The summary that a run prints when it ends: counts, worst claims, unexercised claims; the verdict is last."""

from __future__ import annotations

import os
import shutil
import sys
from collections import Counter
from collections.abc import Mapping, Sequence

from tabulate import MIN_PADDING, tabulate

from reports.decision import count_unreached, spell_decision, spell_waived, spell_work
from reports.numbers import rank_number
from reports.results import Results, leading_check
from reports.schema import Check, ClaimResult, Judged
from reports.text import cut_end, cut_middle, join_lines, pluralize, spell_db, spell_lsb
from reports.verdicts import VERDICTS, Verdict

WORST = 20
UNCUT = 10_000
"""Columns where the output is no terminal: a log is searched, and its lines are cut nowhere."""
SHORT = 48
"""Most characters of what failing cases share that stand before the message."""
NEXT_STEP = (
    "  next: implement the backend's execution(), which says what a lowered model runs "
    "(docs/vendor-guide.md, section 3),\n"
    "  or run with --without-execution-evidence: UNSHOWN then passes, and report and certificate say so"
)
"""What to do about claims whose execution is not shown."""
_PROBLEM_COLUMNS = ("verdict", "stage", "rule", "LSB", "claim, and what is wrong")


def summary(results: Results, html_path: str | os.PathLike[str], *, width: int | None = None) -> str:
    """Return the summary that a run ends with, but for its last line, which is `verdict_line`.

    ``width``: columns that it is fitted to (None: the terminal's; nothing is cut where there is none).
    """
    width = width or (shutil.get_terminal_size().columns if sys.stdout.isatty() else UNCUT)
    blocks = (
        count_line(results),
        "\n".join(f"! {join_lines(problem)}" for problem in results.problems),
        _render_execution(results),
        _render_verdicts(results),
        _render_failures(results, width),
        _render_models(results, width),
        _render_distances(results, width),
        _render_unreached(results),
        _render_reasons("unexercised, by reason:", results.unexercised(), width),
        _render_reasons("execution not shown, by reason:", results.unshown(), width),
        _render_waived(results, width),
        "\n".join(f"note: {join_lines(note)}" for note in (results.footer.notes if results.footer else ())),
        _render_effort(results),
        spell_work(results),
        f"report: {os.fspath(html_path)}",
    )
    return "\n\n".join(block for block in blocks if block) + "\n"


def verdict_line(results: Results) -> str:
    """Return the decision on a run in a line, with its reason. (`reports.decision.spell_decision`)"""
    return join_lines(f"{results.header.backend}: {spell_decision(results)}")


def count_line(results: Results) -> str:
    """Return the verdicts in a line: `404 claims: 12 REFUTED, 392 VERIFIED (12 WAIVED); 9 models: 9 VERIFIED`."""
    claims = _spell_verdicts("claim", results.claims)
    models = f"; {_spell_verdicts('model', results.models)}" if results.models else ""
    return f"{claims}{models}"


def _spell_verdicts(noun: str, judged: Sequence[Judged]) -> str:
    by_verdict = Counter(row.verdict for row in judged)
    counts = ", ".join(f"{by_verdict[verdict]} {verdict}" for verdict in VERDICTS if by_verdict[verdict]) or "none ran"
    passing = {"WAIVED": sum(row.waived for row in judged), "ALLOWED": sum(row.allowed for row in judged)}
    listed = ", ".join(f"{count} {how}" for how, count in passing.items() if count)
    return f"{pluralize(len(judged), noun)}: {counts}" + (f" ({listed})" if listed else "")


def _render_verdicts(results: Results) -> str:
    waived = Counter(claim.verdict for claim in results.claims if claim.waived)
    pairs = Counter(Verdict.worst(c.verdict for c in claims) for claims in results.by_pair().values())
    counts = results.counts
    rows: list[tuple[object, ...]] = [(v, counts[v], waived[v] or "", pairs[v]) for v in VERDICTS if v in counts]
    if not rows:
        return ""
    rows.append(("total", len(results.claims), results.waived or "", len(results.pairs)))
    return _render_table(rows, ("verdict", "claims", "waived", "pairs, by worst claim"), right=(1, 2, 3))


def _render_failures(results: Results, width: int) -> str:
    failures = results.failures()
    if not failures:
        return ""
    checks = results.checks_by_claim()
    rows = [_make_failure_row(claim, leading_check(checks[claim.claim])) for claim in failures[:WORST]]
    hidden = len(failures) - len(rows)
    title = f"failing claims, worst first{f' ({hidden} more in the report)' if hidden else ''}:"
    table = _render_table(_fit_rows(rows, width), _PROBLEM_COLUMNS, right=(3,))
    repro = failures[0].repro
    return f"{title}\n{table}" + (f"\nreproduce the first: {join_lines(repro)}" if repro else "")


def _make_failure_row(claim: ClaimResult, check: Check | None) -> tuple[str, ...]:
    stage, rule = (check.stage, check.rule) if check else ("-", "-")
    message = (check.message if check else "") or claim.reason
    shared = check.evidence.get("shared") if check else None
    if shared and len(shared[0]) <= SHORT:
        message = f"only where {shared[0]}: {message}"
    cells = (claim.verdict, stage, rule, spell_lsb(claim.max_lsb), claim.claim, message)
    return tuple(join_lines(cell) for cell in cells)


def _fit_rows(rows: Sequence[Sequence[str]], width: int) -> list[tuple[str, ...]]:
    """Put the claim above its message in the last column, each cut to the remaining width."""
    headers = [name + " " * MIN_PADDING for name in _PROBLEM_COLUMNS]
    narrow = zip(headers[:4], *(row[:4] for row in rows), strict=True)
    room = max(width - sum(max(map(len, column)) + 2 for column in narrow), len(headers[4]))
    return [(*row[:4], f"{cut_middle(row[4], room)}\n{cut_end(row[5], room)}") for row in rows]


def _render_reasons(title: str, groups: Mapping[str, Sequence[ClaimResult]], width: int) -> str:
    lines = [
        cut_middle(f"{len(claims):6d}  {spell_reason(join_lines(reason), claims)}", width)
        for reason, claims in groups.items()
    ]
    return "\n".join([title, *lines]) if lines else ""


def spell_reason(reason: str, claims: Sequence[ClaimResult]) -> str:
    """Return the reason that claims have in common, and before it how many of them are waived: `(all waived) …`."""
    waived = spell_waived(claims)
    return f"({waived}) {reason}" if waived else reason


def _render_unreached(results: Results) -> str:
    unreached = count_unreached(results)
    return f"! {pluralize(unreached, 'claim')} of {results.header.claims} never reached" if unreached else ""


def _render_execution(results: Results) -> str:
    """Say of what nothing shows the execution, and what to do if that does not pass."""
    text = results.describe_execution()
    is_open = any(row.verdict is Verdict.UNSHOWN and not row.passes for row in results.judged)
    return f"! {text}" + (f"\n{NEXT_STEP}" if is_open else "") if text else ""


def _render_models(results: Results, width: int) -> str:
    """List the models that do not pass, worst first; they are few."""
    models = results.failing_models()
    lines = [cut_end(f"{m.verdict:<11}  {join_lines(f'{m.model}: {m.reason}')}", width) for m in models]
    return "\n".join(["models that do not pass, worst first:", *lines]) if lines else ""


def _render_distances(results: Results, width: int) -> str:
    """List how far the reference models of models that were handed in are from float, the farthest first."""
    own = [(each.worst_db, each.model) for each in results.models if each.deployment is not None]
    known = sorted((rank_number(ratio), spell_db(ratio), name) for ratio, name in own if ratio is not None)
    lines = [cut_middle(f"{ratio:>8}  {join_lines(name)}", width) for _, ratio, name in known]
    return "\n".join(["float model to the reference model's error, dB:", *lines]) if lines else ""


def _render_waived(results: Results, width: int) -> str:
    waivers = [row.waiver for row in results.judged if row.waived and row.waiver]
    groups = Counter((waiver.reason, waiver.url or f"until {waiver.expires}") for waiver in waivers)
    lines = [cut_end(f"{n:6d}  {join_lines(f'{reason} ({ref})')}", width) for (reason, ref), n in groups.most_common()]
    return "\n".join(["WAIVED, by reason:", *lines]) if lines else ""


def _render_effort(results: Results) -> str:
    """Describe the effort: checks per second and per claim, and the memory of the largest process."""
    footer, checks = results.footer, len(results.checks)
    claims = len(results.claims)
    if footer is None or not claims or not footer.seconds:
        return ""
    rate = f"{checks} checks in {footer.seconds:.1f} s: {checks / footer.seconds:.1f} per second"
    work = sum(claim.seconds for claim in results.claims)
    per_claim = f"{checks / claims:.1f} checks and {1000 * work / claims:.0f} ms of work per claim"
    memory = f"; largest process {footer.peak_mib:.0f} MiB" if footer.peak_mib else ""
    measured = pluralize(len(results.measurements), "measurement")
    return f"{rate}, {per_claim}{memory}" + (f"; {measured} in the report" if results.measurements else "")


def _render_table(rows: Sequence[Sequence[object]], headers: Sequence[str], right: Sequence[int]) -> str:
    align = ["right" if i in right else "left" for i in range(len(headers))]
    return tabulate(rows, headers=headers, tablefmt="simple", disable_numparse=True, colalign=align)
