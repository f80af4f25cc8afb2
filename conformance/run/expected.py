"""Expected verdicts: a run that differs from them fails.

`expected_verdicts/<backend>.<isa>.json` says what each claim was found to be. Of a claim that is known to fail it also
says in how many cases and comparisons: a waiver that covers a verdict and an error would not notice that its kernel
fails in more.

A verdict depends on the kernels, so on torch and on the CPU's instruction sets (`conformance.machine.isa`), and on the
cases, so on profile and seed: only like is compared with like, and where nothing is comparable the run says so.

``python -m conformance expect build/conformance/qnnpack/results.jsonl`` writes the file of a run. Of several
runs, it leaves out the counts in which they differ: those of kernels that read what memory happens to hold.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import reduce
from pathlib import Path
from typing import Any, NamedTuple

from reports.results import Results, read_results
from reports.schema import Header
from reports.verdicts import PASSING, Outcome, Verdict

FOLDER = Path(__file__).resolve().parent / "expected_verdicts"
SCHEMA = 2
MOST_SHOWN = 20
"""Differences that are shown one by one at most."""

_UNNAMED = ("", "custom")
"""Levels that say nothing of the kernels."""
_BASIS = ("backend", "isa", "torch", "profile", "seed", "config_sha256")
"""What a file has from the header of its run."""


class ExpectedError(Exception):
    """A file of expected verdicts that cannot be read, or a run of which none can be written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """The verdict of every claim of a backend, and what they hold for.

    ``failing`` has the claims that are known to fail, and in how many cases and comparisons, where that is no chance.
    """

    schema: int
    backend: str
    isa: str
    torch: str
    profile: str
    seed: int
    config_sha256: str
    verdicts: dict[str, Verdict]
    failing: dict[str, int]


class VerdictSeen(NamedTuple):
    """A run's verdict of a claim or model. ``failing``: as in its row; None: it varies from run to run."""

    verdict: Verdict
    failing: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Drift:
    """How a run differs from the expected verdicts.

    ``differences``: lines to show, a headline first; they fail the run. ``note``: why nothing is compared, or "".
    """

    differences: tuple[str, ...] = ()
    note: str = ""


def expected_path(header: Header, folder: Path = FOLDER) -> Path:
    """Return where the expected verdicts of a run's backend and level are, if there are any."""
    return folder / f"{header.backend}.{header.isa}.json"


def compare_expected(path: Path, seen: Mapping[str, VerdictSeen], header: Header) -> Drift:
    """Compare a run's verdicts, waived ones as they were found, with the file at ``path``.

    ``seen`` is by claim ID (of claims, not of models); a claim of the file that is not among them counts only where
    the whole config was judged. A file that cannot be read is a difference.
    """
    if header.isa in _UNNAMED or not path.is_file():
        level = header.isa or "this CPU"
        return Drift(note=f"no expected verdicts for {header.backend} on {level}: nothing compared")
    try:
        expected = read_expected(path)
    except ExpectedError as error:
        return Drift(differences=(str(error),))
    if why := _unlike(header, expected):
        return Drift(note=f"{path.name}: {why}: nothing compared")
    return Drift(differences=_shorten(path, _differences(expected, seen, header)))


def read_expected(path: Path) -> Expected:
    """Read a file of expected verdicts. Raises ExpectedError when it is not one."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["schema"] != SCHEMA:
            raise ExpectedError(f"{path}: schema {content['schema']!r}; expected {SCHEMA}: write it anew from a run")
        verdicts = {key: Verdict(value) for key, value in content["verdicts"].items()}
        failing = {key: int(value) for key, value in content["failing"].items()}
        return Expected(**content | {"verdicts": verdicts, "failing": failing})
    except OSError as error:
        raise ExpectedError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ExpectedError(f"{path}: no file of expected verdicts: {error}; write it anew from a run") from error


def expected_of(results: Results, *others: Results) -> Expected:
    """Return the verdicts of a whole run, and the counts that ``others``, runs of the same, found as well.

    Raises ExpectedError when a run does not show what to expect of every claim, or two do not show the same.
    """
    first, *further = map(_of_run, (results, *others))
    counts = [each.failing.items() for each in (first, *further)]
    failing = dict(item for item in counts[0] if all(item in each for each in counts))
    return replace(reduce(_shown_by_both, further, first), failing=failing)


def _shown_by_both(one: Expected, other: Expected) -> Expected:
    """Of a claim that crashes in one run and is refuted in the other, the crash is to be expected."""
    if why := _first_difference(one, other):
        raise ExpectedError(f"two runs do not show the same: {why}")
    return replace(
        one, verdicts={name: Verdict.worst((one.verdicts[name], other.verdicts[name])) for name in one.verdicts}
    )


def _of_run(results: Results) -> Expected:
    if why := _unfit(results):
        raise ExpectedError(f"{why}; run pytest conformance --backend={results.header.backend} to its end")
    basis: dict[str, Any] = {name: getattr(results.header, name) for name in _BASIS}
    claims = sorted(results.claims, key=lambda claim: claim.claim)
    verdicts = {claim.claim: claim.verdict for claim in claims}
    failing = {claim.claim: claim.failing for claim in claims if claim.verdict not in PASSING and claim.failing}
    return Expected(schema=SCHEMA, verdicts=verdicts, failing=failing, **basis)


def _first_difference(one: Expected, other: Expected) -> str:
    """Say in what two runs do not show the same; empty: they do."""
    for name in _BASIS:
        if getattr(one, name) != getattr(other, name):
            return f"{name} is {getattr(one, name)!r} in one and {getattr(other, name)!r} in the other"
    if alone := sorted(set(one.verdicts) ^ set(other.verdicts)):
        return f"it is of other claims: {alone[0]}"
    for name, verdict in one.verdicts.items():
        found = (verdict, other.verdicts[name])
        if not all(map(Verdict.worst(found).may_be, found)):
            return f"{name} is {found[0]} in one and {found[1]} in the other"
    return ""


def expected_text(expected: Expected) -> str:
    """Return the file's text: a claim a line, sorted, so that a diff can be read."""
    return json.dumps(asdict(expected), indent=1, ensure_ascii=False) + "\n"


