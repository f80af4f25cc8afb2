"""Cases that are lowered together: what is saved by it, and that it hides nothing."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor
from torch.fx import GraphModule

from backends.base import Execution
from conformance.claims.claim import Claim
from conformance.claims.effort import PROFILES, Effort
from conformance.claims.plan import plan_cases
from conformance.machine.messages import Begin
from conformance.pipeline.claim_run import ENOUGH, Reruns, run_claim
from conformance.stages.bench import Bench
from conformance.stages.packing import MOST_PACKED, can_pack
from reports.codec import PlainRow, encode
from reports.schema import Check
from reports.verdicts import Verdict
from tests.conformance.support.small_bench import ADD, claim_on, small_claims
from tests.conformance.support.suite_runs import run
from tests.mutants.integer_kernels import IntegerBackend


class Counted(IntegerBackend):
    """The honest integer backend, which notes of each model that it lowers how many outputs that has."""

    def __init__(self, **capabilities: Any) -> None:
        super().__init__(**capabilities)
        self.outputs: list[int] = []

    def lower(self, reference_model: GraphModule, example_inputs: tuple[Any, ...]) -> Callable[..., Any]:
        found = reference_model.graph.output_node().args[0]
        self.outputs.append(len(found) if isinstance(found, tuple) else 1)
        return super().lower(reference_model, example_inputs)


def checks_of(
    backend: IntegerBackend, claim: Claim, *, may_pack: bool = True, effort: Effort = PROFILES["full"]
) -> dict[str, Check]:
    bench = Bench(backend, seed=0, profile="full")
    bench.effort = effort
    return {
        each.stage: replace(each, seconds=0.0)
        for each in run_claim(bench, claim, may_pack=may_pack)
        if isinstance(each, Check)
    }


def rows(checks: dict[str, Check]) -> list[PlainRow]:
    return [encode(check) for check in checks.values()]


def cases_of(claim: Claim) -> int:
    cases = plan_cases(claim, IntegerBackend().capabilities())
    assert not isinstance(cases, str)
    return len(cases)


@pytest.mark.rule("LOW-01")
@pytest.mark.parametrize("claim", small_claims().values(), ids=str)
def test_a_claim_gets_the_same_checks_packed_and_not(claim: Claim) -> None:
    """But for how many cases of a claim that is refused altogether came to the stages before the backend's."""
    effort = Effort(cases=3 * ENOUGH, directed=1, further=1, random=0, every=3)
    packed, alone = (checks_of(Counted(), claim, may_pack=may_pack, effort=effort) for may_pack in (True, False))
    if any("cases not tried" in check.evidence for check in alone.values()):
        for stage in ("fuse", "prepare", "convert"):
            packed[stage] = replace(packed[stage], cases=alone[stage].cases)
    assert rows(packed) == rows(alone)


@pytest.mark.rule("LOW-01")
def test_a_claim_that_holds_is_lowered_in_packs_but_for_its_first_case() -> None:
    backend, claim = Counted(), claim_on(ADD)
    assert {check.verdict for check in checks_of(backend, claim).values()} == {Verdict.VERIFIED}
    assert cases_of(claim) == 40 and backend.outputs == [MOST_PACKED - 1, 1, MOST_PACKED, MOST_PACKED, 4]


def test_a_backend_that_takes_no_packs_gets_none() -> None:
    backend, claim = Counted(packs=False), claim_on(ADD)
    checks_of(backend, claim)
    assert backend.outputs == [1] * cases_of(claim)


def test_the_profile_that_looks_closest_packs_nothing() -> None:
    benches = [Bench(Counted(), seed=0, profile=profile) for profile in ("quick", "full", "stress")]
    assert [can_pack(bench) for bench in benches] == [True, True, False]


def test_cases_that_are_run_again_are_lowered_alone_where_the_backend_specializes() -> None:
    backend, claim = Counted(specializes=True), claim_on(ADD)
    checks_of(backend, claim)
    cases = plan_cases(claim, backend.capabilities())
    reruns = Reruns(every=3)
    chosen = [case for case in cases if not isinstance(case, str) and reruns.chooses(case)]
    assert backend.outputs.count(1) == len(chosen) and sum(backend.outputs) == len(cases)


