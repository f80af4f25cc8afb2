"""The mutation gate: mutants of each class are killed and blamed rightly, honest ones are not, each check can be taken
away; the reduced form of ``python -m tests.mutation``."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import replace
from functools import cache
from inspect import isgeneratorfunction, signature
from pathlib import Path
from typing import Any

import pytest

from fx_quant_conformance.conformance.machine.environment import DETECTION
from fx_quant_conformance.conformance.machine.guard import GUARDS
from fx_quant_conformance.conformance.machine.release import ROOT
from fx_quant_conformance.reports.verdicts import Verdict
from tests.mutants import mutants as shipped
from tests.mutants.integer_kernels import IntegerBackend, varied
from tests.mutants.runtimes import RUNTIMES, Runtime
from tests.mutation import __main__ as command
from tests.mutation.ablation import WHY, Removal, ablate
from tests.mutation.gate import FailedUnit, MutantRun, Task, run_mutant
from tests.mutation.guards import JUDGES, OPEN
from tests.mutation.mutant import Mutant
from tests.mutation.power import Power, as_data, is_right, render_terminal
from tests.support.torchao import needs_torchao

MUTANTS = {mutant.name: mutant for mutant in shipped.MUTANTS}
CLASSES = {
    "rounding",
    "zero point",
    "scale",
    "accumulation",
    "bias",
    "activation",
    "geometry",
    "layout",
    "sharing",
    "dynamic",
    "structure",
    "claims",
    "state",
    "fixed qparams",
    "flow",
    "declared",
}
EACH = (
    "next channel's scale",
    "15-bit multiplier",
    "XNNPACK: bias floored",
    "CMSIS-NN: sums of two wrap as int16",
    "pairs saturate in int16",
    "relu clamps at integer 0",
    "relu6 as relu",
    "wrong group",
    "mean of a bag as sum",
    "observers not shared",
    "dynamic inputs in 7 bits",
    "qparams of the previous input",
    "adds in float, and says so",
    "batch norm folded with another eps",
    "convert leaves roots in float",
    "declines what it claims",
    "scales below the bound are taken",
    "dies on one op",
    "table for inputs on the grid of the result",
    "one table for all grids",
    "fixed grid: clips at the other end",
    "fixed grid: stands on the input",
    "fuse swaps the norms of two branches",
    "convert drops a product",
    "a reader takes integers for numbers",
)
"""Mutants of the flow and its stages, and few of integer kernels: test_detection.py has them all."""
ALONE = {
    "execution": "adds in float, and says so",
    "numerics.distance": "mean of a bag as sum",
    "lower": "declines what it claims",
    "isolation": "dies on one op",
    "convert.check_meaning": "reference module reverses its channels",
    "convert.check_ranges": "convert writes twice each step",
    "convert.check_fixed_grids": "fixed grid: an observer measures the result",
    "convert.check_own_weights": "own reference module rounds its weight down",
    "refusal.check_refused": "scales below the bound are taken",
    "prepare.check_prepared_meaning": "prepare enlarges biases by 2^-16",
    "models.check_prepared": "prepare changes a number",
    "models.check_roundings": "a reader takes integers for numbers",
}


@cache
def quick(name: str) -> MutantRun:
    return run_mutant(MUTANTS[name], Task(mutant=name, profile="quick"))


def test_there_are_faults_of_every_class_and_each_names_rules_that_exist() -> None:
    rules = set(re.findall(r"[A-Z]{3}-\d\d", (ROOT / "docs" / "spec.md").read_text(encoding="utf-8")))
    faulty = [mutant for mutant in shipped.MUTANTS if not mutant.is_honest]
    assert len(faulty) >= 60 and len(shipped.MUTANTS) - len(faulty) >= 4
    assert {mutant.group for mutant in faulty} >= CLASSES
    assert {rule for mutant in faulty for rule in mutant.rules} <= rules | {Verdict.CRASHED, Verdict.TIMEOUT}
    assert not [name for name, count in Counter(mutant.name for mutant in shipped.MUTANTS).items() if count > 1]


@pytest.mark.slow
@pytest.mark.parametrize("name", EACH)
def test_a_mutant_is_killed_by_quick_and_blamed_on_a_rule_that_it_names(name: str) -> None:
    found = quick(name)
    assert found.is_killed
    assert is_right(MUTANTS[name], found), [(each.unit, each.rule, each.message) for each in found.failures]
    assert all(each.guards for each in found.failures), "each failure is due to a check"


@pytest.mark.slow
def test_an_honest_variant_is_verified() -> None:
    found = quick("bias as int32, declared")
    assert found.units > 60
    assert not found.failures and not found.open


@pytest.mark.slow
@pytest.mark.rule("NUM-04")
@pytest.mark.parametrize("runtime", RUNTIMES, ids=lambda runtime: runtime.name)
def test_a_runtimes_arithmetic_is_verified_as_it_declares_it_and_many_faults_are_just_outside(runtime: Runtime) -> None:
    found = quick(f"{runtime.name}, declared")
    assert found.units > 5
    assert not found.failures and not found.open
    assert len({fault.name for fault in runtime.faults()}) >= 15


@pytest.mark.slow
def test_models_that_are_handed_in_are_run_and_a_fault_of_the_flow_is_found_by_what_it_leaves_open() -> None:
    honest, faulty = quick("models that are handed in"), quick("prepare changes a number")
    assert honest.units == len(MUTANTS["models that are handed in"].models) == 4
    assert not honest.failures and not honest.open
    assert {each.verdict for each in faulty.failures} == {Verdict.UNEXERCISED} and not faulty.open
    assert {each.guards for each in faulty.failures} == {("models.check_prepared",)}


@pytest.mark.slow
@pytest.mark.parametrize(("guard", "name"), ALONE.items())
def test_what_one_check_finds_survives_without_it(guard: str, name: str) -> None:
    failures = quick(name).failures
    assert failures and all(guard in each.guards for each in failures)
    units = tuple(each.unit for each in failures)
    assert not run_mutant(MUTANTS[name], Task(mutant=name, profile="quick", blind=guard, units=units)).is_killed


def marked() -> Counter[str]:
    """The names of the guards that the suite's source marks, and how many functions are marked with each."""
    texts = (path.read_text(encoding="utf-8") for path in (ROOT / "conformance").rglob("*.py"))
    return Counter(name for text in texts for name in re.findall(r'^ *@guard\("([^"]+)"', text, re.MULTILINE))


