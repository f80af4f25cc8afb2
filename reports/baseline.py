"""Baselines: what a run of a backend is known to give, as a small file that later runs are held to.

The first line says, as JSON, which run it is of. Then each claim that is not VERIFIED has a line: its verdict, the rule
that decided, the number of cases and comparisons in which it fails, and its ID. ``-`` stands for no rule, ``?`` for
what varies or is not known. All other claims of the config are VERIFIED. A waiver, which covers a verdict, a rule and
an error, would not notice that a kernel fails in more cases.

A verdict depends on the kernels (so on the release of torch and on the CPU's instruction sets, the run's ``isa``) and
on the cases (so on profile and seed): only equal runs are compared, and a run that cannot be compared says so. The
wheel does not matter: one with CUDA, such as 2.13.0+cu130, has the kernels of the CPU that 2.13.0+cpu has.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import ClassVar, NamedTuple, cast

from fx_quant_conformance.reports.codec import SchemaError, decode, line_of, loads
from fx_quant_conformance.reports.diff import Change, Difference, Differences, Side, compare_sides, make_side
from fx_quant_conformance.reports.reading import FileFault, open_regular, read_text
from fx_quant_conformance.reports.results import Lead, Results, ResultsError, read_results
from fx_quant_conformance.reports.schema import Header
from fx_quant_conformance.reports.text import cut_end
from fx_quant_conformance.reports.verdicts import PASSING, Outcome, Verdict

MOST_SHOWN = 20
"""Maximal number of differences that are shown."""
_COMMAND = "fx-quant-conformance report baseline"
_UNNAMED = ("", "custom")
"""Levels that do not determine the kernels."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Basis:
    """First row: the run that a baseline is of."""

    kind: ClassVar[str] = "baseline"
    backend: str
    isa: str
    torch: str
    profile: str
    seed: int
    config_sha256: str
    claims: int
    """Number of claims of the config."""


class Deviation(NamedTuple):
    """What is known of a claim that is not VERIFIED."""

    verdict: Verdict
    """Its verdict."""
    rule: str | None = ""
    """ID of the rule that decided; "": none did; None: it varies, or is not known."""
    failing: int | None = None
    """In how many cases and comparisons it fails; None: that varies, or is not known."""

    @property
    def side(self) -> Side:
        """What is compared of the claim."""
        return Side(self.verdict, Lead(self.rule or ""), self.failing)


@dataclass(frozen=True, slots=True, kw_only=True)
class Baseline:
    """What a run is known to give."""

    basis: Basis
    deviations: Mapping[str, Deviation]
    """The claims that are not VERIFIED, by ID."""

    @property
    def text(self) -> str:
        """Content of the file: one claim per line, sorted, for a readable diff."""
        lines = [f"{_format_deviation(self.deviations[name])} {name}\n" for name in sorted(self.deviations)]
        return "".join([f"{line_of(self.basis)}\n", *lines])


@dataclass(frozen=True, slots=True, kw_only=True)
class Drift:
    """How a run differs from its baseline."""

    differences: tuple[str, ...] = ()
    """Lines to show, a headline first; they fail the run."""
    note: str = ""
    """Why nothing is compared, or ""."""


def name_file(run: Header | Basis) -> str:
    """Return the name of the baseline of a run's backend, level and release of torch."""
    return f"{run.backend}.{run.isa}.torch-{_release_of(run.torch)}.txt"


def _release_of(version: str) -> str:
    """Return major and minor number of a version of torch: patches, builds and wheels have the same kernels."""
    return ".".join(version.split(".")[:2])


def read_baseline_file(path: Path) -> Baseline:
    """Read a baseline. Raises ResultsError for any other file."""
    try:
        first, *lines = read_text(path).removesuffix("\n").split("\n")
        basis = cast("Basis", decode(loads(first), {Basis.kind: Basis}))
        return Baseline(basis=basis, deviations=dict(map(_parse_deviation, lines)))
    except FileFault as fault:
        raise ResultsError(f"{path}: {fault}") from fault
    except (SchemaError, ValueError) as error:
        raise ResultsError(f"{path}: is no baseline: {error}; {_COMMAND} makes one of a results file") from error


