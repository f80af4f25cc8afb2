"""Activation functions: how they are called and varied, and how far a right backend may be off (NUM-03, NUM-04).

Every backend may evaluate them in float32 (u, γₙ: error_bounds.py). An error before the function is called grows by its
steepest slope at most; the evaluation adds its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fx_quant_conformance.conformance.bounds.error_bounds import (
    FUNCTION,
    RESCALE,
    Errors,
    OpCall,
    OpRule,
    U,
    Value,
    add_error,
    bound_dequantizing,
    error_of,
    gamma,
    share_out,
)
from fx_quant_conformance.conformance.bounds.extremes import NEGLIGIBLE, may_lead
from fx_quant_conformance.conformance.ops.calls import (
    INPLACE,
    PLACES,
    TENSOR,
    are_axes,
    call,
    construct,
    sample_elementwise,
)
from fx_quant_conformance.conformance.ops.op_model import Step
from fx_quant_conformance.conformance.ops.variants import Arguments, Fixed, OpRecord

# -- rules of elementwise functions -----------------------------------------------------------------------------------

Slope: TypeAlias = Callable[[OpCall, Tensor], Tensor | float]
"""The steepest slope of a function within the whole error of its operand, for a call and that error."""
Evaluation: TypeAlias = Callable[[OpCall], Tensor | float]
"""How far a function of the dequantized value is off, in real units."""


def bound_elementwise(slope: Slope, evaluation: Evaluation, call: OpCall) -> Errors:
    """An elementwise function: errors grow by the steepest slope within them."""
    x = call.values()[0]
    dequantized = bound_dequantizing(x)
    steepest = slope(call, x.error() + dequantized)
    errors = {cause: steepest * error for cause, error in x.errors.items()}
    return add_error(errors, "function", steepest * dequantized + evaluation(call))


def _find_sigmoid_slope(call: OpCall, error: Tensor) -> Tensor:
    """σ' = σ(1 − σ) falls with |x|."""
    nearest = (call.values()[0].real.abs() - error).clamp(min=0).sigmoid()
    return nearest * (1 - nearest)


def _find_tanh_slope(call: OpCall, error: Tensor) -> Tensor:
    """The slope tanh' = 1 − tanh² falls with |x|."""
    return 1 - (call.values()[0].real.abs() - error).clamp(min=0).tanh().square()


def _find_leaky_slope(call: OpCall, error: Tensor) -> float:
    return max(1.0, abs(float(call.option("negative_slope", 1, 0.01))))


def _find_step_of_leaky(call: OpCall) -> Tensor | None:
    """The integers of x are the accumulator, in steps of s_x, or of a·s_x where they are negative."""
    x, slope = call.values()[0], abs(float(call.option("negative_slope", 1, 0.01)))
    if x.step is None or x.step.numel() > 1 or not slope:
        return None
    return torch.where(x.real < 0, slope * x.step, x.step)


def _find_softplus_slope(call: OpCall, error: Tensor) -> Tensor:
    """The slope is σ(βx) ≤ 1. Above the threshold T the function is x, lower by J = log(1 + e⁻ᵀ) / β.

    Where βx, twice rounded, is within the error of T, the result moves by the slope's part or by J, which are opposed:
    by at most the larger one.
    """
    x = call.values()[0].real
    beta, threshold = _read_softplus(call)
    step = math.log1p(math.exp(-threshold)) / beta
    is_near = (beta * x - threshold).abs() <= beta * error + gamma(2) * (beta * x).abs()
    slope: Tensor = torch.where(is_near, step / error.clamp(min=torch.finfo(torch.float64).tiny), 0.0).clamp(min=1.0)
    return slope


def _read_softplus(call: OpCall) -> tuple[float, float]:
    return float(call.option("beta", 1, 1.0)), float(call.option("threshold", 2, 20.0))


def _bound_softplus(call: OpCall) -> Tensor:
    """log(1 + eᵇˣ) / β: the product rounds, u·|βx|·σ(βx) ≤ u·(L + 0.3), L the logarithm.

    An exponential off by 2u moves L by 2u·σ ≤ 2u, the sum by u; the logarithm is within one ulp, 2u·L, and a quotient
    by β or a product with a rounded 1/β rounds twice. In all γ₅·|y| + γ₄ / β.
    """
    bound: Tensor = gamma(5) * call.result.abs() + gamma(4) / _read_softplus(call)[0]
    return bound


