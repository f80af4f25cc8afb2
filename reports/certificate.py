"""Certificates: a folder that says what was shown of a backend, and holds all that anyone needs to check it.

A certificate is not signed: who can change the folder can make all of it anew. What checks it against the backend is
`verify --rerun`, which runs claims drawn at random once more and compares them bit for bit.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from reports.html import render_html
from reports.results import Results, ResultsError, ids_digest, read_results
from reports.text import end
from reports.verdicts import Outcome

FORMAT = 1
CERTIFICATE, RESULTS, HTML = "certificate.json", "results.jsonl", "report.html"
WAIVERS, DECISIONS = "waivers.toml", "decisions.json"
_UNSURE = 0.05
"""What is left of confidence in the statement of sampling strength."""


class NotCertified(Exception):
    """A run for which there can be no certificate; the message says why."""


@dataclass(frozen=True, slots=True)
class Mismatch:
    """Something that does not hold of a certificate's folder."""

    file: str
    """Its name in the folder."""
    what: str
    """What is wrong with it, in words."""

    def __str__(self) -> str:
        return f"{self.file}: {self.what}"


def certify(source: Path, folder: Path, waivers: Path | None) -> dict[str, Any]:
    """Make a certificate of a run in a new or empty folder; return what certificate.json says.

    `source`: its results file. `waivers`: the file that the run used; None: the copy beside the results. Raises
    NotCertified for a run that does not show all claims of a config to be green, or whose suite is no clean checkout;
    ResultsError for files that cannot be read or written, or a folder that is not empty.
    """
    results = read_results(source)
    if reasons := list(_reasons(results)):
        raise NotCertified(f"{source}: no certificate: {'; '.join(reasons)}")
    used = _waivers(results, waivers or source.parent / WAIVERS)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise ResultsError(f"{folder}: is not empty; name another folder with -o")
        shutil.copyfile(source, folder / RESULTS)
        if used is not None:
            shutil.copyfile(used, folder / WAIVERS)
        for name, text in _made(results).items():
            (folder / name).write_text(text, encoding="utf-8", errors="backslashreplace")
        certificate = _certificate(results, _digests(folder))
        (folder / CERTIFICATE).write_text(_text(certificate), encoding="utf-8")
    except OSError as error:
        raise ResultsError(f"{folder}: cannot be written: {error.strerror}") from error
    return certificate


def verify(folder: Path) -> tuple[Results | None, list[Mismatch]]:
    """Recompute everything in a certificate's folder; return its results and what does not hold.

    Results that cannot be read are None; no problem: it holds. The backend itself is not asked: `rerun` does that.
    Raises ResultsError for a folder without a certificate.
    """
    stated = _stated(folder)
    try:
        results = read_results(folder / RESULTS)
    except ResultsError as error:
        return None, [Mismatch(RESULTS, str(error))]
    problems = [Mismatch(RESULTS, reason) for reason in _reasons(results)]
    problems += _edits(folder, stated.get("files"))
    made = _made(results)
    for name, text in made.items():
        if _read(folder / name) != text.encode("utf-8", "backslashreplace"):
            problems.append(Mismatch(name, "is not what this version of the suite makes of results.jsonl"))
    if (folder / WAIVERS).exists() != bool(results.header.waivers):
        problems.append(Mismatch(WAIVERS, "is there without a need, or missing: the run's header names a file or none"))
    elif results.header.waivers and _digest(folder / WAIVERS) != results.header.waivers.get("sha256"):
        problems.append(Mismatch(WAIVERS, "is not the file that the run used"))
    again = _certificate(results, stated.get("files"))
    problems += [
        Mismatch(CERTIFICATE, f"{key} is {_brief(stated.get(key))}; the results give {_brief(again.get(key))}")
        for key in sorted({*again, *stated})
        if stated.get(key) != again.get(key)
    ]
    return results, problems


