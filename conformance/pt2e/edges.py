"""Models just outside of a claim, which a Quantizer must not annotate as the claim says."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from fx_quant_conformance.conformance.claims.case import Case
from fx_quant_conformance.conformance.claims.claim import NO_WEIGHT, Claim
from fx_quant_conformance.conformance.claims.pattern_plan import is_norm
from fx_quant_conformance.conformance.machine.fault import Fault
from fx_quant_conformance.conformance.machine.guard import guard
from fx_quant_conformance.conformance.ops.op_model import PatternModel
from fx_quant_conformance.conformance.pt2e.probe import Probe, Probed
from fx_quant_conformance.refimpl import BackendConfig
from fx_quant_conformance.refimpl.config.patterns import Pattern, leaf_name


@dataclass(frozen=True, slots=True, kw_only=True)
class Edge:
    """A model just outside of a claim."""

    name: str
    probe: Probe
    rule: str
    """The rule by which the pattern is not there."""
    is_silent: bool = False
    """Whether no op of it may have a qspec; else only the last one may not. That some Quantizers mark an op as one of a
    pattern, without a qspec, changes nothing in the program."""


def make_edges(claim: Claim, case: Case, config: BackendConfig) -> Iterator[Edge]:
    """Yield the models just outside of a claim, made of one of its cases."""
    probe = Probe.of(case)
    model, ops = probe.pattern, claim.ops
    if isinstance(model, PatternModel) and len(model.steps) > 1 and not any(map(is_norm, ops)):
        if not _is_claimed_alone(ops[-1], config):
            model.gives_inner = True
            yield Edge(name="an inner value is used elsewhere", probe=probe, rule="PAT-06")
    elif claim.scheme == NO_WEIGHT and probe.activations and (integers := _make_integers(probe)) is not None:
        yield Edge(name="integers as inputs", probe=integers, rule="OBS-10", is_silent=True)


def _is_claimed_alone(op: Pattern, config: BackendConfig) -> bool:
    """Tell whether an entry claims an op by itself, in any of its forms, which aten does not tell apart."""
    alone = (entry.normal_pattern for entry in config.configs if not isinstance(entry.normal_pattern, tuple))
    return form_of(op) in map(form_of, alone)


def form_of(op: Pattern) -> str:
    """Return a name that the forms of an op have in common: nn.ReLU, F.relu and .relu_ are ``relu``."""
    return leaf_name(op).rpartition(".")[2].lower().replace("_", "")


def _make_integers(probe: Probe) -> Probe | None:
    """Return a probe of the same op on int64 inputs; None if the op takes none."""
    inputs = tuple(value.round().long() if value.is_floating_point() else value for value in probe.inputs)
    try:
        with torch.no_grad():
            output = probe.pattern(*(value.clone() for value in inputs))
    except (RuntimeError, TypeError, ValueError, NotImplementedError):  # what ops raise for integers
        return None
    is_integer = isinstance(output, Tensor) and not output.is_floating_point()
    return Probe(pattern=probe.pattern, inputs=inputs, activations=()) if is_integer else None


@guard("annotate.find_edge_fault")
def find_edge_fault(edge: Edge, probed: Probed) -> Iterator[Fault]:
    """Check that what is just outside of the claim is not annotated as if it were inside. (PAT-06, OBS-10)"""
    reading = probed.reading
    if reading is None:
        if not probed.is_refused:
            yield Fault(rule="LOW-01", message=probed.failure)
        return
    last = reading.ops[-1] if reading.ops else ""
    if edge.is_silent and reading.asking:
        yield Fault(rule=edge.rule, message=f"{edge.name}: annotates {', '.join(reading.asking)}")
    elif not edge.is_silent and last in reading.asking:
        yield Fault(rule=edge.rule, message=f"{edge.name}: annotates {last}, which no entry claims alone")
