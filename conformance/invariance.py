"""Invariance: what may not change an output bit: repetition, batch split, memory layout, threads. (rule NUM-07)

Every case is run again on the values of its first inputs, under each change that its float model takes as well: an op
that mixes the rows of a batch has no batch to split, one that views its input takes no other layout.
"""

from __future__ import annotations

import math
import threading
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from backends.base import Capabilities
from conformance.cases import Case, Role
from conformance.checks import Check
from conformance.claims import Claim
from conformance.draws import Batch
from conformance.layouts import Layout, in_channels_last, kept, strided
from conformance.numerics import Finding
from conformance.oracle import Exact, NoOracleError
from conformance.quantizers import Kind, kind_of
from conformance.structure import tensors
from reports.results import Verdict

Lowered = Callable[..., Any]
Run = Callable[[], list[Tensor]]
ExactOf = Callable[[Batch], Sequence[Exact]]

REPETITION, BATCH, CHANNELS_LAST, STRIDED, THREADS = "repetition", "batch", "channels_last", "strided", "threads"
EMPTY, OPERANDS = "no rows", "operands"
SAID: dict[str, str] = {
    REPETITION: "a second run on the same input gave another output",
    BATCH: "a batch in parts gave another output than the whole",
    CHANNELS_LAST: "inputs in channels_last layout gave another output than contiguous ones",
    STRIDED: "inputs that are not contiguous gave another output than contiguous ones",
    THREADS: "two threads gave another output than one",
    EMPTY: "a batch without rows gave another shape than the float model's",
    OPERANDS: "the inputs were written to, which the float model leaves as they are",
}
_REORDERING = frozenset(SAID) - {REPETITION, EMPTY, OPERANDS}
PARTS = (1, 3, 5)
"""Into what a batch is split: its rows are more than the tiles of known kernels, and no part is whole tiles."""


def left_out(claim: Claim, profile: str, *, runs_in_float: bool) -> frozenset[str]:
    """Return the changes that a claim is not tried under. ``runs_in_float``: the backend falls back to float.

    The last bits of a float sum depend on its order; half precision is summed in float whatever the backend. Threads
    cost more than all else where workers share the cores, so the quick profile has none.
    """
    in_float = _REORDERING if runs_in_float or kind_of(claim.dtypes) is Kind.FLOAT16 else frozenset()
    return in_float | ({THREADS} if profile == "quick" else set())


def check_invariance(
    case: Case,
    drawn: Sequence[tuple[str, Batch]],
    lowered: Lowered,
    capabilities: Capabilities,
    *,
    left_out: Collection[str] = (),
    exact_of: ExactOf | None = None,
) -> Iterator[Finding]:
    """Compare a case's outputs under every change with those without; yield a finding for each comparison.

    Where the backend accumulates in float, the order of its sums may change with all but a repetition: that is declared
    variance (NUM-04), and left out. ``exact_of`` gives the exact results of inputs: two outputs that differ may both be
    right, a float one within its bound, a quantized one by what the backend declares in ``tie_steps``.
    """
    tried = SAID.keys() - left_out - (_REORDERING if capabilities.float_accumulation else frozenset())
    tried -= frozenset() if capabilities.channels_last else {CHANNELS_LAST}
    tried -= frozenset() if capabilities.dynamic_batch else {BATCH, EMPTY}
    trial = Trial(
        case=case, name=drawn[0][0], inputs=drawn[0][1], lowered=lowered, tie_steps=capabilities.tie_steps,
        exact_of=exact_of,
    )  # fmt: skip
    again = partial(trial.run, trial.inputs)
    first = trial.compared(REPETITION, "at once", again)
    yield first
    if first.problem:
        return  # what else differs would say no more
    for change, find in _FINDERS.items():
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
        evidence={**worst.evidence, "differing": cases[:_SHOWN], "nondeterministic": by_chance},
    )


_SHOWN = 8


def compare_outputs(case: str, change: str, first: Any, second: Any) -> Finding:
    """Compare two outputs that must be equal, bit for bit but for the sign of zero; NaN equals NaN. (NUM-07)"""
    expected, found = tensors(first), tensors(second)
    if len(expected) != len(found):
        return _finding(case, f"{SAID[change]}: {len(found)} tensors for {len(expected)}", {"change": change})
    for number, (left, right) in enumerate(zip(expected, found, strict=True)):
        if (left.dtype, left.shape) != (right.dtype, right.shape):
            kinds = [f"{each.dtype} of shape {tuple(each.shape)}" for each in (right, left)]
            return _finding(case, f"{SAID[change]}: {kinds[0]} for {kinds[1]}", {"change": change})
        differs = (left != right) & ~(left.isnan() & right.isnan())
        if bool(differs.any()):
            indexes = differs.nonzero()[:_SHOWN].tolist()
            evidence = {
                "change": change, "output": number, "index": indexes, "count": int(differs.sum()),
                "expected": [_number(left[tuple(index)].item()) for index in indexes],
                "found": [_number(right[tuple(index)].item()) for index in indexes],
            }  # fmt: skip
            return _finding(case, f"{SAID[change]}, first at index {indexes[0]}", evidence)
    return _alike(case)


def _alike(case: str) -> Finding:
    return Finding(case=case, max_lsb=0.0, slack_lsb=0.0, excess=-0.5, is_within_one=True, rule="NUM-07")


def _number(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)


def _finding(case: str, problem: str, evidence: Mapping[str, object], rule: str = "NUM-07") -> Finding:
    return Finding(
        case=case, max_lsb=float("inf"), slack_lsb=0.0, excess=float("inf"), is_within_one=False, rule=rule,
        problem=problem, evidence={"case": case, **evidence},
    )  # fmt: skip


