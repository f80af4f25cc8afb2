"""The invariance stage: repetition, batch split, layout, threads and other models change no bit of an output. (NUM-07)

A case is run again on the values of its first input, under each change that its float model takes as well: an op that
mixes the rows of a batch has no batch to split, one that views its input takes no other layout.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from fx_quant_conformance.backends.base import Capabilities
from fx_quant_conformance.conformance.claims.inputs import Batch
from fx_quant_conformance.conformance.claims.kinds import Kind
from fx_quant_conformance.conformance.machine.fault import Fault, FaultFound, raise_first
from fx_quant_conformance.conformance.machine.guard import guard
from fx_quant_conformance.conformance.machine.threads import run_with_threads
from fx_quant_conformance.conformance.ops.op_model import Role
from fx_quant_conformance.conformance.stages import reruns
from fx_quant_conformance.conformance.stages.layouts import Layout, lay_in_channels_last, lay_strided
from fx_quant_conformance.conformance.stages.lower import find_leftover
from fx_quant_conformance.conformance.stages.state import CaseState, ClaimState
from fx_quant_conformance.reports.verdicts import PASSING, Verdict

SPLIT = (1, 3, 5)
"""The sizes into which a batch is split: more rows than known kernels' tiles have, and no size is whole tiles."""


def run_again(run: ClaimState, run_twin: Callable[[], CaseState] | None) -> Iterator[Fault]:
    """Run cases of a claim again. Raises FaultFound if none of them gave an output, or for what a device left over.

    ``run_twin``: has the first case's twin lowered and run; None: the claim has a fault already, or its models are not
    lowered in one process.
    """
    bench, claim = run.bench, run.claim
    ran = [each for each in run.rerun_cases if each.first is not None]  # numerics reports the others
    if not ran:
        text = "no case gave an output that could be compared"
        raise FaultFound(Fault(rule="NUM-07", verdict=Verdict.UNEXERCISED, message=text))
    # A small case is not shared out, and threads cost more than all else where workers share the cores.
    threaded = (*ran[:1], *sorted(ran[1:], key=lambda state: state.case.size)[-1:])
    has_faults = False
    for state in ran:
        sums_floats = state.runs_in_float or claim.kind is Kind.FLOAT16
        capabilities = replace(bench.capabilities, float_accumulation=True) if sums_floats else bench.capabilities
        (name, inputs), other_inputs = state.inputs[0], state.inputs[-1].tensors
        repeat = reruns.RepeatRun(
            case=state.case,
            name=name,
            inputs=inputs,
            lowered=state.lowered,
            first=state.first,
            steps=allowed_steps_of(capabilities),
        )
        left_out = {reruns.THREADS} if state not in threaded or bench.profile == "quick" else set[str]()
        if bench.runs_elsewhere:
            left_out.add(reruns.OPERANDS)  # which a device would have to hand in too
        for fault in compare_changes(repeat, other_inputs, capabilities, left_out=left_out):
            has_faults = True
            yield fault
        if run_twin is not None and state is ran[0] and not has_faults:
            yield from keep_models_apart(repeat, run_twin())
        run.counted["invariance"] += len(repeat.compared)
    if not has_faults:
        raise_first(find_leftover(bench))


def allowed_steps_of(capabilities: Capabilities) -> float:
    """Return by how many steps outputs may differ that are both right.

    That is ``tie_steps`` where the backend declares them, and any number where it accumulates in float, as the order of
    sums may change there. (NUM-04)
    """
    return math.inf if capabilities.float_accumulation else capabilities.tie_steps


def compare_changes(
    repeat: reruns.RepeatRun, other_inputs: Batch, capabilities: Capabilities, *, left_out: Collection[str] = ()
) -> Iterator[Fault]:
    """Compare a case's outputs under every change with those without: nothing may differ. (NUM-07)

    ``other_inputs``: other inputs of the case, which are run in between.
    """
    left_out = set(left_out)
    if not capabilities.channels_last:
        left_out.add(reruns.CHANNELS_LAST)
    if not capabilities.dynamic_batch:
        left_out |= {reruns.BATCH, reruns.EMPTY}
    repetitions = list(report_repetitions(_repeat_at_once(repeat)))
    yield from repetitions
    if repetitions:
        return  # other differences would say no more
    for change, compare in _COMPARED.items():  # rule: NUM-07
        if change not in left_out:
            yield from compare(repeat)
    yield from report_repetitions(_repeat_after(repeat, other_inputs))


# -- repetition and threads -------------------------------------------------------------------------------------------


@guard("invariance.repetition")
def report_repetitions(faults: Iterable[Fault]) -> Iterator[Fault]:
    """Yield what differs between runs of the same input."""
    yield from faults


