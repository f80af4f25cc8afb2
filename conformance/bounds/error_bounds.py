"""Error bounds: how far a right backend's float value may be from the exact one, op by op (rules NUM-03 to NUM-05).

A value on the oracle's walk is the exact real result and a bound on its error, split by cause: ``upstream`` (a rounding
before this op that may fall either way), ``rescale`` (float32 factors), ``bias`` (rounded to int32, or added in
float32), ``accumulation`` (sums in floating point), ``function`` (a float32 evaluation), ``weights`` (only where the
model before and after quantizing its weights is compared). Every bound takes the errors of the operands to that of the
result; each bound is derived in its docstring. u = 2⁻²⁴ is the unit roundoff of float32; γₙ = n·u / (1 − n·u) (Higham,
Accuracy and Stability of Numerical Algorithms, 2002, lemma 3.1).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fx_quant_conformance.backends.base import Capabilities, Requantize

U = 2.0**-24  # unit roundoff of float32
U64 = 2.0**-53  # of float64, in which the oracle computes
OVERFLOW = 2.0**128 * (1 - 2.0**-25)
"""The least number that float32 rounds to infinity."""
JUMP = "jump"
"""The cause of an error that comes from an undecided element (jumps.py)."""
_LEVELS = 255  # the most steps between an integer of 8 bits and its zero point
TRANSPOSED = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)
Errors: TypeAlias = dict[str, Tensor]
Bounds: TypeAlias = Tensor | float


class NoOracleError(Exception):
    """The reference graph holds something that the oracle cannot evaluate."""


def gamma(n: int, unit: float = U) -> float:
    """Return γₙ: the bound on the relative error that n roundings in a row make, of a unit roundoff each."""
    return n * unit / (1 - n * unit) if n * unit < 1 else math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class Accumulator:
    """The integer sum from which a machine makes a value (requantizing.py)."""

    step: Tensor | None
    """What 1 of it stands for, in real units, broadcast to the value. 0: two summands are brought to a step so fine
    that it does not matter. None: it is not known, as of a mean over windows, whose divisor is in the multiplier."""
    ends: Tensor | None = None
    """Where an end of a clamp stands in its place; None: nowhere."""
    requantize: Requantize | None = None
    """How integers are made of it, by the op that made it; None: as the backend declares in general."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    """A real value on the walk (float64), the bound on its error by cause, and the step of the grid it is from."""

    real: Tensor
    errors: Mapping[str, Tensor] = field(default_factory=dict)
    step: Tensor | None = None
    """The scale of its grid; of a dot product, that of its accumulator, s_x·s_w (broadcast to its shape). None: it is
    on no grid."""
    accumulator: Accumulator | None = None
    """None: it is not made of integers alone."""
    tolerance: float = 0.0
    """In steps, how far from it a right backend's integer may be, as declared of the ops that made it. (NUM-03)"""
    dtype: torch.dtype = torch.float32
    """The one that the model computes it in. Where that is of integers or truth values, so is ``real``; an element with
    an error is then undecided (jumps.py)."""

    def error(self) -> Tensor:
        """Return the whole bound (float64, in real units, of the value's shape)."""
        nothing = torch.zeros(self.real.shape, dtype=torch.float64)
        return sum((part.expand_as(self.real) for part in self.errors.values()), nothing)


