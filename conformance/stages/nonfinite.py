"""Facts of what a backend makes of NaN, infinities, empty batches and strided indices: recorded, not judged."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor

from conformance.claims.case import Case
from conformance.claims.claim import Claim
from conformance.claims.inputs import Batch
from conformance.stages.layouts import sliced
from conformance.stages.reruns import REPETITION, Lowered, Trial, compare_outputs
from reports.codec import PlainRow


def nonfinite_rows(
    claim: Claim, case: Case, drawn: Sequence[tuple[str, Batch]], lowered: Lowered
) -> Iterator[PlainRow]:
    """Yield what a case makes of NaN and infinities among its inputs, of no rows, of strided indices: facts alone.

    Quantizing such a value has no right result, a backend may be compiled for its batch, and indices are not quantized.
    What comes of them is recorded all the same: an output, or an exception; a crash is the isolation's to tell.
    """
    trial = Trial(case=case, name=drawn[0][0], inputs=drawn[0][1], lowered=lowered)
    if trial.runs:
        values = {name: _told(trial, inputs) for name, inputs in _edges(trial.inputs) if trial.floats(inputs)}
        yield {"kind": "fact", "topic": "nonfinite", "subject": claim.id, "values": values}


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


def _told(trial: Trial, inputs: Batch) -> str:
    """Say what the inputs give, by what differs from the plain ones' output."""
    try:
        found, again = trial.run(inputs), trial.run(inputs)
    except Exception as error:
        return f"raises {type(error).__name__}: {' '.join(str(error).split())[:_MOST]}"
    if compare_outputs(trial.case.name, REPETITION, found, again).problem:
        return "varies from run to run"
    texts = []
    for left, right in zip(trial.expected, found, strict=False):
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
