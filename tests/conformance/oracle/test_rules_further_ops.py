"""The oracle's rules of further ops, and of modules with a forward of their own: against exact arithmetic."""

from __future__ import annotations

import math
import operator
from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest
import torch
import torch.ao.nn.intrinsic as nni
import torch.nn.functional as F
from torch import Tensor, nn

from fx_quant_conformance.backends.base import Capabilities
from fx_quant_conformance.conformance.bounds.error_bounds import (
    NoOracleError,
    OpCall,
    U,
    Value,
    bound_evaluation,
    gamma,
)
from fx_quant_conformance.conformance.oracle.evaluate import Walk
from fx_quant_conformance.conformance.oracle.exact import Exact
from fx_quant_conformance.conformance.oracle.table import OP_RULES
from fx_quant_conformance.refimpl import BackendConfig, BackendPatternConfig, DTypeConfig
from tests.conformance.support.flows import Two, activation_range, converted, drawn_integers, on_grid

SCALE, ZERO = 2.0**-4, 96  # -6 … 9.9375
STEP = Fraction(SCALE)


def quantized(op: Any, model: nn.Module, *integers: Tensor, **capabilities: bool) -> Exact:
    """The exact result of an op on integers of one grid."""
    entry = BackendPatternConfig(op).set_dtype_configs([DTypeConfig(torch.quint8, torch.quint8)])
    config = BackendConfig("one op").set_backend_pattern_config(entry)
    inputs = tuple(on_grid(q, scale=SCALE, zero_point=ZERO) for q in integers)
    ranges = [activation_range(scale=SCALE, zero_point=ZERO)] * len(inputs)
    reference = converted(model, ranges, config=config, output=[inputs])
    (exact,) = Walk(reference, Capabilities(**capabilities)).exact(inputs)  # type: ignore[arg-type]
    return exact


def real(integer: float) -> Fraction:
    return (Fraction(integer) - ZERO) * STEP


def agree(exact: Exact, expected: list[Fraction]) -> None:
    found = exact.real.flatten().tolist()
    assert len(found) == len(expected)
    assert all(abs(Fraction(a) - b) < Fraction(1, 2**40) for a, b in zip(found, expected, strict=True))
    assert len(set(expected)) > 1


def test_a_division_by_a_tensor_is_decided_where_that_is_not_zero() -> None:
    q, divisor = drawn_integers(64, seed=1), drawn_integers(64, seed=2).clamp(min=ZERO + 1)
    divided = quantized(operator.truediv, Two(operator.truediv), q, divisor)
    agree(divided, [real(a) / real(b) for a, b in zip(q.tolist(), divisor.tolist(), strict=True)])
    assert bool(divided.decided.all())


@pytest.mark.parametrize(
    ("module", "mode"),
    [
        (nn.ZeroPad2d(1), "constant"),
        (nn.ConstantPad2d(1, 0.3), "constant"),
        (nn.ReflectionPad2d(1), "reflect"),
        (nn.ReplicationPad2d(1), "replicate"),
        (nn.CircularPad2d(1), "circular"),
    ],
)
def test_errors_move_with_what_is_padded_and_a_constant_has_none(module: nn.Module, mode: str) -> None:
    x = torch.rand(1, 2, 3, 3).double()
    error = torch.rand_like(x)
    call = call_of(module, Value(real=x, errors={"upstream": error}))
    assert torch.equal(OP_RULES[type(module)].bound(call)["upstream"], F.pad(error, (1, 1, 1, 1), mode=mode))


