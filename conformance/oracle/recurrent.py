"""The oracle of recurrent modules and cells: every state of each layer, direction and step, with a bound (CVT-03).

A step of a cell is two linear maps, of the input and of the hidden state, sigmoids and tanhs of their sums, and
products with the states. Each state is computed exactly (float64) and carries a bound on what a right backend may
differ by. Along a sequence it grows as the cell's own slopes make it grow, and jumps only where a hidden state is so
near to a rounding tie that either neighbour is right. A sequence of one step from given states shows each state
separately.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fx_quant_conformance.backends.base import Capabilities
from fx_quant_conformance.conformance.bounds import dynamic
from fx_quant_conformance.conformance.bounds.error_bounds import (
    OpCall,
    U,
    Value,
    as_value,
    find_accumulator_step,
    gamma,
)
from fx_quant_conformance.refimpl.legacy import nnqr
from fx_quant_conformance.refimpl.legacy.weights import read_integers

States: TypeAlias = tuple[Value, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Maps:
    """The two linear maps of a cell: weights (dequantized, with their steps) and biases (None: none)."""

    weight_ih: Value
    weight_hh: Value
    bias_ih: Tensor | None
    bias_hh: Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Arithmetic:
    """How a backend computes."""

    capabilities: Capabilities
    quantize: Callable[[Value], Value]
    """What it does to a hidden state before a map, and to the values that one layer hands to the next."""
    counts_weights: bool
    """Whether the rounding of the weights is an error."""


# -- values with one bound --------------------------------------------------------------------------------------------

CAUSE = "recurrent"
FUNCTION = gamma(8)
"""Of a sigmoid or tanh in float32: eight roundings. 1 / (1 + e⁻ˣ): e⁻ˣ to 1 ulp (2 u), the sum, the quotient; tanh to 1
ulp, or by (1 − e⁻²ˣ) / (1 + e⁻²ˣ) with the roundings of two sums and a quotient more."""


def ball(real: Tensor, error: Tensor) -> Value:
    """Return a value with one bound, whatever the causes."""
    return Value(real=real, errors={CAUSE: error})


def linear(x: Value, weight: Value, bias: Tensor | None, capabilities: Capabilities) -> Value:
    """x·wᵀ + b, with the last rounding to float32 in the bound; ``step`` is its accumulator's."""
    exact = F.linear(x.real, weight.real, None if bias is None else bias.double())
    call = OpCall(function=F.linear, args=(x, weight, bias), kwargs={}, capabilities=capabilities, result=exact)
    error = sum((part.expand_as(exact) for part in dynamic.bound_linear_products(call).values()), U * exact.abs())
    return replace(ball(exact, error), step=find_accumulator_step(F.linear, x, weight, exact))


def add(a: Value, b: Value) -> Value:
    """The sum a + b: errors add up, and one rounding."""
    return _round(a.real + b.real, a.error() + b.error())


def multiply(a: Value, b: Value) -> Value:
    """The product a·b: |a|·e_b + |b|·e_a + e_a·e_b, and one rounding."""
    return _round(a.real * b.real, a.real.abs() * b.error() + a.error() * (b.real.abs() + b.error()))


def _round(real: Tensor, error: Tensor) -> Value:
    return ball(real, error + U * (real.abs() + error))


def sigmoid(a: Value) -> Value:
    """σ, whose slope σ·(1 − σ) is at most 1/4, and whose second derivative is at most 1/(6·√3) < 0.0963."""
    real = a.real.sigmoid()
    return ball(real, _propagate(a.error(), real * (1 - real), 1 / 4, 0.0963) + FUNCTION * real)


def tanh(a: Value) -> Value:
    """tanh, whose slope 1 − tanh² is at most 1, and whose second derivative is at most 4/(3·√3) < 0.7699.

    As 2σ(2a) − 1 it is off by γ₇ near zero as well.
    """
    real = a.real.tanh()
    return ball(real, _propagate(a.error(), 1 - real.square(), 1.0, 0.7699) + FUNCTION)


def _propagate(error: Tensor, slope: Tensor, steepest: float, curvature: float) -> Tensor:
    """An error after a function: by its slope here and Taylor's remainder, or by its steepest slope."""
    return torch.minimum(slope * error + curvature / 2 * error.square(), steepest * error)


def relu(a: Value) -> Value:
    """The slope of a relu is at most 1, and nothing is rounded."""
    return ball(a.real.relu(), a.error())


# -- cells: from the two maps' results and the states to the new states ------------------------------------------------

Cell: TypeAlias = Callable[[Value, Value, States], States]


def step_lstm(of_input: Value, of_hidden: Value, states: States) -> States:
    """i, f, g, o = the four parts of the sum; c' = σ(f)·c + σ(i)·tanh(g); h' = σ(o)·tanh(c'). (torch.nn.LSTM)"""
    i, f, g, o = split_gates(add(of_input, of_hidden), 4)
    c = add(multiply(sigmoid(f), states[1]), multiply(sigmoid(i), tanh(g)))
    return multiply(sigmoid(o), tanh(c)), c