def _read_alpha(call: OpCall) -> float:
    return abs(float(call.option("alpha", 1, 1.0)))


def _read_scale(call: OpCall, position: int) -> float:
    """The scale of aten's elu (2), or that of its input (3); functions and modules have none, but `inplace` there."""
    value = call.args[position] if len(call.args) > position else 1.0
    return 1.0 if isinstance(value, bool) else abs(float(value))


def _bound_elu(call: OpCall) -> Tensor | float:
    """The exponential within one ulp (2u), the difference, a, and the product: γ₅·a, as |eᵗ − 1| ≤ 1.

    With scales t = i·x rounds, which moves eᵗ by |t|·eᵗ·u ≤ u, and s·a: γ₇·s·a; s·x rounds twice.
    """
    scale, inner = _read_scale(call, 2), _read_scale(call, 3)
    evaluated = gamma(5 if scale == inner == 1 else 7) * _read_alpha(call) * scale
    return evaluated if scale == 1 else evaluated + gamma(2) * call.result.abs()


def _make_rule(
    name: str,
    slope: Slope,
    evaluation: Evaluation,
    arithmetic: str = FUNCTION,
    step: Callable[[OpCall], Tensor | None] | None = None,
) -> OpRule:
    """RESCALE: a function that is one factor or another, which integers compute as they compute a product."""
    bound = partial(bound_elementwise, slope, evaluation)
    source = f"torch.nn.functional.{name}; NUM-04"
    return OpRule(arithmetic=arithmetic, bound=bound, source=source, accumulator_step=step)


# x, or a·x: a is rounded to float32, and the product.
_LEAKY_RELU = _make_rule(
    "leaky_relu", _find_leaky_slope, lambda call: gamma(2) * call.result.abs(), RESCALE, _find_step_of_leaky
)
# s·x, or s·a·(eᵗ − 1), t = i·x, eᵗ ≤ 1, where s and i are 1 but for aten's own. The slope is s or s·a·i·eᵗ.
_ELU = _make_rule(
    "elu",
    lambda call, error: max(_read_scale(call, 2), _read_alpha(call) * _read_scale(call, 2) * _read_scale(call, 3)),
    _bound_elu,
)
# x·min(max(x + 3, 0), 6) / 6: where the sum is not clamped, |x| ≤ 3, it rounds by 6u and moves the result by u·|x|;
# then a product, and a quotient or a product with a rounded 1/6. Slopes lie between −1/2 and 3/2.
_HARDSWISH = _make_rule("hardswish", lambda call, error: 1.5, lambda call: gamma(4) * call.values()[0].real.abs())
# min(max(x + 3, 0), 6) / 6: the sum, a rounded 1/6, the product; all of at most 1.
_HARDSIGMOID = _make_rule("hardsigmoid", lambda call, error: 1 / 6, lambda call: gamma(3))
# 1 / (1 + e⁻ˣ): an exponential off by 2u moves σ by σ(1 − σ)·2u ≤ u/2; the sum and the quotient round, σ ≤ 1.
_SIGMOID = _make_rule("sigmoid", _find_sigmoid_slope, lambda call: gamma(3))
# Within one ulp directly; or as 2σ(2x) − 1, twice as far off as σ, and one rounding more.
_TANH = _make_rule("tanh", _find_tanh_slope, lambda call: gamma(7))
# x·σ(x): σ within γ₃, and a product. Slopes lie between −0.1 and 1.1.
_SILU = _make_rule("silu", lambda call, error: 1.1, lambda call: gamma(4) * call.values()[0].real.abs())
# x·tanh(s), s = log(1 + eˣ): an exponential off by 2u moves s by at most 2u, the sum by u, the logarithm by 2u·s;
# tanh moves by sech²(s) ≤ 1 of it, and s·sech²(s) < 1/2; it is within γ₇, and the product rounds. Slopes lie
# between −0.12 and 1.09.
_MISH = _make_rule("mish", lambda call, error: 1.09, lambda call: gamma(12) * call.values()[0].real.abs())
_SOFTPLUS = _make_rule("softplus", _find_softplus_slope, _bound_softplus)
# x·Φ(x), or with the tangent's approximation of Φ: that within four ulp (8u), and two products. Slopes reach 1.13.
_GELU = _make_rule("gelu", lambda call, error: 1.13, lambda call: gamma(10) * call.values()[0].real.abs())
FUNCTIONS: Mapping[str, OpRule] = {
    "leaky_relu": _LEAKY_RELU,
    "elu": _ELU,
    "hardswish": _HARDSWISH,
    "hardsigmoid": _HARDSIGMOID,
    "sigmoid": _SIGMOID,
    "tanh": _TANH,
    "silu": _SILU,
    "mish": _MISH,
    "softplus": _SOFTPLUS,
    "gelu": _GELU,
}
"""By its name, the rule of an aten op as well: its arguments are the same, in one order."""


