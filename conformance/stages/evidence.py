"""Evidence of execution: what shows that integers computed a claim, and how sure that is. (LOW-04)

There are three kinds: the backend reports what ran; the numbers show it; nothing does. Numbers show it where float32
cannot give them: in long sums of products (`conformance.stages.long_sums`). They also show where a report is not true.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.nn.modules.batchnorm import _NormBase

from fx_quant_conformance.conformance.bounds.error_bounds import NoOracleError
from fx_quant_conformance.conformance.claims.case import Case
from fx_quant_conformance.conformance.claims.claim import Claim
from fx_quant_conformance.conformance.claims.kinds import Kind
from fx_quant_conformance.conformance.claims.pattern_plan import PatternPlan, is_taken, plan_pattern
from fx_quant_conformance.conformance.claims.plan import VALUE_RANGES
from fx_quant_conformance.conformance.claims.qconfigs import observer_arguments_of, qconfig_for
from fx_quant_conformance.conformance.claims.quick import Share
from fx_quant_conformance.conformance.claims.registry import registered_for
from fx_quant_conformance.conformance.machine.fault import Fault, FaultFound
from fx_quant_conformance.conformance.machine.guard import guard
from fx_quant_conformance.conformance.ops.op_model import Input
from fx_quant_conformance.conformance.ops.table import WEIGHTED
from fx_quant_conformance.conformance.ops.weighted import LayerShape
from fx_quant_conformance.conformance.oracle.evaluate import Walk
from fx_quant_conformance.conformance.oracle.exact import Exact
from fx_quant_conformance.conformance.oracle.grids import placeholder_grids
from fx_quant_conformance.conformance.stages.bench import Bench
from fx_quant_conformance.conformance.stages.calibration import prepare_case, set_scales
from fx_quant_conformance.conformance.stages.comparison import compare
from fx_quant_conformance.conformance.stages.execution import Reports, ask_execution
from fx_quant_conformance.conformance.stages.long_sums import BITS, ROWS, WIDTH, LongSums, draw_long_sums
from fx_quant_conformance.conformance.stages.lower import lower, run_lowered
from fx_quant_conformance.conformance.stages.state import ExecutionEvidence
from fx_quant_conformance.refimpl import RefimplError
from fx_quant_conformance.refimpl.config.patterns import leaf_name
from fx_quant_conformance.refimpl.observers.observers import dtype_range, is_quantized_dtype
from fx_quant_conformance.reports.schema import Where
from fx_quant_conformance.reports.verdicts import Verdict

PROBE = Where(case="long sums")
X_SCALE, WEIGHT_SCALE = 1.0, 2.0**-7
Y_SCALE = 2 * X_SCALE * WEIGHT_SCALE
"""Scales of the probe: powers of two, and two units of the sum in a step of the output. Totals are even, so that the
exact results are integers, and a sum that is off by two units is off by a step."""
_LEAST_AMPLITUDE = 63
"""Operands of 7 bits. With fewer the sums would not pass 2²⁴ far enough."""
_LEAST_SPAN = 2.0
"""Steps between the smallest and the largest of the exact results, which are 15 apart before what follows the sum.
Where a epilogue leaves less, it hides the sums."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sums:
    """What the probe of long sums shows."""

    are_exact: bool | None
    """None: it cannot tell."""
    text: str
    """What was found, or why not."""


def gather_evidence(bench: Bench, claim: Claim, reports: Reports) -> ExecutionEvidence:
    """Return the evidence for a claim whose cases all hold; the probe runs where it can decide something."""
    if needs_probe(bench, claim, reports):
        return weigh_evidence(reports, probe_sums(bench, claim))
    why = format_blindness(bench, claim)
    return weigh_evidence(reports, Sums(are_exact=None, text=f"numbers cannot tell: {why}" if why else ""))


def needs_probe(bench: Bench, claim: Claim, reports: Reports) -> bool:
    """Tell whether numbers could show a claim's execution, or could contradict what the backend reports.

    A complete report is contradicted claim by claim; in the profile ``quick``, where a probe takes as long as a claim,
    by the last one on each op without epilogues.
    """
    if format_blindness(bench, claim):
        return False
    if not reports.are_complete or bench.profile != "quick":
        return True
    share, plan = bench.shares.get(claim.id, Share()), plan_pattern(claim)
    return share.place == share.of - 1 and isinstance(plan, PatternPlan) and not plan.epilogues


