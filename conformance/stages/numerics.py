"""The numerics stage: checks that every output integer is the exact result, correctly rounded. (NUM-03 to NUM-06)"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

from fx_quant_conformance.backends.base import Capabilities, Requantize
from fx_quant_conformance.conformance.bounds.error_bounds import NoOracleError
from fx_quant_conformance.conformance.machine.fault import Fault, FaultFound
from fx_quant_conformance.conformance.machine.guard import guard
from fx_quant_conformance.conformance.oracle.evaluate import Walk
from fx_quant_conformance.conformance.oracle.exact import Exact
from fx_quant_conformance.conformance.stages.bench import Bench
from fx_quant_conformance.conformance.stages.comparison import Comparison, compare_all
from fx_quant_conformance.conformance.stages.lower import error_on_retry, lower, run_all
from fx_quant_conformance.conformance.stages.resemblance import format_resemblance
from fx_quant_conformance.conformance.stages.state import CaseState, ClaimState, FirstRun, make_check
from fx_quant_conformance.conformance.stages.statistics import summarize
from fx_quant_conformance.conformance.stages.undecided import note_whether_decided
from fx_quant_conformance.reports.schema import Check, Where
from fx_quant_conformance.reports.verdicts import Verdict


def compare_with_exact(run: ClaimState, state: CaseState) -> Iterator[Fault]:
    """Run the lowered model on all inputs, and compare its outputs with the oracle's exact results. (NUM-03, NUM-05)

    A wrong output does not end the case. A model that raises for one input is not run on the others.
    """
    claim, bench = run.claim, run.bench
    walk = Walk(state.reference, capabilities_for(bench, state))
    places = [Where(case=state.case.name, input=name) for name, _ in state.inputs]
    outputs = run_all(state.lowered, places, [inputs for _, inputs in state.inputs])
    compared = list[Sequence[Exact]]()
    for where, (_, inputs) in zip(places, state.inputs, strict=True):
        try:
            exacts = walk.exact(inputs)
            if any(each.is_open for each in exacts):
                raise NoOracleError("no bound is known of an op in it: register its pattern with roundings")
            output = next(outputs)
        except NoOracleError as error:
            run.counted["numerics"] += 1
            yield Fault(rule="NUM-03", verdict=Verdict.UNEXERCISED, message=f"no oracle: {error}")
            return
        except FaultFound as found:
            run.counted["numerics"] += 1
            if found.fault.verdict is Verdict.UNEXERCISED:
                yield found.fault
                return
            lower_again = partial(lower, bench, state.reference, inputs)
            varies = found.fault.rule == "LOW-01" and error_on_retry(lower_again, where, inputs) != str(found)
            for fault in report_failed_run(found.fault, where, {"nondeterministic": True} if varies else {}):
                failed = Comparison(where=where, excess=math.inf, is_within_one=False, fault=fault)
                run.comparisons.append(failed)
                state.comparisons.append(failed)
                yield fault
            return
        state.first = state.first or FirstRun(output=output, exact_of=walk.exact)
        for comparison in compare_all(where, exacts, output, tuple(state.grids), moves_only=claim.moves_only):
            run.counted["numerics"] += 1
            state.comparisons.append(comparison)
            run.comparisons.append(comparison)
            if comparison.fault is not None:
                yield comparison.fault
        compared.append(exacts)
    note_whether_decided(run, state, compared)


def capabilities_for(bench: Bench, state: CaseState) -> Capabilities:
    """Return the backend's capabilities; in a float fallback, those of float arithmetic."""
    if not state.runs_in_float:
        return bench.capabilities
    return replace(
        bench.capabilities,
        float_accumulation=True,
        dynamic_states=False,
        half_row_qparams=False,
        requantize=Requantize(),
        requantize_of={},
        tolerance={},
    )


@guard("numerics.runs")
def report_failed_run(fault: Fault, where: Where, evidence: Mapping[str, object]) -> Iterator[Fault]:
    """Yield the fault of a run without an output."""
    message = f"{where}: {fault.message}"
    yield replace(fault, message=message, where=where, evidence={**fault.evidence, **evidence}, size=math.inf)


def judge_comparisons(name: str, comparisons: Sequence[Comparison], others: Sequence[Fault] = ()) -> Check:
    """Judge a model by all comparisons, and by faults of another kind: the worst decides. (NUM-03, NUM-05)"""
    faults = [*(each.fault for each in comparisons if each.fault is not None), *others]
    return add_numbers(make_check(name, "numerics", faults, cases=len(comparisons) or None), comparisons)


def add_numbers(check: Check, comparisons: Sequence[Comparison]) -> Check:
    """Return the check of the stage with the numbers of all comparisons, and what rounding wrong ones look like."""
    if check.verdict is Verdict.UNEXERCISED or not comparisons:
        return check
    texts = (*_tell_tolerated(check, comparisons), check.message, _format_rounding(comparisons, check.verdict))
    return replace(
        check,
        rule=comparisons[0].rule if check.verdict is Verdict.VERIFIED else check.rule,
        message="; ".join(filter(None, texts)),
        max_lsb=_largest_finite(each.max_lsb for each in comparisons),
        slack_lsb=_largest_finite(each.slack_lsb for each in comparisons),
        allowed=_format_bound(comparisons),
        statistics=summarize(each.sample for each in comparisons if each.sample is not None),
    )


def _tell_tolerated(check: Check, comparisons: Sequence[Comparison]) -> Iterator[str]:
    """Yield for how many results a declared tolerance was needed, and how far off they are, where one was."""
    if check.verdict is Verdict.TOLERATED:
        beyond, elements = (sum(getattr(each, name) for each in comparisons) for name in ("beyond", "elements"))
        largest = max(each.worst[0] for each in comparisons if each.excess > 0)
        yield f"{beyond:,} of {elements:,} results beyond the nearest, as declared, the largest {largest:.3g} LSB off"


def _format_rounding(comparisons: Sequence[Comparison], verdict: Verdict) -> str:
    """Say what rounding a refuted claim's results look like; "" if some are wrong in another way."""
    wrong = [each.resemblance for each in comparisons if each.excess > 0]
    known = [each for each in wrong if each is not None]
    return format_resemblance(known) if verdict is Verdict.REFUTED and len(known) == len(wrong) else ""


def _format_bound(comparisons: Sequence[Comparison]) -> str:
    """Return the bound that is passed by the most, else the widest, of several comparisons; "" if none has one."""
    measured = [each for each in comparisons if math.isfinite(each.slack_lsb) and math.isfinite(each.excess)]
    return max(measured, key=lambda each: (max(each.excess, 0.0), each.slack_lsb)).bound if measured else ""


def _largest_finite(values: Iterable[float]) -> float | None:
    """Return the largest finite value: an output that cannot be measured hides no other's distance."""
    return max((round(value, 6) for value in values if math.isfinite(value)), default=None)