def bound_prelu(call: OpCall) -> Errors:
    """x, or a·x where it is negative, a by channel: errors of x grow by 1, or by |a| below zero, those of a by |x|.

    A config may have a quantized, as fx observes each tensor that a function is given: it is then dequantized, with two
    roundings, before the product: γ₃.
    """
    x, a = call.values()[0], _read_slopes(call)
    reach = a.real.abs() + a.error()
    dequantized = bound_dequantizing(x)
    steepest = torch.where(x.real + x.error() + dequantized < 0, reach, reach.clamp(min=1.0))
    negative = (x.error() - x.real).clamp(min=0.0)
    errors = {
        cause: steepest * error_of(cause)(x) + negative * error_of(cause)(a)
        for cause in dict.fromkeys((*x.errors, *a.errors))
    }
    return add_error(errors, "function", steepest * dequantized + gamma(3) * call.result.abs())


def _read_slopes(call: OpCall) -> Value:
    """The slopes of a PReLU, broadcast to the channels of its operand."""
    slopes, rank = call.option("weight", 1), call.values()[0].real.dim()
    value = slopes if isinstance(slopes, Value) else Value(real=slopes.detach().double())
    shape = (1, -1, *[1] * (rank - 2)) if value.real.numel() > 1 else (1,) * rank
    errors = {cause: error_of(cause)(value).reshape(shape) for cause in value.errors}
    return Value(real=value.real.reshape(shape), errors=errors)


_PRELU_RULE = OpRule(arithmetic=RESCALE, bound=bound_prelu, source="torch.nn.functional.prelu; NUM-04")

# -- softmax ----------------------------------------------------------------------------------------------------------

EXP = 40 * U  # twenty ulp: fast exponentials of vector libraries are as far off
_BEYOND = 500.0  # an exponent whose error is this large has no digit right; float64 still holds its exponential