# -- one case ----------------------------------------------------------------------------------------------------------


@dataclass(kw_only=True)
class Trial:
    """A case, what the backend made of it, and the inputs on which it is run again and again.

    ``exact_of``: what gives the exact results of inputs (None: outputs may not differ at all); ``tie_steps``: by how
    many steps quantized outputs may, where both are right. ``filling`` and ``sizes`` (in bytes): what memory is filled
    with before a run, and how large the pieces are.
    """

    case: Case
    name: str
    inputs: Batch
    lowered: Lowered
    tie_steps: int = 0
    exact_of: ExactOf | None = None
    filling: int = 0x5A
    sizes: tuple[int, ...] = ()

    @cached_property
    def model(self) -> nn.Module:
        """The float model, with parameters of its own."""
        return self.case.build().eval()

    @cached_property
    def expected(self) -> list[Tensor]:
        """What the inputs gave first."""
        return self.run(self.inputs)

    @property
    def runs(self) -> bool:
        """Whether the lowered model takes its inputs at all, and gives a tensor."""
        try:
            return bool(self.expected)
        except Exception:  # whatever the backend's code raises
            return False

    def run(self, inputs: Batch) -> list[Tensor]:
        """Run the lowered model on copies of the inputs, in their own layout; the results are copied as well.

        Memory of the last outputs' sizes is left full of a value that alternates: an element that nobody writes shows.
        """
        copies = [kept(each) for each in inputs]
        self.filling ^= 0xFF
        pieces = [torch.full((size,), self.filling, dtype=torch.uint8) for size in self.sizes for _ in range(_PIECES)]
        del pieces
        found = [each.detach().clone() for each in tensors(self.lowered(*copies))]
        self.sizes = tuple(count for each in found for count in (each.numel(), 4 * each.numel()))
        return found

    def floats(self, inputs: Batch) -> list[Tensor] | None:
        """Run the float model, on copies in the inputs' own layout. None: it does not take such inputs."""
        try:
            with torch.no_grad():
                return tensors(self.model(*map(kept, inputs)))
        except Exception:  # whatever it is that the op raises: it is no input for it
            return None

    def compared(
        self, change: str, label: str, run: Run, *, plain: Batch | None = None, given: list[Tensor] | None = None
    ) -> Finding:
        """Compare what a changed run gives with what the backend makes of ``plain`` inputs, else of the trial's own.

        ``given`` is to be compared with in place of that. To raise where the float model does not is to give something
        else. (LOW-01)
        """
        where = f"{self.case.name}, {self.name}, {f'{change}: {label}' if label else change}"
        try:
            expected = given or (self.expected if plain is None else self.run(plain))
            found = run()
        except Exception as error:
            told = f"raised {type(error).__name__}: {error}; the float model takes such inputs"
            text = "".join(traceback.format_exception(error, limit=-6))
            return _finding(where, told, {"change": change, "traceback": text}, rule="LOW-01")
        finding = compare_outputs(where, change, expected, found)
        if finding.problem and change in _REORDERING:
            wrong = self._wrong(self.inputs if plain is None else plain, expected, found)
            if wrong == "":
                return _alike(where)
            finding = replace(finding, problem=f"{finding.problem}{f': {wrong}' if wrong else ''}")
        if finding.problem and change != REPETITION and self._varies(found, run):
            return replace(finding, evidence={**finding.evidence, "nondeterministic": True})
        return finding

    def _varies(self, found: list[Tensor], run: Run) -> bool:
        """Tell whether a changed run gives something else when it is done again; later runs go on as if it were not."""
        filling, sizes = self.filling, self.sizes
        try:
            again = run()
        except Exception:  # whatever the backend's code raises now
            return True
        self.filling, self.sizes = filling, sizes
        return bool(compare_outputs("", REPETITION, found, again).problem)

    def _wrong(self, inputs: Batch, expected: list[Tensor], found: list[Tensor]) -> str | None:
        """Say where outputs that differ are not both right: "" where they are, None where nobody can tell. (NUM-06)"""
        try:
            exacts = [] if self.exact_of is None else list(self.exact_of(inputs))
        except NoOracleError:
            return None
        shapes = [[each.shape for each in outputs] for outputs in (expected, found)]
        if any([exact.real.shape for exact in exacts] != each for each in shapes):
            return None
        return next(
            filter(None, (_apart(*each, self.tie_steps) for each in zip(exacts, expected, found, strict=True))), ""
        )


def _apart(exact: Exact, left: Tensor, right: Tensor, tie_steps: int) -> str:
    """Say where two outputs differ that are not both roundings of the exact result, or by too many steps."""
    if exact.grid is None:
        places, target, half = [each.double() / exact.step for each in (left, right)], exact.real / exact.step, 0.0
        far = torch.zeros_like(places[0])
    else:
        places, target, half = [exact.grid.integers(each).round() for each in (left, right)], exact.integers, 0.5
        far = (places[0] - places[1]).abs() - tie_steps
    away = torch.maximum(*((place - target).abs() for place in places)) - half - exact.slack
    wrong = (left != right) & ((away > 0) | (far > 0))
    if not bool(wrong.any()):
        return ""
    worst = float(away[wrong].max()) + half
    return f"{int(wrong.sum())} of {wrong.numel()} values are not both right, one {worst:.6g} LSB from the exact result"


_PIECES = 10  # as many as the C library's allocator keeps of a size (7), and some for what an op takes on its way


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
