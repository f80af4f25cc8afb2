"""Checks of what a Quantizer does with a claimed pattern: what is observed, by what, and what shares an observer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch

from fx_quant_conformance.backends.base import Capabilities
from fx_quant_conformance.conformance.claims.case import Case
from fx_quant_conformance.conformance.claims.claim import NO_WEIGHT, Claim
from fx_quant_conformance.conformance.claims.kinds import INTEGERS, Kind
from fx_quant_conformance.conformance.claims.qconfigs import WEIGHT_OBSERVERS
from fx_quant_conformance.conformance.machine.fault import Fault
from fx_quant_conformance.conformance.machine.guard import guard
from fx_quant_conformance.conformance.pt2e.probe import BothPlaces
from fx_quant_conformance.conformance.pt2e.reading import Observed, PatternReading
from fx_quant_conformance.refimpl import DTypeConfig, DTypeWithConstraints, ObservationType
from fx_quant_conformance.refimpl.legacy import qint8, qint32, quint8
from fx_quant_conformance.refimpl.legacy.dtypes import PLAIN_DTYPE
from fx_quant_conformance.refimpl.observers.observers import dtype_range, is_quantized_dtype
from fx_quant_conformance.refimpl.prepare.dtype_choice import (
    ObserverFacts,
    QConfigFacts,
    choose_dtype_config,
    is_observed_dtype,
)
from fx_quant_conformance.reports.verdicts import Verdict

_QUANTIZED = {PLAIN_DTYPE[dtype]: dtype for dtype in (quint8, qint8, qint32)}
_PER_TENSOR = (None, torch.per_tensor_affine, torch.per_tensor_symmetric)


@dataclass(frozen=True, slots=True, kw_only=True)
class Annotated:
    """A claim's pattern as the Quantizer has annotated it in one case."""

    claim: Claim
    case: Case
    reading: PatternReading
    capabilities: Capabilities
    leaves_output: bool = False
    """Whether the model may be why nothing observes an output: no op reads it there that would."""

    @property
    def kind(self) -> Kind:
        """How the claim quantizes."""
        return self.claim.kind

    @property
    def inputs(self) -> list[Observed]:
        """What observes the inputs."""
        return [each for each in self.reading.inputs if each is not None]

    @property
    def outputs(self) -> list[Observed]:
        """What observes the outputs."""
        return [each for each in self.reading.outputs if each is not None]


def is_exported(places: BothPlaces) -> bool:
    """Tell whether a program has an op for a case's pattern, and torchao prepares it."""
    reading = places.alone.reading
    return not places.alone.is_refused and (reading is None or bool(reading.ops))


def is_whole(places: BothPlaces) -> bool:
    """Tell whether the Quantizer observes all inputs of a pattern that stands alone."""
    reading = places.alone.reading
    return reading is not None and bool(reading.inputs) and None not in reading.inputs


def says_something(places: BothPlaces) -> bool:
    """Tell whether a case's reading says something: it is annotated, or some quantized op fits beside it."""
    reading = places.alone.reading
    is_silent = reading is not None and not reading.is_annotated and not reading.inside
    return not (is_silent and places.has_neighbours and places.between is None)


def find_faults(claim: Claim, case: Case, places: BothPlaces, capabilities: Capabilities) -> Iterator[Fault]:
    """Yield the ways in which the Quantizer does not do what the claim says."""
    is_between = _says_more(claim, places)
    probed = places.between if is_between and places.between is not None else places.alone
    if probed.reading is None:
        yield Fault(rule="LOW-01", message=probed.failure)
        return
    annotated = Annotated(
        claim=claim,
        case=case,
        reading=probed.reading,
        capabilities=capabilities,
        leaves_output=places.has_neighbours and not is_between,
    )
    for check in _CHECKS:
        yield from check(annotated)


def _says_more(claim: Claim, places: BothPlaces) -> bool:
    """Tell whether the pattern between others decides: alone, no input is observed, or only the output is not."""
    if places.between is None or places.between.reading is None or claim.kind not in INTEGERS:
        return False
    inputs = () if places.alone.reading is None else places.alone.reading.inputs
    return len({each is None for each in inputs}) < 2


