"""Certificates: made of whole, clean runs that passed, and checked in every part."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fx_quant_conformance.reports.certificate import CERTIFICATE, HTML, PREDICATE, RESULTS, SIGNATURE, WAIVERS, verify
from fx_quant_conformance.reports.codec import encode
from fx_quant_conformance.reports.results import digest_ids, read_results
from fx_quant_conformance.reports.schema import Row
from fx_quant_conformance.reports.verdicts import Outcome
from fx_quant_conformance.reports.writer import ResultsWriter
from tests.support.reporting import main

ROOT = Path(__file__).resolve().parents[2]
TEXT = '[[waiver]]\nclaim = "c1"\nverdict = "REFUTED"\nrule = "NUM-03"\nreason = "known"\nexpires = 2099-01-31\n'
FAILED = {"verdict": "REFUTED", "outcome": "fail"}
WAIVED = {
    "waived": True,
    "verdict": "REFUTED",
    "waiver": {"reason": "known", "url": None, "expires": "2099-01-31", "max_lsb": None},
}
STARTED = "2026-11-25T03:04:05+00:00"


def source(runs: Any, rows: Any = None, **changes: Any) -> Path:
    """The results of a clean run of three claims, one of them waived, with the waivers beside them."""
    rows = rows or [
        row
        for name in ("c0", "c1", "c2")
        for row in (
            runs.check(name, cases=10, **(FAILED if name == "c1" else {})),
            runs.claim(name, **(WAIVED if name == "c1" else {})),
        )
    ]
    names = [row["claim"] for row in rows if row["kind"] == "claim"]
    (runs.directory / WAIVERS).write_text(TEXT)
    waivers = {"file": "npu.toml", "sha256": hashlib.sha256(TEXT.encode()).hexdigest()}
    header = {
        "claims_in_config": len(names),
        "claims_sha256": digest_ids(names),
        "waivers": waivers,
        "started": STARTED,
    }
    path: Path = runs.lines(rows, **header | {"started": STARTED} | changes)
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
    return verify(folder)[1].problems


def test_a_certificate_says_what_was_shown_and_holds(folder: Path, capsys: Any) -> None:
    said = predicate(folder)
    assert (said["certificate"], said["outcome"], said["without_execution_evidence"]) == (3, "PASS", "")
    ran = said["run"]
    assert (ran["backend"], ran["seed"], ran["profile"], ran["suite_commit"]) == (
        "qnnpack",
        7,
        "quick",
        "4fd1c0ffee" * 4,
    )
    assert said["counts"]["verdicts"] == {"REFUTED": 1, "VERIFIED": 2} and said["counts"]["waived"] == 1
    assert (said["counts"]["comparisons"], said["counts"]["resumed"]) == (30, 0)
    subject = json.loads((folder / CERTIFICATE).read_text())["subject"]
    assert subject == [
        {"name": name, "digest": {"sha256": hashlib.sha256((folder / name).read_bytes()).hexdigest()}}
        for name in sorted((RESULTS, HTML, WAIVERS))
    ]
    capsys.readouterr()
    assert main(["verify", str(folder)]) == 0
    told = capsys.readouterr().out
    assert "3 claims: 1 REFUTED, 2 VERIFIED (1 WAIVED)\nqnnpack: PASS with 1 waiver" in told
    assert told.endswith(f"\n{folder}: holds\n")
    assert [line.partition(":")[0] for line in told.splitlines()[:3]] == ["not checked"] * 3


def test_a_certificate_says_how_much_an_earlier_run_judged(runs: Any) -> None:
    target = runs.directory / "certificate"
    assert main(["certify", str(source(runs, resumed=2)), "-o", str(target)]) == 0
    assert predicate(target)["counts"]["resumed"] == 2 and problems(target) == []


def test_foreign_code_is_stated_and_the_vendors_refused(runs: Any, capsys: Any) -> None:
    target, rows = runs.directory / "certificate", [runs.check("c0"), runs.claim("c0", foreign_code=["tqdm 4"])]
    own = [runs.check("c1"), runs.claim("c1", beside_own_code=True)]
    assert main(["certify", str(source(runs, [*rows, *own], foreign_code=["xyz 1"])), "-o", str(target)]) == 0
    assert predicate(target)["foreign_code"] == ["tqdm 4", "xyz 1"] and problems(target) == []
    told = "beside it ran tqdm 4; xyz 1", "1 claim judged beside the vendor's own code"
    assert capsys.readouterr().out.count("".join(f"NOT THE SUITE ALONE: {line}\n" for line in told)) == 1
    assert main(["verify", str(target)]) == 0
    assert capsys.readouterr().out.count("".join(f"NOT THE SUITE ALONE: {line}\n" for line in told)) == 1
    for place in ({"foreign_code": ["the vendor's module npu (npu.py)"]}, {}):
        row = runs.claim("c0", foreign_code=[] if place else ["the vendor's module npu (npu.py)"])
        assert main(["certify", str(source(runs, [runs.check("c0"), row], **place)), "-o", str(target)]) == 1
        assert "the vendor's module npu (npu.py) was loaded where claims are judged" in capsys.readouterr().err


EDITS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a byte of the results": (lambda d: _replace(d / RESULTS, b"0.4996", b"0.4990"), f"{RESULTS}: the run is FAIL"),
    "a byte of the page": (lambda d: _replace(d / HTML, b"PASS", b"pass"), f"{HTML}: was changed: its sha256"),
    "a byte of the page, with its digest": (lambda d: _edit_page(d), f"{HTML}: is not what this version"),
    "a byte of the waivers": (lambda d: _replace(d / WAIVERS, b"known", b"KNOWN"), f"{WAIVERS}: is not the file"),
    "a count": (
        lambda d: _replace(d / CERTIFICATE, b'"waived": 1', b'"waived": 0'),
        f"{CERTIFICATE}: counts.waived is 0; the results give 1",
    ),
    "the seed": (lambda d: _replace(d / CERTIFICATE, b'"seed": 7', b'"seed": 8'), f"{CERTIFICATE}: run.seed is 8"),
    "a further statement": (
        lambda d: _replace(d / CERTIFICATE, b'"seed"', b'"best": 1,\n  "seed"'),
        f"{CERTIFICATE}: run.best is 1",
    ),
    "no page": (lambda d: (d / HTML).unlink(), f"{HTML}: is missing"),
    "no waivers": (lambda d: (d / WAIVERS).unlink(), f"{WAIVERS}: is missing"),
    "no results": (lambda d: (d / RESULTS).unlink(), f"{RESULTS}: is missing"),
    "a file too many": (lambda d: (d / "more.txt").write_text("x"), "more.txt: is not part of a certificate"),
    "an empty folder": (lambda d: (d / "a").mkdir(), "a: is not part of a certificate"),
    "a link to the results": (lambda d: _link(d, RESULTS), f"{RESULTS}: is a symbolic link"),
    "a link to nothing": (lambda d: (d / "x").symlink_to("y"), "x: is not part of a certificate"),
    "a pipe for the page": (lambda d: _pipe(d / HTML), f"{HTML}: is no regular file"),
    "a folder for the signature": (lambda d: (d / SIGNATURE).mkdir(), f"{SIGNATURE}: is no regular file"),
}


def _edit_page(folder: Path) -> None:
    before = hashlib.sha256((folder / HTML).read_bytes()).hexdigest()
    _replace(folder / HTML, b"PASS", b"pass")
    after = hashlib.sha256((folder / HTML).read_bytes()).hexdigest()
    _replace(folder / CERTIFICATE, before.encode(), after.encode())


def _link(folder: Path, name: str) -> None:
    target = folder.parent / f"elsewhere-{name}"
    (folder / name).rename(target)
    (folder / name).symlink_to(target)


def _pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


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


def rewritten(path: Path, drop: str = "", seconds: float = 75.5, **changes: Any) -> None:
    """Write results anew, with a footer that fits, but for one claim."""
    results = read_results(path)
    with ResultsWriter(path) as writer:
        claims = [claim for claim in results.claims if claim.claim != drop]
        writer.write_line(json.dumps(encode(results.header) | changes))
        rows: list[Row] = [*(check for check in results.checks if check.claim != drop), *claims]
        for row in rows:
            writer.write_line(json.dumps(encode(row)))
        writer.close(outcome=Outcome.PASS, exit_status=0, seconds=seconds)


@pytest.mark.parametrize(
    ("drop", "changes", "told"),
    [
        ("c2", {"claims": 2}, f"{RESULTS}: it has 2 of 3 claims"),
        ("c2", {"claims": 2, "claims_in_config": 2}, f"{RESULTS}: its claims are not those of the config"),
        ("", {"seed": 8}, f"{CERTIFICATE}: run.seed is 7; the results give 8"),
        (
            "",
            {"suite_commit": "abc-dirty"},
            f"{RESULTS}: the suite is neither a clean checkout nor an unchanged release: its commit is abc-dirty",
        ),
    ],
)
def test_results_that_were_written_anew_are_found(folder: Path, drop: str, changes: Any, told: str) -> None:
    rewritten(folder / RESULTS, drop, **changes)
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
        ({"isa": "avx512_vnni"}, "no kernel runs at the level 'avx512_vnni' on a CPU with the flags avx2 avx512_vnni"),
        ({"isa": "avx1024"}, "no kernel runs at the level 'avx1024'"),
        ({"started": "2020-01-01T00:00:00+00:00"}, "before there was a suite (2026-11-21)"),
        ({"started": "2999-01-01T00:00:00+00:00"}, "it started in the future"),
        ({"started": "yesterday"}, "it started 'yesterday' and took 75.5 s, which is no time"),
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


def test_a_run_that_ends_before_it_starts_gets_none(runs: Any, capsys: Any) -> None:
    path = source(runs)
    rewritten(path, seconds=-1.0)
    assert main(["certify", str(path), "-o", str(runs.directory / "c")]) == 1
    assert "it ended before it started: it took -1.0 s" in capsys.readouterr().err


def test_a_waiver_counts_until_its_last_day(runs: Any, folder: Path, capsys: Any) -> None:
    """One that was over on the day of the run waived nothing; one that is over by now is said."""

    def certify(expires: str) -> int:
        waived = WAIVED | {"waiver": WAIVED["waiver"] | {"expires": expires}}  # type: ignore[operator]
        rows = [runs.check("c0", cases=1), runs.claim("c0"), runs.check("c1", **FAILED), runs.claim("c1", **waived)]
        return main(["certify", str(source(runs, rows)), "-o", str(folder / expires)])

    assert certify("2026-11-24") == 1
    assert "c1 is waived by a waiver that had expired on the day of the run" in capsys.readouterr().err
    assert certify("2026-11-25") == 0
    assert main(["verify", str(folder / "2026-11-25")]) == 3
    told = capsys.readouterr().out
    assert "? c1 is waived by a waiver that has expired: a run would fail today" in told
    assert told.endswith("2026-11-25: holds, with doubts\n")


def test_a_run_in_which_nothing_is_verified_gets_none(runs: Any, capsys: Any) -> None:
    """Though it passes: all that fails is waived."""
    path = source(runs, [runs.check("c1", **FAILED), runs.claim("c1", **WAIVED)])
    assert read_results(path).outcome is Outcome.PASS
    assert main(["certify", str(path), "-o", str(runs.directory / "c")]) == 1
    assert "no certificate: no claim is VERIFIED" in capsys.readouterr().err


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
FORMAT_2 = STATED % ("urn:fx-quant-conformance:certificate:2", 2)


@pytest.mark.parametrize(
    ("text", "status"),
    [
        (None, 2),
        ("hello", 2),
        ("[]", 2),
        ('{"certificate": 3}', 2),
        ("[" * 100_000, 2),
        (STATED % (PREDICATE, 4), 2),
        (STATED % ("x", 3), 2),
        (STATED % (PREDICATE, 3), 2),
        (FORMAT_1, 4),
        (FORMAT_2, 4),
    ],
)
def test_a_folder_without_a_certificate_is_told(folder: Path, text: str | None, status: int, capsys: Any) -> None:
    (folder / CERTIFICATE).unlink()
    if text is not None:
        (folder / CERTIFICATE).write_text(text)
    assert main(["verify", str(folder)]) == status
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1) and err.startswith(f"reports: {folder / CERTIFICATE}: ")
    assert ("certify results.jsonl of its folder anew" in err) is (status == 4)


def test_a_signature_is_named_with_the_command_that_checks_it(folder: Path, capsys: Any) -> None:
    assert main(["verify", str(folder)]) == 0
    assert "not checked: who made it: it is unsigned, there is no certificate.sigstore" in capsys.readouterr().out
    (folder / SIGNATURE).write_text("{}")
    assert main(["verify", str(folder)]) == 0
    command = f"gh attestation verify {folder / CERTIFICATE} --bundle {folder / SIGNATURE} --predicate-type {PREDICATE}"
    assert f"not checked: its signature: {command} --repo OWNER/NAME" in capsys.readouterr().out


TRAP = "print('TRAPPED')\n"


@pytest.mark.slow
@pytest.mark.parametrize("more", ["", os.pathsep])
def test_nothing_that_lies_in_the_folder_is_executed(folder: Path, more: str) -> None:
    """Where ``verify`` is called in the certificate's folder, also if an empty entry of the path names that."""
    names = ("argparse", "json", "hashlib", "jinja2", "tabulate", "torch", "typing", "lzma")
    for name in names:
        (folder / f"{name}.py").write_text(TRAP)
    done = subprocess.run(
        [sys.executable, "-m", "fx_quant_conformance", "report", "verify", "."],
        cwd=folder,
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": f"{ROOT}{more}"},
        check=False,
    )
    assert done.returncode == 1 and "TRAPPED" not in done.stdout, done.stdout + done.stderr
    assert "! json.py: is not part of a certificate" in done.stdout
