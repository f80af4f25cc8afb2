"""The summary that a run prints when it ends: verdict line, counts, worst claims, what was not exercised."""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Sequence

from tabulate import MIN_PADDING, tabulate

from reports.results import Results, leading_check
from reports.schema import Check, ClaimResult, Judged
from reports.text import counted, end, lsb, middle, one_line
from reports.verdicts import VERDICTS, Verdict

WORST = 20
_PROBLEM_COLUMNS = ("verdict", "stage", "rule", "LSB", "claim, and what is wrong")


def summary(results: Results, html_path: str | os.PathLike[str], *, width: int | None = None) -> str:
    """Return the summary that a run ends with, fitted to `width` columns (the terminal's own if not given)."""
    width = width or shutil.get_terminal_size().columns
    blocks = (
        verdict_line(results),
        "\n".join(f"! {one_line(problem)}" for problem in results.problems),
        _verdict_table(results),
        _failure_table(results, width),
        _models(results, width),
        _unexercised(results, width),
        _waived(results, width),
        "\n".join(f"note: {one_line(note)}" for note in (results.footer.notes if results.footer else ())),
        _effort(results),
        f"report: {os.fspath(html_path)}",
    )
    return "\n\n".join(block for block in blocks if block) + "\n"


def verdict_line(results: Results) -> str:
    """Return the run in a line: `qnnpack: FAIL — 404 claims: 12 REFUTED, 392 VERIFIED; 9 models: 9 VERIFIED`."""
    said = _said("claim", results.claims)
    models = f"; {_said('model', results.models)}" if results.models else ""
    return one_line(f"{results.header.backend}: {results.outcome} — {said}{models}")


def _said(noun: str, judged: Sequence[Judged]) -> str:
    found = Counter(row.verdict for row in judged)
    counts = ", ".join(f"{found[verdict]} {verdict}" for verdict in VERDICTS if found[verdict]) or "none ran"
    waived = sum(row.waived for row in judged)
    return f"{counted(len(judged), noun)}: {counts}" + (f" ({waived} WAIVED)" if waived else "")


def _verdict_table(results: Results) -> str:
    waived = Counter(claim.verdict for claim in results.claims if claim.waived)
    pairs = Counter(Verdict.worst(c.verdict for c in claims) for claims in results.by_pair().values())
    counts = results.counts
    rows: list[tuple[object, ...]] = [(v, counts[v], waived[v] or "", pairs[v]) for v in VERDICTS if v in counts]
    if not rows:
        return ""
    rows.append(("total", len(results.claims), results.waived or "", len(results.pairs)))
    return _table(rows, ("verdict", "claims", "waived", "pairs, by worst claim"), right=(1, 2, 3))


def _failure_table(results: Results, width: int) -> str:
    failures = results.failures()
    if not failures:
        return ""
    checks = results.checks_by_claim()
    rows = [_failure_row(claim, leading_check(checks[claim.claim])) for claim in failures[:WORST]]
    hidden = len(failures) - len(rows)
    title = f"failing claims, worst first{f' ({hidden} more in the report)' if hidden else ''}:"
    table = _table(_fitted(rows, width), _PROBLEM_COLUMNS, right=(3,))
    repro = failures[0].repro
    return f"{title}\n{table}" + (f"\nreproduce the first: {one_line(repro)}" if repro else "")


def _failure_row(claim: ClaimResult, check: Check | None) -> tuple[str, ...]:
    stage, rule = (check.stage, check.rule) if check else ("-", "-")
    message = (check.message if check else "") or claim.reason
    cells = (claim.verdict, stage, rule, lsb(claim.max_lsb), claim.claim, message)
    return tuple(one_line(cell) for cell in cells)


def _fitted(rows: Sequence[Sequence[str]], width: int) -> list[tuple[str, ...]]:
    """The rows with the claim above its message in the last column, each cut to the room that is left."""
    headers = [name + " " * MIN_PADDING for name in _PROBLEM_COLUMNS]
    narrow = zip(headers[:4], *(row[:4] for row in rows), strict=True)
    room = max(width - sum(max(map(len, column)) + 2 for column in narrow), len(headers[4]))
    return [(*row[:4], f"{middle(row[4], room)}\n{end(row[5], room)}") for row in rows]


def _unexercised(results: Results, width: int) -> str:
    groups = results.unexercised()
    lines = [end(f"{len(claims):6d}  {one_line(reason)}", width) for reason, claims in groups.items()]
    return "\n".join(["unexercised, by reason:", *lines]) if lines else ""


def _models(results: Results, width: int) -> str:
    """The models that do not pass, worst first; they are few."""
    red = sorted((model for model in results.models if not model.passes), key=lambda m: (m.verdict.rank, m.model))
    lines = [end(f"{m.verdict:<11}  {one_line(f'{m.model}: {m.reason}')}", width) for m in red]
    return "\n".join(["models that do not pass, worst first:", *lines]) if lines else ""


def _waived(results: Results, width: int) -> str:
    waivers = [row.waiver for row in results.judged if row.waived and row.waiver]
    found = Counter((waiver.reason, waiver.url or f"until {waiver.expires}") for waiver in waivers)
    lines = [end(f"{n:6d}  {one_line(f'{reason} ({ref})')}", width) for (reason, ref), n in found.most_common()]
    return "\n".join(["WAIVED, by reason:", *lines]) if lines else ""


def _effort(results: Results) -> str:
    """What the run took: checks per second and for each claim, and the memory of the largest process."""
    footer, checks = results.footer, len(results.checks)
    claims = len(results.claims)
    if footer is None or not claims or not footer.seconds:
        return ""
    rate = f"{checks} checks in {footer.seconds:.1f} s: {checks / footer.seconds:.1f} per second"
    work = sum(claim.seconds for claim in results.claims)
    each = f"{checks / claims:.1f} checks and {1000 * work / claims:.0f} ms of work per claim"
    memory = f"; largest process {footer.peak_mib:.0f} MiB" if footer.peak_mib else ""
    facts = f"; {counted(len(results.measurements), 'measurement')} in the report" if results.measurements else ""
    return f"{rate}, {each}{memory}{facts}"


def _table(rows: Sequence[Sequence[object]], headers: Sequence[str], right: Sequence[int]) -> str:
    align = ["right" if i in right else "left" for i in range(len(headers))]
    return tabulate(rows, headers=headers, tablefmt="simple", disable_numparse=True, colalign=align)
