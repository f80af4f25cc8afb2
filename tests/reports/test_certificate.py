"""Certificates: made of whole, clean runs that passed, and checked in every part."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from reports.__main__ import main
from reports.certificate import CERTIFICATE, DECISIONS, HTML, PREDICATE, RESULTS, WAIVERS, verify
from reports.codec import encode
from reports.results import digest_ids, read_results
from reports.schema import Row
from reports.verdicts import Outcome
from reports.writer import ResultsWriter

TEXT = '[[waiver]]\nclaim = "c1"\nverdict = "REFUTED"\nrule = "NUM-03"\nreason = "known"\nexpires = 2027-01-31\n'
FAILED = {"verdict": "REFUTED", "outcome": "fail"}
WAIVED = {"waived": True, "verdict": "REFUTED",
          "waiver": {"reason": "known", "url": None, "expires": "2027-01-31", "max_lsb": None}}  # fmt: skip


def source(runs: Any, rows: Any = None, **changes: Any) -> Path:
    """The results of a clean run of three claims, one of them waived, with the waivers beside them."""
    rows = rows or [
        row for name in ("c0", "c1", "c2")
        for row in (
            runs.check(name, cases=10, **(FAILED if name == "c1" else {})),
            runs.claim(name, **(WAIVED if name == "c1" else {})),
        )
    ]  # fmt: skip
    names = [row["claim"] for row in rows if row["kind"] == "claim"]
    (runs.directory / WAIVERS).write_text(TEXT)
    waivers = {"file": "npu.toml", "sha256": hashlib.sha256(TEXT.encode()).hexdigest()}
    header = {"claims_in_config": len(names), "claims_sha256": digest_ids(names), "waivers": waivers}
    path: Path = runs.lines(rows, **header | changes)
    return path


@pytest.fixture
def folder(runs: Any) -> Path:
    path: Path = runs.directory / "certificate"
    assert main(["certify", str(source(runs)), "-o", str(path)]) == 0
    return path


def predicate(folder: Path) -> dict[str, Any]:
    """What the certificate states, behind what makes it a statement."""
    said: dict[str, Any] = json.loads((folder / CERTIFICATE).read_text())
    assert (said["_type"], said["predicateType"]) == ("https://in-toto.io/Statement/v1", PREDICATE)
    assert set(said) == {"_type", "subject", "predicateType", "predicate"}
    return said["predicate"]  # type: ignore[no-any-return]


def problems(folder: Path) -> list[str]:
    return [str(problem) for problem in verify(folder)[1]]


def test_a_certificate_says_what_was_shown_and_holds(folder: Path, capsys: Any) -> None:
    said = predicate(folder)
    assert (said["certificate"], said["backend"], said["seed"], said["profile"], said["outcome"]) == (
        2,
        "qnnpack",
        7,
        "quick",
        "PASS",
    )
    assert said["suite"] == {"version": "0.1.0", "commit": "4fd1c0ffee" * 4}
    assert said["counts"]["verdicts"] == {"REFUTED": 1, "VERIFIED": 2} and said["counts"]["waived"] == 1
    subject = json.loads((folder / CERTIFICATE).read_text())["subject"]
    assert subject == [
        {"name": name, "digest": {"sha256": hashlib.sha256((folder / name).read_bytes()).hexdigest()}}
        for name in sorted((RESULTS, HTML, WAIVERS, DECISIONS))
    ]
    assert main(["verify", str(folder), "--files-only"]) == 3
    told = capsys.readouterr().out
    assert "3 claims: 1 REFUTED, 2 VERIFIED (1 WAIVED)\nqnnpack: PASS with 1 waiver" in told
    assert told.endswith(f"\n{folder}: holds as far as it could be checked\n")


@pytest.mark.parametrize(
    ("resumed", "told"),
    [(0, "all runs of claims and models were made"), (2, "of 2 claims and models in an earlier run")],
)
def test_a_certificate_says_how_much_an_earlier_run_judged(runs: Any, resumed: int, told: str) -> None:
    path, target = worked_run(runs, runs=10, resumed=resumed), runs.directory / "certificate"
    assert main(["certify", str(path), "-o", str(target)]) == 0
    said = predicate(target)["work"]
    assert (said["lowerings"], said["runs"], said["resumed"]) == (2, 10, resumed) and told in said["statement"]
    assert problems(target) == []


def worked_run(made: Any, runs: int, **header: Any) -> Path:
    """The results of a run of two claims, for one of which the backend ran so often."""
    rows = [
        made.check("c0", cases=10),
        made.claim("c0", lowerings=2, runs=runs),
        made.check("c1"),
        made.claim("c1", **WAIVED),
    ]
    rows[2] |= FAILED
    return source(made, rows, **header)


def test_less_than_no_work_is_a_contradiction(runs: Any, capsys: Any) -> None:
    assert main(["certify", str(worked_run(runs, -1)), "-o", str(runs.directory / "certificate")]) == 1
    assert "claim 'c0' counts less than no work" in capsys.readouterr().err


def test_the_statement_of_sampling_strength_is_the_binomial_bound(folder: Path) -> None:
    said = predicate(folder)["sampling"]
    assert (said["claims"], said["comparisons"], said["median"], said["least"]) == (2, 20, 10, 10)
    share = 0.26  # what the statement rounds to two digits
    assert f"more than {100 * share:.0f} % of comparisons of the median claim" in said["statement"]
    assert (1 - share) ** 10 < 0.05 < (1 - (share - 0.005)) ** 10, "missed 10 times in a row in fewer than 5 % of cases"


EDITS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a byte of the results": (lambda d: _replace(d / RESULTS, b"0.4996", b"0.4990"), f"{RESULTS}: the run is FAIL"),
    "a byte of the page": (lambda d: _replace(d / HTML, b"PASS", b"pass"), f"{HTML}: is not what this version"),
    "a byte of the waivers": (lambda d: _replace(d / WAIVERS, b"known", b"KNOWN"), f"{WAIVERS}: is not the file"),
    "a byte of the decisions": (lambda d: _replace(d / DECISIONS, b"[]", b"[ ]"), f"{DECISIONS}: is not what this"),
    "a count": (lambda d: _replace(d / CERTIFICATE, b'"claims": 3', b'"claims": 4'), f"{CERTIFICATE}: counts is"),
    "the seed": (lambda d: _replace(d / CERTIFICATE, b'"seed": 7', b'"seed": 8'), f"{CERTIFICATE}: seed is 8"),
    "a further statement": (
        lambda d: _replace(d / CERTIFICATE, b'"seed"', b'"best": 1,\n  "seed"'),
        f"{CERTIFICATE}: best is 1",
    ),
    "no page": (lambda d: (d / HTML).unlink(), f"{HTML}: is missing"),
    "no waivers": (lambda d: (d / WAIVERS).unlink(), f"{WAIVERS}: is missing"),
    "no results": (lambda d: (d / RESULTS).unlink(), f"{RESULTS}: "),
    "a file too many": (lambda d: (d / "more.txt").write_text("x"), "more.txt: is not part of the certificate"),
    "a file in a folder": (lambda d: _nested(d), "a/b: is not part"),
}  # fmt: skip


def _nested(folder: Path) -> None:
    (folder / "a").mkdir()
    (folder / "a" / "b").write_text("")


def _replace(path: Path, old: bytes, new: bytes) -> None:
    content = path.read_bytes()
    assert old in content
    path.write_bytes(content.replace(old, new))


@pytest.mark.parametrize("edit", EDITS)
def test_every_edit_is_found(folder: Path, edit: str, capsys: Any) -> None:
    change, told = EDITS[edit]
    change(folder)
    assert any(problem.startswith(told) for problem in problems(folder)), problems(folder)
    assert main(["verify", str(folder)]) == 1
    assert f"{folder}: does not hold" in capsys.readouterr().out


def rewritten(folder: Path, runs: Any, drop: str = "", **changes: Any) -> None:
    """Write the results anew, with a footer that fits, and everything that is made of them, but for one claim."""
    results = read_results(folder / RESULTS)
    with ResultsWriter(folder / RESULTS) as writer:
        claims = [claim for claim in results.claims if claim.claim != drop]
        writer.write_line(json.dumps(encode(results.header) | changes))
        rows: list[Row] = [*(check for check in results.checks if check.claim != drop), *claims]
        for row in rows:
            writer.write_line(json.dumps(encode(row)))
        writer.close(outcome=Outcome.PASS, exit_status=0, seconds=75.5)


@pytest.mark.parametrize(
    ("drop", "changes", "told"),
    [
        ("c2", {"claims": 2}, f"{RESULTS}: it has 2 of 3 claims"),
        ("c2", {"claims": 2, "claims_in_config": 2}, f"{RESULTS}: its claims are not those of the config"),
        ("", {"seed": 8}, f"{CERTIFICATE}: seed is 7; the results give 8"),
        (
            "",
            {"suite_commit": "abc-dirty"},
            f"{RESULTS}: the suite is neither a clean checkout nor an unchanged release: its commit is abc-dirty",
        ),
    ],
)
def test_results_that_were_written_anew_are_found(folder: Path, runs: Any, drop: str, changes: Any, told: str) -> None:
    rewritten(folder, runs, drop, **changes)
    found = problems(folder)
    assert any(problem.startswith(told) for problem in found), found
    assert f"{RESULTS}: was changed: its sha256 is not the certificate's" in found


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        (
            {"suite_commit": "abc-dirty"},
            "the suite is neither a clean checkout nor an unchanged release: its commit is abc-dirty",
        ),
        (
            {"suite_commit": "unknown"},
            "the suite is neither a clean checkout nor an unchanged release: its commit is unknown",
        ),
        ({"shard": {"place": 1, "of": 2}}, "it is shard 1/2; merge all of them first"),
        ({"claims_in_config": 5}, "it has 3 of 5 claims"),
        ({"claims_sha256": "00"}, "its claims are not those of the config"),
        ({"claims_sha256": ""}, "its claims are not those of the config"),
        ({"options": {"claim": ["c*"]}}, 'it is a selection: --claim is ["c*"]'),
        ({"options": {"claim_timeout": 1e9}}, "--claim-timeout is 1000000000.0; at most 3600 s are allowed"),
    ],
)
def test_a_run_that_shows_too_little_gets_none(runs: Any, changes: Any, told: str, capsys: Any) -> None:
    folder = runs.directory / "certificate"
    assert main(["certify", str(source(runs, **changes)), "-o", str(folder)]) == 1
    assert told in capsys.readouterr().err and not folder.exists()


def test_a_run_that_failed_or_stopped_gets_none(runs: Any, capsys: Any) -> None:
    path = source(runs, rows=runs.refuted())
    assert main(["certify", str(path), "-o", str(runs.directory / "c")]) == 1
    assert "no certificate: the run is FAIL" in capsys.readouterr().err
    path = source(runs)
    path.write_bytes(path.read_bytes()[:-9])
    assert main(["certify", str(path), "-o", str(runs.directory / "c")]) == 1
    assert "no certificate: the run is INCOMPLETE (no footer" in capsys.readouterr().err


def test_the_waivers_of_the_run_are_needed(runs: Any, tmp_path: Path, capsys: Any) -> None:
    path, folder = source(runs), str(runs.directory / "certificate")
    own = tmp_path / "own.toml"
    shutil.move(runs.directory / WAIVERS, own)
    assert main(["certify", str(path), "-o", folder]) == 2
    assert "the waivers of the run are not there; name the file with --waivers" in capsys.readouterr().err
    assert main(["certify", str(path), "-o", folder, "--waivers", str(own)]) == 0
    own.write_text("")
    assert main(["certify", str(path), "-o", folder + "2", "--waivers", str(own)]) == 2
    assert "is not the file of waivers that the run used" in capsys.readouterr().err


def test_a_folder_that_cannot_be_used_is_told(runs: Any, folder: Path, capsys: Any) -> None:
    assert main(["certify", str(source(runs)), "-o", str(folder)]) == 2
    assert "is not empty" in capsys.readouterr().err
    assert main(["certify", str(source(runs)), "-o", "/dev/null/c"]) == 2
    assert "cannot be written" in capsys.readouterr().err


STATED = '{"_type": "https://in-toto.io/Statement/v1", "predicateType": "%s", "predicate": {"certificate": %s}}'
FORMAT_1 = '{"certificate": 1, "suite": {"commit": "4fd1c0ffee"}}'


@pytest.mark.parametrize(
    "text",
    [
        None, "hello", "[]", '{"certificate": 2}', "[" * 100_000, FORMAT_1, STATED % (PREDICATE, 3), STATED % ("x", 2),
        STATED % (PREDICATE, 2),
    ],
)  # fmt: skip
def test_a_folder_without_a_certificate_is_told(folder: Path, text: str | None, capsys: Any) -> None:
    (folder / CERTIFICATE).unlink()
    if text is not None:
        (folder / CERTIFICATE).write_text(text)
    assert main(["verify", str(folder)]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1) and err.startswith(f"reports: {folder / CERTIFICATE}: ")
    assert ('of format 1, which made no statement; verify it with the suite that made it, commit "4fd1' in err) is (
        text == FORMAT_1
    )
