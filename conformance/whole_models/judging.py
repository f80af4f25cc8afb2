"""Judging a whole model: taken through the flow, run through a backend, compared with the oracle, whole and by pattern.

These are the stages of a claim but for those that need one. The oracle carries its bound from op to op: where an
upstream rounding may fall either way, the bound downstream is whole steps wide. So a model is compared end to end
first; where that fails, or where the bound hides a step, each quantized pattern is cut out, run on its reference inputs
and compared separately. (NUM-03, LOW-04, QAT-01, QAT-02)
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch.fx import GraphModule, Node
from torch.utils._pytree import tree_leaves

from fx_quant_conformance.conformance.bounds.error_bounds import NoOracleError
from fx_quant_conformance.conformance.claims.inputs import Batch
from fx_quant_conformance.conformance.machine.fault import Fault, FaultFound
from fx_quant_conformance.conformance.machine.guard import guard
from fx_quant_conformance.conformance.machine.messages import Begin
from fx_quant_conformance.conformance.oracle.evaluate import Walk
from fx_quant_conformance.conformance.oracle.grids import list_unclaimed, placeholder_grids
from fx_quant_conformance.conformance.stages.bench import Bench
from fx_quant_conformance.conformance.stages.comparison import Comparison, compare_all
from fx_quant_conformance.conformance.stages.execution import ask_execution
from fx_quant_conformance.conformance.stages.float_ops import format_float, list_quantized, read_name
from fx_quant_conformance.conformance.stages.lower import Declined, find_leftover, lower, run_all, run_lowered
from fx_quant_conformance.conformance.stages.numerics import judge_comparisons
from fx_quant_conformance.conformance.stages.reruns import REPETITION, compare_outputs
from fx_quant_conformance.conformance.stages.state import LoweredModel, make_check
from fx_quant_conformance.conformance.whole_models.context import UntoldError, judge_in_context
from fx_quant_conformance.conformance.whole_models.subgraphs import Subgraph, cut_in_half, cut_subgraphs
from fx_quant_conformance.conformance.whole_models.unbounded import name_unbounded
from fx_quant_conformance.conformance.whole_models.units import ModelUnit, QuantizedModel, quantize_model
from fx_quant_conformance.refimpl import explain
from fx_quant_conformance.reports.schema import Check, Evidence, Layer, ModelResult, Statistics, Where, evidence
from fx_quant_conformance.reports.verdicts import PASSING, Verdict

MOST_NAMED = 5
"""Ops that no entry claims, which a message names."""
LEAST_DECIDED = 0.5
"""The share of an output below which a comparison says nothing: a fault of one element is then hidden more often than
seen."""
HALVINGS = 3
"""How often a float region is cut in half at most: each cut is lowered, and the bound grows with each op."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgedModel:
    """The check of a model, and what there is of it."""

    check: Check
    quantized: QuantizedModel | None = None
    """None: the flow ended before."""

    def make_row(self, seconds: float, *, script: str = "") -> ModelResult:
        """Return the row of the results file; ``seconds``: what all of it took."""
        check, shown = self.check, dict[str, Any](self.check.evidence)
        execution, sureness = shown.pop("execution", ""), shown.pop("sureness", "")
        return ModelResult(
            model=check.claim,
            verdict=check.verdict,
            rule=check.rule,
            reason=check.message,
            max_lsb=check.max_lsb,
            cases=check.cases,
            seconds=round(seconds, 6),
            execution=execution,
            sureness=sureness,
            evidence=evidence(shown),
            statistics=check.statistics,
            script=script,
            float_db=[] if self.quantized is None else self.quantized.float_db,
        )


def judge_model(bench: Bench, unit: ModelUnit) -> Generator[Begin, None, JudgedModel]:
    """Take a model through the flow and judge it; a Begin announces each piece of work."""
    quantized = None
    try:
        yield Begin(stage="quantize")
        quantized = quantize_model(bench, unit)
        yield Begin(stage="judge")
        batches = _draw(bench, unit, quantized.reference)
        check = verify_model(bench, unit.id, quantized.reference, batches, takes_apart=unit.takes_apart)
    except FaultFound as found:
        check = make_failed_check(unit.id, found.fault)
    return JudgedModel(check=check, quantized=quantized)