def test_every_guard_has_its_own_name() -> None:
    assert marked().keys() == GUARDS.keys(), "the gate knows every guard that there is"
    assert max(marked().values()) == 1
    assert GUARDS.keys() >= {*JUDGES, *OPEN, *WHY}


def test_a_guard_yields_faults_or_raises_them() -> None:
    """One that returned what another yields could not be watched or blinded."""
    others = {name for name, check in GUARDS.items() if "Iterator" not in signature(check).return_annotation}
    assert others == {"annotate.ask", "flow", "lower", *JUDGES}
    assert others == {name for name, check in GUARDS.items() if not isgeneratorfunction(check)}


@pytest.mark.slow
def test_a_check_is_taken_away_for_those_mutants_that_it_alone_may_find() -> None:
    names = ("declines what it claims", "mean of a bag as sum")
    removals = {each.guard: each for each in ablate([MUTANTS[name] for name in names], map(quick, names), 1)}
    assert (removals["lower"].sees, removals["lower"].alone) == (1, ("declines what it claims",))
    assert removals["numerics.distance"].alone == ("mean of a bag as sum",)
    assert removals["config.matching"] == Removal(
        guard="config.matching", sees=0, alone=(), why=WHY.get("config.matching", "")
    )


# -- what the runs say together ---------------------------------------------------------------------------------------


def failure(rule: str = "NUM-03", **changed: Any) -> FailedUnit:
    first = FailedUnit(
        unit="a/b",
        pattern="a",
        verdict=Verdict.REFUTED,
        stage="numerics",
        rule=rule,
        failing=2,
        cases=8,
        guards=("numerics.distance",),
        max_lsb=3.0,
        message="far",
    )
    return replace(first, **changed)


def mutant(name: str, *rules: str, **more: Any) -> Mutant:
    return Mutant(name=name, group="scale", make=MUTANTS["rounds twice"].make, rules=rules, **more)


def made(name: str, *failures: FailedUnit, profile: str = "full", **more: Any) -> MutantRun:
    return MutantRun(mutant=name, profile=profile, seed=0, failures=failures, units=4, seconds=1.0, **more)


