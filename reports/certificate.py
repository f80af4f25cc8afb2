"""Certificates: a folder with a run that passed, and a manifest of it.

``certificate.json`` is an in-toto statement: the digests of the other files, the run's header, and counts. Anyone who
can write to the folder can make it anew: docs/reports.md has the threat model. `reports.rerun` runs claims of it again.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import date, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

from fx_quant_conformance.reports.codec import encode
from fx_quant_conformance.reports.handed_in import format_remedy
from fx_quant_conformance.reports.html import render_html
from fx_quant_conformance.reports.levels import may_run_at
from fx_quant_conformance.reports.reading import FileFault, read_bytes
from fx_quant_conformance.reports.results import (
    OtherVersionError,
    Results,
    ResultsError,
    digest_ids,
    parse_results,
    read_results,
)
from fx_quant_conformance.reports.schema import OF_VENDOR
from fx_quant_conformance.reports.text import cut_end
from fx_quant_conformance.reports.verdicts import Outcome, Verdict

FORMAT = 3
STATEMENT = "https://in-toto.io/Statement/v1"
PREDICATE = f"urn:fx-quant-conformance:certificate:{FORMAT}"
"""Type of the statement's predicate, a certificate of this format."""
CERTIFICATE, RESULTS, HTML, WAIVERS = "certificate.json", "results.jsonl", "report.html", "waivers.toml"
SIGNATURE = "certificate.sigstore.json"
"""The signature: a Sigstore bundle, as GitHub's attestations write it for the vendor's CI."""
FILES = (CERTIFICATE, RESULTS, HTML, WAIVERS, SIGNATURE)
"""All that a certificate's folder may hold."""
FIRST_DAY = date(2026, 11, 21)
"""The day of the suite's first commit: no run is older."""


class NotCertified(Exception):
    """A run that cannot be certified; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """What is found in a certificate, a line each: what is wrong, and what leaves a doubt."""

    problems: list[str] = field(default_factory=list)
    doubts: list[str] = field(default_factory=list)

    def __add__(self, other: Findings) -> Findings:
        return Findings(problems=self.problems + other.problems, doubts=self.doubts + other.doubts)


# -- making -----------------------------------------------------------------------------------------------------------


def certify(
    source: Path, folder: Path, waivers: Path | None, *, without_execution_evidence: bool = False
) -> tuple[Results, dict[str, Any]]:
    """Make a certificate of a run in a new or empty folder; return the run, and the predicate of its statement.

    `source`: results file of the run. `waivers`: the file that the run used; None: the copy next to the results.
    `without_execution_evidence`: certify claims and models although nothing shows that integers computed them; the
    certificate says so. Raises NotCertified if a claim of the config is missing or does not pass, none is VERIFIED,
    nothing shows the execution of one, or the suite is neither a clean checkout nor an unchanged release; ResultsError
    for files that cannot be read or written, or a folder that is not empty.
    """
    results = read_results(source)
    reasons = list(find_shortcomings(results))
    if (text := results.format_execution()) and not without_execution_evidence:
        also = "or certify with --without-execution-evidence, which is then stated"
        reasons.append(f"{text}; {format_remedy(results.header)}, {also}")
    if reasons:
        raise NotCertified(f"{source}: no certificate: {'; '.join(reasons)}")
    if source.suffix == ".xz":
        raise ResultsError(f"{source}: is packed; unpack it first")
    waiver_file = _find_waivers(results, waivers or source.parent / WAIVERS)
    predicate = _build_predicate(results)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise ResultsError(f"{folder}: is not empty; name another folder with -o")
        shutil.copyfile(source, folder / RESULTS)
        if waiver_file is not None:
            shutil.copyfile(waiver_file, folder / WAIVERS)
        (folder / HTML).write_bytes(_render(results))
        digests = {name: _digest((folder / name).read_bytes()) for name in sorted(os.listdir(folder))}
        text = json.dumps(_build_statement(digests, predicate), indent=1, ensure_ascii=False)
        (folder / CERTIFICATE).write_text(f"{text}\n", encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        raise ResultsError(f"{folder}: cannot be written: {error.strerror}") from error
    return results, predicate


def find_shortcomings(results: Results) -> Iterator[str]:
    """Yield the reasons why a run cannot be certified."""
    header = results.header
    if header.shard:
        yield f"it is shard {header.shard}; merge all of them first"
    if results.outcome is not Outcome.PASS:
        yield f"the run is {results.outcome}" + (f" ({results.problems[0]})" if results.problems else "")
    if header.claims != header.claims_in_config or len(results.claims) != header.claims_in_config:
        yield f"it has {len(results.claims)} of {header.claims_in_config} claims"
    if header.claims_sha256 != digest_ids(claim.claim for claim in results.claims):
        yield "its claims are not those of the config: the sha256 of their IDs is not the header's"
    if not results.counts.get(Verdict.VERIFIED):
        yield "no claim is VERIFIED"
    if header.suite_commit == "unknown" or header.suite_commit.endswith("-dirty"):
        yield f"the suite is neither a clean checkout nor an unchanged release: its commit is {header.suite_commit}"
    if selected := header.options.get("claim"):
        yield f"it is a selection: --claim is {_shorten(selected)}"
    if not may_run_at(header.isa, header.cpu_flags, header.platform):
        yield f"no kernel runs at the level {header.isa!r} on a CPU with the flags {' '.join(header.cpu_flags)}"
    for text in results.foreign_code:
        if text.startswith(OF_VENDOR):
            yield (
                f"{text} was loaded where claims are judged, and could change what judges; keep it out "
                "(-p no:NAME, TORCH_DEVICE_BACKEND_AUTOLOAD=0), and run again"
            )
    yield from _find_strange_times(results)


def _find_strange_times(results: Results) -> Iterator[str]:
    """Yield what no run can have of time: its start, its end, and the days on which its waivers were over."""
    stated, seconds = results.header.started, results.footer.seconds if results.footer else 0.0
    try:
        started = datetime.fromisoformat(stated).astimezone(timezone.utc)
        ended = started + timedelta(seconds=seconds)
    except (ValueError, OverflowError):
        yield f"it started {stated!r} and took {seconds} s, which is no time"
        return
    if started.date() < FIRST_DAY:
        yield f"it started {stated}, before there was a suite ({FIRST_DAY})"
    if ended < started:
        yield f"it ended before it started: it took {seconds} s"
    if started > datetime.now(timezone.utc):  # not its end: of merged shards the seconds are a sum
        yield f"it started in the future: {stated}"
    over = [row.id for row, last in _list_expiries(results) if last < started.date()]
    if over:
        yield f"{over[0]}{_count_more(over)} waived by a waiver that had expired on the day of the run"


def _list_expiries(results: Results) -> Iterator[tuple[Any, date]]:
    """Yield each waived row whose waiver expires, with its last day; what is no day is long over."""
    for row in results.judged:
        if row.waiver is not None and row.waiver.expires is not None:
            try:
                yield row, date.fromisoformat(row.waiver.expires)
            except ValueError:
                yield row, date.min


def _build_statement(digests: Mapping[str, str], predicate: Mapping[str, Any]) -> dict[str, Any]:
    """Return the in-toto statement of a certificate; `digests`: those of the folder's other files."""
    subjects = [{"name": name, "digest": {"sha256": digest}} for name, digest in digests.items()]
    return {"_type": STATEMENT, "subject": subjects, "predicateType": PREDICATE, "predicate": predicate}