def _format_deviation(known: Deviation) -> str:
    rule = "?" if known.rule is None else known.rule or "-"
    return f"{known.verdict} {rule} {'?' if known.failing is None else known.failing}"


def _parse_deviation(line: str) -> tuple[str, Deviation]:
    try:
        verdict, rule, failing, name = line.split(" ", 3)
        count = None if failing == "?" else int(failing)
        return name, Deviation(Verdict(verdict), None if rule == "?" else rule.removeprefix("-"), count)
    except ValueError as error:
        raise ValueError(f"a line has verdict, rule, number and ID; found {cut_end(line, 60)!r}") from error


def write_baseline(files: Sequence[Path], folder: Path) -> str:
    """Write the baseline of one or more runs into a folder; return a line that says so.

    Of several runs it leaves out what they differ in: rules and counts of kernels that read uninitialised memory.
    Raises ResultsError for files that are no whole runs, or do not show the same, and OSError.
    """
    baseline = reduce(_merge, [baseline_of(read_results(file)) for file in files])
    path = folder / name_file(baseline.basis)
    path.write_text(baseline.text, encoding="utf-8")
    return f"{path}: {len(baseline.deviations)} of {baseline.basis.claims} claims are not VERIFIED"


def baseline_of(results: Results) -> Baseline:
    """Return the baseline of a whole run. Raises ResultsError for a run that does not show all claims."""
    header, leads = results.header, results.leads()
    if why := _format_unfit(results):
        raise ResultsError(f"no baseline: {why}; run pytest conformance --backend={header.backend} to its end")
    basis = Basis(
        backend=header.backend,
        isa=header.isa,
        torch=header.torch,
        profile=header.profile,
        seed=header.seed,
        config_sha256=header.config_sha256,
        claims=header.claims_in_config,
    )
    deviations = {
        claim.claim: Deviation(
            claim.verdict, leads[claim.claim].rule, None if claim.verdict in PASSING else claim.failing or None
        )
        for claim in results.claims
        if claim.verdict is not Verdict.VERIFIED
    }
    return Baseline(basis=basis, deviations=deviations)


def _merge(one: Baseline, two: Baseline) -> Baseline:
    """Merge two runs: a claim that crashes in one and is refuted in the other crashes."""
    if one.basis != two.basis or one.deviations.keys() != two.deviations.keys():
        raise ResultsError("no baseline: two runs are not of one config, level, torch, profile and seed, or differ")
    merged: dict[str, Deviation] = {}
    for name, mine in one.deviations.items():
        other = two.deviations[name]
        verdict = Verdict.worst((mine.verdict, other.verdict))
        if not (verdict.may_be(mine.verdict) and verdict.may_be(other.verdict)):
            raise ResultsError(f"no baseline: {name} is {mine.verdict} in one run and {other.verdict} in the other")
        rule = mine.rule if mine.rule == other.rule else None
        failing = mine.failing if mine.failing == other.failing else None
        merged[name] = Deviation(verdict, rule, failing)
    return Baseline(basis=one.basis, deviations=merged)


def compare_baseline(path: Path, seen: Mapping[str, Side], header: Header) -> Drift:
    """Compare a run's claims, before waivers, with the baseline at ``path``.

    ``seen`` is by claim ID; a claim of the baseline that is missing there counts only where the whole config was
    judged. A file that cannot be read is a difference.
    """
    if header.isa in _UNNAMED:
        return Drift(note=f"no baseline: the level of the kernels is {header.isa or 'not known'}: nothing compared")
    if not path.is_file():
        how = f"{_COMMAND} makes it from the results of a run of profile full"
        return Drift(note=f"no baseline: {path.name} does not exist: nothing compared; {how}")
    try:
        baseline = read_baseline_file(path)
    except ResultsError as error:
        return Drift(differences=(str(error),))
    if why := _format_difference(header, baseline.basis):
        return Drift(note=f"{path.name}: {why}: nothing compared")
    changes = [_format_change(row) for row in _compare(baseline, seen) if row.change is not Change.UNCHANGED]
    return Drift(differences=_shorten(path, [*_compare_configs(baseline, header), *changes]))