@dataclass(frozen=True, slots=True, kw_only=True)
class OpCall:
    """One op on its operands, among which are Values."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    capabilities: Capabilities
    result: Any = None
    """Its exact result (a tensor, or a tuple of them)."""

    def evaluate(self, pick: Callable[[Value], Tensor], of_tensor: Callable[[Tensor], Tensor] | None = None) -> Any:
        """Evaluate the op with every Value replaced by what `pick` makes of it (and float tensors by `of_tensor`)."""
        args, kwargs = map_values((self.args, dict(self.kwargs)), pick, of_tensor or Tensor.clone)
        return self.function(*args, **kwargs)

    def values(self) -> list[Value]:
        """List the operands that are Values, also those in lists."""
        return [item for item in flatten((self.args, tuple(self.kwargs.values()))) if isinstance(item, Value)]

    def option(self, name: str, position: int, default: Any = None) -> Any:
        """Return an argument: an attribute of a module; of a function by name or position."""
        if isinstance(self.function, nn.Module):
            return getattr(self.function, name, default)
        return self.kwargs.get(name, self.args[position] if len(self.args) > position else default)

    def causes(self) -> list[str]:
        """List the causes of error that some operand brings."""
        return list(dict.fromkeys(cause for value in self.values() for cause in value.errors))


ErrorBound: TypeAlias = Callable[[OpCall], Any]
"""Errors of a result (an ``Errors``; for an op with several results a tuple of them)."""


def settle_errors(real: Tensor, errors: Mapping[str, Tensor], call: OpCall | None = None) -> Errors:
    """Return errors that are numbers. Of what is infinite, or no number, for some machines nothing is known.

    An error that is no number comes of two that are infinite, and has no bound. A result of a ``call`` is infinite, or
    no number, for every machine if it is so at both ends of the operands' errors, and has no error then; log(0 ± e) and
    1 / (0 ± e) are not. Without a call, as of a choice, it is so if its errors are finite. From 2¹²⁸ on a machine holds
    infinity, or the value in a wider register. Below -2¹²⁸ a value is taken as it is: it is a mask added to a mask.
    """
    settled = {cause: error.nan_to_num(math.inf, math.inf) for cause, error in errors.items()}
    if not real.is_floating_point():
        return settled
    total = sum(errors.values(), torch.zeros_like(real))
    carried = torch.where(total > U * real.abs(), total, 0.0)  # one rounding passes no end
    is_known = real.isfinite() & (real + carried < OVERFLOW)
    if bool(is_known.all()):
        return settled
    is_certain = ~real.isfinite()
    if bool(is_certain.any()):
        is_certain &= ~total.isinf() if call is None else _is_same(call, real)
    settled = {cause: torch.where(is_certain, 0.0, error) for cause, error in settled.items()}
    return add_error(settled, JUMP, torch.where(is_known | is_certain, 0.0, math.inf))


def _is_same(call: OpCall, result: Tensor) -> Tensor:
    """Return where the op gives this result at both ends of its operands' errors too, or no number as here."""

    def run(way: int) -> Tensor:
        end: Tensor = call.evaluate(
            lambda value: value.real + way * value.error() if is_inexact(value.real) else value.real.clone(),
            lambda tensor: tensor.double(),
        )
        return end

    low, high = run(-1), run(1)
    return ((low == result) & (high == result)) | (low.isnan() & result.isnan() & high.isnan())


def share_out(total: Tensor, parts: Errors) -> Errors:
    """Divide a bound on the whole error among its causes, as the parts are to each other.

    A function that bends makes more of two errors together than of each alone: it is bounded once, for all of them.
    """
    whole = sum(parts.values(), torch.zeros_like(total))
    shares = {cause: (part / whole).nan_to_num(1.0, 1.0) for cause, part in parts.items()}
    return {cause: torch.where(whole > 0, total * share, 0.0) for cause, share in shares.items()}


def map_values(structure: Any, of_value: Callable[[Value], Any], of_tensor: Callable[[Tensor], Any]) -> Any:
    """Replace the Values and the float tensors inside an argument structure."""
    if isinstance(structure, Value):
        return of_value(structure)
    if isinstance(structure, Tensor):
        return of_tensor(structure) if structure.is_floating_point() else structure
    if isinstance(structure, (tuple, list)):
        return type(structure)(map_values(item, of_value, of_tensor) for item in structure)
    if isinstance(structure, dict):
        return {key: map_values(item, of_value, of_tensor) for key, item in structure.items()}
    return structure


def flatten(structure: Any) -> list[Any]:
    """List the items of a structure of tuples and lists, in order; of anything else, itself."""
    if isinstance(structure, (tuple, list)):
        return [item for inner in structure for item in flatten(inner)]
    return [structure]


def widen(tensor: Tensor) -> Tensor:
    """Return a tensor in float64, or of complex numbers of two."""
    return tensor.to(torch.complex128) if tensor.is_complex() else tensor.double()


def is_inexact(operand: Any) -> bool:
    """Tell whether an operand is a tensor of what rounds: floats or complex numbers."""
    return isinstance(operand, Tensor) and (operand.is_floating_point() or operand.is_complex())


def as_value(operand: Any, dtype: torch.dtype = torch.float64) -> Value:
    """Return an operand as a Value; a number (rounded to `dtype`) or a constant tensor has no error."""
    if isinstance(operand, Value):
        return operand
    return Value(real=widen(operand if isinstance(operand, Tensor) else torch.tensor(operand, dtype=dtype)))


