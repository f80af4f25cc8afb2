"""Merging: the shards of one run (`--shard=2/8`), from several machines, become one results file."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from fx_quant_conformance.reports.codec import encode
from fx_quant_conformance.reports.handed_in import BUNDLE, HANDED_IN
from fx_quant_conformance.reports.results import Results, ResultsError, digest_ids, read_results
from fx_quant_conformance.reports.schema import Header, Row
from fx_quant_conformance.reports.verdicts import Outcome
from fx_quant_conformance.reports.writer import ResultsWriter

_OWN = frozenset({"shard", "claims", "started", "platform", "cpu", "cpu_flags", "resumed", "foreign_code"})
"""Header fields in which shards of one run may differ; all others are equal."""


def merge(paths: Sequence[Path], target: Path) -> Results:
    """Write one results file of all shards of a run, in any order; return the results read back from it.

    Raises ResultsError for a shard that is missing, duplicated, incomplete, inconsistent, or of another run, and if
    `target` is one of the shards or cannot be written.
    """
    if os.path.realpath(target) in map(os.path.realpath, paths):
        raise ResultsError(f"{target}: the merged file would replace a shard; choose another with -o")
    shards = _order_shards([(path, read_results(path)) for path in paths])
    for path, results in shards:
        _check_shard(path, results, shards[0])
    runs = [results for _, results in shards]
    _check_whole([claim.claim for run in runs for claim in run.claims], runs[0].header)
    try:
        with ResultsWriter(target) as writer:
            for row in _merge_rows(runs):
                writer.write(row)
            _write_footer(writer, runs)
    except OSError as error:
        raise ResultsError(f"{target}: cannot be written: {error.strerror}") from error
    return read_results(target)


def _order_shards(files: Sequence[tuple[Path, Results]]) -> list[tuple[Path, Results]]:
    """Sort the shards by their places. Raises ResultsError if one is missing or duplicated."""
    places: dict[int, tuple[Path, Results]] = {}
    totals: dict[int, Path] = {}
    for path, results in files:
        shard = results.header.shard
        if shard is None:
            raise ResultsError(f"{path}: is no shard (its header names none); run with --shard=K/N")
        place, total = shard.place, shard.of
        if place in places:
            raise ResultsError(f"{path}: shard {shard} is here twice, the first is {places[place][0]}")
        places[place] = path, results
        totals[total] = path
    if len(totals) > 1:
        totals_text = " and ".join(f"of {total} ({path})" for total, path in totals.items())
        raise ResultsError(f"the shards are of runs in different numbers of parts: {totals_text}")
    total = next(iter(totals))
    if missing := [place for place in range(1, total + 1) if place not in places]:
        raise ResultsError(f"shard {', '.join(f'{place}/{total}' for place in missing)} is missing")
    return [places[place] for place in sorted(places)]


def _check_shard(path: Path, results: Results, first: tuple[Path, Results]) -> None:
    """Raise ResultsError for a shard that cannot be merged with the first one."""
    if results.footer is None or results.outcome is Outcome.INCOMPLETE:
        raise ResultsError(f"{path}: shard {results.header.shard} is incomplete; run it again")
    if broken := [problem for problem in results.problems if problem not in results.footer.problems]:
        raise ResultsError(f"{path}: disagrees with itself: {broken[0]}")
    if not results.header.sources_sha256:
        raise ResultsError(f"{path}: does not say which sources it is of: the other shards may be of others")
    ours, theirs = (encode(_without_bundle(header)) for header in (results.header, first[1].header))
    for key in sorted({*ours, *theirs} - _OWN):
        if ours.get(key) != theirs.get(key):
            raise ResultsError(f"{path}: {key} is {ours.get(key)!r}; {first[0]} has {theirs.get(key)!r}: another run")


def _check_whole(names: Sequence[str], header: Header) -> None:
    """Raise ResultsError if claims are missing from a run that selected none."""
    if not header.options.get("claim") and digest_ids(names) != header.claims_sha256:
        raise ResultsError(
            f"the shards have {len(names)} of {header.claims_in_config} claims, or other ones: a shard has lost rows; "
            "run it again"
        )


def _without_bundle(header: Header) -> Header:
    """Return a header without what says which files a device has run: each shard has its own."""
    versions = {name: value for name, value in header.versions.items() if name not in (BUNDLE, HANDED_IN)}
    if versions == header.versions:
        return header
    return replace(header, versions=versions, options=header.options | {"backend": "", "outputs": ""})


def _merge_rows(runs: Sequence[Results]) -> Iterator[Row]:
    yield _merge_headers(runs)
    for run in runs:
        checks = run.checks_by_claim()
        for claim in run.claims:
            yield from checks[claim.claim]
            yield claim
        yield from run.models
        yield from run.measurements


def _merge_headers(runs: Sequence[Results]) -> Header:
    """Return the first header for all claims; where machines differ, with what is true of all of them."""
    headers = [run.header for run in runs]
    flags = set(headers[0].cpu_flags).intersection(*(header.cpu_flags for header in headers))
    return replace(
        headers[0],
        shard=None,
        versions=_merge_versions(headers),
        claims=sum(header.claims for header in headers),
        resumed=sum(header.resumed for header in headers),
        started=min(header.started for header in headers),
        platform="; ".join(dict.fromkeys(header.platform for header in headers)),
        cpu="; ".join(dict.fromkeys(header.cpu for header in headers)),
        cpu_flags=[flag for flag in headers[0].cpu_flags if flag in flags],
        foreign_code=sorted({text for header in headers for text in header.foreign_code}),
    )


def _merge_versions(headers: Sequence[Header]) -> dict[str, str]:
    """Return the versions of all, with the digests of what each shard's device has run and handed in."""
    pairs = ((name, "; ".join(header.versions[name] for header in headers)) for name in headers[0].versions)
    return {name: text if name in (BUNDLE, HANDED_IN) else headers[0].versions[name] for name, text in pairs}


def _write_footer(writer: ResultsWriter, runs: Sequence[Results]) -> None:
    footers = [run.footer for run in runs if run.footer is not None]
    notes = [note for footer in footers for note in footer.notes]
    peaks = [footer.peak_mib for footer in footers if footer.peak_mib is not None]
    failed = any(run.outcome is not Outcome.PASS for run in runs)
    writer.close(
        outcome=Outcome.FAIL if failed else Outcome.PASS,
        exit_status=max(footer.exit_status for footer in footers),
        seconds=round(sum(footer.seconds for footer in footers), 3),
        problems=list(dict.fromkeys(problem for footer in footers for problem in footer.problems)),
        notes=[*dict.fromkeys(notes), f"merged from {len(runs)} shards; the time is that of all of them together"],
        peak_mib=max(peaks, default=None),
        foreign_code=sorted({text for footer in footers for text in footer.foreign_code}),
    )
