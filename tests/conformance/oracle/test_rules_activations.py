"""The oracle's rules of activation functions and normalisations: exact, wide enough for float32, and no wider."""

from __future__ import annotations

import copy
import itertools
import warnings
from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import GraphModule, Node, symbolic_trace

from fx_quant_conformance.backends.base import Capabilities
from fx_quant_conformance.conformance.bounds.error_bounds import Errors, OpCall, Value
from fx_quant_conformance.conformance.ops.op_model import MODEL_OF
from fx_quant_conformance.conformance.oracle.evaluate import Walk
from fx_quant_conformance.conformance.oracle.table import OP_RULES
from fx_quant_conformance.refimpl.config.patterns import leaf_name
from tests.conformance.support.flows import converted, on_grid
from tests.conformance.support.functions import RECORDS

ONE_OF_EACH = {(id(OP_RULES[op]), isinstance(op, type)): op for op in RECORDS}
"""A module and a function, or a method, of each rule."""
ops = pytest.mark.parametrize("op", ONE_OF_EACH.values(), ids=leaf_name)
# Scale and zero point: all integers positive, around zero, negative; coarse and fine.
GRIDS = ((2.0**-5, 0), (0.0123, 128), (16.0, 250), (2.0**-12, 128))


def model_of(op: Any, arguments: dict[str, Any]) -> GraphModule:
    torch.manual_seed(0)
    return symbolic_trace(MODEL_OF[1]([RECORDS[op].step(op, arguments)]).eval())


def call_of(model: GraphModule, op: Any, value: Value) -> OpCall:
    """The call of the op in a model of one op, on a value, with its exact result."""
    node = next(node for node in model.graph.nodes if node.op.startswith("call"))

    def argument(name: Node) -> Any:
        return value if name.op == "placeholder" else getattr(model, str(name.target))

    args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), argument)
    function: Any = node.target
    if node.op == "call_module":
        function = copy.deepcopy(model.get_submodule(str(node.target))).double()
    elif node.op == "call_method":
        function = getattr(Tensor, str(node.target))
    found = OpCall(function=OP_RULES[op].exact or function, args=args, kwargs=kwargs, capabilities=Capabilities())
    return with_result(found)


def with_result(call: OpCall) -> OpCall:
    return replace(call, result=call.evaluate(lambda each: each.real.clone(), lambda tensor: tensor.double()))


def total(errors: Errors) -> Tensor:
    return sum(errors.values(), torch.zeros(()).double())


def drawn(op: Any, arguments: dict[str, Any], scale: float, zero_point: int) -> tuple[Tensor, Value]:
    """Integers of a grid from 0 to 255, and what they stand for."""
    shape = RECORDS[op].inputs(arguments)[0].shape
    integers = torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(0))
    exact = torch.tensor(scale, dtype=torch.float32).double()
    return integers, Value(real=(integers - zero_point) * exact, step=exact)


@pytest.fixture(autouse=True)
def _softmax_may_choose() -> Iterator[None]:
    with warnings.catch_warnings(), torch.no_grad():
        warnings.filterwarnings("ignore", "Implicit dimension choice for softmax")
        yield


@pytest.mark.slow
@pytest.mark.rule("NUM-04")
@ops
def test_float32_is_within_the_bound(op: Any) -> None:
    """However the input is dequantized: (k − z)·s, or k·s − z·s."""
    for _, arguments in RECORDS[op].variants():
        model = model_of(op, arguments)
        for scale, zero_point in GRIDS:
            integers, value = drawn(op, arguments, scale, zero_point)
            call = call_of(model, op, value)
            allowed = total(OP_RULES[op].bound(call)) + 2.0**-24 * call.result.abs()
            step = torch.tensor(scale, dtype=torch.float32)
            for x in ((integers - zero_point) * step, integers * step - zero_point * step):
                assert bool(((model(x.clone()).double() - call.result).abs() <= allowed).all()), arguments


@pytest.mark.rule("NUM-04")
@pytest.mark.parametrize("approximate", ("none", "tanh"))
def test_float32_of_what_architectures_leave_in_float_is_within_the_bound(approximate: str) -> None:
    model = symbolic_trace(nn.Sequential(nn.GELU(approximate)))
    for seed, width in enumerate((0.01, 1.0, 8.0, 100.0)):
        x = width * torch.randn(4096, generator=torch.Generator().manual_seed(seed))
        call = call_of(model, nn.GELU, Value(real=x.double()))
        allowed = total(OP_RULES[nn.GELU].bound(call)) + 2.0**-24 * call.result.abs()
        assert bool(((model(x).double() - call.result).abs() <= allowed).all())


@pytest.mark.rule("NUM-04")
@ops
def test_the_bound_excuses_nothing_that_shows(op: Any) -> None:
    """On an ordinary grid it is far below a step of an 8-bit output: there a wrong result cannot hide in it."""
    arguments = RECORDS[op].base()
    _, value = drawn(op, arguments, 2.0**-5, 128)
    call = call_of(model_of(op, arguments), op, value)
    step = (call.result.max() - call.result.min()) / 255
    assert float(total(OP_RULES[op].bound(call)).max()) < 0.01 * float(step)