def as_operand(operand: Any) -> Value:
    """Return an operand of float arithmetic: integers as numbers, and a number with what float32 rounds of it.

    An undecided truth value is off by 1 as a number.
    """
    if isinstance(operand, (Value, Tensor)):
        value = as_value(operand)
        if value.real.dtype is torch.bool:
            errors = {cause: (error > 0).double() for cause, error in value.errors.items()}
            value = replace(value, errors=errors)
        return replace(value, real=widen(value.real))
    is_complex = isinstance(operand, complex)
    real = torch.tensor(operand, dtype=torch.complex128 if is_complex else torch.float64)
    rounded = (widen(real.to(torch.complex64 if is_complex else torch.float32)) - real).abs()
    return Value(real=real, errors={"function": rounded} if bool(rounded > 0) else {})


def error_of(cause: str) -> Callable[[Value], Tensor]:
    """Return what picks the error of one cause; zero where an operand has none."""

    def pick(value: Value) -> Tensor:
        if cause in value.errors:
            return value.errors[cause].expand_as(value.real)
        return torch.zeros(value.real.shape, dtype=torch.float64)

    return pick


# How an op is judged. (NUM-03 to NUM-05)
MOVES, RESCALE, DOT_PRODUCT, FUNCTION = "moves", "rescale", "dot product", "function"


@dataclass(frozen=True, slots=True, kw_only=True)
class OpRule:
    """How the oracle treats an op."""

    arithmetic: str
    """Its kind: MOVES (values move or are selected: nothing may differ), RESCALE (integers, then a factor),
    DOT_PRODUCT, FUNCTION (evaluated in float32, or approximated)."""
    bound: ErrorBound
    """The errors that a right backend may make."""
    source: str
    """Where the op's definition is stated."""
    exact: Callable[..., Any] | None = None
    """Computes the op on float64 operands, called with the op's own arguments; None: the op itself does."""
    accumulator_step: Callable[[OpCall], Tensor | None] | None = None
    """Of RESCALE, the step of the accumulator (``Accumulator``); None: it is not known."""


def make_aten_rule(bound: ErrorBound, kind: str = FUNCTION, exact: Callable[..., Any] | None = None) -> OpRule:
    """Return the rule of an aten op, which is one of the primitives."""
    return OpRule(arithmetic=kind, bound=bound, source="torch.ops.aten; NUM-04", exact=exact)


# -- the error bounds -------------------------------------------------------------------------------------------------


def add_error(errors: Errors, cause: str, bound: Tensor) -> Errors:
    """Add a bound, in float64 as all errors are, to what the errors have of a cause; return the errors."""
    errors[cause] = errors[cause] + bound if cause in errors else bound.double()
    return errors


def bound_by_slopes(
    count: int,
    slopes: Callable[[OpCall, Sequence[Value]], Sequence[Bounds]],
    rounding: Callable[[OpCall, Sequence[Value]], Bounds],
    call: OpCall,
) -> Errors:
    """Errors of the first `count` operands times their slopes, and the op's own rounding."""
    values = [as_operand(each) for each in call.args[:count]]
    errors: Errors = {}
    for slope, value in zip(slopes(call, values), values, strict=True):
        for cause in value.errors:
            error = error_of(cause)(value)
            grown = torch.where(error == 0, 0.0, slope * error)  # a slope may be infinite
            add_error(errors, cause, grown.expand_as(call.result))
    own = torch.as_tensor(rounding(call, values), dtype=torch.float64)
    return add_error(errors, "function", own.expand_as(call.result)) if bool(own.any()) else errors


def bound_dequantizing(x: Value) -> Tensor:
    """How far dequantizing in float32 is off, elementwise: 2u·|x| + 2·255·u·s.

    (k − z)·s rounds once, and where the scale is itself a product, as that of an accumulator, it rounded once before.
    k·s − z·s rounds both products, of at most 255·s each, and the difference. With a scale that is a power of two
    nothing rounds. A value on no grid has been rounded to float32.
    """
    if x.step is not None and bool((torch.frexp(x.step.double())[0] == 0.5).all()):
        return torch.zeros_like(x.real)
    return _bound_two_roundings(x)


def _bound_two_roundings(x: Value) -> Tensor:
    error = 2 * U * x.real.abs()
    return error if x.step is None else error + 2 * _LEVELS * U * x.step


def bound_rescaling(x: Value, requantize: Requantize) -> Tensor:
    """How far an operand is off that is rescaled by itself, elementwise: in float32, or by a multiplier of n bits.

    A mantissa of n bits in [1/2, 1) is rounded by at most 2⁻ⁿ⁻¹, which is 2⁻ⁿ of it: 2⁻ⁿ·|x| more than in float32.
    """
    error, bits = _bound_two_roundings(x), requantize.multiplier_bits
    return error if bits is None else error + 2.0**-bits * x.real.abs()