def _reasons(results: Results) -> Iterator[str]:
    """Why a run shows too little for a certificate."""
    header = results.header
    if header.shard:
        yield f"it is shard {header.shard}; merge all of them first"
    if results.outcome is not Outcome.PASS:
        yield f"the run is {results.outcome}" + (f" ({results.problems[0]})" if results.problems else "")
    if header.claims != header.claims_in_config or len(results.claims) != header.claims_in_config:
        yield f"it has {len(results.claims)} of {header.claims_in_config} claims"
    if header.claims_sha256 != ids_digest(claim.claim for claim in results.claims):
        yield "its claims are not those of the config: the sha256 of their IDs is not the header's"
    if header.suite_commit == "unknown" or header.suite_commit.endswith("-dirty"):
        yield f"the suite is no clean checkout: its commit is {header.suite_commit}"


def _certificate(results: Results, files: object) -> dict[str, Any]:
    """All that certificate.json says; `files`: the digests of the folder's other files."""
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
        "started": header.started,
        "seconds": footer.seconds if footer else None,
        "outcome": results.outcome.value,
        "counts": {
            "claims": len(results.claims), "pairs": len(results.pairs), "checks": len(results.checks),
            "waived": results.waived, "verdicts": {verdict.value: n for verdict, n in results.counts.items()},
            "models": {verdict.value: n for verdict, n in results.model_counts.items()},
        },
        "sampling": _sampling(results),
        "detection": header.detection,
        "waivers": header.waivers,
        "files": files,
    }  # fmt: skip


def _sampling(results: Results) -> dict[str, Any]:
    """How much was tried, and what a fault could have been that it did not show.

    After n comparisons without a failure a fault that shows in a share p of all comparisons, independently of each
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


def _made(results: Results) -> dict[str, str]:
    """The files that are made of the results alone, by name."""
    decisions = {claim.claim: claim.decisions for claim in results.claims}
    return {HTML: render_html(results), DECISIONS: json.dumps(decisions, indent=1, ensure_ascii=False) + "\n"}


def _waivers(results: Results, path: Path) -> Path | None:
    """The waivers of a run. Raises ResultsError if they are not at hand."""
    if not results.header.waivers:
        return None
    if not path.is_file():
        raise ResultsError(f"{path}: the waivers of the run are not there; name the file with --waivers")
    if _digest(path) != results.header.waivers.get("sha256"):
        raise ResultsError(f"{path}: is not the file of waivers that the run used; name that one with --waivers")
    return path


def _edits(folder: Path, stated: object) -> Iterator[Mismatch]:
    """Files whose digests are not the stated ones, and files too few or too many."""
    digests = stated if isinstance(stated, Mapping) else {}
    found = _digests(folder)
    for name in sorted({*found, *map(str, digests)}):
        if name not in found:
            yield Mismatch(name, "is missing")
        elif name not in digests:
            yield Mismatch(name, "is not part of the certificate")
        elif digests[name] != found[name]:
            yield Mismatch(name, "was changed: its sha256 is not the certificate's")


def _stated(folder: Path) -> dict[str, Any]:
    path = folder / CERTIFICATE
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ResultsError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ResultsError(f"{path}: is not JSON: {error}") from error
    if not isinstance(content, dict) or content.get("certificate") != FORMAT:
        found = content.get("certificate") if isinstance(content, dict) else type(content).__name__
        raise ResultsError(f"{path}: is no certificate of format {FORMAT}, but {_brief(found)}")
    return content


def _digests(folder: Path) -> dict[str, str]:
    """The sha256 of every file of the folder but the certificate itself."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): _digest(path) for path in files if path != folder / CERTIFICATE}


def _digest(path: Path) -> str:
    return hashlib.sha256(_read(path)).hexdigest()


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:  # what is missing is told by _edits
        return b""


def _text(certificate: Mapping[str, Any]) -> str:
    return json.dumps(certificate, indent=1, ensure_ascii=False) + "\n"


def _brief(value: object) -> str:
    return end(json.dumps(value, ensure_ascii=False), 80)
