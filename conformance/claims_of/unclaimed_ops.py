"""Ops that no entry claims, which the vendor's Quantizer must not annotate.

The stage annotate holds the Quantizer to each claim. What it annotates beyond all claims is judged here: one job for
each way in which the config's claims have it configured.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial

from backends.base import QuantizerRequest
from conformance.annotations.probe import BothPlaces, Probe
from conformance.annotations.reading import PatternReading
from conformance.claims.case import Case
from conformance.claims.claim import Claim
from conformance.claims_of.candidates import is_of_qat, list_entries, plan_candidate
from conformance.machine.guard import guard
from conformance.pipeline.job import Job
from conformance.stages.annotate import ask, request_for
from conformance.stages.annotation_edges import form_of
from conformance.stages.bench import Bench
from conformance.stages.stage import Problem, StageError
from refimpl.patterns import Pattern, pattern_name
from reports.schema import ModelResult, evidence
from reports.verdicts import Verdict


def jobs(claims: Sequence[Claim]) -> tuple[Job, ...]:
    """Return a job for each flow, PTQ and QAT, static and dynamic, that the claims of a backend's config have."""
    requests = dict[str, QuantizerRequest]()
    for claim in claims:
        mode = "dynamic" if claim.dtypes.is_dynamic else "static"
        name = f"model/unclaimed_ops/{claim.flow}/{mode}"
        if name not in requests or not requests[name].weight_scheme:
            requests[name] = request_for(claim)
    alone = frozenset(claim.entry.normal_pattern for claim in claims)
    return tuple(Job(id=name, run=partial(_run, name, request, alone)) for name, request in requests.items())


def _run(name: str, request: QuantizerRequest, claimed: frozenset[Pattern], bench: Bench) -> Iterator[ModelResult]:
    """Have the Quantizer annotate each op that the suite knows, alone and between others; yield one result."""
    started = time.perf_counter()
    probes = dict(_list_probes(claimed))
    names = {pattern_name(pattern): pattern for pattern in probes}
    try:
        found = ask(bench, request, {key: probes[pattern] for key, pattern in names.items()})
        problem = check_unclaimed(found, {key for key, pattern in names.items() if pattern in claimed})
        verdict, rule, reason = _read(problem)
    except StageError as error:
        verdict, rule, reason = error.verdict, error.rule, str(error)
    seconds = round(time.perf_counter() - started, 6)
    yield ModelResult(
        model=name, verdict=verdict, rule=rule, reason=reason, cases=len(names) - len(claimed & probes.keys()),
        seconds=seconds, evidence=evidence({}),
    )  # fmt: skip


def _read(problem: Problem | None) -> tuple[Verdict, str, str]:
    return (Verdict.VERIFIED, "DTY-02", "") if problem is None else (problem.verdict, problem.rule, problem.message)


def _list_probes(claimed: frozenset[Pattern]) -> Iterator[tuple[Pattern, Probe]]:
    """Yield a probe of each single op that a float model may hold: what is claimed, and one form of each other op."""
    singles = [each.normal_pattern for each in list_entries() if not is_of_qat(each)]
    singles = [each for each in singles if not isinstance(each, tuple)]
    others = {form_of(pattern): pattern for pattern in reversed(singles)}
    for pattern in (each for each in claimed if not isinstance(each, tuple)):
        others.pop(form_of(pattern), None)
    for pattern in (each for each in singles if each in claimed or each in others.values()):
        case = plan_candidate(pattern)
        if isinstance(case, Case):
            yield pattern, Probe.of(case)


@guard("annotate.check_unclaimed")
def check_unclaimed(found: Mapping[str, BothPlaces], claimed: set[str]) -> Problem | None:
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
    if not beyond:
        return None
    listed = "; ".join(f"{ops} of {name}" for ops, name in sorted(beyond.items()))
    text = f"annotate: the Quantizer annotates ops that no entry claims alone: {listed}"
    return Problem(rule="DTY-02", message=text)


def _readings(places: BothPlaces | None) -> Iterator[PatternReading]:
    for probed in (places.alone, places.between) if places is not None else ():
        if probed is not None and probed.reading is not None:
            yield probed.reading