def bound_moves(call: OpCall) -> Errors:
    """Values are moved or selected: errors move with them. max(x + e) differs from max(x) by at most max e."""
    return {cause: call.evaluate(error_of(cause), lambda tensor: tensor * 0) for cause in call.causes()}  # rule: NUM-05


def bound_clamps(call: OpCall) -> Errors:
    """An elementwise function of the first operand with slopes between −1 and 1: errors do not grow."""
    return dict(call.values()[0].errors)


def bound_sums(call: OpCall) -> Errors:
    """The sum x ± alpha·y: errors add up.

    Each summand is rescaled separately in float32: a rounding of the ratio s_x / s_y and one of the product, 2u of each
    summand; or it is dequantized. The results may cancel, these errors do not. In fixed point, as TFLite does it, both
    are brought to steps of 2⁻¹⁹·max(s_x, s_y) = 32u·max(s_x, s_y) and rounded, by at most 3/4 of such a step each where
    rounded twice, and the sum by one more: 80u·max(s_x, s_y), less than the 2·255·u·s_x and 2·255·u·s_y here.
    """
    alpha = abs(call.kwargs.get("alpha", 1))
    x, y = (as_value(operand, torch.float32) for operand in call.args[:2])
    errors = {cause: error_of(cause)(x) + alpha * error_of(cause)(y) for cause in dict.fromkeys((*x.errors, *y.errors))}
    rescaled = [bound_rescaling(operand, call.capabilities.requantize) for operand in (x, y)]
    return add_error(errors, "rescale", rescaled[0] + alpha * rescaled[1])


def propagate_product(run: Callable[[Tensor, Tensor], Tensor], x: Value, y: Value, cause: str) -> Tensor:
    """Return (|x| + E_x)·e_y + e_x·|y|, E_x the whole error of x: together they are off by no more than their sum.

    Terms that are zero are not computed.
    """
    e_x, e_y = error_of(cause)(x), error_of(cause)(y)
    if cause in x.errors and cause in y.errors:
        return run(x.real.abs() + x.error(), e_y) + run(e_x, y.real.abs())
    return run(e_x, y.real.abs()) if cause in x.errors else run(x.real.abs() + x.error(), e_y)


def bound_dot_products(call: OpCall) -> Errors:
    """Σ x·w + b of integers: as `bound_products`; a bias b that is kept in float adds 2u·|b| + 3u·|y − b| + u·|y|.

    Either b is brought to the accumulator's steps, b / (s_x·s_w), which rounds product and quotient, and the integer
    becomes a float: 2u·|b| + u·|y − b|; or the integer does, and is multiplied by s_x·s_w: 3u·|y − b|. The sum rounds
    once. A multiplier of n bits may be that of the product alone, before b is added: 2⁻ⁿ·|y − b| more. Product and bias
    may cancel, these errors do not.
    """
    errors = bound_products(call)
    x, w, bias, _ = read_operands(call)
    bits = call.capabilities.requantize.multiplier_bits
    is_summed = call.capabilities.int32_bias or call.capabilities.float_accumulation
    is_of_weights = "weights" in w.errors  # models in float64 are compared: nothing is rounded
    has_steps = find_accumulator_step(call.function, x, w, call.result) is not None
    if bias is None or is_summed or is_of_weights or not has_steps:
        return errors
    added = bias.real.reshape(-1, *[1] * (w.real.dim() - 2))
    factor = 3 * U + (0.0 if bits is None else 2.0**-bits)
    rounded = 2 * U * added.abs() + factor * (call.result - added).abs() + U * call.result.abs()
    return add_error(errors, "bias", torch.where(added == 0, 0.0, rounded))


