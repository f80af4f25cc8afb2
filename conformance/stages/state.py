"""What the stages of a claim make, and how their faults become checks.

A stage is a generator of faults over typed state: that of the claim, and, for most stages, that of one of its cases.
It raises FaultFound where a case cannot go on. `conformance.pipeline.claim_run` runs the stages.
"""

from __future__ import annotations

import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

from torch import nn
from torch.fx import GraphModule

from fx_quant_conformance.backends.base import Backend
from fx_quant_conformance.backends.names import format_error
from fx_quant_conformance.conformance.claims.case import Case
from fx_quant_conformance.conformance.claims.claim import Claim
from fx_quant_conformance.conformance.claims.inputs import Batch, NamedInputs
from fx_quant_conformance.conformance.machine.fault import Fault, FaultFound
from fx_quant_conformance.conformance.machine.frames import NoAnswer
from fx_quant_conformance.conformance.machine.guard import guard
from fx_quant_conformance.conformance.oracle.exact import Exact
from fx_quant_conformance.conformance.oracle.grids import Grid, output_step, placeholder_grids, weight_scales
from fx_quant_conformance.conformance.remote.client import format_trace
from fx_quant_conformance.conformance.remote.executor import HeldModel
from fx_quant_conformance.conformance.rooms import find_rooms, list_rooms
from fx_quant_conformance.conformance.stages.bench import Bench
from fx_quant_conformance.conformance.stages.comparison import Comparison
from fx_quant_conformance.refimpl import ConfigError, RefimplError
from fx_quant_conformance.reports.schema import Check, evidence
from fx_quant_conformance.reports.verdicts import PASSING, Verdict

RULES: dict[str, str] = {
    "config": "CFG-09",
    **{room.stage: room.rule for room in list_rooms()},
    "fuse": "FUS-03",
    "prepare": "OBS-01",
    "convert": "CVT-01",
    "lower": "LOW-01",
    "execution": "LOW-04",
    "numerics": "NUM-03",
    "refusal": "DTY-06",
    "invariance": "NUM-07",
}
"""The stages in order, and the rule that each names when it finds no fault."""
STAGES: tuple[str, ...] = tuple(RULES)
MOST_OTHERS = 20
"""Most lines about further faults in the evidence."""
LoweredModel = HeldModel
"""What a backend's lower returned."""
ExactOf = Callable[[Batch], Sequence[Exact]]
"""Computes the exact results for inputs, one for each output."""


@dataclass(frozen=True, kw_only=True)
class FirstRun:
    """The first output that could be compared, and the function for exact results."""

    output: Any
    exact_of: ExactOf


@dataclass(kw_only=True, eq=False)
class CaseState:
    """What the stages have made of a case so far: each adds its part, which is missing before."""

    case: Case
    model: nn.Module = field(init=False)
    """The float model (fuse)."""
    prepared: GraphModule = field(init=False)
    """The prepared and calibrated model (prepare)."""
    misfit: Fault | None = None
    """A grid that does not hold the calibration values, which the stage convert reports."""
    reference: GraphModule = field(init=False)
    """The reference model (convert)."""
    draw: Callable[[Sequence[Grid | None]], list[NamedInputs]] = field(init=False)
    """Draws the inputs on the grids of the reference model's inputs (convert)."""
    lowered: LoweredModel = field(init=False)
    """The lowered model (lower)."""
    runs_in_float: bool = False
    """Whether the backend reports that the pattern, or a part of it, runs in float (execution)."""
    comparisons: list[Comparison] = field(default_factory=list)
    """Of the outputs with the exact results (numerics)."""
    first: FirstRun | None = None
    """None: no output could be compared (numerics)."""

    @cached_property
    def grids(self) -> list[Grid | None]:
        """Grid of each input; None where it is not quantized on one."""
        return placeholder_grids(self.reference)

    @cached_property
    def scales(self) -> dict[str, Any]:
        """The scales that a condition may name: of each input, of weights and of the output."""
        found = {
            "s_in": tuple(grid.scale for grid in self.grids if grid is not None),
            "s_out": output_step(self.reference),
        }
        of_weights = weight_scales(self.reference)
        found["s_w"] = (min(of_weights), max(of_weights)) if of_weights else ()
        return {name: value for name, value in found.items() if value}

    @cached_property
    def inputs(self) -> list[NamedInputs]:
        """Inputs of the case, the same whenever they are drawn."""
        return self.draw(self.grids)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutionEvidence:
    """What shows that integers computed a claim, and in words how sure that is."""

    kind: Literal["reported", "numbers", "none"]
    text: str
    fault: Fault | None = None
    """What the backend reports is not true."""


