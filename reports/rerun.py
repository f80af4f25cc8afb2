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
from reports.text import one_line

ROOT = Path(__file__).resolve().parent.parent
_NOT_COMPARED = frozenset({"repro", "script"})
"""The command line differs by where the waivers are; so does what quotes it."""
_BASIS = ("suite_commit", "torch", "python", "isa", "cpu")


def draw(results: Results, count: int, seed: int) -> tuple[ClaimResult, ...]:
    """Draw `count` claims (all, if there are no more) of those whose numbers are not left to chance.

    The same seed gives the same draw.
    """
    chance = {check.claim for check in results.checks if check.is_nondeterministic}
    known = [claim for claim in results.claims if claim.claim not in chance]
    return tuple(random.Random(seed).sample(known, min(count, len(known))))


def rerun(results: Results, claims: Sequence[ClaimResult], waivers: Path | None) -> list[str]:
    """Run the claims again as the header says, by the suite of this checkout; return what differs, a line each.

    `waivers`: the file that the run used, or None. Rows are compared bit for bit, but for times. Raises ResultsError if
    there is no suite here, or it does not run.
    """
    if not claims:
        return []
    if not (ROOT / "conformance").is_dir():
        raise ResultsError(f"{ROOT}: has no conformance/: --rerun needs a checkout of the suite")
    with tempfile.TemporaryDirectory() as folder:
        command = [*_command(results, waivers), f"--report-dir={folder}", *(f"--claim={each.claim}" for each in claims)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        path = Path(folder) / "results.jsonl"
        if done.returncode not in (0, 1) or not path.is_file():
            told = one_line((done.stdout + done.stderr)[-400:])
            raise ResultsError(f"the suite ended with status {done.returncode}: {told}")
        again = read_results(path)
    return [*_elsewhere(results, again), *_differences(results, again, claims)]


def _command(results: Results, waivers: Path | None) -> Iterator[str]:
    """The command line by which the run was made."""
    header, options = results.header, results.header.options
    yield from (sys.executable, "-m", "pytest", str(ROOT / "conformance"), "-q")
    yield from (f"--backend={options.get('backend', header.backend)}", f"--seed={header.seed}")
    yield f"--profile={header.profile}"
    yield "--no-waivers" if waivers is None else f"--waivers={waivers.resolve()}"
    if options.get("strict"):
        yield "--strict"
    for name in ("claim_timeout", "max_examples", "isa"):
        if options.get(name) is not None:
            yield f"--{name.replace('_', '-')}={options[name]}"


def _elsewhere(old: Results, new: Results) -> Iterator[str]:
    """In what this machine is not that of the run: a reason for what differs, and no equal comparison."""
    for name in (*_BASIS, "versions"):
        was, now = getattr(old.header, name), getattr(new.header, name)
        if was != now:
            yield one_line(f"not the same machine or software: {name} was {was}, is {now}")


def _differences(old: Results, new: Results, claims: Sequence[ClaimResult]) -> Iterator[str]:
    rows_before, rows_after = (_rows(run, other) for run, other in ((old, new), (new, old)))
    for claim in claims:
        before, after = rows_before.get(claim.claim, []), rows_after.get(claim.claim, [])
        if before == after:
            continue
        pairs = zip(before, after, strict=False)
        keys = sorted({key for a, b in pairs for key in {*a, *b} if a.get(key) != b.get(key)})
        what = f"{', '.join(keys)} differ" if keys else f"{len(after)} rows, not {len(before)}"
        yield one_line(f"{claim.claim}: {what}")


def _rows(run: Results, other: Results) -> dict[object, list[dict[str, object]]]:
    """The rows of each claim, as they can be compared."""
    groups: dict[object, list[dict[str, object]]] = {}
    for row in comparable(run, other):
        plain = {key: value for key, value in row.items() if key not in _NOT_COMPARED}
        groups.setdefault(row.get("claim"), []).append(plain)
    return groups
