"""Running claims of a certificate again: drawn at random, by the suite of this checkout, compared bit for bit."""

from __future__ import annotations

import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from reports.results import Results, ResultsError, comparable, read_results
from reports.schema import ClaimResult
from reports.text import join_lines

ROOT = Path(__file__).resolve().parent.parent
_NOT_COMPARED = frozenset({"repro", "script"})
"""The command line differs with the path of the waivers; so does the script, which quotes it."""
_BASIS = ("suite_commit", "torch", "python", "isa", "cpu")


def draw(results: Results, count: int, seed: int) -> tuple[ClaimResult, ...]:
    """Draw `count` of the claims that are deterministic (at most all); the same seed gives the same draw."""
    nondeterministic = {check.claim for check in results.checks if check.is_nondeterministic}
    candidates = [claim for claim in results.claims if claim.claim not in nondeterministic]
    return tuple(random.Random(seed).sample(candidates, min(count, len(candidates))))


def rerun(results: Results, claims: Sequence[ClaimResult], waivers: Path | None) -> list[str]:
    """Run the claims again as the header says, by the suite of this checkout; return the differences, a line each.

    `waivers`: the file that the run used, or None. Rows are compared bit for bit, except times. Raises ResultsError if
    this is not a checkout of the suite, or the suite does not run.
    """
    if not claims:
        return []
    if not (ROOT / "conformance").is_dir():
        raise ResultsError(f"{ROOT}: has no conformance/: --rerun needs a checkout of the suite")
    with tempfile.TemporaryDirectory() as folder:
        selection = [f"--claim={claim.claim}" for claim in claims]
        command = [*_build_command(results, waivers), f"--report-dir={folder}", *selection]
        process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        path = Path(folder) / "results.jsonl"
        if process.returncode not in (0, 1) or not path.is_file():
            output = join_lines((process.stdout + process.stderr)[-400:])
            raise ResultsError(f"the suite ended with status {process.returncode}: {output}")
        repeated = read_results(path)
    return [*_compare_machines(results, repeated), *_compare_claims(results, repeated, claims)]


def _build_command(results: Results, waivers: Path | None) -> Iterator[str]:
    """Yield the command line that repeats the run."""
    header, options = results.header, results.header.options
    yield from (sys.executable, "-m", "pytest", str(ROOT / "conformance"), "-q")
    yield from (f"--backend={options.get('backend', header.backend)}", f"--seed={header.seed}")
    yield f"--profile={header.profile}"
    yield "--no-waivers" if waivers is None else f"--waivers={waivers.resolve()}"
    if options.get("strict"):
        yield "--strict"
    if options.get("without_execution_evidence"):
        yield "--without-execution-evidence"
    for name in ("claim_timeout", "max_examples", "isa"):
        if options.get(name) is not None:
            yield f"--{name.replace('_', '-')}={options[name]}"


def _compare_machines(old: Results, new: Results) -> Iterator[str]:
    """Yield the differences of machine and software: they may explain other differences."""
    for name in (*_BASIS, "versions"):
        was, now = getattr(old.header, name), getattr(new.header, name)
        if was != now:
            yield join_lines(f"not the same machine or software: {name} was {was}, is {now}")


def _compare_claims(old: Results, new: Results, claims: Sequence[ClaimResult]) -> Iterator[str]:
    rows_before, rows_after = (_group_rows(run, other) for run, other in ((old, new), (new, old)))
    for claim in claims:
        before, after = rows_before.get(claim.claim, []), rows_after.get(claim.claim, [])
        if before == after:
            continue
        pairs = zip(before, after, strict=False)
        keys = sorted({key for a, b in pairs for key in {*a, *b} if a.get(key) != b.get(key)})
        what = f"{', '.join(keys)} differ" if keys else f"{len(after)} rows, not {len(before)}"
        yield join_lines(f"{claim.claim}: {what}")


def _group_rows(run: Results, other: Results) -> dict[object, list[dict[str, object]]]:
    """Group the comparable rows by claim."""
    groups: dict[object, list[dict[str, object]]] = {}
    for row in comparable(run, other):
        plain = {key: value for key, value in row.items() if key not in _NOT_COMPARED}
        groups.setdefault(row.get("claim"), []).append(plain)
    return groups