def draw_reference(bench: Bench, unit: ModelUnit) -> tuple[GraphModule, Sequence[Batch]]:
    """Return the reference model of a unit, and the inputs on which it is judged. Raises FaultFound."""
    reference = quantize_model(bench, unit).reference
    return reference, _draw(bench, unit, reference)


def _draw(bench: Bench, unit: ModelUnit, reference: GraphModule) -> Sequence[Batch]:
    torch.default_generator.manual_seed(bench.seed_for(unit.id, "inputs"))
    return unit.draw(reference)


# -- the numbers ------------------------------------------------------------------------------------------------------


@guard("models")
def verify_model(
    bench: Bench, name: str, reference: GraphModule, batches: Sequence[Batch], *, takes_apart: bool = False
) -> Check:
    """Compare a model with the oracle, end to end and, where that decides nothing, pattern by pattern.

    The message names the first pattern, in the order of the graph, of the worst ones; the evidence has all.
    ``takes_apart``: always pattern by pattern as well, and the statistics have each.
    """
    if not any(decision.is_quantized for decision in explain(reference).plan.decisions):
        text = "the config quantizes nothing of this model"
        return make_failed_check(name, Fault(rule="NUM-03", verdict=Verdict.UNEXERCISED, message=text))
    check = _demand_evidence(_verify_numbers(bench, name, reference, batches, takes_apart))
    if check.verdict in (*PASSING, Verdict.UNSHOWN):
        for fault in find_leftover(bench):
            return make_failed_check(name, fault)
    return check


def _demand_evidence(check: Check) -> Check:
    """Turn a verdict that passes into UNSHOWN where the backend does not say what ran. (LOW-04)"""
    shown: dict[str, Any] = {**check.evidence}
    if check.verdict not in PASSING or shown.get("execution") != "none":
        return check
    text = f"execution not shown: {shown['sureness']}, and the numbers of a whole model cannot tell"
    message = f"{text}; {check.message}" if check.message else text
    return replace(
        check,
        rule="LOW-04",
        outcome="fail",
        verdict=Verdict.UNSHOWN,
        message=message,
        evidence=evidence(shown | {"otherwise": check.verdict.value}),
    )


def _verify_numbers(
    bench: Bench, name: str, reference: GraphModule, batches: Sequence[Batch], takes_apart: bool
) -> Check:
    """Compare a model end to end and, where that decides nothing or is not all that is asked, pattern by pattern."""
    whole = judge_run(bench, name, reference, batches)
    is_blind = _share_decided(whole) < 1
    if whole.verdict is Verdict.VERIFIED and not (is_blind or takes_apart or bench.tries_all):
        return whole
    unclaimed = read_unclaimed(whole)
    has_regions = not unclaimed and (is_blind or whole.verdict is not Verdict.VERIFIED)
    separate = [
        judged
        for part in cut_subgraphs(reference, batches, with_regions=has_regions)
        for judged in _judge_alone(bench, name, reference, batches, part, HALVINGS)
    ]
    if unclaimed:
        return _judge_by_parts(whole, unclaimed, separate)
    layers = [_make_layer(part, check) for part, check in separate]
    measured = replace(whole, statistics=replace(whole.statistics or Statistics(), layers=layers))
    combined = _combine(measured, separate)
    is_shown = _share_decided(whole) >= (1.0 if takes_apart else LEAST_DECIDED)
    if combined.verdict is not Verdict.VERIFIED or is_shown:
        return combined
    return _look_into(bench, combined, reference, batches, [part for part, _ in separate])


def _look_into(
    bench: Bench, check: Check, reference: GraphModule, batches: Sequence[Batch], parts: Sequence[Subgraph]
) -> Check:
    """Judge in its context, by the values that it gives within, a model of which nothing is shown end to end."""
    try:
        judged = judge_in_context(bench, check.claim, reference, batches, parts)
    except UntoldError as error:
        told = filter(None, (check.message, f"within it nothing was seen: {error}"))
        return replace(check, message="; ".join(told))
    seen = _count_decided([each for *_, own in judged for each in own], "decided_within")
    if not seen:
        return replace(check, message=f"{check.message}; within it nothing was seen: no part has all that it reads")
    shown = evidence({**check.evidence, **seen})
    wrong = next(((part, own) for part, own, _ in judged if own.failed), None)
    if wrong is None:
        untold = [part.node for part, _, own in judged if not own]
        rest = f", but for {_name_some(untold)}: it does not give what is read there" if untold else ""
        added = f"{check.message}, and in context, on the values that it gives{rest}" if check.message or rest else ""
        return replace(check, message=added, evidence=shown)
    part, own = wrong
    text = f"end to end nothing shows; in context, on the values that it gives, the first to differ is {part.node}"
    return replace(
        check,
        rule=own.rule,
        outcome="fail",
        verdict=own.verdict,
        message=f"{text} ({part.pattern}): {_trim(own.message)}",
        evidence=evidence({**shown, **own.evidence, "node": part.node, "pattern": part.pattern}),
    )


