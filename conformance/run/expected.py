"""Expected verdicts: a run that differs from them fails.

`expected_verdicts/<backend>.<isa>.torch-<release>.json` holds the verdict of each claim. For a claim that is known to
fail it also holds the number of failing cases and comparisons: a waiver, which covers a verdict and an error, would not
notice that its kernel fails in more.

A verdict depends on the kernels (so on the release of torch and on the CPU's instruction sets,
`conformance.machine.isa`) and on the cases (so on profile and seed): only equal runs are compared, and a run that
cannot be compared says so. The wheel does not matter: one with CUDA, such as 2.13.0+cu130, has the kernels of the CPU
that 2.13.0+cpu has.

``python -m conformance expect build/conformance/qnnpack/results.jsonl`` writes the file of a run. For several runs, it
omits the counts in which they differ: those of kernels that read uninitialised memory.
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
"""Maximal number of differences that are shown."""
_COMMAND = "python -m conformance expect RESULTS.jsonl"
_UNNAMED = ("", "custom")
"""Levels that do not determine the kernels."""
_BASIS = ("backend", "isa", "torch", "profile", "seed", "config_sha256")
"""The fields that a file takes from the header of its run."""


class ExpectedError(Exception):
    """A file of expected verdicts that cannot be read, or a run for which none can be written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """The verdict of every claim of a backend, and the conditions under which they hold.

    ``failing``: in how many cases and comparisons a claim is known to fail, if that number is reproducible.
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
    """A run's verdict on a claim or model. ``failing``: as in its row; None: it varies. ``waived``: by this run."""

    verdict: Verdict
    failing: int | None = None
    waived: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Drift:
    """How a run differs from the expected verdicts.

    ``differences``: lines to show, a headline first; they fail the run. ``note``: why nothing is compared, or "".
    """

    differences: tuple[str, ...] = ()
    note: str = ""


def expected_path_of(header: Header, folder: Path = FOLDER) -> Path:
    """Return the path of the expected verdicts for a run's backend, level and torch; the file may not exist."""
    return folder / f"{header.backend}.{header.isa}.torch-{_release_of(header.torch)}.json"


def _release_of(version: str) -> str:
    """Return major and minor number of a version of torch: patches, builds and wheels have the same kernels."""
    return ".".join(version.split(".")[:2])


def compare_expected(path: Path, seen: Mapping[str, VerdictSeen], header: Header) -> Drift:
    """Compare a run's verdicts, before waivers, with the file at ``path``.

    ``seen`` is by claim ID (of claims, not of models); a claim of the file that is missing there counts only where the
    whole config was judged. A file that cannot be read is a difference.
    """
    if header.isa in _UNNAMED:
        level = header.isa or "not known"
        return Drift(note=f"no expected verdicts: the level of the kernels is {level}: nothing compared")
    if not path.is_file():
        how = f"{_COMMAND} makes it from the results of a run of profile full"
        return Drift(note=f"no expected verdicts: {path.name} does not exist: nothing compared; {how}")
    try:
        expected = read_expected(path)
    except ExpectedError as error:
        return Drift(differences=(str(error),))
    if why := _explain_difference(header, expected):
        return Drift(note=f"{path.name}: {why}: nothing compared")
    return Drift(differences=_shorten(path, _list_differences(expected, seen, header)))


def read_expected(path: Path) -> Expected:
    """Read a file of expected verdicts. Raises ExpectedError for any other file."""
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


def expected_of(results: Results, *repeats: Results) -> Expected:
    """Return the verdicts of a whole run, and the counts on which its repeats agree.

    Raises ExpectedError when a run does not show what to expect of every claim, or two do not show the same.
    """
    first, *further = map(_expected_of_run, (results, *repeats))
    failing = dict(item for item in first.failing.items() if all(item in each.failing.items() for each in further))
    return replace(reduce(_merge, further, first), failing=failing)


def _merge(one: Expected, two: Expected) -> Expected:
    """Merge two runs: a claim that crashes in one and is refuted in the other is expected to crash."""
    if why := _find_difference(one, two):
        raise ExpectedError(f"two runs do not show the same: {why}")
    pairs = {name: (verdict, two.verdicts[name]) for name, verdict in one.verdicts.items()}
    return replace(one, verdicts={name: Verdict.worst(pair) for name, pair in pairs.items()})


def _expected_of_run(results: Results) -> Expected:
    if why := _explain_unfit(results):
        raise ExpectedError(f"{why}; run pytest conformance --backend={results.header.backend} to its end")
    basis: dict[str, Any] = {name: getattr(results.header, name) for name in _BASIS}
    claims = sorted(results.claims, key=lambda claim: claim.claim)
    verdicts = {claim.claim: claim.verdict for claim in claims}
    failing = {claim.claim: claim.failing for claim in claims if claim.verdict not in PASSING and claim.failing}
    return Expected(schema=SCHEMA, verdicts=verdicts, failing=failing, **basis)


