"""What is measured of a model that was handed in, beside the verdict: errors by pattern, work, metrics and times."""

from __future__ import annotations

import copy
import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from statistics import median
from typing import Any

import torch
from torch import nn
from torch._ops import OpOverload
from torch.fx import GraphModule

from fx_quant_conformance.conformance.claims.inputs import Batch
from fx_quant_conformance.conformance.machine.fault import FaultFound
from fx_quant_conformance.conformance.own_models.given import Evaluate, GivenModel
from fx_quant_conformance.conformance.own_models.multiplications import count_multiplications
from fx_quant_conformance.conformance.stages.bench import Bench
from fx_quant_conformance.conformance.stages.lower import lower, run_lowered
from fx_quant_conformance.conformance.stages.state import LoweredModel
from fx_quant_conformance.conformance.whole_models.setups import ModelSetup
from fx_quant_conformance.refimpl import explain
from fx_quant_conformance.refimpl.prepare.explain import dtypes_of
from fx_quant_conformance.reports.measured import Deployment, Metric, ModelPart
from fx_quant_conformance.reports.numbers import Number
from fx_quant_conformance.reports.schema import Check

_REPEATS = 5


def measure_model(
    bench: Bench, given: GivenModel, reference: GraphModule, setup: ModelSetup, check: Check
) -> Deployment:
    """Measure what is not judged: the error of each pattern, multiply-accumulates, metrics and times."""
    batches = [tuple(value.clone() for value in batch) for batch in given.calibration or [given.example_inputs]]
    quality = explain(reference, batches)
    verdicts = {layer.node: layer.verdict for layer in check.statistics.layers} if check.statistics else {}
    ratios = {layer.node: (layer.sqnr_alone, layer.sqnr_accumulated) for layer in quality.layers}
    parts = [
        replace(
            part, verdict=verdicts.get(part.node), alone_db=_to_number(alone), accumulated_db=_to_number(accumulated)
        )
        for part in _list_parts(reference, count_multiplications(reference, given.example_inputs))
        for alone, accumulated in [ratios.get(part.node, (None, None))]
        if part.dtypes or part.multiplications or alone is not None  # else it computes a size, or asserts something
    ]
    notes = [f"the error of {node} was not measured: {reason}" for node, reason in quality.unmeasured]
    sides: dict[str, nn.Module] = {"float": copy.deepcopy(given.model).eval(), "reference": reference}
    try:
        sides["backend"] = _Backend(lower(bench, reference, given.example_inputs))
    except FaultFound as error:
        notes.append(f"the backend does not lower it: {error}")
    metrics, failures = _evaluate(given.evaluate, sides) if given.evaluate is not None else ([], [])
    seconds, untimed = _time_all(sides, given.example_inputs)
    is_own = given.qconfig_mapping is not None
    return Deployment(
        qconfigs="the model's own QConfigMapping" if is_own else f"those of the claims that fit {setup} best",
        parts=parts,
        output_db=[ratio for value in quality.outputs if (ratio := _to_number(value)) is not None],
        metrics=metrics,
        seconds=seconds,
        notes=[*notes, *failures, *untimed],
    )


class _Backend(nn.Module):
    """A lowered model as a module, for the functions that users write."""

    def __init__(self, lowered: LoweredModel) -> None:
        super().__init__()
        self._lowered = lowered

    def forward(self, *inputs: torch.Tensor) -> Any:
        """Run it. Raises FaultFound where the backend's code raises."""
        return run_lowered(self._lowered, "it", inputs)


def _list_parts(reference: GraphModule, counts: Mapping[str, int]) -> list[ModelPart]:
    """List the patterns of a reference model and its other calls, in the order of its graph."""
    plan = explain(reference).plan
    order = {node.name: place for place, node in enumerate(reference.graph.nodes)}
    parts = [
        ModelPart(
            node=decision.node,
            pattern=decision.pattern,
            multiplications=sum(counts.get(n, 0) for n in decision.nodes),
            dtypes=dtypes_of(decision) if decision.is_quantized else "",
            reason="" if decision.is_quantized else decision.reason or "; ".join(map(str, decision.refusals)),
        )
        for decision in plan.decisions
    ]
    ops = {node.name: str(node.target) for node in reference.graph.nodes if isinstance(node.target, OpOverload)}
    parts += [
        ModelPart(
            node=node,
            pattern=ops.get(node, kind),
            multiplications=counts.get(node, 0),
            reason="no pattern of the config",
        )
        for node, kind, _ in plan.unmatched
    ]
    return sorted((part for part in parts if part.node in order), key=lambda part: order[part.node])


def _evaluate(evaluate: Evaluate, sides: Mapping[str, nn.Module]) -> tuple[list[Metric], list[str]]:
    """Return the metrics of all sides, and notes on what failed."""
    values, notes = defaultdict[str, dict[str, Number | None]](dict), list[str]()
    for side, model in sides.items():
        try:
            with torch.no_grad():
                found = evaluate(model)
            if not isinstance(found, Mapping):
                raise TypeError(f"it returned {type(found).__name__}, not a mapping of names to numbers")
            numbers = {str(name): _to_number(float(value)) for name, value in found.items()}
        except (Exception, SystemExit) as error:
            why = str(error) if isinstance(error, FaultFound) else f"it raised {type(error).__name__}: {error}"
            notes.append(f"the evaluation of the {side} model was not done: {why}")
            continue
        for name, value in numbers.items():
            values[name][side] = value
    return [
        Metric(name=name, floating=each.get("float"), reference=each.get("reference"), backend=each.get("backend"))
        for name, each in values.items()
    ], notes


def _time_all(sides: Mapping[str, nn.Module], batch: Batch) -> tuple[dict[str, float], list[str]]:
    """Return the median time of a run of each side in seconds, and notes on what has none."""
    seconds, notes = dict[str, float](), list[str]()
    for name, side in sides.items():
        try:
            seconds[name] = _time(side, batch)
        except FaultFound as error:
            notes.append(f"the backend's time was not measured: {error}")
    return seconds, notes


def _time(side: nn.Module, batch: Batch) -> float:
    """Return the median time of a run in seconds; the first run does not count."""
    times = []
    with torch.no_grad():
        for _ in range(_REPEATS + 1):
            inputs = [value.clone() for value in batch]
            started = time.perf_counter()
            side(*inputs)
            times.append(time.perf_counter() - started)
    return round(median(times[1:]), 6)


def _to_number(value: float | None) -> Number | None:
    """Return a number as a results file has it."""
    if value is None or value != value:
        return None if value is None else "nan"
    if value in (float("inf"), float("-inf")):
        return "inf" if value > 0 else "-inf"
    return round(value, 6)