def bound_softmax(call: OpCall) -> Errors:
    """eˣⁱ / Σ eˣʲ over n elements: with eˣ off by factors of 1 + ρ, yᵢ is off by yᵢ(ρᵢ + S) / (1 − S), S = Σ yⱼρⱼ.

    ρ: x and the largest x are dequantized, their difference rounds, the exponential is within twenty ulp. The sum and
    the quotient add γₙ₊₁·yᵢ; exponentials below 2⁻¹²⁶ may be flushed to zero, n of them be missing. Errors of the
    operands grow by at most 1/2: Σⱼ |∂yᵢ/∂xⱼ| = 2yᵢ(1 − yᵢ) ≤ 1/2; those of an xⱼ that is 104 below another for all
    errors do not count, as under a mask: e⁻¹⁰⁴ < 2⁻¹⁵⁰. With E the largest, yᵢ becomes at most yᵢ·exp(eᵢ + E) and at
    least yᵢ·exp(−eᵢ − E), so that it moves by yᵢ·(exp(eᵢ + E) − 1) at most: of n weights that are alike this is less.
    The bound is at most 1, as y is: it is 1 where x is so large that S reaches 1, and nothing is known of y.
    """
    x, y, dim = call.values()[0], call.result, call.option("dim", 1)
    axis = int(dim) if dim is not None else 0 if y.dim() in (0, 1, 3) else 1  # torch's choice
    counts = may_lead(x, axis, margin=NEGLIGIBLE)
    largest = {cause: torch.where(counts, error, 0.0).amax(axis, keepdim=True) for cause, error in x.errors.items()}
    whole = torch.where(counts, x.error(), 0.0).amax(axis, keepdim=True)
    both = x.error() + whole
    moved = torch.where(both < _BEYOND, y * torch.expm1(both.clamp(max=_BEYOND)), math.inf)
    moved = torch.where(counts, torch.minimum(0.5 * whole, moved).clamp(max=1.0), math.exp(-NEGLIGIBLE))
    errors = share_out(moved, {cause: each.expand_as(y) for cause, each in largest.items()})
    dequantized = bound_dequantizing(x).nan_to_num(posinf=0.0)
    below = (x.real.amax(axis, keepdim=True) - x.real).abs().nan_to_num(0.0, 0.0)  # e to minus infinity is zero
    exponent = dequantized + torch.where(counts, dequantized, 0.0).amax(axis, keepdim=True) + U * below
    factor = torch.expm1(exponent.clamp(max=_BEYOND)) + EXP
    total = (y * factor).sum(axis, keepdim=True)
    off = y * ((factor + total) / (1 - total) + gamma(y.shape[axis] + 1))
    return add_error(errors, "function", torch.where(total < 1, off, 1.0).clamp(max=1.0) + y.shape[axis] * 2.0**-126)


_SOFTMAX = OpRule(arithmetic=FUNCTION, bound=bound_softmax, source="torch.nn.Softmax; NUM-04")

# -- samples ----------------------------------------------------------------------------------------------------------

EPILOGUE_SLOPE = 0.3125
"""The slope of what follows a layer; not the default, 0.01."""
_ALPHA = (1.0, 0.3, 2.5)
_SLOPE = (0.01, 0.3, -0.5, 1.5)
_IGNORED = Fixed(reason="of nn.Module's constructor, which takes none")


def _call_leaky_relu_(op: Any, arguments: Arguments) -> Step:
    """A builtin sees whether its slope has a name; functions in Python hand it on by name."""
    spell = call(negative_slope=0.01) if arguments["_by_name"] else call("negative_slope")
    return spell(op, arguments)


def _build_prelu(op: Any, arguments: Arguments) -> Step:
    """The first channel's slope is `init`; those of the others are less steep, so that a wrong channel's shows."""
    module = op(num_parameters=arguments["num_parameters"], init=arguments["init"])
    with torch.no_grad():
        module.weight.mul_(torch.linspace(1.0, 0.25, arguments["num_parameters"]))
    return Step(op=module)


_PRELU = OpRecord(
    rule=_PRELU_RULE,
    epilogue={"init": EPILOGUE_SLOPE},
    arguments={
        "num_parameters": (1, 7, 65),
        "init": (0.25, 1.5, -0.5),
        "shape": ((2, 7, 3, 3), (65,), (4, 65), (1, 7, 63), (1, 7, 3, 4, 5)),
        **PLACES,
    },
    step=_build_prelu,
    is_valid=lambda a: a["num_parameters"] == 1 or a["num_parameters"] in a["shape"][1:2],
)


def _call_prelu(op: Any, arguments: Arguments) -> Step:
    """The function with the slopes of the module, given by position or by name."""
    module: Any = _build_prelu(nn.PReLU, arguments).op

    def call_by_name(x: Any, weight: Any) -> Any:
        return op(x, weight=weight)

    return Step(op=call_by_name if arguments["_by_name"] else op, parameters=(module.weight.detach(),))


_PRELU_FUNCTION = replace(
    _PRELU,
    epilogue={"init": EPILOGUE_SLOPE, "_by_name": True},
    arguments={
        **{name: values for name, values in _PRELU.arguments.items() if name not in PLACES},
        "input": TENSOR,
        "weight": Fixed(reason="a tensor: its size and values are num_parameters and init"),
        "_by_name": (False, True),
    },
    step=_call_prelu,
)