def _build_predicate(results: Results) -> dict[str, Any]:
    """Return what a certificate states of its files: the run's header, but for texts of findings, and counts."""
    header = encode(results.header)
    return {
        "certificate": FORMAT,
        "outcome": results.outcome.value,
        "counts": {
            "claims": len(results.claims),
            "pairs": len(results.pairs),
            "checks": len(results.checks),
            "waived": results.waived,
            "resumed": results.header.resumed,
            "beside_own_code": results.beside_own_code,
            "verdicts": {verdict.value: n for verdict, n in results.counts.items()},
            "models": {verdict.value: n for verdict, n in results.model_counts.items()},
            "execution": results.execution_counts,
            "comparisons": sum(check.cases or 0 for check in results.checks if check.stage == "numerics"),
        },
        "without_execution_evidence": results.format_execution(),
        "foreign_code": results.foreign_code,
        "run": {name: value for name, value in header.items() if name not in ("kind", "findings")},
    }


def _render(results: Results) -> bytes:
    return render_html(results).encode("utf-8", "backslashreplace")


def _find_waivers(results: Results, path: Path) -> Path | None:
    """Return the waiver file of a run. Raises ResultsError if it is missing or another one."""
    if not results.header.waivers:
        return None
    if not path.is_file():
        raise ResultsError(f"{path}: the waivers of the run are not there; name the file with --waivers")
    if _digest(path.read_bytes()) != results.header.waivers.get("sha256"):
        raise ResultsError(f"{path}: is not the file of waivers that the run used; name that one with --waivers")
    return path


# -- checking ---------------------------------------------------------------------------------------------------------