def step_gru(of_input: Value, of_hidden: Value, states: States) -> States:
    """r, z = σ of the sums; n = tanh(nᵢ + r·nₕ); h' = (1 − z)·n + z·h. (torch.nn.GRU)

    h' is written so, or as (h − n)·z + n: errors are those of a mean of n and h with weights 1 − z and z, and of z
    times |h − n|; roundings, at most four, of |h| + 2|n|.
    """
    (r_x, z_x, n_x), (r_h, z_h, n_h), h = split_gates(of_input, 3), split_gates(of_hidden, 3), states[0]
    r, z = sigmoid(add(r_x, r_h)), sigmoid(add(z_x, z_h))
    n = tanh(add(n_x, multiply(r, n_h)))
    error = (1 - z.real) * n.error() + z.real * h.error()
    error = error + z.error() * ((h.real - n.real).abs() + h.error() + n.error())
    rounding = gamma(4) * (h.real.abs() + h.error() + 2 * (n.real.abs() + n.error()))
    return (ball((1 - z.real) * n.real + z.real * h.real, error + rounding),)


def step_rnn(function: Callable[[Value], Value], of_input: Value, of_hidden: Value, states: States) -> States:
    """Return h' = f of the sum, f a tanh or a relu. (torch.nn.RNNCell)"""
    return (function(add(of_input, of_hidden)),)


def split_gates(value: Value, count: int) -> list[Value]:
    """Cut the last axis into equal parts."""
    pairs = zip(value.real.chunk(count, -1), value.error().chunk(count, -1), strict=True)
    return [ball(real, error) for real, error in pairs]


# -- modules ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class RecurrentClass:
    """A recurrent class: its cell, made for a module, and how many states it has."""

    cell: Callable[[Any], Cell]
    states: int


_FUNCTIONS: Mapping[str, Callable[[Value], Value]] = {"tanh": tanh, "relu": relu}
_LSTM = RecurrentClass(cell=lambda module: step_lstm, states=2)
_GRU = RecurrentClass(cell=lambda module: step_gru, states=1)
_RNN = RecurrentClass(cell=lambda module: partial(step_rnn, _FUNCTIONS[module.nonlinearity]), states=1)
KINDS: Mapping[type[nn.Module], RecurrentClass] = {
    nnqr.LSTM: _LSTM,
    nnqr.LSTMCell: _LSTM,
    nnqr.GRU: _GRU,
    nnqr.GRUCell: _GRU,
    nnqr.RNNCell: _RNN,
}


def run_recurrent(
    module: Any,
    x: Value,
    hx: Any,
    capabilities: Capabilities,
    *,
    has_dynamic_states: bool,
    counts_weights: bool = False,
) -> Any:
    """Return what a recurrent reference module or cell gives for an input and its states (None: zeros).

    With `has_dynamic_states` a backend quantizes hidden states, and the values that one layer hands to the next, as it
    does the input: with the qparams of each step's batch, and between layers of the whole sequence. Else it keeps them
    in float. With `counts_weights` the rounding of the weights is an error too.
    """
    kind = KINDS[type(module)]
    quantize = _choose_quantizer(x) if has_dynamic_states else dynamic.leave_in_float
    arithmetic = Arithmetic(capabilities=capabilities, quantize=quantize, counts_weights=counts_weights)
    states = (hx if isinstance(hx, (tuple, list)) else (hx,)) if hx is not None else None
    run = _run_sequence if isinstance(module, nn.RNNBase) else _run_cell
    return run(module, kind, x, states, arithmetic)


def _choose_quantizer(x: Value) -> Callable[[Value], Value]:
    if not isinstance(x, dynamic.Dynamic):
        return dynamic.halve
    low, high = x.bounds
    return lambda value: dynamic.dynamic_quantize(value, low, high, x.eps)


def _run_cell(module: Any, kind: RecurrentClass, x: Value, initial: Any, arithmetic: Arithmetic) -> Any:
    """A cell is a sequence of one step."""
    is_batched = x.real.dim() == 2
    x = x if is_batched else _change(x, lambda tensor: tensor.unsqueeze(0))
    states = _read_states(initial, (x.real.shape[0], module.hidden_size), kind, None if is_batched else 0)
    x = _change(x, lambda tensor: tensor.unsqueeze(0))
    _, states = _run_direction(kind.cell(module), _read_maps(module, "", arithmetic), x, states, arithmetic, False)
    states = states if is_batched else tuple(_change(state, lambda tensor: tensor.squeeze(0)) for state in states)
    return states if kind.states > 1 else states[0]


