"""Measuring what a backend makes of NaN, infinities, empty batches and strided indices: recorded, not judged."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from conformance.claims.claim import Claim
from conformance.claims.inputs import Batch
from conformance.stages.layouts import sliced
from conformance.stages.numerics import ComparedCase
from conformance.stages.reruns import REPETITION, RepeatRun, compare_outputs
from reports.schema import Measurement, Where


def measure_nonfinite(claim: Claim, compared: ComparedCase) -> Iterator[Measurement]:
    """Yield what a case makes of NaN and infinities among its inputs, of no rows, of strided indices.

    Quantizing such a value has no right result, a backend may be compiled for its batch, and indices are not quantized.
    The result is recorded all the same: an output, or an exception; a crash is reported by the isolation.
    """
    name, inputs = compared.reference.inputs[0]
    repeat = RepeatRun(case=compared.case, name=name, inputs=inputs, lowered=compared.lowered)
    if repeat.runs:
        values = {name: _describe(repeat, edge) for name, edge in _edges(inputs) if repeat.run_float(edge)}
        yield Measurement(topic="nonfinite", subject=claim.id, values=dict(values))


def _edges(inputs: Batch) -> Iterator[tuple[str, Batch]]:
    """Yield the inputs with something that no claim speaks of, by name."""
    place = next((n for n, each in enumerate(inputs) if each.is_floating_point() and each.numel()), None)
    if place is not None:
        for name, value in _NONFINITE.items():
            yield name, _poked(inputs, place, value)
    if any(each.dim() and not each.is_floating_point() for each in inputs):
        yield "strided indices", tuple(map(_strided, inputs))
    yield "no rows", tuple(each[:0] if each.dim() else each for each in inputs)


def _strided(value: Tensor) -> Tensor:
    return sliced(value) if value.dim() and not value.is_floating_point() else value


_NONFINITE = {"nan": float("nan"), "+inf": float("inf"), "-inf": float("-inf")}


def _poked(inputs: Batch, place: int, value: float) -> Batch:
    """The inputs, with another value in the middle of one."""
    changed = inputs[place].clone()
    changed.view(-1)[changed.numel() // 2] = value
    return (*inputs[:place], changed, *inputs[place + 1 :])


def _describe(repeat: RepeatRun, inputs: Batch) -> str:
    """Say what the inputs give, by what differs from the plain ones' output."""
    try:
        found, again = repeat.run(inputs), repeat.run(inputs)
    except Exception as error:
        return f"raises {type(error).__name__}: {' '.join(str(error).split())[:_MOST]}"
    if compare_outputs(Where(), REPETITION, found, again).problem:
        return "varies from run to run"
    texts = []
    for left, right in zip(repeat.expected, found, strict=False):
        if left.shape != right.shape:
            texts.append(f"gives shape {tuple(right.shape)}")
            continue
        differs = (left != right) & ~(left.isnan() & right.isnan())
        values = ", ".join(_distinct(right[differs]))
        texts.append(f"changes {int(differs.sum())} of {right.numel()} values{f', to {values}' if values else ''}")
    return "; ".join(texts)


def _distinct(values: Tensor) -> list[str]:
    """The smallest few of different values as text, NaN (which is unlike itself and has no place in an order) first."""
    numbers = sorted({float(value) for value in values if not value.isnan()})
    return ["nan"] * bool(values.isnan().any()) + [f"{value:.6g}" for value in numbers[:4]]


_MOST = 160