@dataclass(kw_only=True, eq=False)
class ClaimState:
    """What the stages have found out of a claim so far."""

    bench: Bench
    claim: Claim
    cases: tuple[Case, ...] = ()
    """Those that are to be tried (config)."""
    proven: defaultdict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    """By stage, the variants that need no further run of the check that is made once for each."""
    lowerings: dict[str, Callable[[nn.Module, GraphModule, Batch], Any]] = field(default_factory=dict)
    """By variant, what lowers its first case, of the float model, the reference model and inputs, in another way."""
    first_prepared: GraphModule | None = None
    """The first prepared model, whose decisions are shown (prepare)."""
    untold: list[str] = field(default_factory=list)
    """Of each case of which it is not known what the backend executes, why (execution)."""
    comparisons: list[Comparison] = field(default_factory=list)
    """Those of all cases (numerics)."""
    decides: bool = False
    """Whether in some case no one output is right for all inputs (numerics)."""
    undecided: str = ""
    """Why the first case that decides nothing, by what is declared, does not; "": none is so (numerics)."""
    rerun_cases: list[CaseState] = field(default_factory=list)
    """Of the cases that passed all stages, those that are run again (invariance)."""
    left_out: dict[str, str] = field(default_factory=dict)
    """By stage, why it can say nothing of this claim, which the other stages judge."""
    outside: int = 0
    """How many converted cases were left out, since their scales are outside of what the backend declares (convert)."""
    counted: Counter[str] = field(default_factory=Counter)
    """By stage, how many things it has judged, if these are not the cases that came to it."""


def stages_of(backend: Backend) -> tuple[str, ...]:
    """Return the stages of a backend's claims, in order."""
    missing = {room.stage for room in list_rooms()} - {room.stage for room in find_rooms(backend)}
    return tuple(stage for stage in STAGES if stage not in missing)


def make_backend_error(where: str, error: Exception) -> FaultFound:
    """Return the fault of a backend's code that raises: what the config claims, the backend must do. (LOW-01)

    Where it was not asked, nothing is known.
    """
    if isinstance(error, NoAnswer):
        return FaultFound(Fault(rule="LOW-01", verdict=Verdict.UNEXERCISED, message=str(error)))
    shown = {"traceback": format_trace(error)}
    return FaultFound(Fault(rule="LOW-01", message=f"{where} raised {type(error).__name__}: {error}", evidence=shown))


@guard("flow")
def run_flow(rule: str, step: Callable[[], GraphModule]) -> GraphModule:
    """Run a step of refimpl. Raises FaultFound: a ConfigError refutes the claim, any other RefimplError leaves it open.

    An error that blames the QConfig or the model says nothing against the config.
    """
    try:
        return step()
    except RefimplError as error:
        verdict = Verdict.REFUTED if isinstance(error, ConfigError) else Verdict.UNEXERCISED
        raise FaultFound(Fault(rule=rule, verdict=verdict, message=str(error))) from error


def show_graph(model: GraphModule, faults: Iterable[Fault]) -> Iterator[Fault]:
    """Yield faults with the model's graph as evidence."""
    for fault in faults:
        yield replace(fault, evidence={**fault.evidence, "graph": model.code})


# -- checks -----------------------------------------------------------------------------------------------------------


def make_check(claim: str, stage: str, faults: Sequence[Fault], *, cases: int | None = None) -> Check:
    """Return the check of a stage by all its faults: the worst decides, and of several the largest.

    A fault that belongs to no case is the claim's as a whole, and no failing case.
    """
    if not faults:
        return Check(claim=claim, stage=stage, rule=RULES[stage], outcome="pass", verdict=Verdict.VERIFIED, cases=cases)
    lead = max(faults, key=lambda fault: (-fault.verdict.rank, fault.size))
    others = [fault for fault in faults if fault is not lead and (fault.verdict is lead.verdict or _fails(fault))]
    shown: dict[str, object] = {"where": lead.where} if lead.has_place else {}
    shown |= lead.evidence
    if others:
        shown["others"] = [fault.line for fault in others[:MOST_OTHERS]]
    if any(fault.evidence.get("nondeterministic") for fault in others if fault.verdict is lead.verdict):
        shown["nondeterministic"] = True
    outcomes: dict[Verdict, Literal["pass", "skip"]] = {Verdict.UNEXERCISED: "skip", **dict.fromkeys(PASSING, "pass")}
    return Check(
        claim=claim,
        stage=stage,
        rule=lead.rule,
        outcome=outcomes.get(lead.verdict, "fail"),
        verdict=lead.verdict,
        message=lead.message,
        cases=cases,
        failing=sum(_fails(fault) for fault in faults if fault.has_place),
        evidence=evidence(shown),
    )


def _fails(fault: Fault) -> bool:
    return fault.verdict not in PASSING


def make_skip(stage: str, ended: Check) -> Check:
    """Return the check of a stage that is not reached; it has the verdict of the check that ended the claim."""
    message = ended.message if ended.outcome == "skip" else f"not reached: {ended.stage} ended the claim"
    return Check(
        claim=ended.claim, stage=stage, rule=RULES[stage], outcome="skip", verdict=ended.verdict, message=message
    )


def make_internal_error(claim: str, stage: str, error: Exception) -> Check:
    """Return the check of a stage in which the suite itself failed."""
    message = f"internal error of the suite: {format_error(error)}"
    shown = evidence({"traceback": "".join(traceback.format_exception(error))})
    return Check(
        claim=claim, stage=stage, rule="", outcome="error", verdict=Verdict.UNEXERCISED, message=message, evidence=shown
    )