class WrongAlone(Counted):
    """Is a step off in some case, wherever that is: one whose first operand has as many elements."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size

    def lower(self, reference_model: GraphModule, example_inputs: tuple[Any, ...]) -> Callable[..., Any]:
        right: Any = super().lower(reference_model, example_inputs)

        def run(*inputs: Tensor) -> Any:
            outputs = right(*inputs)
            wrong = [self.alter(each) for each in (outputs if isinstance(outputs, tuple) else [outputs])]
            return tuple(wrong) if isinstance(outputs, tuple) else wrong[0]

        made: Any = run
        made.ops = right.ops
        return run

    def alter(self, output: Tensor) -> Tensor:
        return output * 2 if output.numel() == self.size else output


@pytest.mark.rule("NUM-03")
def test_what_is_wrong_in_a_pack_is_judged_alone() -> None:
    claim = claim_on(ADD)
    cases = plan_cases(claim, IntegerBackend().capabilities())
    [size, *_] = [math.prod(case.inputs[0].shape) for case in cases[5:] if not isinstance(case, str)]
    backend = WrongAlone(size)
    packed, alone = checks_of(backend, claim), checks_of(WrongAlone(size), claim, may_pack=False)
    assert packed["numerics"].verdict is Verdict.REFUTED and rows(packed) == rows(alone)
    assert 0 < backend.outputs.count(1) < cases_of(claim), "the others of its pack are not lowered again"


class RaisesAlone(Counted):
    """Cannot lower a model of one pattern."""

    def lower(self, reference_model: GraphModule, example_inputs: tuple[Any, ...]) -> Callable[..., Any]:
        lowered = super().lower(reference_model, example_inputs)
        if self.outputs[-1] == 1:
            raise RuntimeError("one pattern")
        return lowered


@pytest.mark.rule("LOW-01")
def test_what_is_right_only_in_a_pack_is_found() -> None:
    """By the first case, which is lowered alone, but for the profile quick."""
    checks = checks_of(RaisesAlone(), claim_on(ADD))
    assert (checks["lower"].verdict, checks["lower"].failing) == (Verdict.REFUTED, 1)


class WrongTogether(Counted):
    """Gives other results, or raises, where a model is of several patterns."""

    def __init__(self, alter: Callable[[tuple[Tensor, ...]], Any]) -> None:
        super().__init__()
        self.alter = alter

    def lower(self, reference_model: GraphModule, example_inputs: tuple[Any, ...]) -> Callable[..., Any]:
        right: Any = super().lower(reference_model, example_inputs)
        if self.outputs[-1] == 1:
            return right  # type: ignore[no-any-return]
        run: Any = lambda *inputs: self.alter(right(*inputs))  # noqa: E731
        run.ops = right.ops
        return run  # type: ignore[no-any-return]


def _refuse(outputs: tuple[Tensor, ...]) -> Any:
    raise RuntimeError("two patterns")


@pytest.mark.rule("LOW-01")
@pytest.mark.parametrize(
    "alter",
    [_refuse, lambda outputs: outputs[0], lambda outputs: outputs[:-1], lambda outputs: (*outputs[1:], outputs[0]),
     lambda outputs: tuple(each * 2 for each in outputs), lambda outputs: None],
)  # fmt: skip
def test_what_is_wrong_only_in_a_pack_refutes_nothing(alter: Callable[[tuple[Tensor, ...]], Any]) -> None:
    """The first pack shows that nothing is right in one: all cases are then lowered alone."""
    backend, claim = WrongTogether(alter), claim_on(ADD)
    assert {check.verdict for check in checks_of(backend, claim).values()} == {Verdict.VERIFIED}
    assert backend.outputs == [MOST_PACKED - 1, *[1] * cases_of(claim)]


class Unsteady(Counted):
    """Gives zeros in other layouts than contiguous ones; ``only_packed``: in a model of several patterns."""

    def __init__(self, *, only_packed: bool) -> None:
        super().__init__()
        self.only_packed = only_packed

    def lower(self, reference_model: GraphModule, example_inputs: tuple[Any, ...]) -> Callable[..., Any]:
        right: Any = super().lower(reference_model, example_inputs)
        is_pack = self.outputs[-1] > 1

        def run(*inputs: Tensor) -> Any:
            outputs = right(*inputs)
            if all(each.is_contiguous() for each in inputs) or (self.only_packed and not is_pack):
                return outputs
            return tuple(each * 0 for each in outputs) if is_pack else outputs * 0

        made: Any = run
        made.ops = right.ops
        return run


@pytest.mark.rule("NUM-07")
@pytest.mark.parametrize("only_packed", [True, False])
def test_what_differs_under_a_change_is_run_again_alone(only_packed: bool) -> None:
    backend, claim = Unsteady(only_packed=only_packed), claim_on(ADD)
    check = checks_of(backend, claim)["invariance"]
    assert check.verdict is (Verdict.VERIFIED if only_packed else Verdict.REFUTED)
    assert 0 < backend.outputs.count(1) < cases_of(claim), "those that are run again are lowered alone"
    alone = checks_of(Unsteady(only_packed=only_packed), claim, may_pack=False)["invariance"]
    assert encode(check) == encode(alone)


class Reports(Counted):
    """Reports what a test says of the names of a model's ops."""

    def __init__(self, report: Callable[[Sequence[str]], Execution | None]) -> None:
        super().__init__()
        self.report = report

    def execution(self, lowered: Any) -> Execution | None:
        return self.report(lowered.ops)


