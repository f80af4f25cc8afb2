"""Comparing an output with the exact result, and judging by it (rules NUM-03 to NUM-07)."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fx_quant_conformance.conformance.machine.fault import Fault
from fx_quant_conformance.conformance.oracle.exact import Exact
from fx_quant_conformance.conformance.oracle.grids import Grid
from fx_quant_conformance.conformance.stages.comparison import Comparison, compare, compare_all
from fx_quant_conformance.conformance.stages.numerics import judge_comparisons, report_failed_run
from fx_quant_conformance.reports.schema import Check, Where
from fx_quant_conformance.reports.verdicts import Verdict
from tests.conformance.support.flows import PROPERTY

GRID = Grid(scale=0.037, zero_point=11, low=0, high=255, dtype="quint8")
Q = st.integers(GRID.low, GRID.high)
WHERE = Where(case="a case")


def exact(*integers: float, shape: tuple[int, ...] | None = None, grid: Grid = GRID, **errors: float) -> Exact:
    """An exact result by its place on the grid, and errors of these causes, in steps."""
    v = torch.tensor(integers, dtype=torch.float64)
    v = v if shape is None else v.reshape(shape)
    step = torch.tensor(grid.scale, dtype=torch.float64)
    return Exact(
        real=(v - grid.zero_point) * step,
        errors={cause: torch.full_like(v, error) * step for cause, error in errors.items()},
        step=step,
        grid=grid,
    )


def tolerant(*integers: float, **errors: Any) -> Exact:
    """The exact result of a function that kernels approximate."""
    return replace(exact(*integers, **errors), tolerance=1.0)


def float_output(*reals: float, step: float, **errors: float) -> Exact:
    """An exact result that is a float tensor, measured in the given step."""
    real = torch.tensor(reals, dtype=torch.float64)
    by_cause = {cause: torch.full_like(real, error * step) for cause, error in errors.items()}
    return Exact(real=real, errors=by_cause, step=torch.tensor(step, dtype=torch.float64))


def compared(expected: Exact, output: Any, *, moves_only: bool = False) -> Comparison:
    return compare(WHERE, expected, output, (GRID,), moves_only=moves_only)


def of(expected: Exact, *integers: float, moves_only: bool = False) -> Comparison:
    """Compare with given integers as output, dequantized as a backend does it."""
    output = GRID.values(torch.tensor(integers, dtype=torch.float64)).reshape(expected.real.shape)
    return compared(expected, output, moves_only=moves_only)


def judged(*comparisons: Comparison) -> Check:
    return judge_comparisons("a claim", comparisons)


def verdict(*comparisons: Comparison) -> Verdict:
    return judged(*comparisons).verdict


@pytest.mark.slow
@pytest.mark.rule("NUM-03")
@pytest.mark.rule("NUM-06")
@PROPERTY
@given(st.integers(GRID.low, GRID.high - 1))
def test_both_ways_at_an_exact_tie_are_right(q: int) -> None:
    tie = exact(q + 0.5)
    for way in (q, q + 1):
        comparison = of(tie, way)
        assert verdict(comparison) is Verdict.VERIFIED
        assert comparison.max_lsb == pytest.approx(0.5, abs=1e-12)


@pytest.mark.slow
@pytest.mark.rule("NUM-03")
@PROPERTY
@given(Q, st.floats(-0.49, 0.49))
def test_the_nearest_integer_is_verified_and_its_neighbours_are_not(q: int, off: float) -> None:
    v = exact(min(max(q + off, GRID.low), GRID.high))
    assert verdict(of(v, q)) is Verdict.VERIFIED
    for neighbour in (q - 1, q + 1):
        assert verdict(of(v, neighbour)) is verdict(of(v, neighbour, moves_only=True)) is Verdict.REFUTED
        is_near = abs(neighbour - float(v.integers)) <= 1 + float(v.slack) and GRID.low <= neighbour <= GRID.high
        close = of(replace(v, tolerance=1.0), neighbour)
        assert verdict(close) is (Verdict.TOLERATED if is_near else Verdict.REFUTED)


@pytest.mark.rule("NUM-04")
@pytest.mark.parametrize("errors", ({}, {"accumulation": 2.0**-10}, {"bias": 2.0**-9, "upstream": 2.0**-9}), ids=str)
def test_just_beyond_the_slack_is_refuted_or_tolerated_where_that_is_declared(errors: dict[str, Any]) -> None:
    """Beside the errors given: 3·89.5 + 100.5 roundings of float32 for a result at 100.5 of a grid around 11."""
    allowed = 369 * 2.0**-24 + sum(errors.values())
    output = GRID.values(torch.tensor([100]))
    assert float(exact(100.5, **errors).slack) == pytest.approx(allowed, rel=1e-9)
    assert verdict(compared(exact(100.5 + 0.999 * allowed, **errors), output)) is Verdict.VERIFIED
    assert verdict(compared(exact(100.5 + 1.001 * allowed, **errors), output)) is Verdict.REFUTED
    assert verdict(compared(tolerant(100.5 + 1.001 * allowed, **errors), output)) is Verdict.TOLERATED


@pytest.mark.rule("NUM-04")
def test_errors_of_a_step_and_more_excuse_the_next_integer_but_not_the_one_after() -> None:
    doubtful = tolerant(20.0, upstream=1.0)
    assert verdict(of(doubtful, 21)) is verdict(of(doubtful, 19)) is Verdict.VERIFIED
    assert verdict(of(doubtful, 22)) is Verdict.TOLERATED
    assert verdict(of(doubtful, 23)) is Verdict.REFUTED


@pytest.mark.rule("NUM-03")
@pytest.mark.parametrize(
    ("v", "q", "expected"),
    (
        (20.0, 21, Verdict.TOLERATED),
        (20.6, 20, Verdict.TOLERATED),
        (20.0, 22, Verdict.REFUTED),
        (20.1, 18.0, Verdict.REFUTED),
        (20.4, 22, Verdict.REFUTED),
        (0.0, 255, Verdict.REFUTED),
        (255.0, 254, Verdict.TOLERATED),
    ),
)
def test_within_a_declared_step_or_not(v: float, q: float, expected: Verdict) -> None:
    assert judged(of(exact(v), q)).verdict is Verdict.REFUTED
    check = judged(of(tolerant(v), q))
    assert (check.verdict, check.rule) == (expected, "NUM-03")
    assert check.outcome == ("pass" if expected is Verdict.TOLERATED else "fail")
    assert "a case" in check.message and f"{abs(q - v):.6g} LSB" in check.message


def test_the_comparisons_that_do_not_pass_are_counted() -> None:
    """20.4 is 20; 21 is a step that a tolerance grants; 23 and 30 are wrong."""
    comparisons = [of(tolerant(20.4), q) for q in (20, 21, 23, 30)]
    assert (judged(*comparisons).cases, judged(*comparisons).failing) == (4, 2)
    assert judged(*(of(tolerant(20.4), q, moves_only=True) for q in (20, 21, 23, 30))).failing == 3
    assert judged(*comparisons[:1]).failing == 0


@pytest.mark.rule("NUM-05")
def test_moved_values_may_not_be_off_by_one() -> None:
    check = judged(of(exact(20.0), 21, moves_only=True))
    assert (check.verdict, check.rule, check.outcome) == (Verdict.REFUTED, "NUM-05", "fail")
    assert verdict(of(exact(20.0), 20, moves_only=True)) is Verdict.VERIFIED


@pytest.mark.slow
@pytest.mark.rule("NUM-04")
@PROPERTY
@given(st.floats(1e-6, 1e3), st.integers(0, 255), st.integers(0, 255))
def test_float32_dequantizes_onto_the_grid_in_either_form(scale: float, zero_point: int, q: int) -> None:
    """(q − z)·s, and low + q·s with low = −z·s as a fake quantization has it."""
    s = torch.tensor(scale, dtype=torch.float32)
    grid = Grid(scale=float(s), zero_point=zero_point, low=0, high=255, dtype="quint8")
    forms = (q - zero_point) * s, s * -zero_point + q * s
    for value in forms:
        assert compared(exact(q, grid=grid), value.reshape(1)).fault is None
    off = torch.tensor([grid.scale * (q - zero_point + 0.001)], dtype=torch.float32)
    assert verdict(compared(exact(q, grid=grid), off)) is Verdict.FALLBACK, "far from what rounding explains"


def test_off_the_grid_and_right_is_a_float_fallback() -> None:
    for v in (20.3, 20.5, 7.75):
        check = judged(compared(exact(v, 3.0), GRID.values(torch.tensor([v, 3.0]))))
        assert (check.verdict, check.outcome) == (Verdict.FALLBACK, "fail")
        assert "computed in float" in check.message


def test_a_float_fallback_is_one_even_where_it_is_exactly_right() -> None:
    grid = Grid(scale=0.5, zero_point=0, low=0, high=255, dtype="quint8")
    right = exact(2.25, 4.75, grid=grid)
    for moves_only in (False, True):
        comparison = compared(right, grid.values(right.integers), moves_only=moves_only)
        assert comparison.max_lsb == 0.0 and verdict(comparison) is Verdict.FALLBACK


def test_off_the_grid_beyond_the_range_is_right_once_clamped() -> None:
    assert verdict(compared(exact(255.0, 0.0), GRID.values(torch.tensor([300.4, -5.6])))) is Verdict.FALLBACK


def test_off_the_grid_and_wrong_is_refuted() -> None:
    check = judged(compared(exact(20.3), GRID.values(torch.tensor([23.4]))))
    assert check.verdict is Verdict.REFUTED
    assert "and it is wrong" in check.message


def test_on_the_grid_but_outside_of_the_range_is_refuted() -> None:
    for v, q in ((255.0, 256), (0.0, -1)):
        assert verdict(of(exact(v), q)) is Verdict.REFUTED


@pytest.mark.parametrize(
    ("output", "text"),
    (
        ([torch.zeros(2)], "the output is a list; expected a tensor"),
        (None, "the output is a NoneType; expected a tensor"),
        (torch.zeros(3), "the output has shape (3,); expected (2,)"),
        (torch.zeros(1, 2), "the output has shape (1, 2); expected (2,)"),
        (torch.zeros(2, dtype=torch.uint8), "the output has dtype torch.uint8"),
        (torch.zeros(2, dtype=torch.float64), "the output has dtype torch.float64"),
        (torch.zeros(2, dtype=torch.float16), "the output has dtype torch.float16"),
        (torch.quantize_per_tensor(torch.zeros(2), 0.1, 0, torch.quint8), "the output has dtype torch.quint8"),
        (torch.tensor([0.0, float("nan")]), "the output is not finite"),
        (torch.tensor([0.0, float("inf")]), "the output is not finite"),
    ),
    ids=str,
)
def test_an_output_that_is_none_is_refuted_with_a_clear_message(output: Any, text: str) -> None:
    check = judged(of(exact(3.0, 4.0), 3, 4), compared(exact(3.0, 4.0), output))
    assert check.verdict is Verdict.REFUTED
    assert text in check.message and "a case" in check.message
    assert check.max_lsb == 0.0, "of the other comparison: this one measured nothing"


def test_empty_tensors_agree_by_shape() -> None:
    nothing = exact(shape=(0, 4))
    assert verdict(compared(nothing, torch.zeros(0, 4))) is Verdict.VERIFIED
    assert verdict(compared(nothing, torch.zeros(4, 0))) is Verdict.REFUTED


def test_a_scalar_has_evidence_too() -> None:
    comparison = compared(exact(7.0, shape=()), GRID.values(torch.tensor(9.0)))
    assert comparison.evidence["index"] == [[]]
    assert verdict(comparison) is Verdict.REFUTED


def test_evidence_shows_the_worst_elements_first() -> None:
    v = exact(*range(12), shape=(3, 4))
    off = torch.zeros(3, 4, dtype=torch.float64)
    off[2, 1], off[0, 3] = 5, -2
    check = judged(of(v, *range(12)), compared(v, GRID.values(v.integers + off)))
    evidence: Any = check.evidence
    assert evidence["index"][:2] == [[2, 1], [0, 3]]
    assert evidence["expected"][:2] == [9.0, 3.0]
    assert evidence["found"][:2] == [14, 1]
    assert evidence["attribution"] == "2 wrong"
    assert evidence["qparams"] == {"input 0": GRID.row(), "output": GRID.row()}
    assert (check.max_lsb, check.cases) == (5.0, 2)


def test_what_is_right_needs_no_evidence() -> None:
    assert not of(exact(20.2, 20.5), 20, 21).evidence


def test_the_worst_verdict_decides_whatever_the_distances_are() -> None:
    right, close, wrong = of(exact(20.0), 20), of(tolerant(20.0), 21), of(exact(20.0), 25)
    in_float = compared(exact(20.3), GRID.values(torch.tensor([20.3])))
    assert verdict(right, close) is Verdict.TOLERATED
    assert verdict(close, in_float, right) is Verdict.FALLBACK
    assert verdict(in_float, wrong, close) is Verdict.REFUTED


# -- float outputs ----------------------------------------------------------------------------------------------------


@pytest.mark.rule("NUM-04")
def test_a_float_output_is_right_within_its_bound_and_else_wrong() -> None:
    """Of 8.0 in steps of 1/4: an error of an eighth of a step, and one rounding to float32, of 2·2⁻²⁴·8."""
    expected = float_output(8.0, step=0.25, accumulation=0.125)
    allowed = 0.25 * 0.125 + 16 * 2.0**-24
    for off, wanted in ((0.0, Verdict.VERIFIED), (0.99, Verdict.VERIFIED), (1.01, Verdict.REFUTED)):
        comparison = compared(expected, torch.tensor([8.0 - off * allowed]))
        assert comparison.allowed == ""
        assert verdict(comparison) is wanted
        assert comparison.max_lsb == pytest.approx(off * allowed / 0.25, abs=1e-5)
    message = judged(compared(expected, torch.tensor([9.0]))).message
    assert message == "a case: distance 4 LSB, allowed 0.125"


def test_a_float_output_has_no_grid_to_be_off() -> None:
    evidence = compared(float_output(0.3, step=1.0), torch.tensor([1.7])).evidence
    assert (evidence["expected"], evidence["found"]) == ([0.3], [1.7])
    assert not {"qparams", "attribution", "worst"} & set(evidence)


# -- several outputs, and none ----------------------------------------------------------------------------------------


def test_outputs_are_compared_in_order_however_they_are_nested() -> None:
    expected = (exact(20.0), float_output(0.5, step=0.25), exact(30.0, 31.0))
    one, two, three = GRID.values(torch.tensor([20])), torch.tensor([0.5]), GRID.values(torch.tensor([30, 41]))
    comparisons = list(compare_all(WHERE, expected, (one, [two, three]), (GRID,)))
    assert [comparison.where for comparison in comparisons] == [replace(WHERE, output=number) for number in range(3)]
    assert [str(comparison.where) for comparison in comparisons] == [f"a case, output {number}" for number in range(3)]
    assert [verdict(each) for each in comparisons] == [Verdict.VERIFIED, Verdict.VERIFIED, Verdict.REFUTED]
    assert [str(comparison.where) for comparison in compare_all(WHERE, expected[:1], one)] == ["a case"]


@pytest.mark.parametrize("output", ((), (torch.zeros(1),) * 3), ids=len)
def test_another_number_of_outputs_is_refuted(output: Any) -> None:
    (comparison,) = compare_all(WHERE, (exact(20.0), exact(20.0)), output)
    assert verdict(comparison) is Verdict.REFUTED
    assert judged(comparison).message == f"a case: the model returned {len(output)} outputs; expected 2"


def test_a_run_without_an_output_is_refuted_by_its_own_rule() -> None:
    raised = Fault(rule="LOW-01", message="running a case, raised ValueError: x", evidence={"traceback": "t"})
    (fault,) = report_failed_run(raised, WHERE, {})
    failed = Comparison(where=WHERE, excess=math.inf, is_within_one=False, fault=fault)
    check = judged(of(exact(3.0), 3, moves_only=True), failed)
    assert (check.verdict, check.rule, check.outcome) == (Verdict.REFUTED, "LOW-01", "fail")
    assert check.evidence["traceback"] == "t" and "raised ValueError: x" in check.message


def test_what_else_is_as_bad_is_listed() -> None:
    wrong = [of(exact(20.0), 20 + off) for off in (30, 40, 50)]
    check = judged(of(exact(20.0), 20), *wrong, of(tolerant(20.0), 21))
    evidence: Any = check.evidence
    assert "50 LSB" in check.message
    assert [other.split(" LSB")[0] for other in evidence["others"]] == ["a case: distance 30", "a case: distance 40"]
    assert check.cases == 5


@pytest.mark.rule("NUM-03")
def test_what_is_compared_with_nan_is_refuted() -> None:
    """A fault that makes the exact result NaN, or its bound, may not pass because nothing compares with NaN."""
    nan = float("nan")
    for expected in (exact(nan), exact(100.0, weights=nan)):
        comparison = of(expected, 100)
        assert not comparison.is_within_one and verdict(comparison) is Verdict.REFUTED


@pytest.mark.rule("NUM-03")
def test_an_output_that_cannot_be_measured_hides_no_distance_of_another() -> None:
    """A waiver without max_lsb covers what was not measured, and no wrong number."""
    far, shapeless = of(exact(0.0), 100), compared(exact(0.0), torch.zeros(2, 3))
    assert judged(shapeless).max_lsb is None
    assert judged(shapeless, far).max_lsb == judged(far).max_lsb == 100.0
