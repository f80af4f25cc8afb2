"""The report as Markdown, for the summary of a CI job: verdict, totals, the worst claims; at most 1 MiB.

Every text is escaped character by character, so that nothing in it is markup, a link, a cell's end or HTML.
"""

from __future__ import annotations

import os
import string
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from reports.decision import list_untried, spell_work
from reports.diff import compare_runs
from reports.reading import FileFault, open_to_append
from reports.results import Results, leading_check
from reports.terminal import count_line, spell_reason, verdict_line
from reports.text import join_lines, pluralize, shorten_commit, spell_duration, spell_lsb
from reports.verdicts import VERDICTS

WORST = 20
LONGEST = 300
"""Largest number of characters of a text, before it is escaped."""
VARIABLE = "GITHUB_STEP_SUMMARY"
_ESCAPED = str.maketrans({c: f"&#{ord(c)};" for c in string.punctuation if c not in ".,-+/ ="})


def markdown(results: Results, baseline: Results | None = None) -> str:
    """Return the report of a run as Markdown, at most 1 MiB.

    `baseline`: an earlier run, whose differences it shows.
    """
    header = results.header
    blocks: list[str] = [
        f"## {results.outcome}: {_escape(header.backend)} against {_escape(header.config_name)}",
        f"**{_escape(verdict_line(results))}**",
        _escape(count_line(results)),
    ]
    if untried := list(list_untried(results)):
        blocks.append("\n".join(["Not shown by this run:", "", *(f"- {_escape(line)}" for line in untried)]))
    if header.shard:
        blocks.append(f"This is shard {_escape(str(header.shard))}: it shows nothing about the others.")
    blocks.append("\n".join(f"- {_escape(problem)}" for problem in _limit(results.problems)))
    blocks.append(f"**{_escape(text)}**" if (text := results.describe_execution()) else "")
    parts = (_render_totals, _render_failures, _render_models, _render_reasons, _render_waived)
    blocks += [render(results) for render in parts]
    if baseline is not None:
        blocks.append(_render_differences(results, baseline))
    blocks.append(_render_environment(results))
    return "\n\n".join(block for block in blocks if block) + "\n"


def write_job_summary(results: Results, baseline: Results | None = None) -> str:
    """Append the Markdown to the file that $GITHUB_STEP_SUMMARY names, if it is set; return a line about it."""
    path = os.environ.get(VARIABLE)
    if not path:
        return ""
    try:
        with open_to_append(Path(path)) as file:
            file.write(markdown(results, baseline).encode(errors="backslashreplace"))
    except FileFault as fault:
        return join_lines(f"job summary: {path} {fault}") + "\n"
    except OSError as error:
        return join_lines(f"job summary: {path} cannot be written: {error.strerror}") + "\n"
    return join_lines(f"job summary: {path}") + "\n"


def _render_totals(results: Results) -> str:
    waived = {verdict: sum(c.waived and c.verdict is verdict for c in results.claims) for verdict in VERDICTS}
    rows = [(verdict.value, str(count), str(waived[verdict])) for verdict, count in results.counts.items()]
    rows.append(("total", str(len(results.claims)), str(results.waived)))
    return _to_table(("verdict", "claims", "of these waived"), rows)


def _render_failures(results: Results) -> str:
    failures = results.failures()
    if not failures:
        return ""
    checks = results.checks_by_claim()
    rows = []
    for claim in failures[:WORST]:
        lead = leading_check(checks[claim.claim])
        message = (lead.message if lead else "") or claim.reason
        rows.append((claim.verdict.value, lead.rule if lead else "", spell_lsb(claim.max_lsb), claim.claim, message))
    title = f"### {pluralize(len(failures), 'failing claim')}, worst first"
    more = f"\n\n{len(failures) - WORST} more are in the report." if len(failures) > WORST else ""
    return f"{title}\n\n{_to_table(('verdict', 'rule', 'LSB', 'claim', 'what is wrong'), rows)}{more}"


def _render_models(results: Results) -> str:
    rows = [(model.verdict.value, model.model, model.reason) for model in results.failing_models()[:WORST]]
    return f"### Models that do not pass\n\n{_to_table(('verdict', 'model', 'what is wrong'), rows)}" if rows else ""


def _render_reasons(results: Results) -> str:
    groups = (("Unexercised", results.unexercised()), ("Unshown", results.unshown()))
    tables = []
    for title, claims_by_reason in groups:
        rows = [(str(len(each)), spell_reason(reason, each)) for reason, each in claims_by_reason.items()][:WORST]
        tables += [f"### {title}\n\n{_to_table(('claims', 'reason'), rows)}"] if rows else []
    return "\n\n".join(tables)


def _render_waived(results: Results) -> str:
    count = sum(row.waived for row in results.judged)
    return f"{pluralize(count, 'verdict')} {'is' if count == 1 else 'are'} waived." if count else ""


def _render_differences(results: Results, baseline: Results) -> str:
    differences = compare_runs(baseline, results)
    counts = ", ".join(f"{count} {change}" for change, count in differences.counts.items())
    rows = [(row.change.value, *row.states, row.name, row.why) for row in differences.changed_rows[:WORST]]
    table = _to_table(("change", "was", "is", "claim or model", "what differs"), rows) if rows else ""
    return "\n\n".join(filter(None, (f"### Differences from the baseline\n\n{counts}", table)))


def _render_environment(results: Results) -> str:
    header, footer = results.header, results.footer
    rows = [
        ("suite", f"{header.suite_version} {shorten_commit(header.suite_commit)}"),
        ("backend", ", ".join([header.backend, *map(" ".join, sorted(header.versions.items()))])),
        ("torch, Python", f"{header.torch}, {header.python}"),
        ("CPU", f"{header.cpu} {header.isa}"),
        ("profile, seed", f"{header.profile}, {header.seed}"),
        ("config", f"{header.config_name} sha256 {header.config_sha256[:12]}"),
        ("duration", spell_duration(footer.seconds) if footer else "-"),
    ]
    work = spell_work(results)
    return _to_table(("run", ""), [*rows, *([("work", work)] if work else [])])


def _to_table(headers: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(headers)} |", f"|{' --- |' * len(headers)}"]
    return "\n".join([*lines, *(f"| {' | '.join(map(_escape, row))} |" for row in rows)])


def _limit(texts: Sequence[str]) -> Iterator[str]:
    yield from texts[:WORST]
    if len(texts) > WORST:
        yield f"… and {len(texts) - WORST} more"


def _escape(text: str) -> str:
    """Return a text in one line, cut, with everything escaped that Markdown or HTML could interpret."""
    line = join_lines(text[: 4 * LONGEST])
    shown = line if len(line) <= LONGEST else f"{line[:LONGEST]}… ({len(text)} characters)"
    return shown.translate(_ESCAPED)