def _sample_softmax(step: Callable[[Any, Arguments], Step], *dims: int | None, **more: Any) -> OpRecord:
    return OpRecord(
        arguments={
            "dim": dims,
            # A sum of n equal terms near 2³² / n overflows 32 bits if rounded up: a little for 513, to zero for 1024.
            "shape": ((2, 7, 3, 3), (65,), (4, 64), (1, 8, 63), (1, 2, 3, 4, 5), (2, 513), (1, 1024)),
            **more,
        },
        step=step,
        is_valid=lambda a: are_axes(len(a["shape"]), a["dim"]),
        rule=_SOFTMAX,
    )


_FLOAT_DTYPE = Fixed(reason="asks for a float dtype, and the claim is about a quantized result")
_BETA: dict[str, Any] = {"beta": (1.0, 0.5, 3.0), "threshold": (20.0, 3.0)}


def _sample_functions(
    rule: OpRule, module: type[nn.Module], function: Callable[..., Any], epilogue: Arguments | None, **arguments: Any
) -> dict[Any, OpRecord]:
    """A module and a function that both may work in place."""
    defaults = {name: values[0] for name, values in arguments.items()} | {"inplace": False}
    varied = {**arguments, "inplace": INPLACE}
    return {
        module: sample_elementwise(construct, rule=rule, epilogue=epilogue, **varied),
        function: sample_elementwise(call(**defaults), rule=rule, epilogue=epilogue, input=TENSOR, **varied),
    }


RECORDS: dict[Any, OpRecord] = {
    **_sample_functions(_ELU, nn.ELU, F.elu, {"alpha": 0.3}, alpha=_ALPHA),
    **_sample_functions(_HARDSWISH, nn.Hardswish, F.hardswish, {}),
    **_sample_functions(_HARDSIGMOID, nn.Hardsigmoid, F.hardsigmoid, {}),
    **_sample_functions(_SILU, nn.SiLU, F.silu, {}),
    **_sample_functions(_MISH, nn.Mish, F.mish, {}),
    **_sample_functions(_LEAKY_RELU, nn.LeakyReLU, F.leaky_relu, None, negative_slope=_SLOPE),
    F.leaky_relu_: sample_elementwise(
        _call_leaky_relu_, rule=_LEAKY_RELU, negative_slope=_SLOPE, _by_name=(False, True)
    ),
    nn.PReLU: _PRELU,
    F.prelu: _PRELU_FUNCTION,
    nn.Sigmoid: sample_elementwise(construct, rule=_SIGMOID, epilogue={}, args=_IGNORED, kwargs=_IGNORED),
    **dict.fromkeys((torch.sigmoid, "sigmoid"), sample_elementwise(call(), rule=_SIGMOID, epilogue={})),
    "sigmoid_": sample_elementwise(call(), rule=_SIGMOID),
    nn.Tanh: sample_elementwise(construct, rule=_TANH, args=_IGNORED, kwargs=_IGNORED),
    **dict.fromkeys((torch.tanh, "tanh", "tanh_"), sample_elementwise(call(), rule=_TANH)),
    nn.GELU: sample_elementwise(construct, rule=_GELU, epilogue={}, approximate=("none", "tanh")),
    F.gelu: sample_elementwise(call(approximate="none"), rule=_GELU, epilogue={}, approximate=("none", "tanh")),
    nn.Softplus: sample_elementwise(construct, rule=_SOFTPLUS, epilogue={}, **_BETA),
    F.softplus: sample_elementwise(call(beta=1.0, threshold=20.0), rule=_SOFTPLUS, epilogue={}, **_BETA),
    nn.Softmax: _sample_softmax(construct, -1, 1, 0, None),
    F.softmax: _sample_softmax(
        call(dim=None), -1, 1, 0, None, input=TENSOR, dtype=_FLOAT_DTYPE, _stacklevel=Fixed(reason="of a warning")
    ),
    **dict.fromkeys((torch.softmax, "softmax"), _sample_softmax(call("dim"), -1, 1, 0, dtype=_FLOAT_DTYPE)),
}
