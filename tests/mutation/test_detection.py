"""The suite finds every seeded fault, and refutes no honest backend (rules NUM-03 to NUM-07).

What the pipeline does for each set of kernels is done here once for all of them: a claim's cases are prepared and
converted, inputs drawn and exact results computed as soon as some kernels need them, in the order of the full profile.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest
import torch
from torch.fx import GraphModule

import tests.mutants.integer_faults
import tests.mutants.requantize_kinds  # noqa: F401  (both enter theirs in the table)
from fx_quant_conformance.backends.base import Capabilities
from fx_quant_conformance.conformance.claims.build import build_model
from fx_quant_conformance.conformance.claims.case import Case
from fx_quant_conformance.conformance.claims.claim import Claim, enumerate_claims
from fx_quant_conformance.conformance.claims.effort import PROFILES
from fx_quant_conformance.conformance.claims.inputs import NamedInputs, draw_static_inputs
from fx_quant_conformance.conformance.claims.plan import plan_cases
from fx_quant_conformance.conformance.machine.fault import FaultFound
from fx_quant_conformance.conformance.oracle.evaluate import Walk
from fx_quant_conformance.conformance.oracle.exact import Exact
from fx_quant_conformance.conformance.oracle.grids import Grid, placeholder_grids
from fx_quant_conformance.conformance.pipeline.claim_run import run_claim
from fx_quant_conformance.conformance.stages.bench import Bench
from fx_quant_conformance.conformance.stages.calibration import prepare_case
from fx_quant_conformance.conformance.stages.comparison import Comparison, compare_all
from fx_quant_conformance.conformance.stages.lower import run_lowered
from fx_quant_conformance.conformance.stages.numerics import judge_comparisons, report_failed_run
from fx_quant_conformance.refimpl import convert_to_reference_decomposed_fx
from fx_quant_conformance.reports.schema import Check, Where
from fx_quant_conformance.reports.verdicts import Verdict
from tests.conformance.support.held import hold
from tests.mutants.fault_table import FAULTS, MOVING, RATIO, RELU_AFTER, RESCALED, WEIGHTED, Fault
from tests.mutants.honest import (
    add_float32,
    add_ratios,
    bias_int32,
    fixed_point,
    float32,
    half_away,
    half_up,
    relu_first,
)
from tests.mutants.integer_kernels import LIMITS, IntegerBackend, Kernels, Make, small_config, varied

SEVERITY = (Verdict.VERIFIED, Verdict.TOLERATED, Verdict.FALLBACK, Verdict.REFUTED)
FEW = 6
"""Cases of a claim on which an honest backend is tried; the claims of an op choose different ones."""


@cache
def all_claims() -> tuple[Claim, ...]:
    backend = IntegerBackend()
    return enumerate_claims(backend.backend_config(), backend.capabilities())


def claims_on(*patterns: str) -> list[Claim]:
    """The static claims on patterns that have integer activations."""
    static = [claim for claim in all_claims() if claim.flow == "ptq" and not claim.dtypes.is_dynamic]
    return [c for c in static if c.pattern in patterns and c.dtypes.input_dtype in (torch.quint8, torch.qint8)]


def claims_of(fault: Fault) -> Iterator[Claim]:
    for claim in claims_on(*fault.patterns):
        is_dtype = any(dtype in claim.dtype_config for dtype in fault.dtypes)
        if is_dtype and (claim.scheme == "per_channel_symmetric" or not fault.per_channel):
            yield claim


# -- a claim's cases, with what all kernels have in common ------------------------------------------------------------


@dataclass(kw_only=True)
class Tried:
    """One case as far as to the reference model, its inputs, and the exact results for capabilities that were asked."""

    name: str
    reference: GraphModule
    grids: tuple[Grid | None, ...]
    drawn: list[NamedInputs]
    exacts: dict[str, list[tuple[Exact, ...]]] = field(default_factory=dict)

    def exact(self, capabilities: dict[str, Any], number: int) -> tuple[Exact, ...]:
        """The exact results for an input set, computed once."""
        known = self.exacts.setdefault(str(capabilities), [])
        walk = Walk(self.reference, Capabilities(**capabilities))
        known += [walk.exact(inputs) for _, inputs in self.drawn[len(known) : number + 1]]
        return known[number]


@cache
def planned(claim: Claim, limit: int | None) -> tuple[Case, ...]:
    cases = plan_cases(claim, Capabilities(limits=LIMITS), limit=limit)
    assert not isinstance(cases, str), cases
    return cases


@cache
def tried(claim: Claim, limit: int | None, number: int) -> Tried:
    torch.manual_seed(number)
    case = planned(claim, limit)[number]
    reference = convert_to_reference_decomposed_fx(prepare_case(claim, case, build_model(case), small_config()))
    grids, effort = placeholder_grids(reference), PROFILES["full"]
    drawn = draw_static_inputs(case, grids, directed=effort.directed, random=effort.random)
    return Tried(name=case.name, reference=reference, grids=tuple(grids), drawn=drawn)


def comparisons(kernels: Make, one: Tried, capabilities: dict[str, Any], *, moves_only: bool) -> Iterator[Comparison]:
    """Compare what kernels give in a case with the exact results."""
    lowered = hold(IntegerBackend(kernels).lower(one.reference, one.drawn[0].tensors))
    for number, (name, inputs) in enumerate(one.drawn):
        where = Where(case=one.name, input=name)
        try:
            output = run_lowered(lowered, where, inputs)
        except FaultFound as found:
            (fault,) = report_failed_run(found.fault, where, {})
            yield Comparison(where=where, excess=math.inf, is_within_one=False, fault=fault)
            continue
        yield from compare_all(where, one.exact(capabilities, number), output, one.grids, moves_only=moves_only)


def checks(kernels: Make, claim: Claim, limit: int | None = None, **capabilities: Any) -> Iterator[Check]:
    """Judge kernels by one case of a claim after the other."""
    for number in range(len(planned(claim, limit))):
        one = tried(claim, limit, number)
        yield judge_comparisons(claim.id, list(comparisons(kernels, one, capabilities, moves_only=claim.moves_only)))


def severity(check: Check) -> int:
    return SEVERITY.index(check.verdict)


def told(check: Check) -> str:
    return f"{check.verdict.value} by {check.rule}: {check.message} {dict(check.evidence)}"


# -- faults -----------------------------------------------------------------------------------------------------------

NUMERIC = [fault for fault in FAULTS if fault.rule != "NUM-07"]


@pytest.mark.slow
@pytest.mark.rule("NUM-03")
@pytest.mark.rule("NUM-05")
@pytest.mark.parametrize("fault", NUMERIC, ids=lambda fault: fault.name)
def test_a_seeded_fault_is_found_on_every_claim_that_it_touches(fault: Fault) -> None:
    """In some case, at the verdict that it must get at the least, under its rule."""
    survived = []
    for claim in claims_of(fault):
        found = checks(fault.kernels, claim, **fault.capabilities)
        first = next((check for check in found if severity(check) >= SEVERITY.index(fault.verdict)), None)
        if first is None:
            survived.append(f"{claim}: not found")
        elif first.rule != fault.rule and first.verdict is Verdict.REFUTED:
            survived.append(f"{claim}: {told(first)}")
    assert not survived, "\n".join(survived)


@pytest.mark.slow
@pytest.mark.rule("NUM-07")
@pytest.mark.parametrize("fault", [each for each in FAULTS if each.rule == "NUM-07"], ids=lambda fault: fault.name)
def test_a_fault_in_repetition_is_found_by_the_pipeline(fault: Fault) -> None:
    bench = Bench(IntegerBackend(fault.kernels), seed=0, profile="quick")
    for claim in claims_of(fault):
        ended = [each for each in run_claim(bench, claim) if isinstance(each, Check)]
        found = max(ended, key=lambda check: severity(check) if check.verdict in SEVERITY else 0)
        assert (found.verdict, found.rule) == (fault.verdict, "NUM-07"), f"{claim}: {told(found)}"


def test_every_name_is_its_own_and_every_fault_touches_a_claim() -> None:
    names = [fault.name for fault in FAULTS]
    assert len(set(names)) == len(names)
    assert all(list(claims_of(fault)) for fault in FAULTS)


# -- honest kernels ---------------------------------------------------------------------------------------------------


EVERYTHING = (*RESCALED, *RELU_AFTER, *MOVING)
HONEST: list[tuple[str, Make, tuple[str, ...], dict[str, Any]]] = [
    ("exact, half to even", Kernels, EVERYTHING, {}),
    ("ties away from zero", varied("rounded", half_away), RESCALED, {}),
    ("ties up", varied("rounded", half_up), RESCALED, {}),
    ("rescale in float32", varied("rescale", float32), RATIO, {}),
    ("rescale by a 31-bit multiplier", varied("rescale", fixed_point), RATIO, {}),
    ("bias as int32, declared", varied("with_bias", bias_int32), (*WEIGHTED, "nn.Conv2d"), {"int32_bias": True}),
    ("add in float32", varied("add", add_float32), ("operator.add", "operator.add+nn.ReLU"), {}),
    ("add of rescaled operands", varied("add", add_ratios), ("operator.add", "operator.add+nn.ReLU"), {}),
    ("relu before the range", varied("clamped", relu_first), RELU_AFTER, {}),
]


@pytest.mark.slow
@pytest.mark.rule("NUM-03")
@pytest.mark.rule("NUM-04")
@pytest.mark.rule("NUM-06")
@pytest.mark.parametrize(("name", "kernels", "patterns", "capabilities"), HONEST, ids=[row[0] for row in HONEST])
def test_an_honest_backend_is_verified(
    name: str, kernels: Make, patterns: tuple[str, ...], capabilities: dict[str, Any]
) -> None:
    found = [(claim, check) for claim in claims_on(*patterns) for check in checks(kernels, claim, FEW, **capabilities)]
    wrong = [f"{claim}: {told(check)}" for claim, check in found if check.verdict is not Verdict.VERIFIED]
    assert len(found) >= 2 * FEW
    assert not wrong, "\n".join(wrong)


def verdicts(method: str, body: Callable[..., Any], *patterns: str) -> list[set[Verdict]]:
    """What each claim's cases make of kernels with one step replaced."""
    return [{check.verdict for check in checks(varied(method, body), claim, FEW)} for claim in claims_on(*patterns)]


