"""What `verify` asks of others: the suite, which may hang or be missing, and the signature beside a certificate."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from reports import __main__ as reports
from reports.against_suite import Findings, compare_with_suite
from reports.certificate import CERTIFICATE, PREDICATE
from reports.description import RunDescription
from reports.rerun import build_command, compare_rerun
from reports.results import ResultsError
from reports.signature import SIGNATURE, describe_signature
from reports.suite import ROOT, SuiteError, run_python

SAID = RunDescription(suite_version="0.1.0", suite_commit="4fd1c0ffee" * 4, detection={}, stages=["numerics"], random=0)


# -- commands ---------------------------------------------------------------------------------------------------------


def test_a_command_leaves_its_status_and_all_that_it_printed() -> None:
    code = "import os, sys; print(os.environ.get('PYTEST_ADDOPTS')); print('e', file=sys.stderr); sys.exit(3)"
    os.environ["PYTEST_ADDOPTS"] = "-k nothing"
    try:
        status, output = run_python(("-c", code), 60)
    finally:
        del os.environ["PYTEST_ADDOPTS"]
    assert (status, sorted(output.split())) == (3, ["None", "e"])


HANGING = """
import pathlib, signal, subprocess, sys, time
signal.signal(signal.SIGINT, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
pathlib.Path(sys.argv[1]).write_text(str(child.pid))
time.sleep(600)
"""


@pytest.mark.slow
def test_a_command_that_hangs_is_ended_with_what_it_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though it takes no interrupt, and its child holds what it prints."""
    monkeypatch.setattr("reports.suite._GRACE", 0.2)
    started = time.monotonic()
    with pytest.raises(SuiteError, match="did not end within 3 s"):
        run_python(("-c", HANGING, str(tmp_path / "child")), 3)
    assert time.monotonic() - started < 30
    stat = Path(f"/proc/{(tmp_path / 'child').read_text()}/stat")
    deadline = time.monotonic() + 10
    while stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z":
        assert time.monotonic() < deadline, "what the command had started went on"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"claim_timeout": 90.0, "max_examples": 3, "isa": "avx2", "allow_quality": True},
         ["--claim-timeout=90", "--allow-quality", "--max-examples=3", "--isa=avx2"]),
        ({"claim_timeout": 1e9}, ["--claim-timeout=60"]),
        ({"claim_timeout": "never", "max_examples": "all"}, ["--claim-timeout=60"]),
        ({"claim_timeout": 0}, ["--claim-timeout=60"]),
    ],
)  # fmt: skip
def test_a_rerun_takes_no_option_that_a_run_cannot_have(runs: Any, options: dict[str, Any], words: list[str]) -> None:
    command = list(build_command(runs.results([runs.claim()], options=options), None))
    assert command[2] == str(ROOT / "conformance") and "--profile=quick" in command and "--no-waivers" in command
    given = [word for word in command if word.startswith(("--claim-t", "--max", "--isa", "--allow"))]
    assert given == words


# -- what the suite says ----------------------------------------------------------------------------------------------


def test_without_the_backend_the_suite_alone_is_compared(runs: Any) -> None:
    results = runs.results([runs.check(), runs.claim()])
    said = replace(SAID, error="unknown backend 'npu'")
    found = compare_with_suite(results, said)
    assert found.problems == []
    assert [line.partition(";")[0] for line in found.unchecked] == [
        "the backend could not be asked: unknown backend 'npu'"
    ]
    inflated = replace(said, detection={"rounding": {"quick": 7}})
    assert compare_with_suite(results, inflated).problems == [
        "the detection power is not this suite's: rounding is None; it is {'quick': 7}"
    ]


def test_what_another_suite_finds_otherwise_is_not_held_against_a_certificate(runs: Any) -> None:
    results = runs.results([runs.check(), runs.claim()])
    found = compare_with_suite(results, replace(SAID, suite_commit="ab", suite_version="2.0", error="no"))
    assert found.problems == [] and len(found.unchecked) == 3
    assert found.unchecked[0].startswith("the suite here is of commit ab, the certificate of 4fd1c0ffee")
    assert found.unchecked[1] == "suite_version is 0.1.0; this commit has 2.0"