@guard("annotate.check_presence")
def check_presence(annotated: Annotated) -> Iterator[Fault]:
    """Check that the pattern is annotated, as one: all of its inputs, its output, and nothing inside. (OBS-01)"""
    reading, kind = annotated.reading, annotated.kind
    if not reading.is_annotated and not reading.inside:
        text = "leaves the pattern in float, alone and between quantized ops"
        yield Fault(rule="OBS-01", message=text, verdict=Verdict.FALLBACK)
    if reading.inside:
        places = ", ".join(dict.fromkeys(reading.inside))
        yield Fault(rule="OBS-01", message=f"does not take the pattern as one: it observes inside, {places}")
    if kind is Kind.WEIGHT_ONLY:
        if annotated.inputs or reading.owns_output:
            text = "observes an input or the output; the claim quantizes the weight alone"
            yield Fault(rule="OBS-01", message=text)
        return
    missing = [number for number, each in enumerate(reading.inputs) if each is None]
    if annotated.claim.dtypes.is_dynamic:
        missing = [number for number in missing if number == 0]  # rule: OBS-05
        if reading.owns_output and annotated.outputs:
            yield Fault(rule="DTY-07", message="observes the output, which is float after a dynamic input")
    if missing:
        places = ", ".join(map(str, missing))
        yield Fault(rule="OBS-01", message=f"observes {len(annotated.inputs)} of the inputs, and not input {places}")
    is_open = annotated.leaves_output and not reading.owns_output
    if kind in INTEGERS and None in reading.outputs and not is_open:
        yield Fault(rule="OBS-01", message="does not observe the output")


@guard("annotate.check_flow")
def check_flow(annotated: Annotated) -> Iterator[Fault]:
    """Check that training has fake quantizes, and nothing else has. (QAT-01)"""
    several = (*annotated.inputs, *annotated.reading.parameters.values(), *annotated.outputs)
    is_qat = annotated.claim.flow == "qat"
    if annotated.kind is not Kind.FLOAT16 and any(each.is_fake != is_qat and not each.is_derived for each in several):
        found, expected = ("observers", "fake quantizes") if is_qat else ("fake quantizes", "observers")
        yield Fault(rule="QAT-01", message=f"uses {found}; {annotated.claim.flow.upper()} needs {expected}")


@guard("annotate.check_dtypes")
def check_dtypes(annotated: Annotated) -> Iterator[Fault]:
    """Check that each end has the claim's dtype, and keeps its bounds. (DTY-01, DTY-03 to DTY-05, DTY-07)"""
    dtypes = annotated.claim.dtypes
    ends = [("input", each, _bare(dtypes.input_dtype_with_constraints, annotated.kind)) for each in annotated.inputs]
    if not dtypes.is_dynamic:
        ends += [("output", each, dtypes.output_dtype_with_constraints) for each in annotated.outputs]
    for role, observed, constraints in ends:
        is_dynamic = observed.facts.is_dynamic if annotated.kind is Kind.FLOAT16 else bool(dtypes.is_dynamic)
        yield from _hold(role, observed, constraints, is_dynamic=is_dynamic)
        if observed.qscheme not in _PER_TENSOR:
            yield Fault(rule="OBS-01", message=f"observes the {role} {observed.qscheme}, and not per tensor")


def _bare(constraints: DTypeWithConstraints, kind: Kind) -> DTypeWithConstraints:
    """Return what an input has to keep: fixed qparams are the output's, and an input is measured. (OBS-14)"""
    if kind is not Kind.FIXED:
        return constraints
    return DTypeWithConstraints(constraints.dtype, constraints.quant_min_lower_bound, constraints.quant_max_upper_bound)


def _hold(role: str, observed: Observed, constraints: DTypeWithConstraints, *, is_dynamic: bool) -> Iterator[Fault]:
    """Hold an observer to a dtype with constraints, as DTY-01 and its kin hold a QConfig's."""
    facts = _as_quantized(observed.facts)
    config = DTypeConfig(input_dtype=constraints, is_dynamic=is_dynamic)
    _, refusals = choose_dtype_config(QConfigFacts(activation=facts, weight=facts), [config], has_weight=False)
    for refusal in refusals:
        what = refusal.where.removeprefix("input ").removeprefix("activation.")
        yield Fault(rule=refusal.rule, message=f"{role}: {what} is {refusal.found}, must be {refusal.bound}")


def _as_quantized(facts: ObserverFacts) -> ObserverFacts:
    """Return facts with the dtype as a BackendConfig names it, and with the dtype's range where there is none."""
    dtype = facts.dtype if facts.dtype is None else _QUANTIZED.get(facts.dtype, facts.dtype)
    if dtype is None or not is_quantized_dtype(dtype):
        return replace(facts, dtype=dtype)
    low, high = dtype_range(dtype)
    return replace(
        facts,
        dtype=dtype,
        quant_min=low if facts.quant_min is None else facts.quant_min,
        quant_max=high if facts.quant_max is None else facts.quant_max,
    )


