"""What is certain whatever the errors: infinities, ranks, counts; and what errors of several causes make together."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fx_quant_conformance.backends.base import Capabilities
from fx_quant_conformance.conformance.bounds.error_bounds import OpCall, Value, bound_evaluation
from fx_quant_conformance.conformance.oracle.decompose import evaluate_opened, open_op
from fx_quant_conformance.conformance.oracle.table import OP_RULES

Run = Callable[..., Any]
MASKED = torch.tensor([0.0, 0.0, 0.0, torch.finfo(torch.float32).min])


def value(numbers: Any, error: float = 0.0, cause: str = "upstream") -> Value:
    real = torch.as_tensor(numbers, dtype=torch.float32).double()
    return Value(real=real, errors={cause: torch.full_like(real, error)} if error else {})


def error(found: Any) -> Tensor:
    """How far each element of a result may be off; a plain tensor is exact."""
    return found.error() if isinstance(found, Value) else torch.zeros(found.shape, dtype=torch.float64)


def evaluate(run: Run, *operands: Any) -> Any:
    return evaluate_opened(open_op(run, operands, {}), operands, {}, Capabilities())[0]


# -- infinities -------------------------------------------------------------------------------------------------------


@pytest.mark.rule("NUM-04")
@pytest.mark.parametrize("run", [torch.log, torch.reciprocal, lambda x: 1 / x, torch.rsqrt])
def test_what_is_infinite_for_some_machines_only_is_not_known(run: Run) -> None:
    found = evaluate(run, value([0.0, 1.0], 1e-3))
    assert found.real[0].isinf() and found.error()[0] == math.inf
    assert found.error()[1] < 0.1


@pytest.mark.parametrize("run", [torch.log, torch.reciprocal, torch.rsqrt])
def test_what_is_infinite_for_every_machine_has_no_error(run: Run) -> None:
    found = evaluate(run, value([0.0, 1.0]))
    assert found.real[0].isinf() and found.error()[0] == 0


@pytest.mark.rule("NUM-04")
@pytest.mark.parametrize(
    "run", [lambda x: x.square().sum(-1, keepdim=True).sqrt(), lambda x: x.relu().sqrt(), lambda x: (x**2) ** 0.5]
)
def test_a_root_of_what_no_machine_has_below_zero_is_known(run: Run) -> None:
    assert float(evaluate(run, value([0.0])).error().max()) < 1e-15
    assert float(evaluate(run, value([0.0], 1e-6)).error().max()) < 1e-2


@pytest.mark.rule("NUM-04")
def test_what_may_pass_the_largest_float32_is_not_known() -> None:
    """A machine holds infinity there, or the value in a wider register."""
    found = evaluate(lambda x: (1 + x.exp()).log(), value([80.0, 100.0]))
    assert found.error()[0] < 1e-4 and found.error()[1] == math.inf
    assert evaluate(torch.exp, value([88.5], 0.5)).error()[0] == math.inf
    assert evaluate(torch.exp, value([60.0], 40.0)).error()[0] == math.inf
    assert evaluate(torch.exp, value([88.5], 1e-6)).error()[0] < math.inf


@pytest.mark.rule("NUM-04")
@pytest.mark.parametrize("run", [lambda x: 1 / x, lambda x: (40 * (x + 2)).exp()])
def test_what_is_open_is_open_in_the_products_that_read_it(run: Run) -> None:
    """It was an error in float32, which no product takes beside float64."""
    found = evaluate(lambda x, y: run(x) @ y, value([[0.0, 0.25]], 1e-3), value([[1.0], [0.0]]))
    assert found.error().dtype == torch.float64 and found.error().shape == (1, 1)
    assert found.error()[0, 0] == math.inf


@pytest.mark.rule("NUM-04")
def test_an_index_of_which_nothing_is_known_is_still_an_index() -> None:
    """0 · ∞ was added to it: an index that no table has."""
    found = evaluate(lambda x: torch.arange(4.0)[x.long()], value([2.0], math.inf))
    assert float(found.real) == 2 and float(found.error()) == 2
    places = evaluate(
        lambda x: F.grid_sample(torch.arange(16.0).reshape(1, 1, 4, 4), x), value(torch.zeros(1, 1, 1, 2), math.inf)
    )
    assert float(places.real) == 7.5 and bool(places.error().isinf().all())


@pytest.mark.rule("NUM-04")
@pytest.mark.parametrize("number", [0.5, math.inf, -math.inf])
def test_a_bucket_of_which_nothing_is_known_is_undecided(number: float) -> None:
    bounds = torch.arange(4.0)
    found = evaluate(lambda x: torch.bucketize(x, bounds), value([number], math.inf))
    assert float(found.error()) == math.inf and int(found.real) == int(torch.bucketize(torch.tensor([number]), bounds))


def test_masks_that_add_up_below_the_least_float32_still_mask() -> None:
    weights = evaluate(lambda x, m: (x + m + m).softmax(-1), value([1.0, 2.0, 3.0, 4.0], 1e-6), MASKED)
    assert float(weights.error().max()) < 1e-5


def test_a_mask_of_minus_infinity_that_is_undecided_leaves_its_element_open() -> None:
    found = evaluate(lambda x: x.masked_fill(x < 0.5, -math.inf), value([0.499, 0.3, 0.9], 1e-2))
    assert found.error()[0] == math.inf  # masked or not
    assert found.error()[1] == 0
    weights = evaluate(lambda x: x.masked_fill(x < 0.5, -math.inf).softmax(-1), value([0.499, 0.3, 0.9], 1e-2))
    moved = F.softmax(torch.tensor([0.501, -math.inf, 0.9], dtype=torch.float64), -1)  # what another machine may give
    assert bool(((moved - weights.real).abs() <= weights.error()).all())


@pytest.mark.parametrize("run", [lambda x: x > 0, torch.isnan, torch.isinf, lambda x: x.bool()])
def test_of_what_is_no_number_nothing_is_decided(run: Run) -> None:
    found = evaluate(lambda x: run((x - x * 1.0) / (x - x * 1.0)), value([1.0], 1e-3))
    assert found.error()[0] == math.inf


# -- ranks and counts -------------------------------------------------------------------------------------------------


PLACES: list[Run] = [
    lambda x, m: (x + m).argmax(-1),
    lambda x, m: (x + m).max(-1).indices,
    lambda x, m: (-x - m).argmin(-1),
    lambda x, m: (x + m).topk(2).indices[0],
]


@pytest.mark.rule("NUM-04")
@pytest.mark.parametrize("run", PLACES)
def test_a_mask_does_not_spoil_the_places_of_others(run: Run) -> None:
    found = evaluate(run, value([1.0, 2.0, 3.0, 4.0], 1e-6), MASKED)
    assert isinstance(found, Tensor) and int(found) == 2


def test_a_mask_does_not_spoil_the_order_and_the_values_of_others() -> None:
    logits = value([1.0, 2.0, 3.0, 4.0], 1e-6)
    assert float(error(evaluate(lambda x, m: (x + m).topk(2).values, logits, MASKED)).max()) < 1e-5
    assert not bool(error(evaluate(lambda x, m: (x + m).sort(-1).indices, logits, MASKED)).any())


def test_a_rival_leaves_a_place_open() -> None:
    close = value([1.0, 3.0, 3.0 + 1e-6], 1e-5)
    assert evaluate(lambda x: x.argmax(-1), close).error() == math.inf
    values = evaluate(lambda x: x.topk(1).values, value([1.0, 2.0, 2.1], 0.2))
    assert float(values.error()) >= 0.2


def test_undecided_truth_values_count_as_one() -> None:
    x = value([1e-4, 1.0, 2.0], 1e-3)
    assert evaluate(lambda x: (x > 0).sum(), x).error() == pytest.approx(1.0, abs=1e-5)
    product = evaluate(lambda x, y: (x > 0) * y, x, torch.tensor([2.0, 3.0, 4.0]))
    assert product.error().tolist() == pytest.approx([2.0, 0.0, 0.0], abs=1e-6)


def test_integers_that_are_cast_are_off_by_what_they_may_be() -> None:
    found = evaluate(lambda x: (x * 3).int().float(), value([1.0, 1.1], 1e-3))
    assert found.real.tolist() == [3.0, 3.0]
    assert found.error().tolist() == pytest.approx([1.0, 0.0], abs=1e-6)


def test_quotients_by_powers_of_two_do_not_round() -> None:
    x = value([2.0, 3.0, 6.0])
    assert not bool(error(evaluate(lambda x: torch.div(x, 2, rounding_mode="floor"), x)).any())
    assert bool(error(evaluate(lambda x: torch.div(x, 3, rounding_mode="floor"), x)).any())  # as x · (1 / 3), too


def test_sums_by_place_round_as_often_as_values_meet_there() -> None:
    rows, places = value(torch.ones(2000, 8)), torch.arange(2000) % 1000
    found = evaluate(lambda x: torch.zeros(1000, 8).index_add(0, places, x), rows)
    assert float(found.error().max()) < 1e-6


# -- several causes, several terms ------------------------------------------------------------------------------------


def split(value: Value) -> Value:
    """The same error, of two causes."""
    return Value(real=value.real, errors={"upstream": value.error() / 2, "rescale": value.error() / 2})


NORMS: dict[str, Run] = {
    "layer_norm": lambda x: F.layer_norm(x, x.shape[-1:]),
    "softmax": lambda x: F.softmax(x, -1),
    "batch_norm": lambda x: torch.batch_norm(
        x, None, None, torch.zeros(x.shape[1]), torch.ones(x.shape[1]), False, 0.1, 1e-5, False
    ),
}


@pytest.mark.rule("NUM-04")
@pytest.mark.parametrize("name", NORMS)
def test_two_causes_make_no_less_than_one(name: str) -> None:
    x = value(torch.where(torch.arange(64).reshape(1, 64) % 2 == 0, 1.0, -1.0), 0.9)
    once, twice = evaluate(NORMS[name], x).error(), evaluate(NORMS[name], split(x)).error()
    assert bool((twice >= once * (1 - 1e-9)).all())


def test_two_causes_of_a_norm_by_its_rule_make_no_less_than_one() -> None:
    x = value(torch.where(torch.arange(1000).reshape(1, 1000) % 2 == 0, 1.0, -1.0), 0.9)
    bounds = []
    for each in (x, split(x)):
        call = OpCall(function=F.layer_norm, args=(each, (1000,)), kwargs={}, capabilities=Capabilities())
        call = replace(call, result=call.evaluate(lambda operand: operand.real))
        bounds.append(sum(OP_RULES[F.layer_norm].bound(call).values(), torch.zeros(x.real.shape)))
    assert bool((bounds[1] >= bounds[0] * (1 - 1e-9)).all())
    moved = torch.where(x.real > 0, 0.1, -0.1)  # all within 0.9, but one
    moved[0, 0] = 1.9
    found = F.layer_norm(moved, (1000,)) - F.layer_norm(x.real, (1000,))
    assert float(found.abs().max()) > 15 and bool((found.abs() <= bounds[1]).all())


def test_two_causes_of_a_vendors_function_make_no_less_than_one() -> None:
    x = value([0.0, 1.0], 2.0)
    bounds = []
    for each in (x, split(x)):
        call = OpCall(function=torch.exp, args=(each,), kwargs={}, capabilities=Capabilities(), result=each.real.exp())
        bounds.append(sum(bound_evaluation(1, call).values(), torch.zeros(2)))
    assert bool((bounds[1] >= bounds[0] * (1 - 1e-9)).all())
    assert float(bounds[1][0]) >= math.expm1(2.0)


def test_softmax_of_many_weights_that_are_alike_is_bounded_by_the_weights() -> None:
    found = evaluate(lambda x: F.softmax(x, -1), value(torch.zeros(1, 512), 1e-3))
    assert float(found.error().max()) < 2 * math.expm1(2e-3) / 512
    moved = torch.zeros(1, 512, dtype=torch.float64)
    moved[0, 0], moved[0, 1:] = 1e-3, -1e-3
    assert float((moved.softmax(-1) - found.real).abs()[0, 0]) <= float(found.error()[0, 0])


@pytest.mark.rule("NUM-04")
@pytest.mark.parametrize("offset", [0.0, 10.0])
def test_a_batch_norm_of_a_captured_model_may_be_folded(offset: float) -> None:
    draw = torch.Generator().manual_seed(0)
    x, mean = torch.randn(64, 16, generator=draw) + offset, torch.randn(16, generator=draw) + offset
    variance, weight, bias = (torch.rand(3, 16, generator=draw) + 0.5).unbind()
    found = evaluate(
        lambda x: torch.batch_norm(x, weight, bias, mean, variance, False, 0.1, 1e-5, False),
        Value(real=x.double()),
    )
    scale = weight * (variance + 1e-5).rsqrt()
    folded = x * scale + (bias - mean * scale)
    assert bool(((folded.double() - found.real).abs() <= found.error()).all())


def test_products_that_are_put_multiply_their_errors() -> None:
    def put(x: Tensor, y: Tensor) -> Tensor:
        return x.scatter(0, torch.tensor([0, 1]), y, reduce="multiply")

    found = evaluate(put, value([3.0, 4.0], 0.1), value([5.0, 6.0], 0.1))
    assert bool((found.error() >= torch.tensor([3.1 * 5.1 - 15, 4.1 * 6.1 - 24])).all())
    assert float(found.error().max()) < 1.02


def test_rounding_to_decimals_multiplies_before() -> None:
    x = torch.arange(-2000, 2001) / 1000 + 0.005
    found = evaluate(lambda x: x.round(decimals=2), Value(real=x.double()))
    assert bool(((x.round(decimals=2).double() - found.real).abs() <= found.error()).all())


@pytest.mark.parametrize("run", [F.selu, lambda x: F.celu(x, 0.5), F.elu])
def test_an_elu_with_a_scale_is_as_steep_as_it_is(run: Run) -> None:
    x = torch.tensor([*torch.linspace(-3, 3, 61), -1e-6])
    found = evaluate(run, value(x, 1e-3))
    for way in (-1, 1):
        moved = run(x.double() + way * 1e-3)
        assert bool(((moved - found.real).abs() <= found.error() * (1 + 1e-6)).all())  # x ± 0.1 rounds
    assert bool(((run(x).double() - found.real).abs() <= found.error()).all())


def test_whole_exponents_of_several_are_told_apart() -> None:
    x = value([-0.01, -0.01, 0.0], 1.0)
    found = evaluate(lambda x: x ** torch.tensor([2.0, 3.0, 2.0]), x)
    for way in (-1, 1):
        moved = (x.real + way) ** torch.tensor([2.0, 3.0, 2.0])
        assert bool(((moved - found.real).abs() <= found.error()).all())
    assert float(evaluate(lambda x: x**0.3, value([0.0, 1.0], 1e-6)).error().max()) < 0.1


def test_what_is_below_the_smallest_normal_number_rounds_to_its_steps() -> None:
    x = torch.linspace(0.01, 2, 200).half()
    found = evaluate(lambda x: x * 1e-6, Value(real=x.double(), dtype=torch.float16))
    assert bool((((x * 1e-6).double() - found.real).abs() <= found.error()).all())
