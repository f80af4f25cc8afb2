"""The lower stage: checks that the backend takes what its config claims. (LOW-01)"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

from torch.fx import GraphModule

from fx_quant_conformance.backends.base import UnsupportedPattern
from fx_quant_conformance.conformance.claims.inputs import Batch
from fx_quant_conformance.conformance.machine.fault import Fault, FaultFound
from fx_quant_conformance.conformance.machine.guard import guard
from fx_quant_conformance.conformance.machine.memory import fill_memory
from fx_quant_conformance.conformance.remote.executor import OverwrittenError
from fx_quant_conformance.conformance.stages.bench import Bench
from fx_quant_conformance.conformance.stages.state import CaseState, ClaimState, LoweredModel, make_backend_error
from fx_quant_conformance.reports.schema import Where

Lowering = Callable[[GraphModule, Batch], Any]
"""Has the backend lower a reference model."""


def lower_reference_model(run: ClaimState, state: CaseState) -> Iterable[Fault]:
    """Lower a copy of the reference model by the backend. (LOW-01)

    The first case of some variants is lowered in a way of its own.
    """
    example = tuple(value.clone() for value in state.inputs[0].tensors)
    own = run.lowerings.pop(state.case.variant, None)
    state.lowered = lower(run.bench, state.reference, example, own and partial(own, state.model))
    return ()


class Declined(FaultFound):
    """The backend declines a model."""


@guard("lower")
def lower(
    bench: Bench, reference: GraphModule, example_inputs: Batch, lower_by_flow: Lowering | None = None
) -> LoweredModel:
    """Lower a copy of the reference model. Raises FaultFound if the backend raises or returns no callable, or Declined.

    ``lower_by_flow``: how; None: a copy of the reference model.
    """
    try:
        lowered: LoweredModel = (lower_by_flow or bench.executor.lower_copy)(reference, example_inputs)
    except UnsupportedPattern as error:
        text = f"the backend declines what its config claims: {error}"
        raise Declined(Fault(rule="LOW-01", message=text)) from error
    except Exception as error:
        raise make_backend_error("lower", error) from error
    if not callable(lowered):
        text = f"lower returned {type(lowered).__name__}, which cannot be called"
        raise FaultFound(Fault(rule="LOW-01", message=text))
    return lowered


def run_lowered(lowered: LoweredModel, where: Where | str, inputs: Batch) -> Any:
    """Run a lowered model on copies of the inputs; its output is copied, as a later run may write over it.

    Raises FaultFound when the backend's code raises.
    """
    return next(run_all(lowered, [where], [inputs]))


def run_all(lowered: LoweredModel, places: Sequence[Where | str], batches: Sequence[Batch]) -> Iterator[Any]:
    """Run a lowered model on several inputs in turn, as `run_lowered` does; yield the outputs.

    A model is given several of them at a time. Until then its outputs have to stay as they are.
    """
    outputs = lowered.run_all(batches)
    for number, where in enumerate(places):
        try:
            output = next(outputs)
        except OverwrittenError as error:
            by = f"the run on {_name_input(places[number + error.later])}" if error.later else "a later run"
            text = f"the output for {_name_input(where)} was overwritten by {by}"
            text = f"{text}: a result belongs to the caller, who may keep it; return a new tensor for each"
            raise FaultFound(Fault(rule="NUM-07", message=text)) from error
        except Exception as error:
            raise make_backend_error(f"running {where},", error) from error
        yield output


def _name_input(where: Where | str) -> str:
    return where if isinstance(where, str) else repr(where.input)


def find_leftover(bench: Bench) -> Iterator[Fault]:
    """Find a fault in what a device handed in for this claim or model and no stage asked for."""
    left = bench.executor.find_leftover()
    if left is not None:
        yield left


def error_on_retry(lower_again: Callable[[], LoweredModel], where: Where, inputs: Batch) -> str:
    """Lower and run a failing case again with other memory contents; return the new error text ("" if it passes).

    Errors from out-of-bounds reads vary between runs.
    """
    try:
        with fill_memory(0x5A):
            run_lowered(lower_again(), where, inputs)
    except FaultFound as error:
        return str(error)
    return ""
