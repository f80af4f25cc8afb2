"""Tables of functions with fixed qparams that assume something of their input's grid, the function the only claim."""

from __future__ import annotations

import pytest

from fx_quant_conformance.reports.verdicts import Verdict
from tests.mutants.integer_kernels import CLAIMS
from tests.mutants.qparams_faults import MUTANTS
from tests.mutants.table_kernels import FlooredBackend, TableBackend
from tests.mutation.gate import Task, run_mutant
from tests.mutation.mutant import Mutant

ASSUMED = (
    "table for inputs on the grid of the result",
    "table for inputs on the grid of the result, as both ends are claimed",
    "table for inputs in steps of 1/16",
    "table for inputs around 128",
    "table of scales up to 1/32",
    "one table for all grids",
    "table whose last result wraps",
)
"""Faults of each kind of assumption: all grid, zero point, scale, largest scale, other tables, the last integer."""


@pytest.mark.slow
@pytest.mark.rule("OBS-14")
@pytest.mark.rule("NUM-03")
@pytest.mark.parametrize("mutant", [each for each in MUTANTS if each.name in ASSUMED], ids=str)
def test_a_table_that_assumes_something_of_its_input_is_refuted(mutant: Mutant) -> None:
    found = run_mutant(mutant, Task(mutant=mutant.name, profile="quick"))
    assert not found.open and found.units >= 4
    assert found.is_killed and {each.verdict for each in found.failures} == {Verdict.REFUTED}
    assert {each.rule for each in found.failures} == {"NUM-03"}


@pytest.mark.slow
@pytest.mark.rule("OBS-14")
@pytest.mark.parametrize("is_input_fixed", [False, True], ids=["output fixed", "both fixed"])
def test_an_honest_table_is_not(is_input_fixed: bool) -> None:
    honest = Mutant(name="honest", group="honest", make=lambda: TableBackend(is_input_fixed=is_input_fixed))
    found = run_mutant(honest, Task(mutant="honest", profile="quick"))
    assert (found.failures, found.open, found.units) == ((), (), 6)


@pytest.mark.slow
@pytest.mark.rule("DTY-04")
@pytest.mark.rule("OBS-14")
def test_a_smallest_scale_that_other_ops_claim_holds_before_fixed_qparams_too() -> None:
    """The suite's own identity had a smaller one, so that the config refused it; sigmoid was blamed by OBS-01."""
    honest = Mutant(name="honest", group="honest", make=FlooredBackend, claims=CLAIMS)
    found = run_mutant(honest, Task(mutant="honest", profile="quick"))
    assert (found.failures, found.open) == ((), ())
    assert found.units == 18
