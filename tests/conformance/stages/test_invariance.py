"""Invariance: each kind of variance is found in a kernel that has it, and none in one that has not. (NUM-07)"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from fx_quant_conformance.backends.base import Capabilities
from fx_quant_conformance.conformance.claims.case import Case, ValueRange
from fx_quant_conformance.conformance.claims.inputs import Batch
from fx_quant_conformance.conformance.ops.op_model import Input, Role
from fx_quant_conformance.conformance.oracle.exact import Exact
from fx_quant_conformance.conformance.oracle.grids import Grid
from fx_quant_conformance.conformance.stages.invariance import SPLIT
from fx_quant_conformance.conformance.stages.reruns import (
    BATCH,
    CHANNELS_LAST,
    EMPTY,
    OPERANDS,
    REPETITION,
    STRIDED,
    THREADS,
    compare_outputs,
)
from fx_quant_conformance.conformance.stages.state import ExactOf, FirstRun
from fx_quant_conformance.reports.schema import Where
from fx_quant_conformance.reports.verdicts import Verdict
from tests.conformance.support.varying_kernels import (  # noqa: F401  (one is a fixture)
    Function,
    by_batch,
    by_layout,
    by_memory,
    by_neighbours,
    by_threads,
    case_of,
    changes_of,
    counting,
    differing,
    filled_with,
    first_run,
    inputs_for,
    keeping,
    no_oracle,
    one_thread,
    rerun,
    tried,
    unwritten,
)

pytestmark = pytest.mark.rule("NUM-07")

IMAGE = (2, 3, 4, 5)


def test_an_op_of_each_element_is_tried_under_all_changes() -> None:
    case = case_of(torch.relu, IMAGE)
    made = rerun(torch.relu, case)
    assert tried(made) == [
        "repetition: at once",
        "channels_last: all inputs",
        "strided: slices",
        "strided: at an offset",
        "strided: expanded",
        "strided: transposed",
        f"batch: 9 rows in parts of {SPLIT}",
        "threads",
        "no rows",
        "operands",
        "repetition: after other inputs",
    ]
    check = made.check
    assert (check.claim, check.stage, check.rule, check.outcome, check.verdict, check.cases) == (
        "a claim",
        "invariance",
        "NUM-07",
        "pass",
        Verdict.VERIFIED,
        11,
    )


def test_each_of_two_inputs_may_be_in_channels_last_alone() -> None:
    changes = tried(rerun(torch.add, case_of(torch.add, IMAGE, IMAGE)))
    assert {"channels_last: input 0 alone", "channels_last: input 1 alone"} < set(changes)
    assert "channels_last: all inputs" in tried(rerun(torch.relu, case_of(torch.relu, (1, 2, 3, 4, 5))))


# -- kernels that vary -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lowered", "change"),
    (
        (counting(), REPETITION),
        (by_batch, BATCH),
        (by_neighbours, BATCH),
        (by_layout, CHANNELS_LAST),
        (by_memory, STRIDED),
        (by_threads, THREADS),
    ),
)
def test_a_kernel_that_varies_is_refuted_for_just_that(lowered: Function, change: str) -> None:
    case = case_of(lambda x: x, IMAGE)
    assert differing(lowered, case) == {change}
    made = rerun(lowered, case)
    check = made.check
    assert (check.outcome, check.verdict, check.rule) == ("fail", Verdict.REFUTED, "NUM-07")
    assert "first at index" in check.message
    assert change in check.message
    assert check.evidence["expected"] != check.evidence["found"]
    assert check.evidence.get("nondeterministic", False) is (change == REPETITION)
    assert check.failing == len(made.faults) > 0


def test_a_state_that_another_input_leaves_is_seen() -> None:
    made = rerun(keeping(), case_of(lambda x: x, ()))
    (fault,) = made.faults
    assert len(made.compared) == 4 and fault.where == made.compared[-1]
    assert "second run" in fault.message


def test_what_the_first_run_gave_is_what_later_ones_must_give() -> None:
    case = case_of(torch.relu, IMAGE)
    output = torch.relu(*inputs_for(case)[0].tensors)
    right, off = (
        rerun(torch.relu, case, first=FirstRun(output=first, exact_of=no_oracle)) for first in (output, output + 1)
    )
    assert tried(right)[:2] == ["repetition: since the first run", "repetition: at once"]
    assert right.check.verdict is Verdict.VERIFIED
    assert off.check.verdict is Verdict.REFUTED and len(off.compared) == 2


@pytest.mark.slow
def test_memory_that_nobody_writes_is_seen() -> None:
    for size in (1, 8, 65, 260, 5000, 70000):  # from what the C library's allocator keeps, and from the system
        for _ in range(20):
            assert differing(unwritten, case_of(lambda x: x, (2, size))) == {REPETITION}, size


def test_a_run_right_after_an_equal_one_is_compared_with_the_first_of_all() -> None:
    """Where every run but the first after other inputs is off, two of them side by side are off alike."""
    case, before = case_of(torch.relu, IMAGE), list[Tensor]()
    named = inputs_for(case)

    def run(x: Tensor) -> Tensor:
        again, before[:] = bool(before) and torch.equal(before[0], x), [x.clone()]
        return torch.relu(x) * (2 if again else 1)

    first = first_run(run, named, no_oracle)
    run(*named[1].tensors)
    made = rerun(run, case, named=named, first=first)
    assert tried(made) == ["repetition: since the first run", "repetition: at once"]
    assert [fault.where for fault in made.faults] == made.compared[1:]


def test_nothing_more_is_tried_on_a_kernel_that_does_not_repeat_itself() -> None:
    assert tried(rerun(counting(), case_of(lambda x: x, IMAGE))) == ["repetition: at once"]


def test_a_wrong_type_or_shape_or_number_of_outputs_is_said() -> None:
    value = torch.ones(2, 3)
    for other in (value.double(), value[:1], (value, value)):
        fault = compare_outputs(Where(case="a case"), REPETITION, value, other)
        assert fault is not None and fault.verdict is Verdict.REFUTED
        assert fault.message.startswith("a case: a second run on the same input gave another output: ")


def test_nan_equals_nan_and_zeros_of_both_signs_are_equal() -> None:
    left, right = torch.tensor([float("nan"), 0.0, 1.0]), torch.tensor([float("nan"), -0.0, 1.0])
    where = Where(case="a case")
    assert compare_outputs(where, BATCH, left, right) is None
    right[2] = float("nan")
    fault = compare_outputs(where, BATCH, (left, left), (left, right))
    assert fault is not None and fault.evidence == {
        "change": BATCH,
        "output": 1,
        "index": [[2]],
        "count": 1,
        "expected": [1.0],
        "found": ["nan"],
    }


def raising(when: Callable[[Tensor], bool]) -> Function:
    def run(x: Tensor) -> Tensor:
        if when(x):
            raise RuntimeError("not taken")
        return x

    return run


def test_to_raise_at_another_layout_refutes() -> None:
    check = rerun(raising(lambda x: not x.is_contiguous()), case_of(lambda x: x, (4, 5))).check
    assert (check.verdict, check.rule) == (Verdict.REFUTED, "LOW-01")
    assert "raised RuntimeError: not taken; the float model takes such inputs" in check.message
    assert "in run" in str(check.evidence["traceback"])


# -- what is left out --------------------------------------------------------------------------------------------------


def test_a_model_made_for_its_batch_is_not_split() -> None:
    lowered, case = raising(lambda x: len(x) != 2), case_of(lambda x: x, IMAGE)
    made = rerun(lowered, case, Capabilities(dynamic_batch=False))
    assert changes_of(made) == set()
    assert not any(where.change in (BATCH, EMPTY) for where in made.compared)
    assert differing(lowered, case) == {BATCH}, "what does not say so must take other batches"


@pytest.mark.parametrize(
    ("function", "shapes"),
    (
        (lambda x: x - x.amax(0), (IMAGE,)),
        (lambda x: x.sum(), (IMAGE,)),
        (lambda x, y: torch.cat([x, y]), (IMAGE, IMAGE)),
        (torch.add, (IMAGE, (3, 4, 5))),
    ),
)
def test_rows_that_depend_on_each_other_are_not_split(function: Function, shapes: tuple[tuple[int, ...], ...]) -> None:
    made = rerun(function, case_of(function, *shapes))
    assert changes_of(made) == set()
    assert not any(where.change == BATCH for where in made.compared)


def test_rows_have_one_range_so_that_dynamic_quantization_can_be_split() -> None:
    def dynamic(x: Tensor) -> Tensor:
        scale = (x.max() - x.min()) / 255
        return (x / scale).round() * scale

    case = case_of(lambda x: x, (2, 8))
    made = rerun(dynamic, case)
    assert f"batch: 9 rows in parts of {SPLIT}" in tried(made)
    assert BATCH not in changes_of(made)


def test_an_op_that_views_memory_takes_no_other_layout() -> None:
    def view(x: Tensor) -> Tensor:
        return x.view(x.shape[0], -1)

    made = rerun(view, case_of(view, IMAGE))
    assert changes_of(made) == set()
    assert not any(name.startswith((CHANNELS_LAST, "strided: transposed")) for name in tried(made))
    reads = case_of(lambda x: x.as_strided((3,), (1,)), IMAGE)
    assert differing(reads.build(), reads) == set()


def test_indices_are_split_but_keep_their_layout() -> None:
    table = torch.rand(9, 3)
    case = case_of(lambda i: table[i], (4, 2), role=Role.INDEX)
    assert tried(rerun(case.build(), case)) == [
        "repetition: at once",
        f"batch: 9 rows in parts of {SPLIT}",
        "threads",
        "no rows",
        "operands",
        "repetition: after other inputs",
    ]


def test_recurrent_ops_are_not_split() -> None:
    value_range = ValueRange(name="any", ranges=((-1.0, 1.0),))
    inputs = (Input(shape=(2, 3, 4)),)
    case = Case(name="a case", build=lambda: nn.GRU(4, 5, batch_first=True), inputs=inputs, value_range=value_range)
    with torch.no_grad():
        made = rerun(case.build(), case)
    assert not any(where.change == BATCH for where in made.compared)
    assert changes_of(made) == set()


def test_what_the_backend_declares_is_left_out() -> None:
    case = case_of(lambda x: x, IMAGE)
    contiguous = Capabilities(channels_last=False)
    assert changes_of(rerun(by_layout, case, contiguous)) == set()
    assert changes_of(rerun(by_threads, case, without=(THREADS,))) == set()


def test_where_floats_are_summed_another_order_may_give_another_result_that_is_right() -> None:
    """Right is what is within the bound; NaN, another shape and what no oracle knows of are not."""
    case, named = case_of(lambda x: x, IMAGE), filled_with(2.0, IMAGE)

    def exact_of(inputs: Batch) -> list[Exact]:
        bound = torch.tensor(0.01, dtype=torch.float64)
        return [Exact(real=inputs[0].double(), errors={"sum": bound}, step=torch.tensor(0.5))]

    floats, nothing, ties = Capabilities(float_accumulation=True), Capabilities(), Capabilities(tie_steps=1)

    def changes(other: Function, exact_of: ExactOf = exact_of, declared: Capabilities = floats) -> set[str]:
        def lowered(x: Tensor) -> Tensor:
            return x if x.is_contiguous() else other(x.contiguous())

        first = first_run(lowered, named, exact_of)
        return changes_of(rerun(lowered, case, declared, without=(BATCH,), named=named, first=first))

    both = {CHANNELS_LAST, STRIDED}
    assert changes(lambda x: x + 0.009) == set()
    assert changes(lambda x: x + 0.009, declared=nothing) == both, "no variance is declared"
    assert changes(lambda x: x + 0.011) == both
    assert changes(lambda x: x * float("nan")) == both
    assert changes(lambda x: x[:1]) == both
    assert changes(lambda x: x + 0.011, no_oracle) == set(), "nobody can tell"
    assert changes(lambda x: x + 2.0**-20, no_oracle, ties) == both, "no tie is known"
    assert changes(lambda x: x[:1], no_oracle) == both


def test_a_batch_without_rows_keeps_the_other_axes() -> None:
    flat = lambda x: x if len(x) else torch.zeros(0, 7)  # noqa: E731
    assert differing(flat, case_of(lambda x: x, IMAGE)) == {EMPTY}
    assert EMPTY not in tried(rerun(torch.sum, case_of(torch.sum, IMAGE))), "no axis is a batch"
    assert not differing(raising(lambda x: not len(x)), case_of(lambda x: x, IMAGE)), "measured"


def test_inputs_are_not_the_backends_to_write_to() -> None:
    def writing(x: Tensor) -> Tensor:
        result = x + 1
        x.view(-1)[0] += 1
        return result

    assert differing(writing, case_of(lambda x: x + 1, (3,))) == {OPERANDS}
    assert not differing(lambda x: x.relu_(), case_of(lambda x: x.relu_(), (3,)))


def test_what_differs_by_a_step_is_right_at_a_tie_alone() -> None:
    """Contiguous inputs are rounded down, others up: at 2.5 steps both are right, at 2.25 the others are not."""
    case, capabilities = case_of(lambda x: x, IMAGE), Capabilities(tie_steps=1)
    named = filled_with(2.25, IMAGE)
    grid = Grid(scale=1.0, zero_point=0, low=0, high=255, dtype="quint8")

    def by_layout(x: Tensor) -> Tensor:
        return x.floor() if x.is_contiguous() else x.floor() + 1

    def changes(value: float) -> set[str]:
        exact = Exact(real=torch.full(IMAGE, value).double(), errors={}, step=torch.tensor(1.0), grid=grid)
        first = first_run(by_layout, named, lambda inputs: [exact])
        return changes_of(rerun(by_layout, case, capabilities, named=named, first=first))

    assert changes(2.5) == set()
    assert changes(2.25) == {CHANNELS_LAST, STRIDED}


def test_a_float_result_may_differ_where_both_are_within_the_bound_of_their_element() -> None:
    """A bound of 0.01 at the first element and of 0 elsewhere; two runs on the same inputs may not differ at all."""
    case, named = case_of(lambda x: x, IMAGE), filled_with(2.0, IMAGE)
    bound = torch.zeros(IMAGE, dtype=torch.float64)
    bound.view(-1)[0] = 0.01

    def exact_of(inputs: Batch) -> list[Exact]:
        return [Exact(real=inputs[0].double(), errors={"sum": bound}, step=torch.tensor(0.5))]

    def changes(lowered: Function, tie_steps: int = 1) -> set[str]:
        capabilities, first = Capabilities(tie_steps=tie_steps), first_run(lowered, named, exact_of)
        return changes_of(rerun(lowered, case, capabilities, without=(BATCH,), named=named, first=first))

    def apart(distance: float, element: int) -> Function:
        def run(x: Tensor) -> Tensor:
            result = x.clone(memory_format=torch.contiguous_format)
            result.view(-1)[element] += 0.0 if x.is_contiguous() else distance
            return result

        return run

    assert changes(apart(0.009, 0)) == set()
    assert changes(apart(0.009, 0), tie_steps=0) == {CHANNELS_LAST, STRIDED}, "no variance is declared"
    assert changes(apart(0.011, 0)) == changes(apart(0.009, 1)) == {CHANNELS_LAST, STRIDED}
    tiny = iter(range(99))
    assert changes(lambda x: x + 2.0**-20 * next(tiny)) == {REPETITION}


def test_the_exact_result_is_that_of_the_inputs_that_are_compared() -> None:
    """A batch has values of its own, and each of several outputs a bound of its own."""
    seen: list[tuple[int, ...]] = []

    def exact_of(inputs: Batch) -> list[Exact]:
        seen.append(tuple(inputs[0].shape))
        bounds = (torch.tensor(0.01, dtype=torch.float64), torch.tensor(0.0, dtype=torch.float64))
        return [Exact(real=inputs[0].double(), errors={"sum": each}, step=torch.tensor(0.5)) for each in bounds]

    def changes(one: float, other: float) -> set[str]:
        def by_rows(x: Tensor) -> tuple[Tensor, Tensor]:
            return x + one * (len(x) < sum(SPLIT)), x + other * (len(x) < sum(SPLIT))

        case, named = case_of(lambda x: (x, x), IMAGE), filled_with(2.0, IMAGE)
        first = first_run(by_rows, named, exact_of)
        return changes_of(rerun(by_rows, case, Capabilities(tie_steps=1), named=named, first=first))

    assert changes(0.009, 0.0) == set()
    assert seen == [(sum(SPLIT), *IMAGE[1:])]
    assert changes(0.009, 0.009) == {BATCH}


def test_the_number_of_threads_is_put_back() -> None:
    before = torch.get_num_threads()
    seen: list[int] = []

    def run(x: Tensor) -> Tensor:
        seen.append(torch.get_num_threads())
        return x

    rerun(run, case_of(lambda x: x, IMAGE))
    assert torch.get_num_threads() == before
    assert 2 in seen
