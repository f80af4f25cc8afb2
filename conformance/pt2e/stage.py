"""The annotate stage: checks that the vendor's torchao Quantizer annotates what the config claims, and nothing else.

Each variant of the claim's pattern is a float model that is exported, and prepared by torchao with the Quantizer, in
the vendor's process. The judge gets what each tensor is observed by. Where something is not observed, the pattern is
tried again between ops that the Quantizer quantizes: some Quantizers leave an output to the op that reads it, or
quantize an op only between others.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn
from torch.fx import GraphModule

from fx_quant_conformance.backends.base import WEIGHT_SCHEMES, QuantizerRequest, Representation
from fx_quant_conformance.conformance.claims.case import Case
from fx_quant_conformance.conformance.claims.claim import FLOAT_QPARAMS, Claim
from fx_quant_conformance.conformance.claims.inputs import Batch
from fx_quant_conformance.conformance.claims.kinds import Kind
from fx_quant_conformance.conformance.claims.pattern_plan import is_norm
from fx_quant_conformance.conformance.machine.fault import Fault, FaultFound
from fx_quant_conformance.conformance.machine.guard import guard
from fx_quant_conformance.conformance.ops.fused_modules import QAT_OF
from fx_quant_conformance.conformance.pt2e.asking import QuantizerNotFound, annotate, lower_annotated
from fx_quant_conformance.conformance.pt2e.checks import find_faults, is_exported, is_whole, says_something
from fx_quant_conformance.conformance.pt2e.edges import find_edge_fault, make_edges
from fx_quant_conformance.conformance.pt2e.probe import BothPlaces, Probe
from fx_quant_conformance.conformance.pt2e.programs import OtherGridError
from fx_quant_conformance.conformance.pt2e.spelling import read_places
from fx_quant_conformance.conformance.remote.executor import Executor
from fx_quant_conformance.conformance.stages.bench import Bench
from fx_quant_conformance.conformance.stages.state import ClaimState, make_backend_error
from fx_quant_conformance.refimpl import ObservationType
from fx_quant_conformance.reports.schema import Where
from fx_quant_conformance.reports.verdicts import Verdict

Found = Mapping[str, BothPlaces]
"""What came of the probes, by name."""
_RULE = "OBS-15"


def check_annotations(run: ClaimState) -> Iterator[Fault]:
    """Have the Quantizer annotate each variant of a claim, and models just outside of it, and judge what it did.

    Of each variant whose pattern it quantizes alone, without neighbours, the first case will be lowered so. Raises
    FaultFound if there is no Quantizer for the claim, it raises, or it says nothing. A claim that no Quantizer can be
    held to is left to the other stages.
    """
    bench, claim, request = run.bench, run.claim, request_for(run.claim)
    if reason := _find_inexpressible(claim):
        run.left_out["annotate"] = reason
        return
    variants = _choose_variants(run.cases)
    edges = {edge.name: edge for edge in make_edges(claim, next(iter(variants.values())), bench.config)}
    probes = {name: Probe.of(case) for name, case in variants.items()}
    found = ask(bench, request, probes | {name: edge.probe for name, edge in edges.items()})
    exported = [name for name in variants if is_exported(found[name])]
    if not exported:
        reason = found[next(iter(variants))].alone.failure or "export writes no op for the pattern"
        run.left_out["annotate"] = reason
        return
    readable = [name for name in exported if says_something(found[name])]
    if not readable:
        text = "the Quantizer leaves the pattern in float alone, and nothing that it quantizes fits beside it"
        raise FaultFound(Fault(rule=_RULE, verdict=Verdict.UNEXERCISED, message=text))
    run.counted["annotate"] = len(readable) + sum(not found[name].alone.is_refused for name in edges)
    is_exported_form = bench.backend.representation is Representation.EXPORTED
    folds_norms = any(map(is_norm, claim.members))  # torchao folds one that a fused module holds, and FX does not
    if is_exported_form and claim.flow == "ptq" and not folds_norms:
        lower = partial(lower_as_annotated, bench.executor, request)
        run.lowerings |= {name: lower for name in readable if is_whole(found[name])}
    for name in readable:
        yield from _place(name, find_faults(claim, variants[name], found[name], bench.capabilities))
    for name, edge in edges.items():
        yield from _place(name, find_edge_fault(edge, found[name].alone))


def _place(case: str, faults: Iterator[Fault]) -> Iterator[Fault]:
    """Yield the first fault of a case, if any, as the Quantizer's."""
    for fault in faults:
        text = f"the Quantizer: {fault.message.removeprefix('the Quantizer ')}"
        yield replace(fault, message=text, where=Where(case=case))
        return


def request_for(claim: Claim) -> QuantizerRequest:
    """Return what a vendor's Quantizer is to be configured for."""
    scheme = claim.scheme if claim.scheme in WEIGHT_SCHEMES else ""
    return QuantizerRequest(is_qat=claim.flow == "qat", is_dynamic=bool(claim.dtypes.is_dynamic), weight_scheme=scheme)


@guard("annotate.ask")
def ask(bench: Bench, request: QuantizerRequest, probes: Mapping[str, Probe]) -> Found:
    """Return what came of probes. Raises FaultFound if there is no Quantizer, or the backend's code raises."""
    try:
        step = "quantizer() or annotate"
        found = bench.executor.ask_by(annotate, (request, dict(probes)), read_places, step=step)
    except Exception as error:
        if type(error).__name__ == QuantizerNotFound.__name__:  # here, or in the backend's process
            raise FaultFound(Fault(rule=_RULE, verdict=Verdict.UNEXERCISED, message=str(error))) from error
        raise make_backend_error("quantizer()", error) from error
    if found is None:
        text = f"the backend gives no Quantizer for {request}"
        raise FaultFound(Fault(rule=_RULE, verdict=Verdict.UNEXERCISED, message=text))
    return found


def lower_as_annotated(
    executor: Executor, request: QuantizerRequest, model: nn.Module, reference: GraphModule, example_inputs: Batch
) -> Any:
    """Have a backend lower a float model as its Quantizer has it quantized, on the grids of the reference model.

    Where the Quantizer keeps to other grids within the claim, such as a narrower range, the reference model is lowered.
    """
    given = (request, model, reference, example_inputs)
    try:
        return executor.lower_by(lower_annotated, given, step="quantizer() or lower")
    except Exception as error:
        if type(error).__name__ != OtherGridError.__name__:  # here, or in the backend's process
            raise
        return executor.lower_copy(reference, example_inputs)


def _find_inexpressible(claim: Claim) -> str:
    """Say why no exported float program has a claim's pattern; "" if one has."""
    if any(leaf in QAT_OF for leaf in claim.ops):
        return "a QAT module is no part of a float model, which is what a Quantizer annotates"
    if claim.entry.normal_pattern in claim.preparation.custom_modules:
        return "PT2E has no words for custom modules"
    if claim.scheme == FLOAT_QPARAMS:
        return "PT2E drops the fraction of a weight's zero point, and these are real numbers"
    if claim.entry.observation_type is ObservationType.INPUT_OUTPUT_NOT_OBSERVED:
        return "what reads a shape is no op of an exported program"
    return "the suite knows no such dtypes" if claim.kind is Kind.OTHER else ""


def _choose_variants(cases: tuple[Case, ...]) -> dict[str, Case]:
    """Return the first case of each variant, by name; torch.export drops an identity before the pattern."""
    variants = dict[str, Case]()
    for case in cases:
        if not case.arguments.get("behind an identity"):
            variants.setdefault(case.variant, case)
    return variants or {cases[0].variant: cases[0]}
