"""The oracle of recurrent modules and cells: it computes what torch defines, and its bounds hold and are tight."""

from __future__ import annotations

import copy
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fx_quant_conformance.backends.base import Capabilities
from fx_quant_conformance.backends.quantized_form import to_quantized_form
from fx_quant_conformance.backends.torch_engines.engine import engine
from fx_quant_conformance.conformance.bounds.dynamic import leave_in_float
from fx_quant_conformance.conformance.bounds.error_bounds import Value
from fx_quant_conformance.conformance.ops.embeddings_and_recurrent import RECORDS
from fx_quant_conformance.conformance.oracle import recurrent
from fx_quant_conformance.conformance.oracle.evaluate import Walk
from fx_quant_conformance.conformance.oracle.recurrent import KINDS, ball
from fx_quant_conformance.refimpl import lower
from fx_quant_conformance.refimpl.graph.tracing import NOT_LOWERED
from tests.conformance.support.dynamic_flows import (
    FLOAT16,
    IN_FLOAT,
    NATIVE,
    PER_CHANNEL,
    RECURRENT,
    dynamic,
    excess,
    flat,
    inputs_of,
    model_of,
    reference_of,
)

ops = pytest.mark.parametrize("op", RECURRENT, ids=lambda op: op.__name__)
FULL = (0, 255)


def module_of(reference: nn.Module) -> Any:
    """The recurrent reference module of a model."""
    return next(module for module in reference.modules() if type(module) in KINDS)


def in_doubles(op: Any, arguments: dict[str, Any], reference: nn.Module) -> nn.Module:
    """The float model in float64, with the weights that the reference model folded to integers."""
    model = model_of(op, arguments).double()
    found: Any = next(module for module in model.modules() if isinstance(module, op))
    folded: Any = module_of(reference)
    with torch.no_grad():
        for name, parameter in found.named_parameters():
            if name.startswith("weight"):
                suffix = name.removeprefix("weight_ih").removeprefix("weight_hh")
                maps = recurrent._read_maps(
                    folded,
                    suffix,
                    recurrent.Arithmetic(
                        capabilities=IN_FLOAT,
                        quantize=leave_in_float,
                        counts_weights=False,
                    ),
                )
                parameter.copy_(getattr(maps, name[:9]).real)
            else:
                parameter.copy_(getattr(folded, name))
    return model


@pytest.mark.slow
@ops
@pytest.mark.rule("CVT-02")
def test_without_quantized_inputs_it_computes_what_torch_computes_in_float64(op: Any) -> None:
    for number, (_, arguments) in enumerate(RECORDS[op].variants()):
        torch.manual_seed(number)
        reference = reference_of(model_of(op, arguments), PER_CHANNEL if number % 2 else dynamic())
        inputs = inputs_of(op, arguments)
        x, *states = (Value(real=each.double()) for each in inputs)
        hx = (tuple(states) if len(states) > 1 else states[0]) if states else None
        found = recurrent.run_recurrent(module_of(reference), leave_in_float(x), hx, IN_FLOAT, has_dynamic_states=False)
        wanted = in_doubles(op, arguments, reference)(*(each.double() for each in inputs))
        for value, right in zip(flat(found), flat(wanted), strict=True):
            assert value.real.shape == right.shape
            assert torch.allclose(value.real, right, rtol=1e-9, atol=1e-12), arguments