@pytest.mark.rule("NUM-04")
@ops
def test_errors_of_the_input_are_carried_on(op: Any) -> None:
    """Nothing that an input within its error can give is outside of the result's."""
    for _, arguments in itertools.islice(RECORDS[op].variants(), 0, None, 2):
        _, value = drawn(op, arguments, 2.0**-5, 100)
        model = model_of(op, arguments)
        error = torch.rand(value.real.shape, generator=torch.Generator().manual_seed(1)).double() * 2.0**-5
        call = call_of(model, op, replace(value, errors={"upstream": error}))
        allowed = OP_RULES[op].bound(call)["upstream"]
        alternating = torch.where(torch.arange(error.numel()).reshape(error.shape) % 2 == 0, 1.0, -1.0)
        for sign in (torch.tensor(1.0), alternating):
            moved = with_result(replace(call, args=(replace(value, real=value.real + sign * error), *call.args[1:])))
            assert bool(((moved.result - call.result).abs() <= allowed * (1 + 1e-9) + 2.0**-48).all()), arguments


@pytest.mark.parametrize("name", ("running_mean", "running_var", "weight", "bias"))
def test_errors_of_parameters_are_carried_on(name: str) -> None:
    """A config may have them quantized, for fx observes each tensor that a function is given."""
    arguments = {**RECORDS[F.instance_norm].base(), "use_input_stats": False}
    _, value = drawn(F.instance_norm, arguments, 2.0**-5, 128)
    call = call_of(model_of(F.instance_norm, arguments), F.instance_norm, value)
    parameter = call.kwargs[name].double()
    for error in (torch.full_like(parameter, 0.25), torch.linspace(-0.25, 0.2, 7).double()):
        off = replace(call, kwargs={**call.kwargs, name: Value(real=parameter, errors={"weights": error.abs()})})
        allowed = OP_RULES[F.instance_norm].bound(off)["weights"]
        moved = with_result(replace(call, kwargs={**call.kwargs, name: parameter + error})).result
        assert bool((moved != call.result).any())
        assert bool(((moved - call.result).abs() <= allowed * (1 + 1e-9) + 2.0**-48).all())


# -- through the graph, against numbers computed by hand ---------------------------------------------------------------

SCALE, ZERO = 2.0**-4, 96  # -6 … 9.9375


def through(module: nn.Module, real: Tensor) -> Tensor:
    """The oracle's real result behind a quantized module, on values of the grid."""
    low, high = -ZERO * SCALE, (255 - ZERO) * SCALE
    ends = torch.linspace(low, high, real.numel()).reshape(real.shape)
    model = converted(nn.Sequential(module), [(low, high)], output=((ends,),))
    integers = (real / SCALE).round().long() + ZERO
    (exact,) = Walk(model, Capabilities()).exact((on_grid(integers, scale=SCALE, zero_point=ZERO),))
    assert float(exact.slack.max()) < 0.01
    return exact.real


def _batch_norm(*, eps: float, mean: float, variance: float, weight: float, bias: float) -> nn.Module:
    norm = nn.BatchNorm2d(1, eps=eps)
    values = {"running_mean": mean, "running_var": variance, "weight": weight, "bias": bias}
    for name, value in values.items():
        getattr(norm, name).data.fill_(value)
    return norm


BY_HAND: tuple[tuple[nn.Module, tuple[float, ...], str], ...] = (
    (nn.LeakyReLU(0.25), (-3.0, 0.0, 2.5, -0.0625), "-3/4 0 5/2 -1/64"),
    (nn.PReLU(init=-0.5), (-3.0, 0.0, 2.5, -1.0), "3/2 0 5/2 1/2"),
    (nn.Hardswish(), (-4.0, -1.5, 1.0, 4.0), "0 -3/8 2/3 4"),
    (nn.ELU(alpha=3.0), (0.0, 1.0, 2.0, 3.0), "0 1 2 3"),
    (nn.InstanceNorm2d(1, eps=3.0), (-1.0, 1.0, 1.0, -1.0), "-1/2 1/2 1/2 -1/2"),
    # (x - 1) * (-2) / sqrt(15.9375 + 0.0625) + 3
    (_batch_norm(eps=0.0625, mean=1.0, variance=15.9375, weight=-2.0, bias=3.0), (5.0, 1.0, -3.0, 9.0), "1 3 5 -1"),
)


@pytest.mark.rule("NUM-03")
@pytest.mark.parametrize(("module", "inputs", "expected"), BY_HAND, ids=[type(row[0]).__name__ for row in BY_HAND])
def test_results_are_those_computed_by_hand(module: nn.Module, inputs: tuple[float, ...], expected: str) -> None:
    found = through(module.eval(), torch.tensor(inputs).reshape(1, 1, 2, 2))
    for value, wanted in zip(found.flatten().tolist(), map(Fraction, expected.split()), strict=True):
        assert abs(Fraction(value) - wanted) < Fraction(1, 2**40)