def write_expected(files: Sequence[Path], folder: Path) -> str:
    """Write the file of one or more runs; return a line that says so.

    Raises ResultsError, ExpectedError or OSError where none can be written.
    """
    results, *others = map(read_results, files)
    text, path = expected_text(expected_of(results, *others)), expected_path(results.header, folder)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return f"{path}: {len(results.claims)} verdicts"


def _unlike(header: Header, expected: Expected) -> str:
    """Say what makes a run incomparable with a file; empty: nothing does."""
    pairs = [(name, getattr(header, name), getattr(expected, name)) for name in ("torch", "profile", "seed")]
    different = [f"it is of {name} {theirs}, the run of {ours}" for name, ours, theirs in pairs if ours != theirs]
    if header.options.get("max_examples") is not None:
        different.append("the run has --max-examples")
    return ", ".join(different)


def _unfit(results: Results) -> str:
    """Say why a run's verdicts are not to be expected of the next; empty: they are."""
    header, footer = results.header, results.footer
    own = () if footer is None else footer.problems
    broken = [problem for problem in results.problems if problem not in own]
    reasons = (
        (results.outcome is Outcome.INCOMPLETE, "the run is incomplete"),
        (bool(broken), f"the file disagrees with itself: {'; '.join(broken)}"),
        (len(results.claims) != header.claims_in_config, "the run leaves claims out"),
        (header.profile != "full", f"the run is of profile {header.profile}, not full"),
        (header.options.get("max_examples") is not None, "the run has --max-examples"),
        (header.isa in _UNNAMED, f"the level of the kernels is {header.isa or 'not known'}"),
    )
    return next((why for holds, why in reasons if holds), "")


def _differences(expected: Expected, seen: Mapping[str, VerdictSeen], header: Header) -> list[str]:
    """List the claims that differ, those that got worse first."""
    is_whole = len(seen) >= header.claims_in_config
    names = sorted({*seen, *(expected.verdicts if is_whole else ())})
    verdicts = {name: each.verdict for name, each in seen.items()}
    pairs = [(name, expected.verdicts.get(name), verdicts.get(name)) for name in names]
    changed = sorted((pair for pair in pairs if _changed(*pair[1:])), key=lambda pair: _gain(*pair[1:]))
    other_config = header.config_sha256 != expected.config_sha256
    lines = ["the config is not the one that the file is of: its sha256 differs"] if other_config else []
    lines += [f"{name}: {_change(old, new)}" for name, old, new in changed]
    return lines + [line for name, old, new in pairs if old is new for line in _recount(name, expected, seen[name])]


def _recount(name: str, expected: Expected, found: VerdictSeen) -> Iterator[str]:
    """Say where a claim fails as it is expected to, but in more cases or fewer."""
    count = expected.failing.get(name)
    if None not in (count, found.failing) and count != found.failing:
        yield f"{name}: {found.verdict} as expected, but in {found.failing} cases and comparisons, not in {count}"


def _changed(old: Verdict | None, new: Verdict | None) -> bool:
    return old is None or new is None or not old.may_be(new)


def _gain(old: Verdict | None, new: Verdict | None) -> int:
    """Rank a change: below 0 it got worse."""
    return 0 if old is None or new is None else new.rank - old.rank


def _change(old: Verdict | None, new: Verdict | None) -> str:
    if old is None:
        return f"found {new}; the file has no such claim"
    return f"expected {old}, found {new}" if new is not None else f"expected {old}, not judged"


def _shorten(path: Path, lines: Sequence[str]) -> tuple[str, ...]:
    if not lines:
        return ()
    todo = "if that is meant, python -m conformance expect RESULTS.jsonl writes it anew"
    more = [f"… and {len(lines) - MOST_SHOWN} more"] if len(lines) > MOST_SHOWN else []
    return (f"{path.name} differs in {len(lines)} places; {todo}", *lines[:MOST_SHOWN], *more)