@pytest.mark.slow
@ops
@pytest.mark.rule("NUM-04")
def test_qnnpacks_kernels_are_within_the_slack(op: Any) -> None:
    """Whose states are quantized, to eight bits; the slack is below half a step where no state is near a tie."""
    slacks = []
    for number, (_, arguments) in enumerate(RECORDS[op].variants()):
        if arguments["_unbatched"]:
            continue  # torch's quantized modules take batches alone
        torch.manual_seed(number)
        qconfig = PER_CHANNEL if number % 2 else dynamic()
        reference = reference_of(model_of(op, arguments), qconfig)
        inputs = inputs_of(op, arguments)
        with engine("qnnpack"):
            lowered = lower(to_quantized_form(reference))
            if lowered.meta[NOT_LOWERED]:
                continue
            found = lowered(*inputs)
        exacts = Walk(reference, NATIVE).exact(inputs)
        assert excess(exacts, found) <= 0, arguments
        slacks.append(max(float(exact.slack.max()) for exact in exacts))
    assert sorted(slacks)[len(slacks) * 3 // 4] < 0.5


@pytest.mark.slow
@ops
@pytest.mark.rule("NUM-04")
def test_the_reference_model_is_within_the_slack_of_states_left_in_float(op: Any) -> None:
    for number, (_, arguments) in enumerate(RECORDS[op].variants()):
        torch.manual_seed(number)
        reference, inputs = (
            reference_of(model_of(op, arguments), dynamic()),
            inputs_of(op, arguments),
        )
        assert excess(Walk(reference, IN_FLOAT).exact(inputs), reference(*inputs)) <= 0, arguments


@ops
def test_states_left_in_float_seven_bits_and_swapped_weights_are_refuted(op: Any) -> None:
    arguments = RECORDS[op].base() | {"hx": True, "_batch": 3, "hidden_size": 9, "input_size": 65}
    torch.manual_seed(0)
    model, inputs = model_of(op, arguments), inputs_of(op, arguments)
    reference = reference_of(model, dynamic())
    assert excess(Walk(reference, NATIVE).exact(inputs), reference(*inputs)) > 1
    assert excess(Walk(reference_of(model, dynamic(0, 127)), IN_FLOAT).exact(inputs), reference(*inputs)) > 1
    exacts = Walk(reference, IN_FLOAT).exact(inputs)
    module = module_of(reference)
    name = "weight_hh" if "Cell" in op.__name__ else "weight_hh_l0"
    weight = getattr(module, name)
    setattr(module, name, nn.Parameter(weight.detach().roll(1, 0)))
    assert excess(exacts, reference(*inputs)) > 1


@pytest.mark.rule("NUM-03")
def test_a_relu_cell_by_hand() -> None:
    """One feature, one state: h' = relu(w·x + v·h + b + c), x and h quantized each by its own range, 0 … value."""
    model = nn.RNNCell(1, 1, nonlinearity="relu")
    with torch.no_grad():
        for parameter, value in zip(model.parameters(), (0.5, -0.25, 0.125, 1.0), strict=True):
            parameter.fill_(value)
    wrapped = nn.Sequential(model).eval()
    inputs = (torch.tensor([[1.5]]),)
    reference = reference_of(wrapped, dynamic())
    (exact,) = Walk(reference, NATIVE).exact(inputs)
    scale = Fraction(float(module_of(reference).weight_ih_scale))
    weight = scale * round(Fraction(1, 2) / scale)
    assert float(exact.real) == pytest.approx(float(weight * Fraction(3, 2) + Fraction(9, 8)), rel=1e-14)


def test_a_state_at_a_tie_may_fall_to_either_side() -> None:
    """States from −1 to 1 have their zero point at a tie: either reading of the ends is within the bounds."""
    torch.manual_seed(0)
    arguments = RECORDS[nn.RNNCell].base() | {"hx": True, "_batch": 2, "hidden_size": 1, "nonlinearity": "relu"}
    reference = reference_of(model_of(nn.RNNCell, arguments), dynamic())
    module, inputs = module_of(reference), (inputs_of(nn.RNNCell, arguments)[0], torch.tensor([[-1.0], [1.0]]))
    (exact,) = Walk(reference, NATIVE).exact(inputs)
    step = 2 / 255
    for low, high in ((-127, 128), (-128, 127)):
        states = torch.tensor([[low * step], [high * step]])
        x = inputs[0]
        wanted = module(x, states)
        assert excess([exact], wanted) <= 0
    assert excess([exact], module(inputs[0], inputs[1] * 1.02)) > 0


@pytest.mark.parametrize("function", ["sigmoid", "tanh", "relu"])
def test_functions_of_an_uncertain_value_stay_within_their_bounds(function: str) -> None:
    torch.manual_seed(0)
    real, error = torch.randn(500).double() * 3, torch.rand(500).double() * 10.0 ** -torch.arange(500).fmod(7)
    bound = getattr(recurrent, function)(ball(real, error))
    for share in (-1.0, -0.3, 0.0, 0.7, 1.0):
        found = getattr(torch, function)(real + share * error)
        assert bool(((found - bound.real).abs() <= bound.error() + 1e-15).all())
        rounded = getattr(torch, function)((real + share * error).float()).double()
        near = error + real.abs() * 2.0**-23
        assert bool(((rounded - bound.real).abs() <= getattr(recurrent, function)(ball(real, near)).error()).all())


@ops
def test_every_state_within_its_error_leads_into_the_bounds(op: Any) -> None:
    """Cells, on uncertain results of their maps and uncertain states: samples stay inside."""
    torch.manual_seed(0)
    kind = KINDS[type(module_of(reference_of(model_of(op, RECORDS[op].base()), dynamic())))]
    module = nn.RNNCell(1, 1)
    chunks = {nn.LSTM: 4, nn.LSTMCell: 4, nn.GRU: 3, nn.GRUCell: 3, nn.RNNCell: 1}[op]
    values = [_uncertain(5, 7 * chunks), _uncertain(5, 7 * chunks), *(_uncertain(5, 7) for _ in range(kind.states))]

    def run(*given: Value) -> Any:
        return kind.cell(module)(given[0], given[1], tuple(given[2:]))

    bounds = run(*values)
    for _ in range(20):
        sampled = [ball(v.real + v.error() * (2 * torch.rand_like(v.real) - 1), v.real * 0) for v in values]
        for bound, found in zip(bounds, run(*sampled), strict=True):
            assert bool(((found.real - bound.real).abs() <= bound.error()).all())


def _uncertain(*shape: int) -> Value:
    return ball(torch.randn(shape).double(), torch.rand(shape).double() * 0.1)


@pytest.mark.rule("CVT-04")
def test_half_precision_keeps_states_in_float_or_rounds_them() -> None:
    torch.manual_seed(0)
    arguments = RECORDS[nn.GRUCell].base() | {"hx": True, "_batch": 3, "hidden_size": 9}
    reference = reference_of(model_of(nn.GRUCell, arguments), FLOAT16)
    inputs = inputs_of(nn.GRUCell, arguments, is_half=True)
    module = module_of(reference)
    with torch.no_grad():
        for name in ("weight_ih", "weight_hh"):
            setattr(module, name, nn.Parameter(getattr(module, name).half().float()))
    found = reference(*inputs)
    for declared in (IN_FLOAT, Capabilities(dynamic_states=True)):
        assert excess(Walk(reference, declared).exact(inputs), found) <= 0


def test_comparing_with_the_float_model_counts_the_rounding_of_weights() -> None:
    torch.manual_seed(0)
    arguments = RECORDS[nn.LSTM].base() | {"num_layers": 2, "bidirectional": True}
    model, inputs = model_of(nn.LSTM, arguments), inputs_of(nn.LSTM, arguments)
    reference = reference_of(model, dynamic())
    exacts = Walk(reference, NATIVE, counts_weights=True).exact(inputs)
    with torch.no_grad():
        found: tuple[Tensor, ...] = tuple(flat(copy.deepcopy(model).double()(*(x.double() for x in inputs))))
    assert excess(exacts, found) <= 0
    assert excess(Walk(reference, IN_FLOAT).exact(inputs), found) > 1