def _is_third(name: str) -> bool:
    return name.startswith("part2_")


@pytest.mark.rule("LOW-04")
@pytest.mark.parametrize(
    ("report", "lowered"),
    [
        pytest.param(lambda ops: None, [11, *[1] * 40], id="says nothing"),
        pytest.param(lambda ops: None if len(ops) > 1 else Execution(quantized_ops=tuple(ops), float_fallbacks=()),
                     [11, *[1] * 40], id="says nothing of packs"),
        pytest.param(lambda ops: Execution(quantized_ops=("a kernel",), float_fallbacks=()), [11, *[1] * 40],
                     id="names no part"),
        pytest.param(lambda ops: Execution(quantized_ops=tuple(name for name in ops if not _is_third(name)),
                     float_fallbacks=()), [11, 1, 1, 12, 1, 12, 1, 4, 1], id="leaves one out"),
        pytest.param(lambda ops: Execution(quantized_ops=tuple(ops), float_fallbacks=tuple(filter(_is_third, ops))),
                     [11, 1, 1, 12, 1, 12, 1, 4, 1], id="names one in float"),
        pytest.param(lambda ops: Execution(quantized_ops=tuple(ops), float_fallbacks=("a layer",) * (len(ops) > 1)),
                     [11, *[1] * 40], id="a layer in float is of no part"),
        pytest.param(lambda ops: Execution(quantized_ops=tuple(ops), float_fallbacks=tuple(
                     [*filter(_is_third, ops), "a layer"] if len(ops) == MOST_PACKED else [])),
                     [11, 1, 12, 11, 1, 12, 11, 1, 4], id="it is gone with the part in float"),
    ],
)  # fmt: skip
def test_a_part_counts_where_the_report_says_that_it_is_quantized(
    report: Callable[[Sequence[str]], Execution | None], lowered: list[int]
) -> None:
    backend, claim = Reports(report), claim_on(ADD)
    assert cases_of(claim) == 40
    verdict = checks_of(backend, claim)["execution"].verdict
    assert verdict is (Verdict.UNSHOWN if report(["add"]) is None else Verdict.VERIFIED)
    assert backend.outputs == lowered


@pytest.mark.slow
@pytest.mark.parametrize("ends", ["dies", "hangs"])
def test_a_process_that_a_pack_has_cost_costs_no_claim(tmp_path: Path, ends: str) -> None:
    """The claims are run again, with each case alone."""
    marker = str(tmp_path / "process") if ends == "hangs" else ""
    ran = run(tmp_path, "fakes:DiesInPacks", "--claim=nn.Linear/*", "--claim-timeout=10", FAKE_MARKER=marker)
    assert {claim.verdict for claim in ran.results.claims} == {Verdict.VERIFIED} and ran.status == 0, ran.said
    assert all(claim.lowerings > 1 for claim in ran.results.claims)


def test_a_message_says_when_cases_are_packed() -> None:
    """A process that is lost later on is lost by no case that is known."""
    claim = claim_on(ADD)
    bench = Bench(IntegerBackend(), seed=0, profile="full")
    for may_pack in (True, False):
        begun = [each for each in run_claim(bench, claim, may_pack=may_pack) if isinstance(each, Begin)]
        assert any(each.is_packed for each in begun) is may_pack