def test_rates_are_of_faulty_mutants_and_honest_ones_may_not_be_red() -> None:
    faults = tuple(mutant(f"fault {n}", "NUM-03", size=2.0**-n) for n in range(4))
    honest = mutant("honest")
    several = (failure(), failure("LOW-01", max_lsb=0.6), failure(pattern="b"))
    runs = (
        made("fault 0", failure()),
        made("fault 1", failure("LOW-01")),
        made("fault 2"),
        made("fault 3", *several),
        made("honest"),
    )
    power = Power(mutants=(*faults, honest), runs=runs)
    assert str(power.count_killed("full")) == "3 of 4 (75.0 %)"
    assert str(power.count_blamed("full")) == "2 of 3 (66.7 %)"
    assert str(power.honest) == "1 of 1 (100.0 %)"
    assert power.find_smallest() == {"a": (2.0**-3, 0.6), "b": (2.0**-3, 3.0)}
    assert not power.passes
    alarmed = replace(power, mutants=(honest,), runs=(made("honest", failure()),))
    assert not alarmed.passes and alarmed.honest.count == 0
    left_open = replace(power, mutants=(honest,), runs=(made("honest", open=("a claim: no samples",)),))
    assert not left_open.passes, "what cannot be exercised is no pass"
    found = replace(power, mutants=faults[:1], runs=runs[:1])
    assert found.passes
    text = render_terminal(power)
    assert "survived" in text and "THE GATE FAILS" in text and "the gate passes" in render_terminal(found)
    data = json.loads(json.dumps(as_data(power, {"torch": "1"})))
    assert [each["killed"] for each in data["trials"]] == [True, True, False, True, False]
    assert data["trials"][1]["blamed_rightly"] is False and data["passes"] is False


@needs_torchao
def test_the_document_and_the_headers_are_of_these_mutants() -> None:
    text = (ROOT / "docs" / "detection-power.md").read_text(encoding="utf-8")
    said = json.loads(DETECTION.read_text(encoding="utf-8"))
    honest = said.pop("honest variants")
    total = said.pop("every class")
    faulty = Counter(each.group for each in shipped.MUTANTS if not each.is_honest)
    assert {name: row["faults"] for name, row in said.items()} == faulty
    assert total["faults"] == total["full"] == faulty.total() and honest["runs"] == honest["without a false alarm"]
    for name, row in {**said, "every class": total}.items():
        line = "| {} | {} | {} | {} |".format(name, *row.values())
        assert name == "every class" or line in re.sub(" +", " ", text), name
    assert f"killed by full: {total['full']} of {total['faults']} (100.0 %)" in text
    assert "- the gate passes" in text


# -- the command ------------------------------------------------------------------------------------------------------

CLAIMS = ("torch.flatten/static:in=quint8*/ptq/*", "nn.ReLU/static:in=quint8*/ptq/*")
HONEST_ONE = Mutant(name="honest", group="honest", make=IntegerBackend, claims=CLAIMS)
FAULTY_ONE = Mutant(
    name="no relu",
    group="activation",
    rules=("NUM-05",),
    claims=CLAIMS,
    make=lambda: IntegerBackend(varied("relu", lambda honest, x: x)),
)
HIDDEN = Mutant(name="hidden", group="state", rules=("NUM-07",), claims=CLAIMS, make=IntegerBackend)


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "MUTANTS", (HONEST_ONE, FAULTY_ONE, HIDDEN))
    monkeypatch.setattr(command, "PROFILES", ("quick",))
    monkeypatch.setattr(command, "DOCUMENT", tmp_path / "doc.md")
    monkeypatch.setattr(command, "DETECTION", tmp_path / "header.json")


@pytest.mark.slow
@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize(("names", "status"), ((("honest", "no relu"), 0), (("hidden",), 1)))
def test_the_command_says_what_the_mutants_show(
    names: tuple[str, ...], status: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--profile=quick", "-n1", f"--report-dir={tmp_path}/out")
    assert command.main([*(f"--mutant={name}" for name in names), *options]) == status
    printed = capsys.readouterr()
    data = json.loads((tmp_path / "out" / "detection-power.json").read_text(encoding="utf-8"))
    assert data["passes"] is (status == 0) and data["suite_commit"]
    assert ("the gate passes" in printed.out) is (status == 0)
    assert printed.err.count("quick seed 0") == len(data["trials"]) == len(names)


@pytest.mark.usefixtures("tiny")
def test_the_command_writes_the_document_of_all_mutants(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "MUTANTS", (HIDDEN,))
    assert command.main(["-n1", f"--report-dir={tmp_path}/out", "--write-doc"]) == 1
    written = (tmp_path / "doc.md").read_text(encoding="utf-8")
    assert written.startswith("# Detection power") and "seconds" not in written
    assert "- hidden (state)" in written
    header = json.loads((tmp_path / "header.json").read_text(encoding="utf-8"))
    assert header["every class"]["quick"] == 0


@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize("option", ("--mutant=hidden", "--profile=quick", "--no-ablation"))
def test_the_document_is_not_written_of_a_part(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main([option, "--write-doc"]) == command.USAGE
    assert re.search(rf"leave out .*{option.partition('=')[0]}", capsys.readouterr().err)


def test_a_mutant_whose_claims_are_not_in_its_config_is_not_killed() -> None:
    lost = replace(MUTANTS["rounds twice"], claims=("nn.Nothing/*",))
    found = run_mutant(lost, Task(mutant=lost.name, profile="quick"))
    assert not found.is_killed and "matches no claim" in found.open[0]