def test_one_in_four_of_what_varies_may_be_steady_once(runs: Any) -> None:
    """Waived, for a race refutes; a fifth claim is said to vary, and does in no run."""
    waiver = {"reason": "race", "url": "https://a.b", "expires": None, "max_lsb": None}
    refuted = {"verdict": "REFUTED", "waived": True, "waiver": waiver, "failing": None}

    def run(count: int) -> Any:
        rows = []
        for number in range(5):
            varies = {"evidence": {"nondeterministic": True}} if number < count else {}
            rows += [runs.check(f"c{number}", outcome="fail", verdict="REFUTED", **varies)]
            rows += [runs.claim(f"c{number}", **refuted)]
        return runs.results(rows)

    units = [f"c{number}" for number in range(5)]
    assert compare_rerun(run(5), run(5), units, []).findings == Findings()
    once = compare_rerun(run(5), run(4), units, []).findings
    assert once.problems == [] and once.unchecked == [
        "c4: is said to vary by chance, and did not when it was run again"
    ]
    assert len(compare_rerun(run(5), run(3), units, []).findings.problems) == 2
    assert len(compare_rerun(run(3), run(2), units, []).findings.problems) == 1, "one of three is more than one in four"


# -- signatures -------------------------------------------------------------------------------------------------------


@pytest.fixture
def certificate(tmp_path: Path) -> Path:
    path = tmp_path / CERTIFICATE
    path.write_text(json.dumps({"predicateType": PREDICATE, "predicate": {"certificate": 2}}))
    return path


def bundle(certificate: Path, **changes: Any) -> str:
    """A bundle as GitHub's attestations write it, of a statement about a certificate, without its keys."""
    digest = hashlib.sha256(certificate.read_bytes()).hexdigest()
    stated = json.loads(certificate.read_text())
    signed = {"_type": "https://in-toto.io/Statement/v1", "subject": [{"name": "c", "digest": {"sha256": digest}}]}
    payload = base64.b64encode(json.dumps(signed | stated | changes).encode()).decode()
    return json.dumps({"mediaType": "…", "dsseEnvelope": {"payload": payload, "signatures": [{"sig": "…"}]}})


def test_a_signature_is_named_with_the_command_that_checks_it(certificate: Path) -> None:
    assert describe_signature(certificate.parent, certificate).startswith("unsigned: there is no certificate.sigstore")
    signature = certificate.with_name(SIGNATURE)
    signature.write_text(bundle(certificate))
    said = describe_signature(certificate.parent, certificate)
    assert said.startswith("signed, but by whom is not checked here: gh attestation verify ")
    assert f"{certificate} --bundle {signature} --predicate-type {PREDICATE} --repo OWNER/NAME" in said


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"subject": []}, "signs another certificate than certificate.json"),
        ({"subject": [{"name": "c", "digest": {"sha256": "ab" * 32}}]}, "signs another certificate"),
        ({"predicate": {"certificate": 3}}, "signs another certificate"),
        ({"subject": None}, "is no Sigstore bundle of an in-toto statement"),
    ],
)
def test_a_signature_of_something_else_is_told(certificate: Path, changes: dict[str, Any], told: str) -> None:
    certificate.with_name(SIGNATURE).write_text(bundle(certificate, **changes))
    with pytest.raises(ResultsError, match=told):
        describe_signature(certificate.parent, certificate)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"dsseEnvelope": {"payload": "e30="}}', "[" * 100_000])
def test_what_is_no_signature_is_told(certificate: Path, text: str) -> None:
    certificate.with_name(SIGNATURE).write_text(text)
    with pytest.raises(ResultsError, match="is no Sigstore bundle"):
        describe_signature(certificate.parent, certificate)


def test_the_exit_statuses_tell_three_outcomes_apart() -> None:
    assert len({reports.OK, reports.FAILED, reports.UNUSABLE, reports.PARTLY}) == 4