def compare_with_baseline(path: Path, results: Results) -> Differences:
    """Compare a run with a baseline, as `reports.diff.compare_runs` does with a run. Raises ResultsError."""
    baseline, leads = read_baseline_file(path), results.leads()
    seen = {claim.claim: make_side(claim, leads[claim.claim]) for claim in results.claims}
    why = _format_difference(results.header, baseline.basis)
    return Differences(
        rows=_compare(baseline, seen),
        basis=(*([why] if why else []), *_compare_configs(baseline, results.header)),
        is_complete=results.outcome is not Outcome.INCOMPLETE,
        title=path.name,
    )


def is_baseline(path: Path) -> bool:
    """Tell whether a file is a baseline, by its first bytes."""
    try:
        with open_regular(path) as file:
            return b'"kind": "baseline"' in file.read(2000)
    except (FileFault, OSError):
        return False  # who reads it says why


def _format_difference(header: Header, basis: Basis) -> str:
    """Say why a run cannot be compared with a baseline; empty: it can."""
    releases = ("torch", _release_of(header.torch), _release_of(basis.torch))
    pairs = [releases, *((name, getattr(header, name), getattr(basis, name)) for name in ("profile", "seed"))]
    different = [f"it is of {name} {theirs}, the run of {ours}" for name, ours, theirs in pairs if ours != theirs]
    if header.options.get("max_examples") is not None:
        different.append("the run has --max-examples")
    return ", ".join(different)


def _format_unfit(results: Results) -> str:
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


def _compare_configs(baseline: Baseline, header: Header) -> Iterator[str]:
    basis = baseline.basis
    if header.config_sha256 != basis.config_sha256:
        yield "the config is not the one that the baseline is of: its sha256 differs"
    if header.claims_in_config != basis.claims:
        yield f"the config has {header.claims_in_config} claims; the baseline is of {basis.claims}"


def _compare(baseline: Baseline, seen: Mapping[str, Side]) -> tuple[Difference, ...]:
    """Compare the claims of a run with what is known of them; those that got worse come first."""
    known = baseline.deviations
    pairs = {name: _pair(known.get(name), side) for name, side in seen.items()}
    before, after = ({name: pair[index] for name, pair in pairs.items()} for index in (0, 1))
    if len(seen) >= baseline.basis.claims:
        before |= {name: known[name].side for name in known if name not in seen}
    return compare_sides(before, after)


def _pair(known: Deviation | None, side: Side) -> tuple[Side, Side]:
    """Return what the baseline and a run say of a claim, as far as both know it."""
    known = known or Deviation(Verdict.VERIFIED)
    if known.verdict is not side.verdict:
        return known.side, known.side if known.verdict.may_be(side.verdict) else Side(side.verdict, side.lead)
    rules = ("", "") if known.rule is None or known.verdict is Verdict.VERIFIED else (known.rule, side.lead.rule)
    counts = (None, None) if None in (known.failing, side.failing) else (known.failing, side.failing)
    before, after = (Side(known.verdict, Lead(rule), count) for rule, count in zip(rules, counts, strict=True))
    return before, after


def _format_change(row: Difference) -> str:
    if row.new is None or row.old is None:
        return f"{row.name}: {row.why}"
    rule = f" by {row.new.lead.rule}" if row.new.lead.rule else ""
    return f"{row.name}: {row.change}: {row.why}; it is {row.new.verdict}{rule}"


def _shorten(path: Path, lines: Sequence[str]) -> tuple[str, ...]:
    if not lines:
        return ()
    todo = f"if that is meant, {_COMMAND} writes it anew"
    end = [f"… and {len(lines) - MOST_SHOWN} more"] if len(lines) > MOST_SHOWN else []
    return (f"{path.name} differs in {len(lines)} places; {todo}", *lines[:MOST_SHOWN], *end)