def _find_difference(one: Expected, two: Expected) -> str:
    """Say in what two runs differ; empty: they do not."""
    for name in _BASIS:
        if getattr(one, name) != getattr(two, name):
            return f"{name} is {getattr(one, name)!r} in one and {getattr(two, name)!r} in the other"
    if unshared := sorted(set(one.verdicts) ^ set(two.verdicts)):
        return f"it is of other claims: {unshared[0]}"
    for name, verdict in one.verdicts.items():
        pair = (verdict, two.verdicts[name])
        if not all(map(Verdict.worst(pair).may_be, pair)):
            return f"{name} is {pair[0]} in one and {pair[1]} in the other"
    return ""


def expected_text_of(expected: Expected) -> str:
    """Return the file's text: one claim per line, sorted, for a readable diff."""
    return json.dumps(asdict(expected), indent=1, ensure_ascii=False) + "\n"


def write_expected(files: Sequence[Path], folder: Path) -> str:
    """Write the file of one or more runs; return a line that says so. Raises ResultsError, ExpectedError or OSError."""
    results, *repeats = map(read_results, files)
    text, path = expected_text_of(expected_of(results, *repeats)), expected_path_of(results.header, folder)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return f"{path}: {len(results.claims)} verdicts"


def _explain_difference(header: Header, expected: Expected) -> str:
    """Say why a run cannot be compared with a file; empty: it can."""
    releases = ("torch", _release_of(header.torch), _release_of(expected.torch))
    pairs = [releases, *((name, getattr(header, name), getattr(expected, name)) for name in ("profile", "seed"))]
    different = [f"it is of {name} {theirs}, the run of {ours}" for name, ours, theirs in pairs if ours != theirs]
    if header.options.get("max_examples") is not None:
        different.append("the run has --max-examples")
    return ", ".join(different)


def _explain_unfit(results: Results) -> str:
    """Say why a run's verdicts cannot be expected of later runs; empty: they can."""
    header, footer = results.header, results.footer
    known = () if footer is None else footer.problems
    broken = [problem for problem in results.problems if problem not in known]
    reasons = (
        (results.outcome is Outcome.INCOMPLETE, "the run is incomplete"),
        (bool(broken), f"the file disagrees with itself: {'; '.join(broken)}"),
        (len(results.claims) != header.claims_in_config, "the run leaves claims out"),
        (header.profile != "full", f"the run is of profile {header.profile}, not full"),
        (header.options.get("max_examples") is not None, "the run has --max-examples"),
        (header.isa in _UNNAMED, f"the level of the kernels is {header.isa or 'not known'}"),
    )
    return next((why for holds, why in reasons if holds), "")


def _list_differences(expected: Expected, seen: Mapping[str, VerdictSeen], header: Header) -> list[str]:
    """List the claims that differ, those that got worse first."""
    is_whole = len(seen) >= header.claims_in_config
    names = sorted({*seen, *(expected.verdicts if is_whole else ())})
    is_same_config = header.config_sha256 == expected.config_sha256
    lines = [] if is_same_config else ["the config is not the one that the file is of: its sha256 differs"]
    changes = [_describe_change(name, expected.verdicts.get(name), seen.get(name)) for name in names]
    lines += [line for _, line in sorted(filter(None, changes), key=lambda change: change[0])]
    return lines + [line for name in names if name in seen for line in _recount(name, expected, seen[name])]


def _recount(name: str, expected: Expected, seen: VerdictSeen) -> Iterator[str]:
    """Yield a line for a claim that fails as expected, but in more or fewer cases."""
    count = expected.failing.get(name)
    is_known = expected.verdicts.get(name) is seen.verdict and None not in (count, seen.failing)
    if is_known and count != seen.failing:
        yield f"{name}: {seen.verdict} as expected, but in {seen.failing} cases and comparisons, not in {count}"


def _describe_change(name: str, old: Verdict | None, seen: VerdictSeen | None) -> tuple[int, str] | None:
    """Rank and describe a change of verdict (a negative rank: it got worse); None: it did not change."""
    if old is None or seen is None:
        text = f"expected {old}, not judged" if seen is None else f"found {seen.verdict}; the file has no such claim"
        return 0, f"{name}: {text}"
    gain, text = seen.verdict.rank - old.rank, f"expected {old}, found {seen.verdict}"
    return None if old.may_be(seen.verdict) else (gain, f"{name}: {text}")


def _shorten(path: Path, lines: Sequence[str]) -> tuple[str, ...]:
    if not lines:
        return ()
    todo = f"if that is meant, {_COMMAND} writes it anew"
    end = [f"… and {len(lines) - MOST_SHOWN} more"] if len(lines) > MOST_SHOWN else []
    return (f"{path.name} differs in {len(lines)} places; {todo}", *lines[:MOST_SHOWN], *end)
