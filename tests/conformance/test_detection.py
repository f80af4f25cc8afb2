"""The suite finds every seeded fault, and refutes no honest backend (rules NUM-03 to NUM-07)."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch
from faults import FAULTS, MOVING, RATIO, RELU_AFTER, RESCALED, WEIGHTED, Fault, Make, varied
from integer_kernels import IntegerBackend, Integers, Kernels, Sum
from torch import Tensor

from conformance.checks import Check
from conformance.claims import Claim, enumerate_claims
from conformance.pipeline import STAGES, Workbench
from reports.results import Verdict

SEVERITY = (Verdict.VERIFIED, Verdict.QUALITY, Verdict.FALLBACK, Verdict.REFUTED)


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


@cache
def converted(claim: Claim, seed: int) -> Workbench:
    """A workbench with the claim taken as far as to the reference model, which all kernels have in common."""
    bench = Workbench(IntegerBackend(), seed=seed, profile="quick", max_examples=None)
    assert bench.check(claim, "convert").verdict is Verdict.VERIFIED
    return bench


def numerics(kernels: Make, claim: Claim, seed: int = 0, **capabilities: Any) -> Check:
    bench = converted(claim, seed)
    bench.backend = IntegerBackend(kernels, **capabilities)
    bench.capabilities = bench.backend.capabilities()
    run = bench._run
    assert run is not None
    run.ended = None
    for stage in STAGES[STAGES.index("lower") :]:
        run.checks.pop(stage, None)
    return bench.check(claim, "numerics")


def told(check: Check) -> str:
    return f"{check.verdict.value} by {check.rule}: {check.message} {dict(check.evidence)}"


@pytest.mark.rule("NUM-03")
@pytest.mark.rule("NUM-05")
@pytest.mark.rule("NUM-07")
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_seeded_fault_is_found_on_every_claim_that_it_touches(fault: Fault) -> None:
    survived = []
    claims = list(claims_of(fault))
    for claim in claims:
        check = numerics(fault.kernels, claim, **fault.capabilities)
        is_found = SEVERITY.index(check.verdict) >= SEVERITY.index(fault.verdict)
        is_named = check.rule == fault.rule or check.verdict is not Verdict.REFUTED
        if not (is_found and is_named):
            survived.append(f"{claim}: {told(check)}")
    assert claims
    assert not survived, "\n".join(survived)


def half_away(honest: Any, value: Tensor) -> Tensor:
    return value.sign() * (value.abs() + 0.5).floor()


def half_up(honest: Any, value: Tensor) -> Tensor:
    return (value + 0.5).floor()


def float32(honest: Any, total: Tensor, ratio: Tensor) -> Tensor:
    return (total.float() * ratio.float()).double()


def fixed_point(honest: Any, total: Tensor, ratio: Tensor) -> Tensor:
    """A 31-bit mantissa and a shift, as gemmlowp's kernels have them."""
    mantissa, exponent = torch.frexp(ratio)
    result: Tensor = honest(total, (mantissa * 2.0**31).round() * 2.0**-31 * 2.0 ** exponent.double())
    return result


def add_float32(honest: Any, x: Integers, y: Integers) -> Sum:
    """Dequantizes both in float32 and adds: the sum may cancel, the operands' rounding does not."""
    first, second = ((value.centred() * value.scale).float() for value in (x, y))
    return Sum(total=(first + second).double(), scale=torch.ones(()).double())


def add_ratios(honest: Any, x: Integers, y: Integers) -> Sum:
    """Rescales each operand by a ratio that was rounded to float32 and a product that was."""
    ratios = [(value.scale * 77).float() for value in (x, y)]
    products = [value.centred().float() * ratio for value, ratio in zip((x, y), ratios, strict=True)]
    return Sum(total=(products[0] + products[1]).double(), scale=torch.ones(()).double() / 77)


def bias_int32(honest: Any, total: Sum, bias: Tensor) -> Any:
    return honest(total, (bias / total.scale).round() * total.scale)


def relu_first(honest: Any, value: Tensor, grid: Integers, *, rectified: bool) -> Tensor:
    """Clamps at the zero point first and to the range then."""
    floor = grid.zero_point if rectified else torch.tensor(float(grid.low))
    result: Tensor = honest(torch.maximum(value, floor), grid, rectified=False)
    return result


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


@pytest.mark.rule("NUM-03")
@pytest.mark.rule("NUM-04")
@pytest.mark.rule("NUM-06")
@pytest.mark.parametrize("seed", (0, 1))
@pytest.mark.parametrize(("name", "kernels", "patterns", "capabilities"), HONEST, ids=[row[0] for row in HONEST])
def test_an_honest_backend_is_verified(
    name: str, kernels: Make, patterns: tuple[str, ...], capabilities: dict[str, Any], seed: int
) -> None:
    checks = {claim: numerics(kernels, claim, seed, **capabilities) for claim in claims_on(*patterns)}
    wrong = [f"{claim}: {told(check)}" for claim, check in checks.items() if check.verdict is not Verdict.VERIFIED]
    assert checks
    assert not wrong, "\n".join(wrong)


@pytest.mark.rule("NUM-04")
def test_an_int32_bias_that_is_not_declared_is_of_lesser_quality_at_most() -> None:
    """It reaches 0.5 + 0.5·s_x·s_w/s_y, which shows where an exact result happens to be that close to a tie."""
    found = {numerics(varied("with_bias", bias_int32), claim).verdict for claim in claims_on(*WEIGHTED)}
    assert found <= {Verdict.VERIFIED, Verdict.QUALITY}
    assert Verdict.QUALITY in found


@pytest.mark.rule("NUM-03")
@pytest.mark.parametrize("bits", (12, 14))
def test_a_ratio_off_by_little_shows_where_it_carries_a_result_over_a_tie(bits: int) -> None:
    """|r|·2⁻ⁿ of a step at a result r: at n = 12 some result of some case is that close to a tie."""

    def off(honest: Any, total: Tensor, ratio: Tensor) -> Any:
        return honest(total, ratio * (1 + 2.0**-bits))

    verdicts = [numerics(varied("rescale", off), claim).verdict for claim in claims_on("torch.conv2d", "operator.add")]
    assert set(verdicts) <= {Verdict.VERIFIED, Verdict.QUALITY}
    assert verdicts.count(Verdict.QUALITY) >= len(verdicts) - 1 if bits == 12 else Verdict.QUALITY in verdicts


def test_every_step_of_the_kernels_has_a_fault_and_every_name_is_its_own() -> None:
    names = [fault.name for fault in FAULTS]
    assert len(set(names)) == len(names)
    assert all(list(claims_of(fault)) for fault in FAULTS)