def verify(folder: Path) -> tuple[Results | None, Findings]:
    """Recompute digests, counts and report of a certificate's folder; return its results, and what is found.

    Results that cannot be read are None. Raises ResultsError for a folder without a certificate, OtherVersionError for
    one of an earlier format.
    """
    files, problems = _read_folder(folder)
    if CERTIFICATE not in files:
        raise ResultsError(f"{folder / CERTIFICATE}: {problems.get(CERTIFICATE, 'is missing')}")
    digests, stated = _read_statement(folder / CERTIFICATE, files[CERTIFICATE])
    found = Findings(problems=[f"{name}: {what}" for name, what in problems.items()])
    found.problems.extend(_compare_digests(digests, files))
    if RESULTS not in files:
        return None, found
    try:
        results = parse_results(files[RESULTS], folder / RESULTS)
    except ResultsError as error:
        found.problems.append(str(error))
        return None, found
    found.problems.extend(f"{RESULTS}: {reason}" for reason in find_shortcomings(results))
    if HTML in files and files[HTML] != _render(results):
        found.problems.append(
            f"{HTML}: is not what this version of the suite makes of {RESULTS}; verify with that which made it: "
            f"version {results.header.suite_version}, commit {results.header.suite_commit}"
        )
    digest = _digest(files[WAIVERS]) if WAIVERS in files else None
    if digest != results.header.waivers.get("sha256"):
        found.problems.append(f"{WAIVERS}: is not the file that the run used, if it used one")
    recomputed = _build_predicate(results)
    found.problems.extend(f"{CERTIFICATE}: {line}" for line in _compare_values(stated, recomputed))
    over = [row.id for row, last in _list_expiries(results) if last < date.today()]
    if over:
        found.doubts.append(f"{over[0]}{_count_more(over)} waived by a waiver that has expired: a run would fail today")
    return results, found


def _read_folder(folder: Path) -> tuple[dict[str, bytes], dict[str, str]]:
    """Return the contents of the files that a certificate may have, by name, and what is wrong with others."""
    files, problems = dict[str, bytes](), dict[str, str]()
    try:
        names = sorted(os.listdir(folder))
    except OSError as error:
        raise ResultsError(f"{folder}: cannot be read: {error.strerror}") from error
    for name in names:
        if name not in FILES:
            problems[name] = "is not part of a certificate"
            continue
        try:
            files[name] = read_bytes(folder / name, follows_links=False)
        except FileFault as fault:
            problems[name] = str(fault)
    return files, problems


def _read_statement(path: Path, data: bytes) -> tuple[dict[str, str], dict[str, Any]]:
    """Return the digests that a certificate states, by file, and its predicate."""
    try:
        content = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ResultsError(f"{path}: is not JSON: {error}") from error
    predicate = content.get("predicate", content) if isinstance(content, dict) else None
    number = predicate.get("certificate") if isinstance(predicate, dict) else None
    if number in (1, 2):
        raise OtherVersionError(
            f"{path}: is of format {number}; certify {RESULTS} of its folder anew, or verify with the suite that made "
            "it"
        )
    if number != FORMAT or (content.get("_type"), content.get("predicateType")) != (STATEMENT, PREDICATE):
        raise ResultsError(f"{path}: is no certificate of format {FORMAT}, but {_shorten(content)}")
    try:
        return {str(each["name"]): str(each["digest"]["sha256"]) for each in content["subject"]}, content["predicate"]
    except (KeyError, TypeError) as error:
        raise ResultsError(f"{path}: its subject is no list of files with their sha256") from error


def _compare_digests(stated: Mapping[str, str], files: Mapping[str, bytes]) -> Iterator[str]:
    subject = {name: _digest(data) for name, data in files.items() if name not in (CERTIFICATE, SIGNATURE)}
    for name in sorted({*subject, *stated, RESULTS, HTML}):
        if name not in subject:
            yield f"{name}: is missing"
        elif stated.get(name) != subject[name]:
            yield f"{name}: was changed: its sha256 is not the certificate's"


def _compare_values(stated: Mapping[str, Any], recomputed: Mapping[str, Any], within: str = "") -> Iterator[str]:
    """Yield where values of JSON differ from those that the results give."""
    for key in sorted({*stated, *recomputed}):
        pair = stated.get(key), recomputed.get(key)
        if all(isinstance(value, dict) for value in pair):
            yield from _compare_values(*pair, f"{within}{key}.")  # type: ignore[arg-type]
        elif pair[0] != pair[1]:
            yield f"{within}{key} is {_shorten(pair[0])}; the results give {_shorten(pair[1])}"


def format_signature(folder: Path) -> str:
    """Say in a line whether a certificate is signed, and what checks the signature: nothing here does."""
    certificate, bundle = folder / CERTIFICATE, folder / SIGNATURE
    if not os.path.lexists(bundle):
        return f"who made it: it is unsigned, there is no {SIGNATURE}"
    return (
        f"its signature: gh attestation verify {certificate} --bundle {bundle} --predicate-type {PREDICATE} "
        "--repo OWNER/NAME, with the vendor's repository"
    )


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _count_more(names: list[str]) -> str:
    return f" and {len(names) - 1} more are" if names[1:] else " is"


def _shorten(value: object) -> str:
    return cut_end(json.dumps(value, ensure_ascii=False), 80)