def _run_sequence(module: Any, kind: RecurrentClass, x: Value, initial: Any, arithmetic: Arithmetic) -> Any:
    """Run all layers in all directions; inside, sequences are (step, batch, feature)."""
    is_batched, directions = x.real.dim() == 3, 2 if module.bidirectional else 1
    x = x if is_batched else _change(x, lambda tensor: tensor.unsqueeze(0 if module.batch_first else 1))
    x = _change(x, lambda tensor: tensor.transpose(0, 1)) if module.batch_first else x
    shape = (module.num_layers * directions, x.real.shape[1], module.hidden_size)
    initial, finals = _read_states(initial, shape, kind, None if is_batched else 1), []
    for layer in range(module.num_layers):
        runs = [
            _run_direction(
                kind.cell(module),
                _read_maps(module, f"_l{layer}{'_reverse' if direction else ''}", arithmetic),
                x,
                tuple(_pick(state, layer * directions + direction) for state in initial),
                arithmetic,
                direction == 1,
            )
            for direction in range(directions)
        ]
        outputs = _join([output for output, _ in runs], partial(torch.cat, dim=-1))
        x = arithmetic.quantize(outputs)
        finals += [states for _, states in runs]
    results = (outputs, *(_join(states, torch.stack) for states in zip(*finals, strict=True)))
    if not is_batched:
        results = tuple(_change(value, lambda tensor: tensor.squeeze(1)) for value in results)
    elif module.batch_first:
        results = (_change(outputs, lambda tensor: tensor.transpose(0, 1)), *results[1:])
    return results[0], results[1:] if kind.states > 1 else results[1]


def _run_direction(
    cell: Cell, maps: Maps, x: Value, states: States, arithmetic: Arithmetic, is_reversed: bool
) -> tuple[Value, States]:
    """Run a cell along a sequence; return its outputs, in the order of the steps, and the last states."""
    of_inputs = linear(x, maps.weight_ih, maps.bias_ih, arithmetic.capabilities)
    steps = range(len(of_inputs.real))
    outputs: list[Value] = []
    for number in reversed(steps) if is_reversed else steps:
        hidden = arithmetic.quantize(states[0])
        of_hidden = linear(hidden, maps.weight_hh, maps.bias_hh, arithmetic.capabilities)
        unit = _choose_unit(of_inputs.step, of_hidden.step)
        states = tuple(replace(s, step=unit(s.real)) for s in cell(_pick(of_inputs, number), of_hidden, states))
        outputs.append(states[0])
    return _join(outputs[::-1] if is_reversed else outputs, torch.stack), states


def _choose_unit(*steps: Tensor | None) -> Callable[[Tensor], Tensor]:
    """What distances of a state are measured in: the larger step of the two accumulators; else of half precision."""
    largest = max((float(step.max()) for step in steps if step is not None), default=None)
    return dynamic.half_steps_of if largest is None else lambda real: torch.full_like(real, largest)


def _read_maps(module: Any, suffix: str, arithmetic: Arithmetic) -> Maps:
    """The linear maps of a layer and direction, or of a cell (whose names have no suffix)."""
    names = (f"weight_{which}{suffix}" for which in ("ih", "hh"))
    weight_ih, weight_hh = (_read_weight(module, name, arithmetic.counts_weights) for name in names)
    bias_ih, bias_hh = (getattr(module, f"bias_{which}{suffix}", None) for which in ("ih", "hh"))
    return Maps(weight_ih=weight_ih, weight_hh=weight_hh, bias_ih=bias_ih, bias_hh=bias_hh)


def _read_weight(module: Any, name: str, counts_weights: bool) -> Value:
    """A weight as it was folded to integers, or in half precision."""
    integers = read_integers(module, name)
    if integers.is_floating_point():
        return dynamic.read_half_weight(integers, counts_weights=counts_weights)
    scale, zero = (getattr(module, f"{name}_{each}").double().reshape(-1, 1) for each in ("scale", "zero_point"))
    return dynamic.dequantize(integers.double(), scale, zero, counts_weights=counts_weights)


def _read_states(initial: Any, shape: tuple[int, ...], kind: RecurrentClass, new_axis: int | None) -> States:
    """The initial states, with an axis of batches where they have none."""
    if initial is None:
        return (Value(real=torch.zeros(shape, dtype=torch.float64)),) * kind.states
    given = map(as_value, initial)  # the model may make them: zeros
    if new_axis is None:
        return tuple(given)
    return tuple(_change(state, lambda tensor: tensor.unsqueeze(new_axis)) for state in given)


def _change(value: Value, change: Callable[[Tensor], Tensor]) -> Any:
    """Change the layout of a value with its errors, and of a step that has its shape; it stays what it is."""
    step = value.step
    if step is not None and step.shape == value.real.shape:
        step = change(step)
    errors = {cause: change(error.expand_as(value.real)) for cause, error in value.errors.items()}
    return replace(value, real=change(value.real), errors=errors, step=step)


def _pick(value: Value, number: int) -> Value:
    return ball(value.real[number], value.error()[number])


def _join(values: Sequence[Value], join: Callable[[Any], Tensor]) -> Value:
    real, error = join([value.real for value in values]), join([value.error() for value in values])
    return replace(ball(real, error), step=join([value.step for value in values]))
