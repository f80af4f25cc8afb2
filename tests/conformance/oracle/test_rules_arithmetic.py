"""The oracle's rules of ops without weights: against integers and fractions by hand, and their bounds against draws."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator
from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fx_quant_conformance.backends.base import Capabilities
from fx_quant_conformance.conformance.bounds.error_bounds import MOVES, OpCall, Value
from fx_quant_conformance.conformance.ops.op_model import MODEL_OF
from fx_quant_conformance.conformance.ops.variants import Arguments
from fx_quant_conformance.conformance.oracle.evaluate import Walk
from fx_quant_conformance.conformance.oracle.exact import Exact
from fx_quant_conformance.conformance.oracle.table import OP_RULES
from fx_quant_conformance.refimpl import BackendConfig, BackendPatternConfig, DTypeConfig, ObservationType
from fx_quant_conformance.refimpl.config.patterns import leaf_name
from tests.conformance.support.by_hand import SX, ZX, X
from tests.conformance.support.flows import One, activation_range, converted, drawn_integers, on_grid
from tests.conformance.support.ops_without_weights import RECORDS

RANGE = activation_range(**X)  # type: ignore[arg-type]
SHARE = ObservationType.OUTPUT_SHARE_OBSERVER_WITH_INPUT
DIFFERENT = ObservationType.OUTPUT_USE_DIFFERENT_OBSERVER_AS_INPUT
SHAPE_READS = ("size", "shape")


def config_for(op: Any, *, shares: bool = False) -> BackendConfig:
    entry = BackendPatternConfig(op).set_observation_type(SHARE if shares else DIFFERENT)
    entry.add_dtype_config(DTypeConfig(torch.quint8, torch.quint8))
    return BackendConfig("one op").set_backend_pattern_config(entry)


def exact_of(op: Any, function: Callable[[Any], Any], q: Tensor, *, shares: bool = False) -> Exact:
    """The exact result of a function, which calls the op, on integers of one grid."""
    x, config = on_grid(q, scale=2.0**-5, zero_point=40), config_for(op, shares=shares)
    model = converted(One(function), [RANGE], config=config, output=[[x]])
    (exact,) = Walk(model).exact((x,))
    return exact


def reals(q: Tensor) -> list[Fraction]:
    return [(value - ZX) * SX for value in q.flatten().tolist()]


def agree(exact: Exact, expected: list[Fraction]) -> None:
    assert exact.real.flatten().tolist() == pytest.approx([float(each) for each in expected], rel=0, abs=1e-12)
    assert len(set(expected)) > 1


@pytest.mark.rule("NUM-03")
def test_bounds_between_two_steps_are_no_multiple_of_the_step() -> None:
    """The oracle's v is the bound itself, not a rounding of it."""
    q = drawn_integers(64, seed=2)
    low, high = Fraction(-0.3), Fraction(0.7)
    for op in (F.hardtanh, F.hardtanh_):
        exact = exact_of(op, lambda x, op=op: op(x, -0.3, 0.7), q)  # type: ignore[misc]
        agree(exact, [min(max(each, low), high) for each in reals(q)])
    exact = exact_of("clamp", lambda x: x.clamp(min=-0.3), q)
    agree(exact, [max(each, low) for each in reals(q)])


