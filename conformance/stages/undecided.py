"""Cases whose numbers decide nothing: by what a vendor declares, one output is right whatever the input is. (NUM-03)"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from fx_quant_conformance.backends.base import Capabilities
from fx_quant_conformance.conformance.claims.claim import Claim
from fx_quant_conformance.conformance.claims.registry import roundings_in
from fx_quant_conformance.conformance.machine.fault import Fault
from fx_quant_conformance.conformance.oracle.evaluate import Walk
from fx_quant_conformance.conformance.oracle.exact import Exact
from fx_quant_conformance.conformance.stages.state import CaseState, ClaimState
from fx_quant_conformance.conformance.vectors.interval import interval_of
from fx_quant_conformance.reports.verdicts import Verdict

Exacts = Sequence[Exact]
"""The exact results for an input, one for each output."""


def note_whether_decided(run: ClaimState, state: CaseState, exacts: Sequence[Exacts]) -> None:
    """Note whether a case decides something; if none has so far, why the first one does not."""
    run.decides = run.decides or _tells_inputs_apart(exacts)
    if not run.decides and not run.undecided:
        run.undecided = _format_undecided(run, state, exacts)


def find_undecided(run: ClaimState) -> Iterator[Fault]:
    """Find that no case of a claim decides anything, by what is declared."""
    if run.undecided and not run.decides:
        yield Fault(rule="NUM-03", verdict=Verdict.UNEXERCISED, message=run.undecided)


def _tells_inputs_apart(exacts: Sequence[Exacts]) -> bool:
    """Tell whether no output is right for all of several inputs: the right results of some element share none."""
    for outputs in zip(*exacts, strict=True):
        intervals = [interval_of(each) for each in outputs]
        lowest, highest = torch.stack([each.low for each in intervals]), torch.stack([each.high for each in intervals])
        if bool((lowest.amax(0) > highest.amin(0)).any()):  # rule: NUM-03
            return True
    return False


def _format_undecided(run: ClaimState, state: CaseState, exacts: Sequence[Exacts]) -> str:
    """Say why a case does not tell its inputs apart, though its exact results are apart, with nothing declared.

    "" if these are not apart either: a relu of negative numbers is 0 whatever they are.
    """
    walk = Walk(state.reference)
    plain = [[replace(each, errors={}) for each in walk.exact(inputs)] for _, inputs in state.inputs]
    if not _tells_inputs_apart(plain):
        return ""
    found = [found for outputs in exacts for each in outputs for found in each.slack_by_cause.items()]
    slack, cause = max((float(slack.max()), cause) for cause, slack in found)
    text = "the numbers decide nothing: one output would be right in each case, whatever the input is"
    bound = f"the bound is up to {slack:.3g} LSB by the cause {cause!r} alone"
    declared = _list_declared(run.claim, run.bench.capabilities)
    return "; ".join((text, bound, *(f"declared is {each}" for each in declared)))


def _list_declared(claim: Claim, declared: Capabilities) -> Iterator[str]:
    """Yield what is declared with a number that has no end."""
    if roundings := roundings_in(claim.entry.normal_pattern):
        yield f"roundings={roundings}"
    if claim.dtypes.is_dynamic and declared.dynamic_scale_floor:
        yield f"dynamic_scale_floor={declared.dynamic_scale_floor:g}"