def _judge_alone(
    bench: Bench, name: str, reference: GraphModule, batches: Sequence[Batch], part: Subgraph, halvings: int
) -> Iterator[tuple[Subgraph, Check]]:
    """Judge a part alone; a float region whose bounds are too wide, by its halves: theirs are narrower."""
    check = _judge_part(bench, name, part)
    is_open = part.is_region and check.verdict is Verdict.VERIFIED and _share_decided(check) < LEAST_DECIDED
    is_wide = is_open and halvings and not name_unbounded(part.model, part.batches[0])
    halves = list(cut_in_half(reference, batches, part)) if is_wide else []
    for half in halves:
        yield from _judge_alone(bench, name, reference, batches, half, halvings - 1)
    if not halves:
        yield part, check


def _judge_part(bench: Bench, name: str, part: Subgraph) -> Check:
    """Judge a part alone. Of a float region only its numbers count: no entry claims that it can be lowered alone."""
    check = judge_run(bench, name, part.model, part.batches, moves_only=part.moves_only, is_float=part.is_region)
    if part.is_region and check.rule == "LOW-01":
        return make_failed_check(name, Fault(rule="LOW-01", verdict=Verdict.UNEXERCISED, message=check.message))
    return check


def read_unclaimed(check: Check) -> Sequence[str]:
    """Return the unclaimed ops of a model that the backend declines, as its check has them; none of any other."""
    unclaimed: Sequence[str] = dict[str, Any](check.evidence).get("unclaimed ops", ())
    return unclaimed


def _judge_by_parts(whole: Check, unclaimed: Sequence[str], separate: Sequence[tuple[Subgraph, Check]]) -> Check:
    """Judge a model that the backend declines, and in which some ops are not claimed, by its claimed patterns alone."""
    ops = _name_some(unclaimed)
    text = f"{whole.message}; the config does not claim {ops}: the {len(separate)} claimed patterns were judged alone"
    told = [dict[str, Any](check.evidence) for _, check in separate]
    untold = next((each for each in told if each.get("execution") == "none"), None)
    shown = {"execution": "reported"} if untold is None else {name: untold[name] for name in ("execution", "sureness")}
    layers = [_make_layer(part, check) for part, check in separate]
    left = replace(
        whole,
        rule="NUM-03",
        outcome="pass",
        verdict=Verdict.VERIFIED,
        failing=0,
        evidence=evidence({**whole.evidence, **shown}),
        statistics=Statistics(layers=layers),
    )
    check = _combine(replace(left, message=text), separate)
    return replace(check, message=text) if check.verdict is Verdict.VERIFIED else check


def _name_some(names: Sequence[str]) -> str:
    return ", ".join(names[:MOST_NAMED]) + (" and others" if len(names) > MOST_NAMED else "")


def _make_layer(part: Subgraph, check: Check) -> Layer:
    ratio = check.statistics.sqnr_db if check.statistics else None
    return Layer(node=part.node, pattern=part.pattern, verdict=check.verdict, sqnr_db=ratio)


