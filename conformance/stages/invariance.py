"""Invariance: what may not change an output bit: repetition, batch split, memory layout, threads. (rule NUM-07)

Every case is run again on the values of its first inputs, under each change that its float model takes as well: an op
that mixes the rows of a batch has no batch to split, one that views its input takes no other layout.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from backends.base import Capabilities
from conformance.claims.case import Case
from conformance.claims.inputs import Batch
from conformance.ops.op_model import Role
from conformance.stages.check import Check
from conformance.stages.layouts import Layout, in_channels_last, strided
from conformance.stages.numerics import Finding
from conformance.stages.reruns import (
    BATCH,
    CHANNELS_LAST,
    EMPTY,
    OPERANDS,
    REPETITION,
    SAID,
    SHOWN,
    STRIDED,
    THREADS,
    ExactOf,
    Lowered,
    Run,
    Trial,
    compare_outputs,
)
from reports.results import Verdict

PARTS = (1, 3, 5)
"""Into what a batch is split: its rows are more than the tiles of known kernels, and no part is whole tiles."""


def check_invariance(
    case: Case,
    drawn: Sequence[tuple[str, Batch]],
    lowered: Lowered,
    capabilities: Capabilities,
    *,
    left_out: Collection[str] = (),
    exact_of: ExactOf | None = None,
    first: Any = None,
) -> Iterator[Finding]:
    """Compare a case's outputs under every change with those without; yield a finding for each comparison.

    ``exact_of`` gives the exact results of inputs; ``first`` is what the lowered model gave for the first ones in an
    earlier run, None: it has not run yet. Outputs may differ that are both right by it: by ``tie_steps`` where
    the backend declares them, and by any where it accumulates in float: the order of sums may change there. (NUM-04)
    """
    steps = math.inf if capabilities.float_accumulation else capabilities.tie_steps
    tried = SAID.keys() - left_out
    tried -= frozenset() if capabilities.channels_last else {CHANNELS_LAST}
    tried -= frozenset() if capabilities.dynamic_batch else {BATCH, EMPTY}
    trial = Trial(
        case=case, name=drawn[0][0], inputs=drawn[0][1], lowered=lowered, steps=steps, exact_of=exact_of, first=first,
    )  # fmt: skip
    again = partial(trial.run, trial.inputs)
    before = () if first is None else (trial.compared(REPETITION, "since the first run", again),)
    repeated = (*before, trial.compared(REPETITION, "at once", again))
    yield from repeated
    if any(each.problem for each in repeated):
        return  # what else differs would say no more
    for change, find in _FINDERS.items():  # rule: NUM-07
        if change in tried:
            yield from find(trial)
    yield trial.compared(REPETITION, "after other inputs", lambda: (trial.run(drawn[-1][1]), again())[1])


def judge_invariance(findings: Sequence[Finding]) -> Check:
    """Judge a claim by all comparisons: nothing may differ. (NUM-07)"""
    differing = [finding for finding in findings if finding.problem]
    if not differing:
        return Check(
            stage="invariance", rule="NUM-07", outcome="pass", verdict=Verdict.VERIFIED, cases=len(findings)
        )  # fmt: skip
    unsteady = [finding for finding in differing if finding.evidence["change"] == REPETITION]
    worst = (unsteady or differing)[0]
    cases = [f"{finding.case}: {finding.problem}" for finding in differing]
    by_chance = bool(unsteady) or any(finding.evidence.get("nondeterministic") for finding in differing)
    return Check(
        stage="invariance",
        rule=worst.rule,
        outcome="fail",
        verdict=Verdict.REFUTED,
        message=f"{worst.case}: {worst.problem}",
        cases=len(findings),
        failing=len(differing),
        evidence={**worst.evidence, "differing": cases[:SHOWN], "nondeterministic": by_chance},
    )


def _are_close(left: list[Tensor] | None, right: list[Tensor] | None) -> bool:
    """Tell whether two runs of a float model give the same, up to the order of float32 sums.

    A change that has a meaning for the op, such as a row for one that mixes rows, changes its result by far more.
    """
    if left is None or right is None or [each.shape for each in left] != [each.shape for each in right]:
        return False
    pairs = [(one.double(), other.double()) for one, other in zip(left, right, strict=True) if one.numel()]
    return all(bool((one - other).abs().le(2.0**-10 * (1 + one.abs().max())).all()) for one, other in pairs)


def _with_threads(count: int, run: Run) -> list[Tensor]:
    """Run something with that many threads, in a thread of its own.

    OpenMP keeps a pool for each thread that starts one, and a process forked later would wait for its workers for ever:
    this pool ends with the thread.
    """
    before, outcome = torch.get_num_threads(), list[list[Tensor] | Exception]()

    def work() -> None:
        torch.set_num_threads(count)
        try:
            outcome.append(run())
        except Exception as error:
            outcome.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    torch.set_num_threads(before)
    (found,) = outcome
    if isinstance(found, Exception):
        raise found
    return found


# -- layouts -----------------------------------------------------------------------------------------------------------


def _layouts(change: str, of: Callable[[Batch], Iterator[Layout]], trial: Trial) -> Iterator[Finding]:
    """Equal values in other layouts, where they are the same to the float model: a view of the memory is not."""
    for label, plain, changed in of(trial.inputs):
        if _are_close(trial.floats(plain), trial.floats(changed)):
            yield trial.compared(change, label, partial(trial.run, changed), plain=plain)


# -- batches -----------------------------------------------------------------------------------------------------------


def _split(trial: Trial) -> Iterator[Finding]:
    """A batch in parts against the whole, where each row of the output comes of one row of inputs.

    Left out where the backend says that it is made for batches of the size that it was compiled with.
    """
    whole = _batch(trial)
    if whole is None:
        return
    parts = list(zip(*(torch.split(each, list(PARTS)) for each in whole), strict=True))
    if not _are_close(trial.floats(whole), _joined([trial.floats(part) for part in parts])):
        return
    label = f"{sum(PARTS)} rows in parts of {PARTS}"
    yield trial.compared(BATCH, label, lambda: _joined([trial.run(part) for part in parts]) or [], plain=whole)


def _joined(parts: Sequence[list[Tensor] | None]) -> list[Tensor] | None:
    """Join the outputs for the parts of a batch; None: they do not go together."""
    found = [each for each in parts if each is not None]
    outputs = list(zip(*found, strict=True)) if len({len(each) for each in found}) == 1 else []
    if len(found) < len(parts) or any(not each.dim() for pieces in outputs for each in pieces):
        return None
    if any(len({(each.dtype, each.shape[1:]) for each in pieces}) > 1 for pieces in outputs):
        return None
    return [torch.cat(pieces) for pieces in outputs]


def _batch(trial: Trial) -> Batch | None:
    """A batch whose rows are the first one, its elements rolled on; None: the inputs do not share a batch axis.

    Rows with the same elements have the same range: dynamic quantization gives the whole batch and each part the same
    qparams. A recurrent op quantizes states of its own making, whose ranges are not the same.
    """
    is_recurrent = any(isinstance(module, nn.RNNBase) for module in trial.model.modules())
    is_plain = all(each.role in (Role.ACTIVATION, Role.INDEX) for each in trial.case.inputs)
    lengths = {each.shape[0] if each.dim() else 0 for each in trial.inputs}
    if is_recurrent or not is_plain or len(lengths) != 1 or lengths == {0}:
        return None
    return tuple(
        torch.stack([each[0].flatten().roll(number).reshape(each[0].shape) for number in range(sum(PARTS))])
        for each in trial.inputs
    )


def _threads(trial: Trial) -> Iterator[Finding]:
    yield trial.compared(THREADS, "", partial(_with_threads, 2, partial(trial.run, trial.inputs)))


def _empty(trial: Trial) -> Iterator[Finding]:
    """The shape for a batch of no rows, where the float model and the lowered one take it (else nonfinite.py tells)."""
    rowless = tuple(each[:0] if each.dim() else each for each in trial.inputs)
    wanted = trial.floats(rowless)
    if wanted is None or [each.shape for each in wanted] != [(0, *each.shape[1:]) for each in trial.expected]:
        return  # the first axis is no batch
    try:
        found = trial.run(rowless)
    except Exception:  # whatever the backend's code raises: a fact
        return
    shapes = [torch.zeros(each.shape) for each in found], [torch.zeros(each.shape) for each in wanted]
    yield compare_outputs(f"{trial.case.name}, {trial.name}, {EMPTY}", EMPTY, shapes[1], shapes[0])


def _operands(trial: Trial) -> Iterator[Finding]:
    """What is given to the lowered model is not the backend's to write to, unless the op itself is in place."""
    floating, given = ([each.clone() for each in trial.inputs] for _ in range(2))
    try:
        with torch.no_grad():
            trial.model(*floating)
    except Exception:  # whatever it is that the op raises: it is no input for it
        return
    untouched = [
        n for n, (before, after) in enumerate(zip(trial.inputs, floating, strict=True)) if torch.equal(before, after)
    ]

    def run() -> list[Tensor]:
        trial.lowered(*given)
        return [given[n] for n in untouched]

    if untouched:
        yield trial.compared(OPERANDS, "", run, given=[trial.inputs[n] for n in untouched])


_FINDERS: dict[str, Callable[[Trial], Iterator[Finding]]] = {
    CHANNELS_LAST: partial(_layouts, CHANNELS_LAST, in_channels_last),
    STRIDED: partial(_layouts, STRIDED, strided),
    BATCH: _split,
    THREADS: _threads,
    EMPTY: _empty,
    OPERANDS: _operands,
}