def bound_products(call: OpCall) -> Errors:
    """Σ x·w + b over n products: Σ|x|·e_w + e_x·|w| + e_x·e_w + e_b for each cause.

    A bias held as int32 of scale s_x·s_w is off by half such a step, and by what is beyond 2³¹ of them. Summing in
    floating point adds γₙ₊₃·(Σ|x|·|w| + |b|): n products, the bias, one rounding each where x and w are dequantized.
    """
    x, w, bias, options = read_operands(call)
    keywords = {name: value for name, value in call.kwargs.items() if name != "bias"}

    def run(a: Tensor, b: Tensor) -> Tensor:
        return call.function(a, b, None, *options, **keywords)  # type: ignore[no-any-return]

    errors = {cause: propagate_product(run, x, w, cause) for cause in dict.fromkeys((*x.errors, *w.errors))}
    step = find_accumulator_step(call.function, x, w, call.result)
    added = None
    if bias is not None:
        shape = (-1, *[1] * (w.real.dim() - 2))
        added = bias.real.abs().reshape(shape)
        for cause in bias.errors:
            add_error(errors, cause, error_of(cause)(bias).reshape(shape).expand_as(call.result))
    if call.capabilities.int32_bias and added is not None and step is not None:
        beyond = (added - 2.0**31 * step).clamp(min=0.0)
        add_error(errors, "bias", (0.5 * step + beyond).expand_as(call.result))
    if call.capabilities.float_accumulation:
        absolute = run(x.real.abs(), w.real.abs())
        if added is not None:
            absolute = absolute + added
        # a transposed convolution's weight has its input channels first, in all groups
        count = (w.real[:, 0] if call.function in TRANSPOSED else w.real[0]).numel()
        add_error(errors, "accumulation", gamma(count + 3) * absolute)
    return errors


def read_operands(call: OpCall) -> tuple[Value, Value, Value | None, tuple[Any, ...]]:
    """Return input, weight, bias and what follows, of a function of the form f(x, weight, bias, …)."""
    x, w, *options = call.args
    bias = options[0] if options else call.kwargs.get("bias")
    return x, as_value(w), None if bias is None else as_value(bias), tuple(options[1:])


def bound_matrix_products(call: OpCall) -> Errors:
    """A·B: |A|·e_B + e_A·|B| + e_A·e_B for each cause; summing n products in float adds γₙ₊₂·|A|·|B|.

    Each part of a sum of n complex products is one of 2n real ones: √2·γ₂ₙ₊₂.
    """
    a, b = map(as_value, call.args[:2])
    errors = {cause: propagate_product(torch.matmul, a, b, cause) for cause in dict.fromkeys((*a.errors, *b.errors))}
    if call.capabilities.float_accumulation:
        terms = a.real.shape[-1]
        own = 2**0.5 * gamma(2 * terms + 2) if a.real.is_complex() or b.real.is_complex() else gamma(terms + 2)
        bound = own * torch.matmul(a.real.abs(), b.real.abs())
        add_error(errors, "accumulation", bound)
    return errors


def bound_evaluation(roundings: int, call: OpCall) -> Errors:
    """A vendor's function that every backend evaluates in float32.

    Errors of an operand are carried on as |f(x ± e) − f(x)|, e that of all causes together, and do not shrink below e:
    within e the function is taken to be monotone or no steeper than 1. The evaluation dequantizes each operand, which
    moves the result in the same way, and makes `roundings` roundings of its own, each of at most u of |f(x)|.
    """
    errors: Errors = {}
    for x in call.values():
        parts = {}
        for cause in x.errors:
            error = error_of(cause)(x)
            parts[cause] = error if error.shape == call.result.shape else error.max().expand_as(call.result)
        moved = sum(parts.values(), torch.zeros_like(call.result))
        for cause, error in share_out(torch.maximum(moved, _find_reach(call, x, x.error())), parts).items():
            add_error(errors, cause, error)
        add_error(errors, "function", _find_reach(call, x, bound_dequantizing(x)))
    return add_error(errors, "function", gamma(roundings) * call.result.abs())


def _find_reach(call: OpCall, operand: Value, error: Tensor) -> Tensor:
    """How far the result moves when one operand does by ± error; where it is no number, that end does not count."""

    def move(by: Tensor) -> Tensor:
        end = call.evaluate(lambda value: value.real + by if value is operand else value.real.clone())
        moved: Tensor = (end - call.result).abs().nan_to_num(nan=0.0)
        return moved

    return torch.maximum(move(-error), move(error))


def find_accumulator_step(function: Any, x: Any, w: Any, result: Tensor) -> Tensor | None:
    """Return s_x·s_w, per channel and broadcast to the result of a dot product.

    None: an operand is on no grid, or the weight's scales are not those of output channels. The output channels of a
    transposed convolution's weight are those of one group.
    """
    if not isinstance(x, Value) or not isinstance(w, Value) or x.step is None or w.step is None:
        return None
    step = x.step * w.step
    if step.numel() == 1:
        return step.flatten()[0]
    if step.shape[1 if function in TRANSPOSED else 0] == 1:
        return None
    per_channel = step.flatten()
    channels = result.shape[1 - w.real.dim()]
    return per_channel.repeat(channels // per_channel.numel()).reshape(-1, *[1] * (w.real.dim() - 2))