@pytest.mark.slow
@pytest.mark.rule("NUM-04")
def test_an_int32_bias_that_is_not_declared_is_refuted_where_it_shows() -> None:
    """It reaches 0.5 + 0.5·s_x·s_w/s_y, which shows where an exact result happens to be that close to a tie.

    Where the output is much finer than the accumulator, that is more than one step.
    """
    fine = [case.value_range.output < 1 for claim in claims_on(*WEIGHTED) for case in planned(claim, 2 * FEW)]
    kernels = varied("with_bias", bias_int32)
    found = [check for claim in claims_on(*WEIGHTED) for check in checks(kernels, claim, 2 * FEW)]
    assert {check.verdict for check in found} == {Verdict.VERIFIED, Verdict.REFUTED}
    assert all(float(check.max_lsb or 0) < 1 for check, is_fine in zip(found, fine, strict=True) if not is_fine)


@pytest.mark.slow
@pytest.mark.rule("NUM-03")
@pytest.mark.parametrize("bits", (12, 14))
def test_a_ratio_off_by_little_shows_where_it_carries_a_result_over_a_tie(bits: int) -> None:
    """|r|·2⁻ⁿ of a step at a result r: at n = 12 some result of some case is that close to a tie."""
    found = verdicts(
        "rescale", lambda honest, total, ratio: honest(total, ratio * (1 + 2.0**-bits)), "torch.conv2d", "operator.add"
    )
    assert set().union(*found) <= {Verdict.VERIFIED, Verdict.REFUTED}
    shown = sum(Verdict.REFUTED in each for each in found)
    assert shown >= len(found) - 1 if bits == 12 else shown
