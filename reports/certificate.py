"""Certificates: a folder that says what a run showed of a backend, and holds everything that is needed to check it.

``certificate.json`` is an in-toto statement about the other files. Anyone who can write to the folder can make it anew,
unless it is signed: `reports.signature` says where a signature lies. `reports.against_suite` holds the results to what
the installed suite and backend say of them, and `reports.rerun` runs parts of them again.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from reports.audit import LONGEST_CLAIM, find_contradictions, is_timeout
from reports.html import render_html
from reports.results import Results, ResultsError, digest_ids, read_results
from reports.signature import SIGNATURE
from reports.text import cut_end, pluralize, spell_count
from reports.verdicts import Outcome

FORMAT = 2
STATEMENT = "https://in-toto.io/Statement/v1"
PREDICATE = "urn:fx-quant-conformance:certificate:2"
"""Type of the statement's predicate, a certificate of this format."""
CERTIFICATE, RESULTS, HTML = "certificate.json", "results.jsonl", "report.html"
WAIVERS, DECISIONS = "waivers.toml", "decisions.json"
_UNSURE = 0.05
"""1 minus the confidence of the statement of sampling strength."""


class NotCertified(Exception):
    """A run that cannot be certified; the message says why."""


@dataclass(frozen=True, slots=True)
class Mismatch:
    """A fault in a certificate's folder."""

    file: str
    """Name of the file in the folder."""
    what: str
    """What is wrong with the file, in words."""

    def __str__(self) -> str:
        return f"{self.file}: {self.what}"


def certify(
    source: Path, folder: Path, waivers: Path | None, *, without_execution_evidence: bool = False
) -> tuple[Results, dict[str, Any]]:
    """Make a certificate of a run in a new or empty folder; return the run, and the predicate of its statement.

    `source`: results file of the run. `waivers`: the file that the run used; None: the copy next to the results.
    `without_execution_evidence`: certify claims and models although nothing shows that integers computed them; the
    certificate says so. Raises NotCertified if a claim of the config is missing or does not pass, nothing shows its
    execution, or the suite is neither a clean checkout nor an unchanged release; ResultsError for files that cannot be
    read or written, or a folder that is not empty.
    """
    results = read_results(source)
    reasons = list(find_shortcomings(results))
    if (text := results.describe_execution()) and not without_execution_evidence:
        remedy = (
            "implement the backend's execution(), or certify with --without-execution-evidence, which is then stated"
        )
        reasons.append(f"{text}; {remedy}")
    if reasons:
        raise NotCertified(f"{source}: no certificate: {'; '.join(reasons)}")
    waiver_file = _find_waivers(results, waivers or source.parent / WAIVERS)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise ResultsError(f"{folder}: is not empty; name another folder with -o")
        shutil.copyfile(source, folder / RESULTS)
        if waiver_file is not None:
            shutil.copyfile(waiver_file, folder / WAIVERS)
        for name, text in _render_files(results).items():
            (folder / name).write_text(text, encoding="utf-8", errors="backslashreplace")
        predicate = _build_predicate(results)
        text = json.dumps(_build_statement(_digest_files(folder), predicate), indent=1, ensure_ascii=False)
        (folder / CERTIFICATE).write_text(f"{text}\n", encoding="utf-8")
    except OSError as error:
        raise ResultsError(f"{folder}: cannot be written: {error.strerror}") from error
    return results, predicate


def verify(folder: Path) -> tuple[Results | None, list[Mismatch]]:
    """Recompute everything in a certificate's folder from its results; return these and the faults.

    Results that cannot be read are None. Neither suite nor backend is asked. Raises ResultsError for a folder without a
    certificate.
    """
    files, stated = _read_certificate(folder)
    try:
        results = read_results(folder / RESULTS)
    except ResultsError as error:
        return None, [Mismatch(RESULTS, str(error))]
    problems = [Mismatch(RESULTS, reason) for reason in find_shortcomings(results)]
    problems += _find_edits(folder, files)
    rendered = _render_files(results)
    for name, text in rendered.items():
        if _read(folder / name) != text.encode("utf-8", "backslashreplace"):
            problems.append(Mismatch(name, "is not what this version of the suite makes of results.jsonl"))
    if (folder / WAIVERS).exists() != bool(results.header.waivers):
        problems.append(Mismatch(WAIVERS, "is unexpected or missing, compared with the header of the run"))
    elif results.header.waivers and _digest(folder / WAIVERS) != results.header.waivers.get("sha256"):
        problems.append(Mismatch(WAIVERS, "is not the file that the run used"))
    recomputed = _build_predicate(results)
    problems += [
        Mismatch(CERTIFICATE, f"{key} is {_shorten(stated.get(key))}; the results give {_shorten(recomputed.get(key))}")
        for key in sorted({*recomputed, *stated})
        if stated.get(key) != recomputed.get(key)
    ]
    return results, problems


