"""However an op is called, its claim has the same verdicts, and a model with it is judged the same."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn
from torch._jit_internal import boolean_dispatched
from torch.fx.operator_schemas import get_signature_for_torch_op

from fx_quant_conformance.conformance.claims.build import build_model
from fx_quant_conformance.conformance.claims.case import Case
from fx_quant_conformance.conformance.claims.claim import Claim, enumerate_claims
from fx_quant_conformance.conformance.claims.effort import Effort
from fx_quant_conformance.conformance.claims.inputs import draw_calibration_inputs
from fx_quant_conformance.conformance.claims.kinds import Kind
from fx_quant_conformance.conformance.claims.plan import plan_cases
from fx_quant_conformance.conformance.ops import op_model
from fx_quant_conformance.conformance.ops.op_model import PatternModel, Step
from fx_quant_conformance.conformance.oracle.grids import place_on_grids
from fx_quant_conformance.conformance.pipeline.claim_run import run_claim
from fx_quant_conformance.conformance.stages.bench import Bench
from fx_quant_conformance.conformance.whole_models.judging import judge_model
from fx_quant_conformance.conformance.whole_models.setups import ModelSetup, activation_dtypes_of
from fx_quant_conformance.conformance.whole_models.units import ModelUnit
from fx_quant_conformance.refimpl.config.patterns import leaf_name
from fx_quant_conformance.reports.schema import Check
from fx_quant_conformance.reports.verdicts import Verdict
from tests.conformance.support.fake_backends.reporting import ReportingReference

pytestmark = pytest.mark.slow
Verdicts = list[tuple[str, Verdict]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Spelling:
    """How a call is written: how many arguments by position, and whether defaults are written out."""

    positions: int
    keeps_defaults: bool


BY_NAME = Spelling(positions=0, keeps_defaults=False)
SPELLINGS = st.builds(Spelling, positions=st.integers(0, 8), keeps_defaults=st.booleans())


@cache
def signatures_of(op: Any) -> tuple[inspect.Signature, ...]:
    """The signatures of a function, or of the torch function with a method's name; those that name each argument."""
    op = getattr(torch, op, None) if isinstance(op, str) else op
    if op in boolean_dispatched:  # which of two functions is called, one of its arguments says
        op = boolean_dispatched[op]["if_true"]
    try:
        found = [inspect.signature(op)]
    except (TypeError, ValueError):
        found = list(get_signature_for_torch_op(op) or ())
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return tuple(each for each in found if all(p.kind in named for p in each.parameters.values()))