def _repeat_at_once(repeat: reruns.RepeatRun) -> Iterator[Fault]:
    """Run twice, and compare the second run with the first one, and with that of the numerics stage."""

    def run_again() -> list[Tensor]:
        return repeat.run(repeat.inputs)

    repeat.foresee([repeat.inputs, repeat.inputs])
    if repeat.first is not None:
        yield from repeat.compare(repeat.where(reruns.REPETITION, "since the first run"), run_again)
    yield from repeat.compare(repeat.where(reruns.REPETITION, "at once"), run_again)


def _repeat_after(repeat: reruns.RepeatRun, other_inputs: Batch) -> Iterator[Fault]:
    """Run on other inputs, and then again on the first ones."""

    def run_both() -> list[Tensor]:
        repeat.foresee([other_inputs, repeat.inputs])
        repeat.run(other_inputs)
        return repeat.run(repeat.inputs)

    yield from repeat.compare(repeat.where(reruns.REPETITION, "after other inputs"), run_both)


@guard("invariance.threads")
def run_in_threads(repeat: reruns.RepeatRun) -> Iterator[Fault]:
    """Run with two threads."""
    yield from repeat.compare(
        repeat.where(reruns.THREADS), partial(run_with_threads, 2, partial(repeat.run, repeat.inputs))
    )


def _are_close(left: list[Tensor] | None, right: list[Tensor] | None) -> bool:
    """Tell whether two runs of a float model give the same, up to the order of float32 sums.

    A change that has a meaning for the op, such as a row for one that mixes rows, changes its result by far more.
    """
    if left is None or right is None or [each.shape for each in left] != [each.shape for each in right]:
        return False
    pairs = [(one.double(), other.double()) for one, other in zip(left, right, strict=True) if one.numel()]
    return all(bool((one - other).abs().le(2.0**-10 * (1 + one.abs().max())).all()) for one, other in pairs)


# -- layouts -----------------------------------------------------------------------------------------------------------


@guard("invariance.channels_last")
def lay_out_in_channels_last(repeat: reruns.RepeatRun) -> Iterator[Fault]:
    """Run on equal values in channels_last."""
    yield from _lay_out(reruns.CHANNELS_LAST, lay_in_channels_last, repeat)


@guard("invariance.strided")
def lay_out_strided(repeat: reruns.RepeatRun) -> Iterator[Fault]:
    """Run on equal values that are not contiguous, or begin later than their memory."""
    yield from _lay_out(reruns.STRIDED, lay_strided, repeat)


def _lay_out(change: str, layouts: Callable[[Batch], Iterator[Layout]], repeat: reruns.RepeatRun) -> Iterator[Fault]:
    """Run on equal values in other layouts, where they are the same to the float model: a view of the memory is not."""
    meant = [
        (label, plain, changed)
        for label, plain, changed in layouts(repeat.inputs)
        if _are_close(repeat.run_float(plain), repeat.run_float(changed))
    ]
    repeat.foresee([inputs for _, *both in meant for inputs in both])
    for label, plain, changed in meant:
        yield from repeat.compare(repeat.where(change, label), partial(repeat.run, changed), plain=plain)


# -- batches -----------------------------------------------------------------------------------------------------------


@guard("invariance.batch")
def split_batch(repeat: reruns.RepeatRun) -> Iterator[Fault]:
    """Run a batch in parts, where each row of the output depends on one row of inputs.

    Left out where the backend says that it is made for batches of the size that it was compiled with.
    """
    whole = _make_batch(repeat)
    if whole is None:
        return
    pieces = (
        [part.clone() for part in torch.split(each, list(SPLIT))] for each in whole
    )  # each from its memory's start
    parts = list(zip(*pieces, strict=True))
    if not _are_close(repeat.run_float(whole), _join([repeat.run_float(part) for part in parts])):
        return
    where = repeat.where(reruns.BATCH, f"{sum(SPLIT)} rows in parts of {SPLIT}")
    repeat.foresee([whole, *parts])
    yield from repeat.compare(where, lambda: _join([repeat.run(part) for part in parts]) or [], plain=whole)


def _join(parts: Sequence[list[Tensor] | None]) -> list[Tensor] | None:
    """Join the outputs for the parts of a batch; None: they do not go together."""
    joinable = [outputs for outputs in parts if outputs is not None]
    outputs = list(zip(*joinable, strict=True)) if len(set(map(len, joinable))) == 1 else []
    if len(joinable) < len(parts) or any(not each.dim() for pieces in outputs for each in pieces):
        return None
    if any(len({(each.dtype, each.shape[1:]) for each in pieces}) > 1 for pieces in outputs):
        return None
    return [torch.cat(pieces) for pieces in outputs]