def find_shortcomings(results: Results) -> Iterator[str]:
    """Yield the reasons why a run shows too little for a certificate."""
    header = results.header
    if header.shard:
        yield f"it is shard {header.shard}; merge all of them first"
    if results.outcome is not Outcome.PASS:
        yield f"the run is {results.outcome}" + (f" ({results.problems[0]})" if results.problems else "")
    if header.claims != header.claims_in_config or len(results.claims) != header.claims_in_config:
        yield f"it has {len(results.claims)} of {header.claims_in_config} claims"
    if header.claims_sha256 != digest_ids(claim.claim for claim in results.claims):
        yield "its claims are not those of the config: the sha256 of their IDs is not the header's"
    if header.suite_commit == "unknown" or header.suite_commit.endswith("-dirty"):
        yield f"the suite is neither a clean checkout nor an unchanged release: its commit is {header.suite_commit}"
    if selected := header.options.get("claim"):
        yield f"it is a selection: --claim is {_shorten(selected)}"
    timeout = header.options.get("claim_timeout", LONGEST_CLAIM)
    if not is_timeout(timeout):
        yield f"--claim-timeout is {_shorten(timeout)}; at most {LONGEST_CLAIM:g} s are allowed"
    yield from find_contradictions(results)


def _build_statement(files: Mapping[str, str], predicate: Mapping[str, Any]) -> dict[str, Any]:
    """Return the in-toto statement of a certificate; `files`: digests of the folder's other files."""
    subjects = [{"name": name, "digest": {"sha256": digest}} for name, digest in files.items()]
    return {"_type": STATEMENT, "subject": subjects, "predicateType": PREDICATE, "predicate": predicate}


def _build_predicate(results: Results) -> dict[str, Any]:
    """Return what a certificate states of its files."""
    header, footer = results.header, results.footer
    return {
        "certificate": FORMAT,
        "backend": header.backend,
        "versions": header.versions,
        "engine": header.engine,
        "representation": header.representation,
        "config": {"name": header.config_name, "sha256": header.config_sha256, "claims_sha256": header.claims_sha256},
        "suite": {"version": header.suite_version, "commit": header.suite_commit},
        "environment": {
            "torch": header.torch, "python": header.python, "platform": header.platform, "cpu": header.cpu,
            "cpu_flags": header.cpu_flags, "isa": header.isa, "isolation": header.isolation,
        },
        "seed": header.seed,
        "profile": header.profile,
        "options": header.options,
        "limits": header.limits,
        "capabilities": header.capabilities,
        "started": header.started,
        "seconds": footer.seconds if footer else None,
        "outcome": results.outcome.value,
        "counts": {
            "claims": len(results.claims), "pairs": len(results.pairs), "checks": len(results.checks),
            "waived": results.waived, "allowed": results.allowed,
            "beside_own_code": sum(claim.beside_own_code for claim in results.claims),
            "verdicts": {verdict.value: n for verdict, n in results.counts.items()},
            "models": {verdict.value: n for verdict, n in results.model_counts.items()},
        },
        "execution": _describe_execution(results),
        "work": _describe_work(results),
        "sampling": _describe_sampling(results),
        "detection": header.detection,
        "waivers": header.waivers,
    }  # fmt: skip


def _describe_execution(results: Results) -> dict[str, Any]:
    """Say what shows that integers computed the claims, and how sure that is."""
    counts = Counter(claim.execution for claim in results.claims)
    reported, shown = (pluralize(counts[kind], "claim") for kind in ("reported", "numbers"))
    lacking = results.describe_execution()
    parts = (
        (bool(lacking), f"WITHOUT EXECUTION EVIDENCE: {lacking}"),
        (counts["reported"] > 0, f"what ran of {reported} is the backend's own report"),
        (
            counts["numbers"] > 0,
            f"of {shown} long sums show that nothing was summed in float32 (int32, or float64, was)",
        ),
    )
    statement = "; ".join(text for is_so, text in parts if is_so) or "the results do not say what shows the execution"
    return {"claims": results.execution_counts, "statement": statement}


def _describe_work(results: Results) -> dict[str, Any]:
    """Say how often the backend lowered and ran for claims and models, and how many of these an earlier run judged."""
    resumed = results.header.resumed
    made = "all runs of claims and models were made" if results.runs else "the results do not say how much was run"
    statement = f"{made}, of {spell_count(resumed)} claims and models in an earlier run (--resume)" if resumed else made
    return {"lowerings": results.lowerings, "runs": results.runs, "resumed": resumed, "statement": statement}