def format_blindness(bench: Bench, claim: Claim) -> str:
    """Say why numbers cannot tell integers from floats for a claim; "" if its sums of products may.

    What moves, selects or clamps values gives the same in both. All other rules allow a right backend the rounding of
    float32 (NUM-04), in which sums of the few 8-bit integers that these ops take are exact.
    """
    if claim.kind is not Kind.STATIC:
        return f"of claims of the kind {claim.kind.value!r} the rounding of float32 is right (NUM-04)"
    if claim.moves_only:
        return "the op moves or selects values, which floats hold as exactly as integers do"
    plan = None if registered_for(claim.entry.normal_pattern) else plan_pattern(claim)
    if not isinstance(plan, PatternPlan):
        return "the suite does not know which sums a vendor's own op makes"
    if plan.root not in WEIGHTED or not is_quantized_dtype(claim.dtypes.weight_dtype):
        return "the op makes no long sums of products of integers, and the rounding of float32 is right (NUM-04)"
    if bench.capabilities.float_accumulation:
        return "the backend declares that it sums in floating point (float_accumulation)"
    return ""


def weigh_evidence(reports: Reports, sums: Sums) -> ExecutionEvidence:
    """Decide what shows the execution, by what the backend reports and by what its sums show."""
    fault = next(contradict(reports, sums), None)
    text = "; ".join(filter(None, (str(reports), sums.text)))
    if reports.are_complete:
        return ExecutionEvidence(kind="none" if fault else "reported", text=text, fault=fault)
    return ExecutionEvidence(kind="numbers" if sums.are_exact else "none", text=text, fault=fault)


@guard("execution.evidence")
def contradict(reports: Reports, sums: Sums) -> Iterator[Fault]:
    """Find that a backend which declares no sums in float sums in float, and whether it says otherwise. (LOW-04)"""
    if sums.are_exact is not False:
        return
    found = f"{reports}, and that it was quantized; but {sums.text}" if reports.told else f"{reports}; {sums.text}"
    text = (
        f"{found}. If its kernels multiply integers and sum in float, declare Capabilities.float_accumulation; if "
        "their sums are narrower than 32 bits, declare the op's limits; else it runs in float"
    )
    yield Fault(rule="LOW-04", verdict=Verdict.REFUTED if reports.told else Verdict.FALLBACK, message=text)


# -- the probe --------------------------------------------------------------------------------------------------------


class _Blind(Exception):
    """The probe cannot tell; the message says why."""


def probe_sums(bench: Bench, claim: Claim) -> Sums:
    """Run the claim's pattern, with long sums in its root op, on the backend's lowered model.

    Whatever the flow or the backend refuses leaves it open: the probe is no case of the claim.
    """
    try:
        return _run_probe(bench, claim)
    except _Blind as error:
        why = str(error)
    except (RefimplError, NoOracleError, FaultFound) as error:
        first, *_ = str(error).strip().splitlines() or [""]
        why = f"a sum of {WIDTH} products cannot be run: {first[:200]}"
    return Sums(are_exact=None, text=f"numbers cannot tell: {why}")


def _run_probe(bench: Bench, claim: Claim) -> Sums:
    reference, inputs = _make_reference(bench, claim)
    exact = Walk(reference, replace(bench.capabilities, float_accumulation=False)).exact(inputs)[0]
    _check_visible(exact)
    lowered = lower(bench, reference, tuple(value.clone() for value in inputs))
    execution = ask_execution(bench, lowered, reference)
    if not isinstance(execution, str) and (execution.float_fallbacks or not execution.quantized_ops):
        raise _Blind(f"of a sum of {WIDTH} products the backend itself reports that it runs in float")
    comparison = compare(PROBE, exact, run_lowered(lowered, PROBE, inputs))
    if comparison.excess <= 0:
        found = f"{ROWS * BITS} sums that pass 2^24 on the way are exact, which they are in int32 or float64 only"
        return Sums(are_exact=True, text=f"the numbers show that products are not summed in float32: {found}")
    size = f"they are off by up to {comparison.max_lsb:g} LSB"
    if comparison.fault is not None and math.isinf(comparison.excess):
        size = comparison.fault.message
    return Sums(are_exact=False, text=f"sums that pass 2^24 on the way come back wrong, as in float32: {size}")


def _check_visible(exact: Exact) -> None:
    """Raise _Blind where what follows the sums leaves too little of them."""
    if exact.grid is None or float(exact.integers.max() - exact.integers.min()) < _LEAST_SPAN:
        raise _Blind("what follows the sums hides them")