def spell(
    op: Any, spelling: Spelling, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[list[Any], dict[str, Any]]:
    """The same arguments, written in another way; as they are where no signature names them."""
    for signature in signatures_of(op):
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError:
            continue
        if spelling.keeps_defaults:
            bound.apply_defaults()
        named, defaults = dict(bound.arguments), signature.parameters
        if not spelling.keeps_defaults:
            named = {name: value for name, value in named.items() if not _is_default(value, defaults[name].default)}
        first = list[Any]()
        for name, parameter in defaults.items():
            is_receiver = isinstance(op, str) and not first
            if name not in named or parameter.kind is parameter.KEYWORD_ONLY:
                break
            if len(first) >= spelling.positions and not is_receiver:
                break
            first.append(named.pop(name))
        return first, named
    return list(args), kwargs


def _is_default(value: Any, default: Any) -> bool:
    return isinstance(value, (bool, int, float, str, type(None))) and type(value) is type(default) and value == default


class Spelled:
    """Calls the steps of patterns in another way; counts the calls that are not what they were."""

    def __init__(self, spelling: Spelling) -> None:
        self.spelling, self.changed = spelling, 0

    def call(self, model: PatternModel, number: int, step: Step, values: tuple[Any, ...]) -> Any:
        """Take the place of ``PatternModel._call_step``."""
        if isinstance(step.op, nn.Module):
            return step.op(*values, **dict(step.keywords))
        names = (*op_model._PARAMETERS[: len(step.parameters)], *op_model._STATISTICS[: len(step.statistics)])
        tensors = (list(values),) if step.takes_list else values
        given = (*tensors, *(getattr(model, f"{name}{number}") for name in names), *step.arguments)
        args, kwargs = spell(step.op, self.spelling, given, dict(step.keywords))
        self.changed += (len(args), kwargs.keys()) != (len(given), dict(step.keywords).keys())
        if isinstance(step.op, str):
            return getattr(args[0], step.op)(*args[1:], **kwargs)
        return step.op(*args, **kwargs)


@cache
def bench() -> Bench:
    """Tries one case of each claim."""
    made = Bench(ReportingReference(), seed=0, profile="quick")
    made.effort, made.shares = Effort(cases=1, directed=1, further=1, random=0), {}
    return made


@cache
def claims() -> dict[str, Claim]:
    """A claim of each function and each method that is claimed alone."""
    found = enumerate_claims(bench().config, bench().capabilities)
    return {
        leaf_name(claim.ops[0]): claim
        for claim in reversed(found)
        if len(claim.ops) == 1 and not isinstance(claim.ops[0], type) and claim.kind in (Kind.STATIC, Kind.FIXED)
        if claim.flow == "ptq" and (signatures_of(claim.ops[0]) or hasattr(torch.Tensor, str(claim.ops[0])))
    }


def first_case(claim: Claim) -> Case:
    """The first case of a claim."""
    cases = plan_cases(claim, bench().capabilities, limit=1)
    assert not isinstance(cases, str), cases
    return cases[0]


def judge(claim: Claim) -> Verdicts:
    """The verdicts on a claim, and on its first case as a model that is handed in."""
    found = [(each.stage, each.verdict) for each in run_claim(bench(), claim) if isinstance(each, Check)]
    case = first_case(claim)
    setup = ModelSetup(
        flow="ptq", activation=activation_dtypes_of([claim, *claims().values()])[0], scheme="per_tensor_symmetric"
    )
    batches = draw_calibration_inputs(case)
    unit = ModelUnit(
        id=f"model/own/{claim.pattern}",
        model=build_model(case),
        claims=list(claims().values()),
        setup=setup,
        calibration=batches,
        draw=lambda reference: [place_on_grids(reference, batch) for batch in batches],
        is_bounded=False,
        takes_apart=True,
    )
    judging = judge_model(bench(), unit)
    while True:
        try:
            next(judging)
        except StopIteration as ended:
            return [*found, ("model", ended.value.check.verdict)]


@cache
def judge_as_sampled(name: str) -> Verdicts:
    return judge(claims()[name])


NOT_CALLED_OTHERWISE = {
    *(".contiguous", ".detach", ".detach_", ".mean", ".permute", ".relu", ".relu_", ".repeat", ".reshape", ".resize_"),
    *(".sigmoid", ".sigmoid_", ".squeeze", ".squeeze_", ".tanh", ".tanh_", ".unsqueeze_", ".view"),
    "F.instance_norm",  # the samples call it by a function of their own
}
"""Methods without arguments as they are first sampled, or with numbers one by one, and some that no function names."""


def test_nearly_all_can_be_called_otherwise() -> None:
    assert len(claims()) > 60
    unchanged = set()
    for name, claim in claims().items():
        spelled = Spelled(BY_NAME)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(PatternModel, "_call_step", lambda *given, to=spelled: to.call(*given))
            build_model(first_case(claim))
        unchanged |= {name} if spelled.changed == 0 else set()
    assert unchanged == NOT_CALLED_OTHERWISE


@pytest.mark.parametrize("name", sorted(claims().keys() - NOT_CALLED_OTHERWISE))
@given(spelling=SPELLINGS)
@example(spelling=BY_NAME)
@settings(max_examples=1, derandomize=True, deadline=None)
def test_an_op_is_judged_the_same_however_it_is_called(name: str, spelling: Spelling) -> None:
    expected, spelled = judge_as_sampled(name), Spelled(spelling)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PatternModel, "_call_step", lambda *given: spelled.call(*given))
        assert judge(claims()[name]) == expected