def _describe_sampling(results: Results) -> dict[str, Any]:
    """Say how much was tested, and how frequent a fault could be without being found.

    After n comparisons without a failure, a fault that shows in a share p of all comparisons, independently of each
    other, was missed with probability (1 - p)^n: with 95 % confidence p is at most 1 - 0.05^(1/n).
    """
    counts = [check.cases for check in results.checks if check.stage == "numerics" and check.outcome == "pass"]
    known = sorted(count for count in counts if count)
    if not known:
        return {"comparisons": 0, "statement": "no claim was compared with the exact result"}
    least, middle = known[0], round(median(known))
    shares = [100 * (1 - _UNSURE ** (1 / count)) for count in (middle, least)]
    statement = (
        f"{len(known)} claims were compared with the exact result {sum(known)} times, the median claim {middle} times "
        f"and the least {least}. A fault that shows at random in more than {shares[0]:.2g} % of comparisons of the "
        f"median claim ({shares[1]:.2g} % of the least) would have been seen with 95 % confidence; inputs are aimed "
        "at faults rather than random, and the detection power says which seeded faults are found"
    )
    return {"claims": len(known), "comparisons": sum(known), "median": middle, "least": least, "statement": statement}


def _render_files(results: Results) -> dict[str, str]:
    """Return the files that are generated only from the results, by name."""
    decisions = {claim.claim: claim.decisions for claim in results.claims}
    return {HTML: render_html(results), DECISIONS: json.dumps(decisions, indent=1, ensure_ascii=False) + "\n"}


def _find_waivers(results: Results, path: Path) -> Path | None:
    """Return the waiver file of a run. Raises ResultsError if it is missing or another one."""
    if not results.header.waivers:
        return None
    if not path.is_file():
        raise ResultsError(f"{path}: the waivers of the run are not there; name the file with --waivers")
    if _digest(path) != results.header.waivers.get("sha256"):
        raise ResultsError(f"{path}: is not the file of waivers that the run used; name that one with --waivers")
    return path


def _find_edits(folder: Path, digests: Mapping[str, str]) -> Iterator[Mismatch]:
    """Yield the files whose digests are not the stated ones, and missing and additional files."""
    actual = _digest_files(folder)
    for name in sorted({*actual, *digests}):
        if name not in actual:
            yield Mismatch(name, "is missing")
        elif name not in digests:
            yield Mismatch(name, "is not part of the certificate")
        elif digests[name] != actual[name]:
            yield Mismatch(name, "was changed: its sha256 is not the certificate's")


def _read_certificate(folder: Path) -> tuple[dict[str, str], dict[str, Any]]:
    """Return the digests that a certificate states, by file, and its predicate."""
    path = folder / CERTIFICATE
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ResultsError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ResultsError(f"{path}: is not JSON: {error}") from error
    if isinstance(content, dict) and content.get("certificate") == 1:
        raise ResultsError(
            f"{path}: is a certificate of format 1, which made no statement; verify it with the suite that made it, "
            f"commit {_shorten(_get_in(content, 'suite', 'commit'))}, or certify {RESULTS} of its folder anew"
        )
    kind = tuple(_get_in(content, *keys) for keys in (("_type",), ("predicateType",), ("predicate", "certificate")))
    if kind != (STATEMENT, PREDICATE, FORMAT):
        raise ResultsError(f"{path}: is no certificate of format {FORMAT}, but {_shorten(content)}")
    try:
        digests = {str(each["name"]): str(each["digest"]["sha256"]) for each in content["subject"]}
    except (KeyError, TypeError) as error:
        raise ResultsError(f"{path}: its subject is no list of files with their sha256") from error
    return digests, content["predicate"]


def _get_in(content: object, *keys: str) -> object:
    """Return what nested objects of JSON hold under keys; None if nothing."""
    for key in keys:
        content = content.get(key) if isinstance(content, dict) else None
    return content


def _digest_files(folder: Path) -> dict[str, str]:
    """Return the sha256 of every file of the folder except the certificate and its signature."""
    files = {str(path.relative_to(folder)): path for path in sorted(folder.rglob("*")) if path.is_file()}
    return {name: _digest(path) for name, path in files.items() if name not in (CERTIFICATE, SIGNATURE)}


def _digest(path: Path) -> str:
    return hashlib.sha256(_read(path)).hexdigest()


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:  # _find_edits reports missing files
        return b""


def _shorten(value: object) -> str:
    return cut_end(json.dumps(value, ensure_ascii=False), 80)