def _make_reference(bench: Bench, claim: Claim) -> tuple[GraphModule, tuple[Tensor, ...]]:
    """Take the pattern with long sums to its reference model, and return it with its inputs. Raises _Blind."""
    plan = plan_pattern(claim)
    assert isinstance(plan, PatternPlan), "format_blindness has asked for it"
    arguments = _choose_arguments(bench, claim, plan)
    sums = draw_long_sums(_find_amplitude(claim))
    spatial = [1] * (len(plan.samples.inputs(arguments)[0].shape) - 2)
    shapes = [(ROWS, WIDTH, *spatial), *[(ROWS, BITS, *spatial)] * plan.has_second_input]
    model = plan.build(arguments).eval()
    _set_parameters(model, claim, sums)
    inputs = tuple(Input(shape=shape) for shape in shapes)
    case = Case(name=PROBE.case, build=lambda: model, inputs=inputs, value_range=VALUE_RANGES[0])
    prepared = prepare_case(claim, case, model, bench.config, _hold_statistics)
    set_scales(prepared, X_SCALE, Y_SCALE)
    reference = bench.convert(prepared)
    grid = placeholder_grids(reference)[0]
    if grid is None or grid.scale != X_SCALE:
        raise _Blind("the claim does not take the scales that the probe needs")
    x = (sums.x * X_SCALE).float().reshape(shapes[0])
    return reference, (x, *(torch.zeros(shape) for shape in shapes[1:]))


def _choose_arguments(bench: Bench, claim: Claim, plan: PatternPlan) -> dict[str, Any]:
    """Return the root op's arguments: WIDTH channels or features come in, BITS go out. Raises _Blind."""
    base = plan.samples.base()
    sizes = {"shape": LayerShape(c_in=WIDTH, c_out=BITS, batch=ROWS), "_leading": (ROWS,), "kernel_size": 1}
    arguments = {**base, **{name: value for name, value in sizes.items() if name in base}}
    is_trained_norm = plan.has_norm and (claim.flow == "qat" or plan.holds_qat)
    if not is_taken(bench.capabilities.limits.get(leaf_name(plan.root), {}), is_trained_norm, arguments):
        raise _Blind(f"the backend's limits exclude a sum of {WIDTH} products")
    if bench.capabilities.conditions_for(leaf_name(plan.root)):
        raise _Blind("the backend declares conditions on the op's cases")
    return arguments


def _find_amplitude(claim: Claim) -> int:
    """Return the largest operand, of a grid whose zero point is in the middle. Raises _Blind for few bits."""
    ends = (claim.dtypes.input_dtype_with_constraints, claim.dtypes.output_dtype_with_constraints)
    arguments = observer_arguments_of(*ends)
    low, high = dtype_range(arguments["dtype"])
    low, high = arguments.get("quant_min", low), arguments.get("quant_max", high)
    amplitude = int(high - low) // 2
    if amplitude < _LEAST_AMPLITUDE:
        raise _Blind(f"operands of {low}..{high} are too small for sums that pass 2^24")
    return amplitude


def _set_parameters(model: nn.Module, claim: Claim, sums: LongSums) -> None:
    """Set the weight to the sums'; a bias to 0, and a norm so that it changes nothing.

    Two weights of each channel, whose operands are 0, are at the ends of the range, so that the scale is WEIGHT_SCALE.
    """
    observer: Any = qconfig_for(claim).weight()
    half = (observer.quant_max - observer.quant_min) / 2
    weight = sums.weight.clone()
    weight[:, sums.idle[0]], weight[:, sums.idle[1]] = -half, half
    weight = (weight.T if claim.weight_axis else weight) * WEIGHT_SCALE
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.rpartition(".")[2].startswith("bias"):
                parameter.zero_()
            elif parameter.dim() > 1:
                parameter.copy_(weight.reshape(parameter.shape))
            else:
                parameter.fill_(1.0)
    for module in model.modules():
        if isinstance(module, _NormBase) and module.running_mean is not None and module.running_var is not None:
            module.running_mean.zero_()
            module.running_var.fill_(1 - module.eps)


def _hold_statistics(prepared: GraphModule, _: object) -> None:
    """Let the step of training leave the statistics of norms as they are."""
    for module in prepared.modules():
        if isinstance(module, _NormBase):
            module.momentum = 0.0
