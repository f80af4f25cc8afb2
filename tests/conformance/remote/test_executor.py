"""Held models: what the suite gets of a lowered model is the same in a worker and in its own process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import nn

from fx_quant_conformance.backends.base import Backend, Execution
from fx_quant_conformance.conformance.claims.case import Case
from fx_quant_conformance.conformance.claims.plan import VALUE_RANGES
from fx_quant_conformance.conformance.machine.fault import FaultFound
from fx_quant_conformance.conformance.machine.memory import fill_memory
from fx_quant_conformance.conformance.machine.threads import run_with_threads
from fx_quant_conformance.conformance.ops.op_model import Input
from fx_quant_conformance.conformance.remote.executor import HeldModel, LocalExecutor, OverwrittenError
from fx_quant_conformance.conformance.stages.lower import run_all
from fx_quant_conformance.conformance.stages.reruns import RepeatRun
from tests.conformance.remote import vendor
from tests.support.remote import WorkersBackend, remote_backend

MODEL = torch.fx.symbolic_trace(nn.Sequential(nn.Linear(3, 3)))
INPUT = torch.ones(2, 3)
CASE = Case(name="a case", build=nn.Identity, inputs=(Input(shape=(2, 3)),), value_range=VALUE_RANGES[0])
Find = Callable[[str], LocalExecutor | WorkersBackend]
Lower = Callable[[str], HeldModel]


@pytest.fixture(params=["here", pytest.param("in a worker", marks=pytest.mark.slow)])
def find(request: pytest.FixtureRequest) -> Iterator[Find]:
    """Finds what reaches a backend of `vendor`."""
    with ExitStack() as opened:

        def find_executor(name: str) -> LocalExecutor | WorkersBackend:
            if request.param == "here":
                return LocalExecutor(getattr(vendor, name)())
            return opened.enter_context(remote_backend(f"{vendor.__name__}:{name}"))

        yield find_executor


@pytest.fixture
def lowered_by(find: Find) -> Lower:
    """Lowers by a backend of `vendor`."""
    return lambda name: find(name).lower_copy(MODEL, (INPUT,))


def lower_doubled(backend: Backend, number: int) -> Callable[[torch.Tensor], Any]:
    return lambda x: 2 * x + number


def say(backend: Backend, given: tuple[str, torch.Tensor]) -> list[Any]:
    text, value = given
    if not text:
        raise vendor.DeviceError("nothing is given")
    return [backend.name, text, value.tolist()]


def test_a_function_of_the_suite_runs_beside_the_backends_code(find: Find) -> None:
    executor = find("Plain")
    assert torch.equal(executor.lower_by(lower_doubled, 3, step="doubling")(INPUT), 2 * INPUT + 3)
    assert executor.ask_by(say, ("a text", INPUT[0]), tuple, step="saying") == ("good", "a text", [1.0, 1.0, 1.0])
    with pytest.raises(Exception, match="nothing is given") as caught:
        executor.ask_by(say, ("", INPUT), tuple, step="saying")
    assert type(caught.value).__name__ == "DeviceError"
    if isinstance(executor, WorkersBackend):
        assert executor.tally.lowerings == 1


def test_what_lower_makes_says_itself_what_it_runs_and_shows(lowered_by: Lower) -> None:
    lowered = lowered_by("Says")
    assert torch.equal(lowered(INPUT), INPUT + 1)
    assert lowered.execution() == Execution(quantized_ops=("own",), float_fallbacks=())
    assert lowered.graph() == "a graph of its own"


def test_what_says_nothing_runs_and_shows_what_the_backend_and_its_graph_module_say(lowered_by: Lower) -> None:
    lowered = lowered_by("Plain")
    assert lowered.execution() == Execution(quantized_ops=("linear",), float_fallbacks=(), kernels=("k",))
    assert [line.partition(" ")[0] for line in lowered.graph().splitlines()] == ["input_1", "_0", "return"]
    assert lowered_by("Writes").graph() == ""


def test_inputs_that_are_written_to_are_written_to_here_too(lowered_by: Lower) -> None:
    written = INPUT.clone()
    lowered_by("Writes")(written)
    assert torch.equal(written, INPUT * 2)


def test_threads_layout_and_memory_are_those_of_the_caller(lowered_by: Lower) -> None:
    lowered = lowered_by("Tells")
    with fill_memory(0x5A):
        told = run_with_threads(2, lambda: lowered(INPUT.T))
    assert [int(each) for each in told] == [2, *INPUT.T.stride(), 0, 0x5A]
    assert next(int(each) for each in lowered(INPUT)) == torch.get_num_threads()


def test_several_runs_have_each_its_layout_and_its_filling(lowered_by: Lower) -> None:
    lowered = lowered_by("Tells")
    batches = [(INPUT,), (INPUT.T,), (torch.ones(4, 6)[::2, 1::2],)]
    made = list(lowered.run_all(batches, [0x5A, 0xA5, 0]))
    layout_and_filling = [[int(each) for each in output[1:]] for output in made]
    assert layout_and_filling == [[3, 1, 0, 0x5A], [1, 3, 0, 0xA5], [12, 2, 1, 0]]
    with fill_memory(0x33):
        assert [int(output[-1]) for output in lowered.run_all(batches)] == [0x33] * 3, "the caller's, by default"


def test_several_runs_get_copies_and_an_error_ends_them_in_its_place(lowered_by: Lower) -> None:
    lowered, inputs = lowered_by("Counts"), INPUT.clone()
    outputs = lowered.run_all([(inputs,), (inputs,), (inputs * 0,), (inputs,)])
    assert [int(next(outputs)[0]) for _ in range(2)] == [1, 2]
    with pytest.raises(Exception, match=r"^run 3: division by zero$"):
        next(outputs)
    assert int(lowered(INPUT.clone())[0]) == 4, "the run after the error was not made"
    assert torch.equal(inputs, INPUT), "the model has written to copies"


def test_an_output_that_a_later_run_wrote_over_is_told_in_its_place(lowered_by: Lower) -> None:
    lowered, batches = lowered_by("Reuses"), [(INPUT,), (INPUT * 2,), (INPUT * 3,)]
    with pytest.raises(OverwrittenError) as caught:
        next(lowered.run_all(batches))
    assert caught.value.later == 2
    told = "the output for first was overwritten by the run on third: a result belongs to the caller"
    with pytest.raises(FaultFound, match=told):
        next(run_all(lowered, ["first", "second", "third"], batches))
    assert torch.equal(next(lowered.run_all(batches[:1])), INPUT), "alone it stays as it was"


def test_runs_that_are_foreseen_are_those_that_are_asked_for(lowered_by: Lower) -> None:
    """In turn, each with its error, and with memory full of another byte; others are made when they are asked for."""
    inputs, zeros = (INPUT,), (INPUT * 0,)
    repeat = RepeatRun(case=CASE, name="", inputs=inputs, lowered=lowered_by("Counts"))
    repeat.foresee([inputs, inputs, zeros, inputs])
    made = [[int(each) for each in repeat.run(inputs)] for _ in range(2)]
    assert [number for number, _ in made] == [1, 2] and {byte for _, byte in made} == {0x5A, 0xA5}
    with pytest.raises(Exception, match="run 3: division by zero"):
        repeat.run(zeros)
    assert int(repeat.run(inputs)[0]) == 4
    repeat.foresee([inputs, inputs])
    assert int(repeat.run((INPUT,))[0]) == 7, "another input: what was foreseen does not count"
    assert int(repeat.run(inputs)[0]) == 8
    assert torch.equal(INPUT, torch.ones(2, 3)), "the model has written to copies"