@pytest.mark.rule("NUM-03")
def test_floor_division() -> None:
    q = drawn_integers(64, seed=5)
    exact = exact_of(operator.floordiv, lambda x: x // -1.5, q)
    agree(exact, [Fraction(math.floor(each / Fraction(-3, 2))) for each in reals(q)])
    edges = [each % Fraction(3, 2) == 0 for each in reals(q)]
    assert [float(each) > 0.9 for each in exact.errors["function"]] == edges  # one unit, at whole quotients only


@pytest.mark.rule("NUM-03")
def test_addmm() -> None:
    q = drawn_integers(3, 5, seed=6)
    weight, bias = drawn_integers(5, 2, seed=7, low=-127, high=127), torch.tensor([0.3, -1.5])
    weight[0, 0] = 127
    model = MODEL_OF[1](
        [RECORDS[torch.addmm].step(torch.addmm, {**RECORDS[torch.addmm].base(), "beta": -1, "alpha": 2})]
    )
    model.get_parameter("weight0").data, model.get_parameter("bias0").data = weight * 2.0**-6, bias
    config = config_for(torch.addmm)
    entry = BackendPatternConfig(torch.addmm).set_dtype_configs(
        [DTypeConfig(torch.quint8, torch.quint8, torch.qint8, torch.float32)]
    )
    entry._set_input_type_to_index({"bias": 0, "input": 1, "weight": 2})
    x = on_grid(q, scale=2.0**-5, zero_point=40)
    config.set_backend_pattern_config(entry)
    reference = converted(model, [RANGE], output=[[x]], config=config)
    (exact,) = Walk(reference, Capabilities(int32_bias=True)).exact((x,))
    places = [(n, c) for n in range(3) for c in range(2)]
    parts = [[(int(q[n, k]) - ZX) * int(weight[k, c]) * SX * Fraction(2) ** -6 for k in range(5)] for n, c in places]
    products = [sum(each) for each in parts]
    biases = [Fraction(each) for each in bias.tolist()] * 3
    agree(exact, [2 * product - added for product, added in zip(products, biases, strict=True)])
    assert set(exact.errors["bias"].flatten().tolist()) == {2.0**-5 * 2.0**-6}  # half a step of 2·s_x·s_w
    sizes = [abs(added) + 2 * sum(map(abs, each)) for added, each in zip(biases, parts, strict=True)]
    assert exact.errors["rescale"].flatten().tolist() == pytest.approx([float(size) * 2.0**-23 for size in sizes])


@pytest.mark.rule("NUM-05")
def test_pieces_of_a_tensor() -> None:
    def swapped(x: Any) -> Any:
        (first, second), (_, rest) = torch.chunk(x, 2, dim=1), torch.split(x, [1, 3], dim=1)
        return torch.cat([second, first, rest[:, 1:]], 1)

    q = drawn_integers(3, 4, seed=8)
    exact = exact_of(torch.cat, swapped, q, shares=True)
    agree(exact, [each for row in q for each in reals(row[[2, 3, 0, 1, 2, 3]])])


# -- bounds -----------------------------------------------------------------------------------------------------------


def operands(op: Any, arguments: Arguments, seed: int) -> tuple[Any, tuple[Value, ...], Any] | None:
    """The function that a variant calls, operands that are off by some error, and how it is called on them.

    None: the step of the samples is more than a call of the op on its operands.
    """
    samples = RECORDS[op]
    step: Any = samples.step(op, arguments)
    is_module = isinstance(step.op, nn.Module)
    if step.op is not op and not is_module:
        return None
    generator = torch.Generator().manual_seed(seed)
    draw = [torch.randint(-128, 128, each.shape, generator=generator) * 2.0**-5 for each in samples.inputs(arguments)]
    values = tuple(
        Value(real=x.double(), errors={"upstream": torch.rand(x.shape, generator=generator).double() / 8}) for x in draw
    )
    function: Any = step.op.double().eval() if is_module else step.op
    if isinstance(op, str):
        function = lambda x, *rest, **options: getattr(x, op)(*rest, **options)  # noqa: E731
    rest, keywords = (() if is_module else step.arguments), ({} if is_module else dict(step.keywords))

    def run(inputs: tuple[Any, ...], how: Callable[..., Any]) -> Any:
        return how(*(([*inputs],) if step.takes_list else inputs), *rest, **keywords)

    return function, values, run


def variants(op: Any) -> Iterator[tuple[Arguments, Any, tuple[Value, ...], Any]]:
    for number, (_, arguments) in enumerate(RECORDS[op].variants()):
        found = operands(op, arguments, number)
        if found is not None:
            yield arguments, *found


def judged(
    op: Any, function: Any, values: tuple[Value, ...], run: Any, capabilities: Capabilities
) -> tuple[Tensor, Tensor]:
    """The exact result of a call, and the whole bound on its error."""
    rule = OP_RULES[op]
    call = run(
        values,
        lambda *args, **kwargs: OpCall(
            function=rule.exact or function, args=args, kwargs=kwargs, capabilities=capabilities
        ),
    )
    result = call.evaluate(lambda value: value.real.clone())
    errors = rule.bound(replace(call, result=result))
    return result, sum((error.expand_as(result) for error in errors.values()), torch.zeros_like(result))


WITH_RULES = [op for op in RECORDS if op not in SHAPE_READS and op is not torch.addmm]


@pytest.mark.rule("NUM-04")
@pytest.mark.parametrize("op", WITH_RULES, ids=leaf_name)
def test_operands_that_are_off_leave_the_result_inside_its_bound(op: Any) -> None:
    """Operands off by any part of their error, and by all of it up or down."""
    for arguments, function, values, run in variants(op):
        result, bound = judged(op, function, values, run, Capabilities())
        for draw in range(3):
            shifts = [
                torch.rand_like(value.real) * 2 - 1 if draw else torch.randint_like(value.real, 2) * 2 - 1
                for value in values
            ]
            off = tuple(v.real + v.errors["upstream"] * by for v, by in zip(values, shifts, strict=True))
            found = run(off, function)
            assert bool(((found - result).abs() <= bound + 1e-12).all()), (
                arguments,
                float((found - result).abs().max()),
            )


@pytest.mark.rule("NUM-04")
@pytest.mark.parametrize("op", WITH_RULES, ids=leaf_name)
def test_a_float32_evaluation_is_inside_the_bound_which_excuses_no_step(op: Any) -> None:
    """On operands that are exact in float32. Without float sums the bound is far below a step, 2⁻⁵ here."""
    for arguments, function, values, run in variants(op):
        exact = tuple(Value(real=value.real) for value in values)
        result, bound = judged(op, function, exact, run, Capabilities(float_accumulation=True))
        single = function.float() if isinstance(function, nn.Module) else function
        found = run(tuple(value.real.float() for value in values), single).double()
        last = 2.0**-24 * result.abs()  # the result is rounded to float32 once
        assert bool(((found - result).abs() <= bound + last).all()), (arguments, float((found - result).abs().max()))
        _, plain = judged(op, function, exact, run, Capabilities())
        assert op is operator.floordiv or float(plain.max()) < 0.05 * 2.0**-5, arguments


@pytest.mark.rule("NUM-05")
def test_what_moves_selects_or_clamps_has_no_error_of_its_own() -> None:
    for op in WITH_RULES:
        if OP_RULES[op].arithmetic == MOVES:
            for _, function, values, run in variants(op):
                exact = tuple(Value(real=value.real) for value in values)
                _, bound = judged(op, function, exact, run, Capabilities(float_accumulation=True))
                assert not bool(bound.any()), leaf_name(op)


def test_an_op_in_place_leaves_an_expanded_tensor_as_it_is() -> None:
    rule = OP_RULES["resize_"]
    assert rule.exact is not None
    x = torch.zeros(1).expand(4)
    assert rule.exact(x, 2, 2).shape == (2, 2)
    assert (x.shape, x.untyped_storage().nbytes()) == ((4,), 4)


@pytest.mark.rule("NUM-03")
@pytest.mark.parametrize("op", [op for op in WITH_RULES if op not in (torch.clamp, "detach_")], ids=leaf_name)
def test_the_reference_model_in_float32_is_correctly_rounded(op: Any) -> None:
    """Some variants of every op, in both forms: the last step from exact to integer is a rounding within the slack."""
    every = [arguments for _, arguments in RECORDS[op].variants()]
    for number, arguments in enumerate(every[:: max(1, len(every) // 2)]):
        samples = RECORDS[op]
        torch.manual_seed(number)
        shapes = [each.shape for each in samples.inputs(arguments)]
        model = MODEL_OF[len(shapes)]([samples.step(op, arguments)])
        scale = 0.0173 if number else 2.0**-5
        integers = [drawn_integers(*shape, seed=number) for shape in shapes]
        inputs = tuple(on_grid(q, scale=scale, zero_point=40) for q in integers)
        ranges = [activation_range(scale=scale, zero_point=40)] * len(shapes)
        config = config_for(op, shares=OP_RULES[op].arithmetic == MOVES)
        reference = converted(model, ranges, output=[inputs], config=config)
        (exact,) = Walk(reference, Capabilities(float_accumulation=True)).exact(inputs)
        with torch.no_grad():
            found = reference(*(x.clone() for x in inputs))
        assert exact.grid is not None
        distance = (exact.grid.integers(found).round() - exact.integers).abs()
        assert bool((distance <= 0.5 + exact.slack).all()), (arguments, float(distance.max()))
