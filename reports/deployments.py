"""The section of models that were handed in: what of each is quantized, what that costs, what the backend adds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from fx_quant_conformance.reports.evidence import Table
from fx_quant_conformance.reports.measured import Deployment, Metric, ModelPart
from fx_quant_conformance.reports.numbers import Number
from fx_quant_conformance.reports.plots import Plot, plot_parts
from fx_quant_conformance.reports.schema import ModelResult
from fx_quant_conformance.reports.text import format_count, format_db, format_number, pluralize

MOST_WORST = 8
"""Number of patterns that the table of the worst has."""
_PARTS = ("node", "pattern", "dtypes", "verdict", "alone, dB", "accumulated, dB", "multiplications", "why in float")

_SIDES = (("backend", "the backend, with the way to its process"), ("reference", "the reference model"))


@dataclass(frozen=True, slots=True, kw_only=True)
class DeploymentView:
    """A model that was handed in, with everything that is shown about it."""

    model: ModelResult
    facts: tuple[str, ...]
    metrics: Table
    worst: Table
    parts: Table
    plot: Plot | None


def view_deployments(models: Sequence[ModelResult]) -> tuple[DeploymentView, ...]:
    """Return the models of which more was measured than a verdict, in their order."""
    measured = [(model, model.deployment) for model in models if model.deployment is not None]
    return tuple(_view(number, model, each) for number, (model, each) in enumerate(measured, start=1))


def _view(number: int, model: ModelResult, deployment: Deployment) -> DeploymentView:
    """Sort what was measured of a model into facts, tables and a picture."""
    total = deployment.multiplications
    worst = sorted(deployment.quantized, key=_rank)[:MOST_WORST]
    return DeploymentView(
        model=model,
        facts=tuple(_list_facts(deployment)),
        metrics=Table(
            columns=("metric", "float", "reference", "backend", "quantization's part", "the backend's part"),
            rows=tuple(map(_row_of_metric, deployment.metrics)),
        ),
        worst=Table(columns=_PARTS[:-1], rows=tuple(_row_of_part(part, total)[:-1] for part in worst)),
        parts=Table(columns=_PARTS, rows=tuple(_row_of_part(part, total) for part in deployment.parts)),
        plot=plot_parts(f"parts-{number}", model.model, deployment.parts) if deployment.parts else None,
    )


def _list_facts(deployment: Deployment) -> Iterator[str]:
    """Yield what there is to say of a model, a sentence each."""
    quantized, parts, total = deployment.quantized, deployment.parts, deployment.multiplications
    share = f", {_format_share(sum(part.multiplications for part in quantized), total)} of " if total else ""
    work = f"{share}its {format_count(total)} multiply-accumulates" if total else ""
    if parts:
        yield f"{len(quantized)} of its {pluralize(len(parts), 'pattern')} and ops are quantized{work}."
    if deployment.qconfigs:
        yield f"Its QConfigs are {deployment.qconfigs}."
    if deployment.output_db:
        ratios = ", ".join(map(format_db, deployment.output_db))
        yield f"Its outputs, float to the reference model's error: {ratios} dB."
    times = deployment.seconds
    if times.get("float"):
        ratios = " and ".join(
            f"{times[side] / times['float']:.2f} times ({name})" for side, name in _SIDES if side in times
        )
        yield f"A run takes, measured against the float model on one thread: {ratios}."
    yield from deployment.notes


def _row_of_metric(metric: Metric) -> tuple[str, ...]:
    values = (metric.floating, metric.reference, metric.backend)
    steps = [_subtract(after, before) for before, after in pairwise(values)]
    return (metric.name, *(format_number(value, ".6g") for value in values), *steps)


def _row_of_part(part: ModelPart, total: int) -> tuple[str, ...]:
    verdict = part.verdict.value if part.verdict is not None else "-"
    share = _format_share(part.multiplications, total) if part.multiplications else "-"
    ratios = (format_db(part.alone_db), format_db(part.accumulated_db))
    return part.node, part.pattern, part.dtypes or "float", verdict, *ratios, share, part.reason or "-"


def _rank(part: ModelPart) -> tuple[int, float]:
    """Rank a part: the worst verdict first, then the largest error."""
    known = float(part.alone_db) if part.alone_db not in (None, "nan") else float("inf")
    return (part.verdict.rank if part.verdict is not None else 99), known


def _subtract(after: Number | None, before: Number | None) -> str:
    if not isinstance(after, (int, float)) or not isinstance(before, (int, float)):
        return "-"
    return f"{after - before:+.4g}"


def _format_share(count: int, total: int) -> str:
    return f"{100 * count / total:.1f} %"
