"""Ops that no entry claims, which the vendor's Quantizer must not annotate.

The stage annotate holds the Quantizer to each claim. What it annotates beyond all claims is judged here: one job for
each way in which the config's claims have it configured.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial

from fx_quant_conformance.backends.base import QuantizerRequest
from fx_quant_conformance.conformance.claims.case import Case
from fx_quant_conformance.conformance.claims.claim import Claim
from fx_quant_conformance.conformance.machine.fault import Fault, FaultFound
from fx_quant_conformance.conformance.machine.guard import guard
from fx_quant_conformance.conformance.ops.fused_modules import QAT_OF
from fx_quant_conformance.conformance.ops.table import FAMILIES
from fx_quant_conformance.conformance.pipeline.job import Job
from fx_quant_conformance.conformance.pt2e.candidates import plan_candidate
from fx_quant_conformance.conformance.pt2e.edges import form_of
from fx_quant_conformance.conformance.pt2e.probe import BothPlaces, Probe
from fx_quant_conformance.conformance.pt2e.reading import PatternReading
from fx_quant_conformance.conformance.pt2e.stage import ask, request_for
from fx_quant_conformance.conformance.stages.bench import Bench
from fx_quant_conformance.refimpl.config.patterns import Pattern, pattern_name
from fx_quant_conformance.reports.schema import ModelResult, evidence
from fx_quant_conformance.reports.verdicts import Verdict


def jobs(claims: Sequence[Claim]) -> tuple[Job, ...]:
    """Return jobs for each flow, PTQ and QAT, static and dynamic, that the claims of a config have: one per family."""
    requests = dict[str, QuantizerRequest]()
    for claim in claims:
        way = f"{claim.flow}/{'dynamic' if claim.dtypes.is_dynamic else 'static'}"
        if way not in requests or not requests[way].weight_scheme:
            requests[way] = request_for(claim)
    claimed = {claim.entry.normal_pattern for claim in claims}
    families = {family: _choose_ops(ops, claimed) for family, ops in FAMILIES.items()}
    return tuple(
        Job(id=name, run=partial(_run, name, request, claimed, ops))
        for way, request in requests.items()
        for family, ops in families.items()
        if not claimed.issuperset(ops)
        for name in (f"model/unclaimed_ops/{family}/{way}",)
    )


def _choose_ops(family: Collection[Pattern], claimed: Collection[Pattern]) -> tuple[Pattern, ...]:
    """Return the ops of a family that float models may hold: what is claimed, and one form of each other op."""
    ops = [op for op in family if op not in QAT_OF]
    others = {form_of(op): op for op in reversed(ops)}
    for op in ops:
        if op in claimed:
            others.pop(form_of(op), None)
    return tuple(op for op in ops if op in claimed or op in others.values())


def _run(
    name: str, request: QuantizerRequest, claimed: Collection[Pattern], ops: Sequence[Pattern], bench: Bench
) -> Iterator[ModelResult]:
    """Have the Quantizer annotate each op, alone and between others; yield one result."""
    started = time.perf_counter()
    planned = {pattern_name(op): (op, plan_candidate(op)) for op in ops}
    probes = {each: Probe.of(case) for each, (_, case) in planned.items() if isinstance(case, Case)}
    own = {each for each, (op, _) in planned.items() if op in claimed}
    try:
        fault = next(check_unclaimed(ask(bench, request, probes), own), None)
    except FaultFound as found:
        fault = found.fault
    fault = fault or Fault(rule="DTY-02", verdict=Verdict.VERIFIED, message="")
    yield ModelResult(
        model=name,
        verdict=fault.verdict,
        rule=fault.rule,
        reason=fault.message,
        cases=len(probes.keys() - own),
        seconds=round(time.perf_counter() - started, 6),
        evidence=evidence({}),
    )


@guard("annotate.check_unclaimed")
def check_unclaimed(found: Mapping[str, BothPlaces], claimed: set[str]) -> Iterator[Fault]:
    """Check that no op is annotated that no entry claims. (DTY-02)

    Aten does not tell the forms of an op apart, such as nn.ReLU and F.relu: what is claimed in one form may be
    annotated in the others. ``claimed``: the names of the probes that are.
    """
    known = {op for name in claimed for reading in _readings(found.get(name)) for op in reading.ops}
    beyond = dict[str, str]()
    for name, places in found.items():
        for reading in _readings(places) if name not in claimed else ():
            asking = [op for op in reading.asking if op not in known]
            if asking:
                beyond.setdefault(", ".join(asking), name)
    if beyond:
        listed = "; ".join(f"{ops} of {name}" for ops, name in sorted(beyond.items()))
        text = f"annotate: the Quantizer annotates ops that no entry claims alone: {listed}"
        yield Fault(rule="DTY-02", message=text)


def _readings(places: BothPlaces | None) -> Iterator[PatternReading]:
    for probed in (places.alone, places.between) if places is not None else ():
        if probed is not None and probed.reading is not None:
            yield probed.reading