def judge_run(
    bench: Bench,
    name: str,
    model: GraphModule,
    batches: Sequence[Batch],
    *,
    moves_only: bool = False,
    is_float: bool = False,
) -> Check:
    """Lower a reference model, run it on batches, and judge the outputs by the oracle and by what was executed.

    The evidence says whether the backend reports that: ``execution`` is ``reported`` or ``none``, ``sureness`` why.
    ``is_float``: nothing in it should run quantized.
    """
    comparisons, others = list[Comparison](), list[Fault]()
    try:
        lowered = lower(bench, model, batches[0])
        floating = [] if is_float else _find_float_ops(bench, lowered, model)
        comparisons = list(_compare_batches(bench, model, lowered, batches, moves_only))
    except Declined as found:
        return make_failed_check(name, replace(found.fault, evidence={"unclaimed ops": list_unclaimed(model)}))
    except FaultFound as found:
        return make_failed_check(name, found.fault)
    except NoOracleError as error:
        others.append(Fault(rule="NUM-03", verdict=Verdict.UNEXERCISED, message=f"no oracle: {error}"))
    told = {"execution": "none", "sureness": floating} if isinstance(floating, str) else {"execution": "reported"}
    if floating and not isinstance(floating, str):
        floating = [format_float(model, each) for each in floating]
        text = f"runs in float: {'; '.join(floating)}"
        others.append(Fault(rule="LOW-04", verdict=Verdict.FALLBACK, message=text, evidence={"float_ops": floating}))
    check = judge_comparisons(name, comparisons, others)
    return replace(check, evidence=evidence({**check.evidence, **told, **_count_decided(comparisons)}))


def _count_decided(comparisons: Sequence[Comparison], key: str = "decided") -> dict[str, float]:
    """Return the share of elements of which the bound would show a fault, of the output with the smallest one.

    Nothing where none was measured; all, of outputs that are right and have no elements.
    """
    counts: dict[int | None, list[int]] = {}
    for each in comparisons:
        counted = counts.setdefault(each.where.output, [0, 0])
        counted[0], counted[1] = counted[0] + each.decided, counted[1] + each.elements
    shares = [decided / elements for decided, elements in counts.values() if elements]
    if not shares and comparisons and all(each.fault is None for each in comparisons):
        shares = [1.0]
    return {key: math.floor(min(shares) * 1e4) / 1e4} if shares else {}


def _compare_batches(
    bench: Bench, model: GraphModule, lowered: LoweredModel, batches: Sequence[Batch], moves_only: bool
) -> Iterator[Comparison]:
    """Compare every output for every batch, and the first batch's with those of a second run. (NUM-07)"""
    walk = Walk(model, bench.capabilities)
    grids = tuple(placeholder_grids(model))
    places = [Where(input=f"batch {number}") for number in range(len(batches))]
    outputs = list(run_all(lowered, places, batches))
    is_structure = not isinstance(model.graph.output_node().args[0], Node)
    for where, batch, output in zip(places, batches, outputs, strict=True):
        if is_structure:  # such as a dict
            leaves = tree_leaves(output)
            output = leaves[0] if len(leaves) == 1 else leaves
        yield from compare_all(where, walk.exact(batch), output, grids, moves_only=moves_only)
    repeated = run_lowered(lowered, places[0], batches[0])
    fault = compare_outputs(places[0], REPETITION, outputs[0], repeated)
    yield Comparison(where=places[0], excess=-0.5 if fault is None else math.inf, fault=fault)


def _find_float_ops(bench: Bench, lowered: LoweredModel, model: GraphModule) -> list[str] | str:
    """Return what runs in float by the backend's report though the decision log has it quantized. (LOW-04)

    Or why it is not known what runs. A float fallback counts if its text begins with the name of a quantized op, or if
    nothing in the model is float.
    """
    execution = ask_execution(bench, lowered, model)
    if isinstance(execution, str):
        return execution
    quantized, is_whole = list_quantized(model), not list_unclaimed(model)
    floats = [text for text in execution.float_fallbacks if is_whole or read_name(text) in quantized]
    return floats if floats or execution.quantized_ops else ["all of it: the backend shows no quantized op that ran"]