@guard("annotate.check_weight")
def check_weight(annotated: Annotated) -> Iterator[Fault]:
    """Check that the weight has the claim's dtype, bounds, scheme and axis, and nothing but it is observed. (OBS-13)"""
    claim = annotated.claim
    weights = {name: each for name, each in annotated.reading.parameters.items() if name != "bias"}
    if not is_observed_dtype(claim.dtypes.weight_dtype):
        numbers = [name for name in weights if isinstance(annotated.case.arguments.get(name), (int, float))]
        if numbers:
            yield Fault(rule="OBS-07", message=f"observes the number that is given as {', '.join(numbers)}")
        return
    if not weights and claim.scheme != NO_WEIGHT:
        yield Fault(rule="OBS-13", message="does not observe the weight")
    for name, observed in weights.items():
        constraints = claim.dtypes.weight_dtype_with_constraints
        yield from _hold(name, observed, constraints, is_dynamic=observed.facts.is_dynamic)
        if claim.scheme in WEIGHT_OBSERVERS:
            yield from _hold_scheme(claim, name, observed)


def _hold_scheme(claim: Claim, name: str, observed: Observed) -> Iterator[Fault]:
    expected, axis = WEIGHT_OBSERVERS[claim.scheme][1], claim.weight_axis
    if observed.qscheme is not expected:
        yield Fault(rule="OBS-13", message=f"{name}: its qscheme is {observed.qscheme}, must be {expected}")
    elif claim.scheme.startswith("per_channel") and observed.axis != axis:
        text = f"{name}: quantized along axis {observed.axis}; the output's channels are axis {axis}"
        yield Fault(rule="OBS-13", message=text)


@guard("annotate.check_bias")
def check_bias(annotated: Annotated) -> Iterator[Fault]:
    """Check that the bias is float, or int32 of scale s_x·s_w where the Capabilities say so. (OBS-06, NUM-04)"""
    reading, bias = annotated.reading, annotated.reading.parameters.get("bias")
    has_int32 = annotated.capabilities.int32_bias and annotated.kind in INTEGERS and annotated.claim.scheme != NO_WEIGHT
    weights = [each.group for name, each in reading.parameters.items() if name != "bias"]
    if bias is None:
        text = "leaves the bias in float; Capabilities(int32_bias=True) without lowers_bias=True says that it is int32"
        if has_int32 and "bias" in reading.floats and not annotated.capabilities.lowers_bias:
            yield Fault(rule="NUM-04", message=text)
    elif not has_int32:
        if annotated.kind is not Kind.FLOAT16:
            yield Fault(rule="OBS-06", message="observes the bias, which stays float")
    elif bias.facts.dtype is not torch.int32 or {*bias.sources} != {annotated.inputs[0].group, *weights}:
        text = f"the bias is {bias.facts.dtype}; it has to be int32, derived of the input's scale and the weight's"
        yield Fault(rule="NUM-04", message=text)


@guard("annotate.check_sharing")
def check_sharing(annotated: Annotated) -> Iterator[Fault]:
    """Check that inputs and output share one observer, or have one each, by the observation type. (OBS-01, OBS-02)"""
    if annotated.kind not in INTEGERS or not annotated.outputs:
        return
    inputs, outputs = {each.group for each in annotated.inputs}, {each.group for each in annotated.outputs}
    if _observation_of(annotated) is ObservationType.OUTPUT_SHARE_OBSERVER_WITH_INPUT:
        if len(inputs | outputs) > 1:
            text = f"{len(inputs | outputs)} observers; the inputs and the output have to share one"
            yield Fault(rule="OBS-02", message=text)
    elif inputs & outputs:
        yield Fault(rule="OBS-01", message="the output shares an observer with an input; it needs its own")
    elif len(inputs) < len(annotated.inputs):
        yield Fault(rule="OBS-01", message="inputs share an observer; each needs its own")


def _observation_of(annotated: Annotated) -> ObservationType:
    """Return the observation type by the number of tensors that the op takes. (OBS-07)"""
    entry = annotated.claim.entry
    count = 2 if annotated.case.arguments.get("other") == "itself" else len(annotated.reading.inputs)
    return entry._num_tensor_args_to_observation_type.get(count, entry.observation_type)


_CHECKS: tuple[Callable[[Annotated], Iterator[Fault]], ...] = (
    check_presence,
    check_flow,
    check_dtypes,
    check_weight,
    check_bias,
    check_sharing,
)