def _make_batch(repeat: reruns.RepeatRun) -> Batch | None:
    """Return a batch whose rows are the first one, its elements rolled on; None: the inputs share no batch axis.

    Rows with the same elements have the same range: dynamic quantization gives the whole batch and each part the same
    qparams. A recurrent op also quantizes its states, whose ranges are not the same.
    """
    is_recurrent = any(isinstance(module, nn.RNNBase) for module in repeat.model.modules())
    is_plain = all(each.role in (Role.ACTIVATION, Role.INDEX) for each in repeat.case.inputs)
    lengths = {each.shape[0] if each.dim() else 0 for each in repeat.inputs}
    if is_recurrent or not is_plain or len(lengths) != 1 or lengths == {0}:
        return None
    return tuple(
        torch.stack([each[0].flatten().roll(number).reshape(each[0].shape) for number in range(sum(SPLIT))])
        for each in repeat.inputs
    )


@guard("invariance.no rows")
def run_without_rows(repeat: reruns.RepeatRun) -> Iterator[Fault]:
    """Compare the shape for a batch of no rows, where the float model and the lowered one take it.

    Elsewhere `conformance.stages.nonfinite` records it.
    """
    rowless = tuple(each[:0] if each.dim() else each for each in repeat.inputs)
    floats = repeat.run_float(rowless)
    if floats is None or [each.shape for each in floats] != [(0, *each.shape[1:]) for each in repeat.expected]:
        return  # the first axis is no batch
    try:
        outputs = repeat.run(rowless)
    except Exception:  # whatever the backend's code raises: it is recorded, not judged
        return
    expected, actual = ([torch.zeros(each.shape) for each in tensors] for tensors in (floats, outputs))
    where = repeat.where(reruns.EMPTY)
    repeat.compared.append(where)
    fault = reruns.compare_outputs(where, reruns.EMPTY, expected, actual)
    if fault is not None:
        yield fault


@guard("invariance.operands")
def watch_operands(repeat: reruns.RepeatRun) -> Iterator[Fault]:
    """Run on inputs that are not copied: the backend may not write to them, unless the op itself is in place."""
    floating, operands = ([each.clone() for each in repeat.inputs] for _ in range(2))
    try:
        with torch.no_grad():
            repeat.model(*floating)
    except Exception:  # whatever it is that the op raises: it is no input for it
        return
    pairs = enumerate(zip(repeat.inputs, floating, strict=True))
    untouched = [number for number, (before, after) in pairs if torch.equal(before, after)]

    def run() -> list[Tensor]:
        repeat.lowered(*operands)
        return [operands[number] for number in untouched]

    if untouched:
        expected = [repeat.inputs[number] for number in untouched]
        yield from repeat.compare(repeat.where(reruns.OPERANDS), run, expected=expected)


@guard("invariance.models")
def keep_models_apart(repeat: reruns.RepeatRun, twin: CaseState) -> Iterator[Fault]:
    """Find a cache whose key leaves out weights or qparams, and a kernel that holds those of one model.

    The twin was lowered after the case, in the same process. Its numbers must be right, and the case's as before. If
    they are wrong, and those that the case's own model gives, the two are one; else the kernel is wrong for the twin.
    """
    where = repeat.where(reruns.MODELS, "other weights, scales and zero points")
    faults = (each.fault for each in twin.comparisons)
    wrong = next((fault for fault in faults if fault is not None and fault.verdict not in PASSING), None)
    if wrong is None:
        yield from repeat.compare(where, partial(repeat.run, repeat.inputs))
        return
    inputs = dict(twin.inputs)[wrong.where.input]
    are_one = not list(repeat.compare(where, partial(replace(repeat, lowered=twin.lowered).run, inputs), plain=inputs))
    text = f"{reruns.CHANGES[reruns.MODELS]}: lowered second" if are_one else "of another model"
    message = f"{where}: {text}, {wrong.message}"
    rule = "NUM-07" if are_one else wrong.rule
    yield replace(wrong, where=where, message=message, rule=rule, verdict=Verdict.REFUTED)


_COMPARED: dict[str, Callable[[reruns.RepeatRun], Iterator[Fault]]] = {
    reruns.CHANNELS_LAST: lay_out_in_channels_last,
    reruns.STRIDED: lay_out_strided,
    reruns.BATCH: split_batch,
    reruns.THREADS: run_in_threads,
    reruns.EMPTY: run_without_rows,
    reruns.OPERANDS: watch_operands,
}
assert {reruns.REPETITION, reruns.MODELS, *_COMPARED} == set(reruns.CHANGES)
