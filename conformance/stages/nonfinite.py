"""Measuring a backend's results for NaN, infinities, empty batches and strided indices: recorded, not judged."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from fx_quant_conformance.conformance.claims.claim import Claim
from fx_quant_conformance.conformance.claims.inputs import Batch
from fx_quant_conformance.conformance.stages.layouts import copy_with_gaps
from fx_quant_conformance.conformance.stages.reruns import REPETITION, RepeatRun, compare_outputs
from fx_quant_conformance.conformance.stages.state import CaseState
from fx_quant_conformance.reports.schema import Measurement, Where

_NONFINITE = {"nan": float("nan"), "+inf": float("inf"), "-inf": float("-inf")}
_MOST = 160
"""Characters of an error that are recorded at most."""


def measure_nonfinite(claim: Claim, state: CaseState, *, dynamic_batch: bool) -> Iterator[Measurement]:
    """Yield a case's results for NaN and infinities among its inputs, for strided indices, and for no rows.

    Quantizing such a value has no right result, and indices are not quantized. The result is recorded all the same: an
    output, or an exception; a crash is reported by the isolation. Without ``dynamic_batch`` a model has its rows.
    """
    name, inputs = state.inputs[0]
    repeat = RepeatRun(case=state.case, name=name, inputs=inputs, lowered=state.lowered)
    if repeat.runs:
        values = {
            name: _describe(repeat, edge) for name, edge in _make_edges(inputs, dynamic_batch) if repeat.run_float(edge)
        }
        yield Measurement(topic="nonfinite", subject=claim.id, values=dict(values))


def _make_edges(inputs: Batch, dynamic_batch: bool) -> Iterator[tuple[str, Batch]]:
    """Yield the inputs changed in ways that no claim covers, by name."""
    place = next((n for n, each in enumerate(inputs) if each.is_floating_point() and each.numel()), None)
    if place is not None:
        for name, value in _NONFINITE.items():
            yield name, _poke(inputs, place, value)
    are_indices = [bool(each.dim()) and not each.is_floating_point() for each in inputs]
    if any(are_indices):
        pairs = zip(inputs, are_indices, strict=True)
        yield "strided indices", tuple(copy_with_gaps(each) if is_index else each for each, is_index in pairs)
    if dynamic_batch:
        yield "no rows", tuple(each[:0] if each.dim() else each for each in inputs)


def _poke(inputs: Batch, place: int, value: float) -> Batch:
    """Put another value in the middle of one input."""
    changed = inputs[place].clone()
    changed.view(-1)[changed.numel() // 2] = value
    return (*inputs[:place], changed, *inputs[place + 1 :])


def _describe(repeat: RepeatRun, inputs: Batch) -> str:
    """Say what the inputs give, by the differences to the plain ones' output."""
    try:
        outputs, repeated = repeat.run(inputs), repeat.run(inputs)
    except Exception as error:
        return f"raises {type(error).__name__}: {' '.join(str(error).split())[:_MOST]}"
    if compare_outputs(Where(), REPETITION, outputs, repeated) is not None:
        return "varies from run to run"
    texts = []
    for left, right in zip(repeat.expected, outputs, strict=False):
        if left.shape != right.shape:
            texts.append(f"gives shape {tuple(right.shape)}")
            continue
        differs = (left != right) & ~(left.isnan() & right.isnan())
        values = ", ".join(_list_distinct(right[differs]))
        texts.append(f"changes {int(differs.sum())} of {right.numel()} values{f', to {values}' if values else ''}")
    return "; ".join(texts)


def _list_distinct(values: Tensor) -> list[str]:
    """Return the four smallest distinct values as text; first NaN, which is unlike itself and has no order."""
    numbers = sorted({float(value) for value in values if not value.isnan()})
    return ["nan"] * bool(values.isnan().any()) + [f"{value:.6g}" for value in numbers[:4]]
