"""Backends that take exported programs, in processes of their own: what is found of them, and what they are given."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx import symbolic_trace

from fx_quant_conformance.backends.base import UnsupportedPattern
from fx_quant_conformance.backends.lowering import lower_reference
from tests.conformance.support.fake_backends.programs import Dynamic, Runs, Static
from tests.conformance.support.own_entries import checks_of
from tests.conformance.support.suite_runs import FAKES, REPO, Ran, run
from tests.support.warm_python import run_python

ADD, OTHERS = "operator.add", ("torch.cat",)
CLAIMS = [f"--claim={pattern}/*/ptq/*" for pattern in (ADD, *OTHERS)]


def verdicts(ran: Ran) -> dict[str, set[str]]:
    """The verdicts of each pattern's claims."""
    found = dict[str, set[str]]()
    for row in ran.rows:
        if row["kind"] == "claim":
            found.setdefault(row["pattern"], set()).add(row["verdict"])
    return found


@pytest.mark.slow
@pytest.mark.rule("CVT-07")
@pytest.mark.rule("NUM-03")
def test_a_backend_that_computes_another_op_is_refuted_with_a_script_that_shows_it(tmp_path: Path) -> None:
    ran = run(tmp_path, "programs:Subtracts", *CLAIMS)
    assert verdicts(ran) == {ADD: {"REFUTED"}} | {pattern: {"VERIFIED"} for pattern in OTHERS}, ran.said
    assert ran.results.header.representation == "EXPORTED"
    refuted = [row for row in ran.rows if row["kind"] == "check" and row["verdict"] == "REFUTED"]
    assert {(row["stage"], row["rule"]) for row in refuted} == {("numerics", "NUM-03")}
    script = next((ran.folder / "scripts").glob("*.py"))
    assert "lowered = lower_reference(backend, torch.fx.GraphModule(" in script.read_text()
    for variables, said in (({}, "AssertionError: at "), ({"FAKE_FIXED": "1"}, "")):
        environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(REPO), str(FAKES)])} | variables
        done = run_python(str(script), cwd=tmp_path, environment=environment, timeout=120)
        assert bool(done.returncode) is bool(said) and said in done.stderr, done.stderr


@pytest.mark.slow
@pytest.mark.rule("LOW-01")
@pytest.mark.parametrize("kind", [Static, Dynamic])
def test_the_batch_is_dynamic_unless_the_backend_says_otherwise(kind: type[Static]) -> None:
    failed = [each for each in checks_of(kind(), ADD) if each.outcome == "fail"]
    assert [each.stage for each in failed] == ([] if kind is Static else ["lower"])
    assert all("lower raised AssertionError: a dynamic size" in each.message for each in failed)


@pytest.mark.rule("LOW-01")
def test_a_model_without_a_program_is_declined_before_the_backend_sees_it() -> None:
    with pytest.raises(UnsupportedPattern, match=SAID):
        lower_reference(Runs(), symbolic_trace(Moves()), (torch.zeros(2, 3),))


SAID = r"^it takes exported programs, and the reference model \(to\) has no exported program: torch says RuntimeError: "


class Moves(nn.Module):
    """A call that no export takes: to a device that is none."""

    def forward(self, x: Any) -> Any:
        return x.to("nowhere")