def _combine(whole: Check, separate: Sequence[tuple[Subgraph, Check]]) -> Check:
    """Judge a model that is wrong, or whose bound is too wide, by its patterns and float regions, run separately."""
    patterns = [check for part, check in separate if not part.is_region]
    regions = [(part, check) for part, check in separate if part.is_region]
    wrong = [
        (part, check)
        for part, check in separate
        if check.verdict is not Verdict.VERIFIED and not (part.is_region and check.verdict is Verdict.UNEXERCISED)
    ]
    shown: dict[str, object] = {**whole.evidence, "patterns": len(patterns), "bound_lsb": whole.slack_lsb}
    if separate:
        told = [_share_decided(check) for _, check in separate]
        shown["decided_alone"] = math.floor(sum(told) / len(told) * 1e4) / 1e4
    if not wrong:
        summary = f"alone, on their reference inputs, all {len(patterns)} patterns hold"
        return _pass(whole, summary, regions, evidence(shown))
    rank = min(check.verdict.rank for _, check in wrong)
    subgraph, first = next((subgraph, check) for subgraph, check in wrong if check.verdict.rank == rank)
    verdict = _choose_verdict(whole, first)
    bound = "without end" if whole.slack_lsb is None else f"of {whole.slack_lsb:.3g} LSB"
    text = _trim(whole.message) or f"end to end nothing shows within a bound {bound}"
    is_open = first.verdict is Verdict.UNEXERCISED
    which = "that cannot be judged" if is_open else "to differ"
    culprit = f"the first {which} is {subgraph.node} ({subgraph.pattern})"
    shown |= {
        **first.evidence,
        "node": subgraph.node,
        "pattern": subgraph.pattern,
        "node_lsb": first.max_lsb,
        "alone": {part.node: f"{check.verdict.value} by {check.rule}: {_trim(check.message)}" for part, check in wrong},
    }
    return replace(
        whole,
        rule=first.rule if verdict is first.verdict else whole.rule,
        outcome=_outcome_of(verdict),
        verdict=verdict,
        message=f"{text}; alone, on its reference inputs, {culprit}: {_trim(first.message)}",
        evidence=evidence(shown),
    )


def _pass(whole: Check, summary: str, regions: Sequence[tuple[Subgraph, Check]], shown: Evidence) -> Check:
    """Return the check of a model of which no part is wrong alone.

    Where end to end less than half of its outputs are decided, its parts decide; and nothing is shown of a model with a
    float region of which, alone, no more is decided, or which the backend does not lower alone.
    """
    if whole.verdict is Verdict.UNEXERCISED:
        return replace(whole, message=f"{whole.message}; {summary}", evidence=shown)
    if whole.verdict is not Verdict.VERIFIED:
        return replace(whole, message=f"{whole.message}; {summary}: it goes wrong in context", evidence=shown)
    decided = _share_decided(whole)
    text = f"end to end {_format_share(decided)} of the outputs are decided"
    if decided >= LEAST_DECIDED:
        return replace(whole, message=f"{text}; {summary}" if decided < 1 else "", evidence=shown)
    text = f"{text}, which says nothing; {summary}"
    is_open = [(part, check) for part, check in regions if _share_decided(check) < LEAST_DECIDED]
    if not is_open:
        return replace(whole, message=text, evidence=shown)
    region, check = is_open[0]
    why = _trim(check.message) or f"{_format_share(_share_decided(check))} of its outputs are decided"
    if not check.message and (culprit := name_unbounded(region.model, region.batches[0])):
        why = f"{why}; the first result without a bound is that of {culprit}"
    text = f"{text}, but of what is float at {region.node} ({region.pattern}) nothing is shown: {why}"
    return replace(whole, verdict=Verdict.UNEXERCISED, outcome="skip", message=text, evidence=shown)


def _format_share(share: float) -> str:
    """Format a share, rounded down: not all of them is less than 100 %."""
    return f"{math.floor(share * 1e3) / 10:.1f}%"


def _share_decided(check: Check) -> float:
    """Return the share of outputs of which the bound would show a fault; 0 where nothing was compared."""
    share: float = dict[str, Any](check.evidence).get("decided", 0.0)
    return share


def _trim(message: str) -> str:
    return message.partition("\n")[0]


def _choose_verdict(whole: Check, first: Check) -> Verdict:
    """Return the worst of both; but wrong numbers end to end are no worse than the pattern that explains them."""
    is_numeric = whole.rule == "NUM-03" and whole.max_lsb is not None
    if is_numeric and first.verdict is not Verdict.UNEXERCISED:
        return first.verdict
    return Verdict.worst((whole.verdict, first.verdict))


def _outcome_of(verdict: Verdict) -> Literal["pass", "fail", "skip"]:
    if verdict is Verdict.UNEXERCISED:
        return "skip"
    return "pass" if verdict in PASSING else "fail"


def make_failed_check(name: str, fault: Fault) -> Check:
    """Return the check of a model that ended before its numbers were compared."""
    return replace(make_check(name, "numerics", [fault]), failing=0)
