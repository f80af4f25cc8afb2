"""The float models that a vendor registered: one variant for each, of those that can be run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

import torch

from fx_quant_conformance.conformance.bounds.error_bounds import flatten
from fx_quant_conformance.conformance.claims.build import build_model
from fx_quant_conformance.conformance.claims.case import Case, ValueRange
from fx_quant_conformance.conformance.claims.claim import Claim
from fx_quant_conformance.conformance.claims.inputs import draw_calibration_inputs
from fx_quant_conformance.conformance.claims.pattern_plan import PatternPlan, plan_registered
from fx_quant_conformance.conformance.claims.registry import MisfitError, Registered


def list_registered(
    claim: Claim, registered: Registered, vary: Callable[[PatternPlan], Iterable[Case]], value_range: ValueRange
) -> list[Case] | str:
    """Return a variant for each registered model, in this value range, or the reason why one cannot be tried.

    A model around the root op is made for each of its variants, which `vary` yields; left out are those in which the
    vendor's float model cannot run, such as an input without a batch before an op that needs one.
    """
    if registered.around_root is None:
        every = [
            Case(name=each.name, build=each.build, inputs=each.inputs, value_range=value_range, varied=each.varied)
            for each in registered.builds
        ]
        fault = next(filter(None, map(format_fault, every)), "")
        return f"the model registered for {claim.pattern} cannot be run: {fault}" if fault else every
    plan = plan_registered(claim, registered)
    if isinstance(plan, str):
        return plan
    try:
        variants = list(_rename(vary(plan)))
    except MisfitError as error:
        return f"the inputs registered for {claim.pattern} are no inputs: {error}"
    faults = {case.name: format_fault(case) for case in variants}
    if not variants or all(faults.values()):
        why = next(iter(faults.values()), "the limits of the backend leave no variant of the root")
        return f"the model registered for {claim.pattern} cannot be run: {why}"
    return [case for case in variants if not faults[case.name]]


def _rename(variants: Iterable[Case]) -> Iterator[Case]:
    for case in variants:
        yield replace(case, name=f"registered {case.name}")


def keep_finite(cases: Sequence[Case]) -> list[Case]:
    """Return the cases whose results are finite; what an op has no number for has no integer either."""
    return [case for case in cases if not format_fault(case, is_finite=True)]


def format_fault(case: Case, *, is_finite: bool = False) -> str:
    """Say why the float model of a case cannot be tried; "" if it runs and, if asked, gives finite numbers."""
    try:
        results = evaluate(case)
    except Exception as error:  # the vendor's code may raise anything; the claim says so
        return f"{case.name}: {type(error).__name__}: {error}"
    if is_finite and not all(bool(each.isfinite().all()) for each in results):
        return f"{case.name}: the results are not finite"
    return ""


def evaluate(case: Case) -> list[torch.Tensor]:
    """Return what the float model of a case gives for its calibration inputs; torch's generator is left as it was."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.default_generator.manual_seed(0)
        model = build_model(case)
        outputs = [model(*inputs) for inputs in draw_calibration_inputs(case)]
    return [each for each in flatten(outputs) if isinstance(each, torch.Tensor)]