@pytest.mark.rule("NUM-03")
def test_upsampling_modules_interpolate() -> None:
    """Sample k of 4 along an axis of 2 is at k/2 − 1/4; with aligned corners at k/3."""
    q = drawn_integers(1, 1, 1, 2, seed=4).flatten()
    a, b = map(real, q.tolist())
    image = q.reshape(1, 1, 1, 2)
    for op, model, weights in (
        (nn.Upsample, nn.Upsample(scale_factor=(1, 2), mode="bilinear"), [Fraction(n, 4) for n in (0, 1, 3, 4)]),
        (nn.UpsamplingBilinear2d, nn.UpsamplingBilinear2d((1, 4)), [Fraction(n, 3) for n in range(4)]),
        (nn.UpsamplingNearest2d, nn.UpsamplingNearest2d((1, 4)), [Fraction(n // 2) for n in range(4)]),
        (nn.Upsample, nn.Upsample((1, 4)), [Fraction(n // 2) for n in range(4)]),
    ):
        exact = quantized(op, nn.Sequential(model), image)
        agree(exact, [(1 - weight) * a + weight * b for weight in weights])
        is_nearest = model.mode == "nearest"
        assert bool(exact.errors.get("function", torch.zeros(1)).any()) != is_nearest


# -- bounds -----------------------------------------------------------------------------------------------------------


def call_of(function: Any, *args: Any, **kwargs: Any) -> OpCall:
    call = OpCall(function=function, args=args, kwargs=kwargs, capabilities=Capabilities())
    return replace(call, result=call.evaluate(lambda value: value.real.clone(), lambda tensor: tensor.double()))


@pytest.mark.rule("NUM-04")
def test_the_step_of_a_softplus_at_its_threshold_is_in_the_bound_and_nowhere_else() -> None:
    """At βx = T = 3 it falls by log(1 + e⁻³) / β, more than an error of 2⁻⁷ would move it."""
    x = torch.tensor([0.5, 1.495, 1.505, 3.0]).double()
    value = Value(real=x, errors={"upstream": torch.full_like(x, 2.0**-7)})
    call = call_of(F.softplus, value, beta=2.0, threshold=3.0)
    step = math.log1p(math.exp(-3.0)) / 2
    allowed = OP_RULES[F.softplus].bound(call)["upstream"].tolist()
    assert allowed == pytest.approx([2.0**-7, step, step, 2.0**-7], rel=1e-3)
    moved = F.softplus(x + torch.tensor([1.0, 1.0, -1.0, 1.0]) * 2.0**-7, 2.0, 3.0)
    distance = (moved - call.result).abs()
    assert bool((distance <= torch.tensor(allowed).double() + 1e-9).all())
    assert bool((distance[1:3] > 2 * 2.0**-7).all()), "the step is met"


@pytest.mark.rule("NUM-04")
def test_errors_of_a_prelus_slopes_are_carried_on_where_it_may_be_negative() -> None:
    x = torch.tensor([[-2.0, 3.0, 0.25]]).double()
    slopes = torch.tensor([0.5, 0.5, -1.5]).double()
    off = Value(real=slopes, errors={"weights": torch.full_like(slopes, 0.125)})
    value = Value(real=x, errors={"upstream": torch.full_like(x, 0.5)})
    errors = OP_RULES[F.prelu].bound(call_of(F.prelu, value, off))
    assert errors["weights"].flatten().tolist() == [2.5 * 0.125, 0.0, 0.25 * 0.125]
    assert errors["upstream"].flatten().tolist() == [0.5 * 0.625, 0.5, 0.5 * 1.625]


@pytest.mark.rule("NUM-04")
def test_the_bound_on_a_vendors_op_follows_its_slope() -> None:
    x = torch.tensor([-3.0, 0.0, 2.0]).double()
    errors = bound_evaluation(
        2, call_of(lambda v: v.square(), Value(real=x, errors={"upstream": torch.full((3,), 0.25)}))
    )
    assert errors["upstream"].tolist() == [9.0 - 2.75**2 + 2 * 0.25**2, 0.25, 1.0625]
    dequantized = [2 * 3.0 * 2 * U * 3.0, 0.0, 2 * 2.0 * 2 * U * 2.0]
    assert errors["function"].tolist() == pytest.approx(
        [gamma(2) * y + d for y, d in zip((9.0, 0.0, 4.0), dequantized, strict=True)], rel=1e-5
    )
    logarithm = bound_evaluation(1, call_of(torch.log, Value(real=x[2:], errors={"upstream": torch.full((1,), 4.0)})))
    assert logarithm["upstream"].tolist() == [4.0], "of −2 there is none, at 6 it is off by less"
    summed = bound_evaluation(1, call_of(lambda v: v.sum(), Value(real=x, errors={"upstream": torch.tensor(0.5)})))
    assert float(summed["upstream"]) == 1.5


# -- modules with a forward of their own ------------------------------------------------------------------------------


class Joined(nni._FusedModule):  # type: ignore[name-defined,misc]
    def __init__(self, scale: int) -> None:
        super().__init__(nn.Hardtanh(-4, 4), nn.ReLU())
        self.scale = scale

    def forward(self, x: Tensor, y: Tensor | None = None) -> Any:
        first = self[0](x)
        return self[1](first if y is None else torch.sub(first, y, alpha=self.scale)), first


class Choosing(Joined):
    def forward(self, x: Tensor, y: Tensor | None = None) -> Any:
        return self[0](x) if bool((x > 0).all()) else x


class Leaves(torch.fx.Tracer):
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return isinstance(m, nni._FusedModule)  # type: ignore[attr-defined]


def walk_of(model: nn.Module) -> Walk:
    return Walk(torch.fx.GraphModule(model, Leaves().trace(model)))


class Holds(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor, y: Tensor) -> Any:
        joined, first = self.inner(x, y=y)
        return joined, first, self.inner(y)[0]


class HoldsSum(Holds):
    def forward(self, x: Tensor, y: Tensor) -> Any:
        return self.inner(x, y)


def test_a_fused_module_is_evaluated_by_its_own_forward() -> None:
    x, y = torch.tensor([5.0, -1.0]), torch.tensor([1.0, -2.0])
    joined, first, other = walk_of(Holds(Joined(3))).exact((x, y))
    assert joined.real.tolist() == [1.0, 5.0] and first.real.tolist() == [4.0, -1.0]
    assert other.real.tolist() == [1.0, 0.0]
    assert float(joined.errors["rescale"].min()) > 0, "what the forward calls has its rules"


def test_a_forward_that_cannot_be_traced_has_no_oracle() -> None:
    with pytest.raises(NoOracleError, match="the forward of Choosing cannot be traced: TraceError"):
        walk_of(Holds(Choosing(1))).exact((torch.ones(2), torch.ones(2)))


def test_torchs_own_fused_sums_are_what_they_were() -> None:
    module: Any = nni.ConvAddReLU2d(nn.Conv2d(1, 1, 1), torch.add, nn.ReLU())  # type: ignore[no-untyped-call]
    module[0].weight.data.fill_(2.0)
    module[0].bias.data.fill_(0.5)
    (exact,) = walk_of(HoldsSum(module)).exact((torch.tensor([[[[1.0, -3.0]]]]), torch.tensor([[[[0.25, 0.5]]]])))
    assert exact.real.flatten().tolist() == [2.75, 0.0]
