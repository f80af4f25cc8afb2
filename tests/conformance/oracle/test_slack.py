"""How far a right backend may be from the oracle: the bounds against fractions by hand (rules NUM-04, NUM-05)."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fx_quant_conformance.backends.base import Capabilities
from fx_quant_conformance.conformance.bounds.error_bounds import OpCall, Value, propagate_product
from fx_quant_conformance.conformance.bounds.error_bounds_arithmetic import bound_affine_products
from fx_quant_conformance.conformance.oracle.evaluate import Walk
from fx_quant_conformance.conformance.oracle.exact import Exact
from fx_quant_conformance.conformance.oracle.grids import Grid
from fx_quant_conformance.conformance.oracle.recurrent import sigmoid, step_gru, tanh
from fx_quant_conformance.conformance.oracle.table import OP_RULES
from tests.conformance.support.by_hand import (
    SX,
    ZX,
    U,
    X,
    agree,
    both_schemes,
    exact_of,
    gamma,
    quantized,
    weighted,
)
from tests.conformance.support.flows import (
    PROPERTY,
    One,
    activation_range,
    converted,
    drawn_integers,
    input_grids,
    on_grid,
)


@pytest.mark.slow
@pytest.mark.rule("NUM-04")
@PROPERTY
@given(v=st.floats(-20, 280), zero=st.integers(0, 255), scale=st.floats(2.0**-12, 2.0**4), error=st.floats(0, 1e-2))
def test_the_slack_is_the_rules_formula(v: float, zero: int, scale: float, error: float) -> None:
    """3|r| + |r + zp| roundings of the result as it is after the clamp; errors are in steps of the scale."""
    grid = Grid(scale=scale, zero_point=zero, low=0, high=255, dtype="quint8")
    one = torch.ones(1, 1).double()
    errors = {"bias": one * error, "upstream": one[0] * error}
    exact = Exact(real=one * (v - zero) * scale, errors=errors, step=one[0, 0] * scale, grid=grid)
    r = min(max(Fraction(v), Fraction(0)), Fraction(255)) - zero
    final = (3 * abs(r) + abs(r + zero)) * U
    assert float(exact.slack_by_cause["final"]) == pytest.approx(float(final), rel=1e-9, abs=1e-18)
    expected = final + 2 * Fraction(error) / Fraction(scale)
    assert float(exact.slack) == pytest.approx(float(expected), rel=1e-9, abs=1e-18)
    assert exact.slack_by_cause["upstream"].shape == exact.real.shape


def test_a_float_output_is_measured_in_its_own_step_and_has_a_rounding_of_its_own() -> None:
    exact = Exact(real=torch.tensor([3.0, -8.0]).double(), errors={}, step=torch.tensor(0.5).double())
    assert exact.slack.tolist() == [2 * 3 * 2.0**-24 / 0.5, 2 * 8 * 2.0**-24 / 0.5]


@pytest.mark.rule("NUM-04")
@both_schemes
def test_an_int32_bias_is_off_by_half_a_step_of_input_and_weight(per_channel: bool) -> None:
    layer = nn.Conv2d(2, 3, 1)
    _, scales = weighted(layer, per_channel)
    x = on_grid(drawn_integers(1, 2, 4, 4, seed=4), **X)  # type: ignore[arg-type]
    how: dict[str, Any] = {"per_channel": per_channel}
    model = quantized(nn.Sequential(layer), x, **how)
    exact = exact_of(model, x, int32_bias=True)
    assert exact.errors["bias"][0, :, 0, 0].tolist() == [float(SX * scale / 2) for scale in scales]
    with torch.no_grad():
        layer.bias[1] = float(-SX * scales[1] * 2**33)  # type: ignore[index]
    beyond = exact_of(quantized(nn.Sequential(layer), x, **how), x, int32_bias=True).errors["bias"][0, :, 0, 0]
    assert beyond[1] == pytest.approx(float(SX * scales[1] * (2**33 - 2**31)), rel=2**-22), "what saturates is lost"
    assert beyond[0] == float(SX * scales[0] / 2)
    layer.bias = None
    assert "bias" not in exact_of(quantized(nn.Sequential(layer), x, **how), x, int32_bias=True).errors


@pytest.mark.rule("NUM-04")
@both_schemes
def test_sums_in_floating_point_have_the_bound_of_a_dot_product(per_channel: bool) -> None:
    layer = nn.Linear(9, 5)
    w, scales = weighted(layer, per_channel)
    q = drawn_integers(3, 9, seed=1)
    x = on_grid(q, **X)  # type: ignore[arg-type]
    model = quantized(nn.Sequential(layer), x, per_channel=per_channel)
    bias = [Fraction(b) for b in layer.bias.tolist()]
    absolute = [
        sum(abs((int(q[n, k]) - ZX) * int(w[c, k])) for k in range(9)) * SX * scales[c] + abs(bias[c])
        for n in range(3)
        for c in range(5)
    ]
    found = exact_of(model, x, float_accumulation=True).errors["accumulation"].flatten().tolist()
    assert found == pytest.approx([float(gamma(9 + 3) * each) for each in absolute], rel=1e-12)
    assert set(exact_of(model, x).errors) == {"bias"}, "integers are summed exactly; the bias is in float"


@pytest.mark.rule("NUM-04")
@both_schemes
def test_a_bias_in_float_is_rounded_as_the_sum_is_and_none_is_not(per_channel: bool) -> None:
    layer = nn.Linear(9, 5)
    weighted(layer, per_channel)
    with torch.no_grad():
        layer.bias[2] = 0
    x = on_grid(drawn_integers(3, 9, seed=1), **X)  # type: ignore[arg-type]
    how: dict[str, Any] = {"per_channel": per_channel}
    exact = exact_of(quantized(nn.Sequential(layer), x, **how), x)
    reals = [[Fraction(y) for y in row] for row in exact.real.tolist()]
    biases = [Fraction(b) for b in layer.bias.tolist()]
    expected = [
        float((2 * abs(b) + 3 * abs(y - b) + abs(y)) * U) if b else 0.0
        for row in reals
        for y, b in zip(row, biases, strict=True)
    ]
    assert exact.errors["bias"].flatten().tolist() == pytest.approx(expected, rel=1e-9)
    layer.bias = None  # type: ignore[assignment]
    assert not exact_of(quantized(nn.Sequential(layer), x, **how), x).errors


@pytest.mark.slow
@pytest.mark.rule("NUM-04")
@PROPERTY
@given(seed=st.integers(0, 2**16), size=st.integers(1, 12))
def test_two_ways_to_add_a_bias_in_float32_are_within_the_slack_though_they_cancel(seed: int, size: int) -> None:
    """Integers up to 2²⁴, biases that nearly cancel them: the kernels' arithmetic in float32 against fractions.

    FBGEMM divides the bias by the scales of input and weight, and adds it to the integer; others multiply the integer.
    """
    torch.manual_seed(seed)
    integers = torch.randint(-(2**24), 2**24, (size,))
    s_x, s_w, s_y = (2.0 ** -float(each) * 1.37 for each in torch.randint(4, 12, (3,)))
    step, out = (torch.tensor(each, dtype=torch.float32) for each in (s_x, s_y))
    weight_step = torch.tensor(s_w, dtype=torch.float32)
    bias = (-integers.double() * float(step) * float(weight_step) + torch.randn(size) * float(out) * 50).float()
    multiplier = step * weight_step / out
    divided = (integers.float() + bias / (step * weight_step)) * multiplier
    multiplied = (integers.float() * (step * weight_step) + bias) / out
    for place in range(size):
        products = int(integers[place]) * Fraction(float(step)) * Fraction(float(weight_step))
        added, scale = Fraction(float(bias[place])), Fraction(float(out))
        result = products + added
        slack = ((2 * abs(added) + 3 * abs(products) + abs(result)) / scale + 4 * abs(result / scale)) * U
        for found in (divided[place], multiplied[place]):
            assert abs(Fraction(float(found)) - result / scale) <= slack * (1 + 8 * U)


@pytest.mark.rule("NUM-03")
@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.Linear(9, 5), (3, 9)),
        (nn.Conv2d(4, 6, (3, 2), padding=1, groups=2, bias=False), (2, 4, 5, 6)),
        (nn.ConvTranspose1d(3, 2, 3, stride=2, output_padding=1), (2, 3, 5)),
    ],
    ids=lambda each: type(each).__name__,
)
def test_a_float_module_with_a_weight_is_computed_and_its_sums_are_in_float(layer: Any, shape: tuple[int, ...]) -> None:
    """In the place of a reference module of the same weight: the same result, with the error of a sum of floats."""
    weighted(layer, per_channel=False)
    x = on_grid(drawn_integers(*shape, seed=1), **X)  # type: ignore[arg-type]
    model = quantized(nn.Sequential(copy.deepcopy(layer)), x, per_channel=False)
    of_integers, in_float = exact_of(model, x), exact_of(model, x, float_accumulation=True)
    model.set_submodule("0", layer)
    found = exact_of(model, x)
    assert torch.equal(found.real, of_integers.real)
    assert of_integers.errors.keys() == ({"bias"} if layer.bias is not None else set())
    assert torch.equal(found.errors["accumulation"], in_float.errors["accumulation"]) and set(found.errors) == {
        "accumulation"
    }


@pytest.mark.rule("NUM-04")
@pytest.mark.parametrize("layer", [nn.AvgPool1d(4), lambda x: x.mean(2)], ids=("module", "function"))
def test_what_is_not_quantized_again_is_summed_in_float(layer: Any) -> None:
    """γ of 4 terms, each dequantized with a rounding, and their division; as far as a quantize follows, nothing."""
    x = on_grid(drawn_integers(3, 2, 4, seed=1), **X)  # type: ignore[arg-type]
    model = quantized(One(layer), x)
    assert not exact_of(model, x).errors
    (output,) = (node for node in model.graph.nodes if node.op == "output")
    (dequantize,) = output.all_input_nodes
    (quantize,) = dequantize.all_input_nodes
    output.replace_input_with(dequantize, quantize.all_input_nodes[0])
    model.graph.eliminate_dead_code()
    expected = [float(gamma(4 + 2) * each) for each in x.double().abs().mean(2).flatten().tolist()]
    assert exact_of(model, x).errors["accumulation"].flatten().tolist() == pytest.approx(expected, rel=1e-12)


class AddLinear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3, bias=False)

    def forward(self, x: Tensor, y: Tensor) -> Any:
        return self.linear(x + y)


@pytest.mark.rule("NUM-04")
@pytest.mark.rule("NUM-06")
def test_a_tie_on_the_way_may_fall_either_way_and_goes_on_as_one_step() -> None:
    """Sums of k/32 on a grid of 1/16: odd k are ties. Elsewhere nothing is in doubt."""
    grid: dict[str, Any] = {"scale": 2.0**-5, "zero_point": 128}
    q, r = torch.tensor([[0, 130, 141, 255], [2, 7, 128, 90]]), torch.tensor([[0, 129, 120, 255], [4, 9, 64, 90]])
    x, y = on_grid(q, **grid), on_grid(r, **grid)
    model = AddLinear()
    w, (scale, *_) = weighted(model.linear, False)
    reference = converted(model, [activation_range(**grid)] * 2, output=[[x, y]])
    exact = exact_of(reference, x, y)
    half = [
        [(a - 128) + (b - 128) for a, b in zip(*rows, strict=True)] for rows in zip(q.tolist(), r.tolist(), strict=True)
    ]
    middle = [[round(Fraction(k, 2)) for k in row] for row in half]
    agree(exact, [sum(m * int(w[c, k]) for k, m in enumerate(row)) * scale / 16 for row in middle for c in range(3)])
    doubt = [
        [float(sum(abs(int(w[c, k])) for k, h in enumerate(row) if h % 2) * scale / 16) for c in range(3)]
        for row in half
    ]
    assert exact.errors["upstream"].tolist() == doubt
    assert min(doubt[0]) > 0 and max(doubt[1]) == 0
    assert "upstream" not in exact_of(reference, x[1:], y[1:]).errors


@pytest.mark.slow
@pytest.mark.rule("CVT-02")
@settings(PROPERTY, max_examples=30)
@given(seed=st.integers(0, 2**31), per_channel=st.booleans(), n=st.integers(1, 40))
def test_the_weights_error_holds_for_any_weights(seed: int, per_channel: bool, n: int) -> None:
    torch.manual_seed(seed)
    layer = nn.Linear(n, 3)
    wanted = nn.Linear(n, 3).double()
    wanted.load_state_dict(layer.state_dict())
    model = converted(nn.Sequential(layer), [(-9.0, 9.0)], output=[[torch.randn(4, n)]], per_channel=per_channel)
    (grid,) = input_grids(model)
    x = grid.values(drawn_integers(4, n, seed=seed))
    (exact,) = Walk(model, counts_weights=True).exact((x,))
    assert set(exact.errors) == {"weights"}
    assert bool(((exact.real - wanted(x.double())).abs() <= exact.errors["weights"]).all())
    wanted.weight.data[0, 0] += 4 * (exact.real.abs().max() + 1) / x[:, 0].abs().max()
    assert bool(((exact.real - wanted(x.double())).abs() > exact.errors["weights"]).any())


@pytest.mark.rule("NUM-05")
@pytest.mark.parametrize(("factors", "beta", "alpha"), [({}, 1, 1), ({"beta": -2, "alpha": 3}, 2, 3)])
def test_errors_of_the_operands_of_addmm_add_up(factors: dict[str, int], beta: int, alpha: int) -> None:
    """β·C + α·A·B with A ± a, B ± b and C ± c: |β|·c + |α|·(|A|·b + a·|B| + a·b)."""
    real = {"c": torch.randn(3, 2).double(), "a": torch.randn(3, 5).double(), "b": torch.randn(5, 2).double()}
    error = {name: torch.rand_like(each) for name, each in real.items()}
    operands = tuple(Value(real=real[name], errors={"upstream": error[name]}) for name in "cab")
    call = OpCall(function=torch.addmm, args=operands, kwargs=factors, capabilities=Capabilities())
    call = replace(call, result=call.evaluate(lambda value: value.real))
    found = OP_RULES[torch.addmm].bound(call)["upstream"]
    products = real["a"].abs() @ error["b"] + error["a"] @ (real["b"].abs() + error["b"])
    assert torch.allclose(found, beta * error["c"] + alpha * products, rtol=1e-12, atol=0)


@pytest.mark.rule("NUM-04")
def test_the_roundings_of_addmm_by_hand() -> None:
    """−2·3 + 3·(1·4 + 2·(−1)) = 0: its terms are 6 and 3·(4 + 2) = 18; a float sum of two products loses γ₆ of them."""
    operands = tuple(Value(real=torch.tensor(each).double()) for each in ([[3.0]], [[1.0, 2.0]], [[4.0], [-1.0]]))
    for float_accumulation, cause, factor in ((True, "accumulation", gamma(2 + 4)), (False, "rescale", 2 * U)):
        capabilities = Capabilities(float_accumulation=float_accumulation)
        call = OpCall(function=torch.addmm, args=operands, kwargs={"beta": -2, "alpha": 3}, capabilities=capabilities)
        call = replace(call, result=call.evaluate(lambda value: value.real))
        assert call.result.item() == 0.0
        assert OP_RULES[torch.addmm].bound(call)[cause].item() == pytest.approx(
            float(factor * (6 + 18)), rel=1e-12, abs=0
        )


@pytest.mark.rule("NUM-04")
def test_a_step_of_a_gru_is_off_by_four_roundings_of_its_terms() -> None:
    """Gates of 0 give r = z = 1/2, off by ½·(½·γ₃) each; n = tanh(0 + ½·nₕ) with nₕ = 0 is 0; h' = h / 2.

    With h = 8 the roundings are γ₄·(8 + 2·0), and z's error goes on by |h − n| = 8.
    """
    zeros = torch.zeros(1, 3, dtype=torch.float64)
    h = Value(real=torch.full((1, 1), 8.0, dtype=torch.float64))
    (found,) = step_gru(Value(real=zeros), Value(real=zeros), (h,))
    z, n = sigmoid(Value(real=zeros[:, :1])), tanh(Value(real=zeros[:, :1]))
    assert found.real.item() == 4.0
    of_n = 0.5 * (n.error() + 0.5 * 0.0).item()
    expected = float(gamma(4)) * (8 + 2 * n.error().item()) + z.error().item() * (8 + n.error().item()) + of_n
    assert found.error().item() == pytest.approx(expected, rel=1e-6, abs=0)


@pytest.mark.rule("NUM-05")
def test_a_norm_of_two_numbers_is_off_by_the_roundings_of_its_mean_variance_root_and_sum() -> None:
    """(3, 1): μ = 2, v = 1; each is dequantized first, off by e = 2u·|x|, at most E = 6u.

    A = √5 + E. The mean is off by E + γ₂·A; v lies between (1 − E)² − γ₉·A² and (1 + E)² + γ₉·A²; r rounds by γ₄; and
    (x − μ)·r = x·r − μ·r by γ₃·(|x| + |μ|)·r.
    """
    given, eps = (3.0, 1.0), 1e-5
    off = [2 * float(U) * x for x in given]
    largest, size = max(off), math.sqrt(5) + max(off)
    spread = float(gamma(9)) * size**2
    most = ((1 - largest) ** 2 - spread + eps) ** -0.5 * (1 + float(gamma(4)))
    least = ((1 + largest) ** 2 + spread + eps) ** -0.5 * (1 - float(gamma(4)))
    exact = (1 + eps) ** -0.5
    of_root = max(most - exact, exact - least)
    expected = [
        abs(x - 2) * of_root + (e + largest + float(gamma(2)) * size + float(gamma(3)) * (x + 2)) * most
        for x, e in zip(given, off, strict=True)
    ]
    operand = Value(real=torch.tensor([given]).double())
    call = OpCall(function=F.layer_norm, args=(operand, (2,)), kwargs={}, capabilities=Capabilities())
    found = OP_RULES[F.layer_norm].bound(call)["function"].flatten().tolist()
    assert found == pytest.approx(expected, rel=1e-9)


def test_batch_norm_normalizes_by_its_input_where_the_sixth_argument_says_so() -> None:
    """F.batch_norm(x, mean, variance, weight, bias, training): at its place or by its name."""
    x = Value(real=torch.randn(4, 3, 5).double() + 8)
    given = (x, torch.zeros(3), torch.ones(3), None, None)

    def bound(*further: bool, **named: bool) -> Tensor:
        call = OpCall(function=F.batch_norm, args=(*given, *further), kwargs=named, capabilities=Capabilities())
        error: Tensor = OP_RULES[F.batch_norm].bound(call)["function"]
        return error

    assert torch.equal(bound(True), bound(training=True))
    assert torch.equal(bound(False), bound()) and not torch.equal(bound(True), bound())


@pytest.mark.rule("NUM-04")
def test_a_bag_that_is_left_in_float_is_off_by_the_sum_of_its_rows() -> None:
    """Three rows of numbers of at most 2 in magnitude: γ₅·3·2."""
    bag = nn.EmbeddingBag.from_pretrained(torch.tensor([[1.0, -2.0], [0.5, 1.5], [0.25, 1.0]]), mode="sum")
    call = OpCall(function=bag, args=(torch.tensor([[0, 1, 2]]),), kwargs={}, capabilities=Capabilities())
    call = replace(call, result=call.evaluate(lambda value: value.real))
    found = OP_RULES[nn.EmbeddingBag].bound(call)["accumulation"].flatten().tolist()
    assert found == pytest.approx([float(gamma(5)) * 3 * 2] * 2, rel=1e-9)


@pytest.mark.rule("NUM-04")
def test_a_cubic_interpolation_is_off_by_its_coordinates_on_each_axis_and_its_sums() -> None:
    """Two axes of 2, made 4, of numbers of at most 3: c is off by 5u·5; Σ|w'| ≤ 4, Σ|w| ≤ 1.375; γ₁₁ for the sums."""
    operand = Value(real=torch.tensor([[[[1.0, -3.0], [2.0, 0.5]]]]).double())
    call = OpCall(
        function=F.interpolate, args=(operand, (4, 4), None, "bicubic"), kwargs={}, capabilities=Capabilities()
    )
    call = replace(call, result=call.evaluate(lambda value: value.real))
    found = OP_RULES[F.interpolate].bound(call)["function"].flatten().tolist()
    expected = (2 * 4 * 1.375 * 25 * float(U) + float(gamma(11)) * 1.375**2) * 3
    assert found == pytest.approx([expected] * 16, rel=1e-9)


@pytest.mark.rule("NUM-04")
def test_an_error_of_the_matrix_that_is_added_alone_goes_on() -> None:
    added = Value(real=torch.ones(2, 2).double(), errors={"upstream": torch.full((2, 2), 0.5).double()})
    a, b = (Value(real=torch.ones(*shape).double()) for shape in ((2, 3), (3, 2)))
    result = torch.addmm(added.real, a.real, b.real)
    call = OpCall(function=torch.addmm, args=(added, a, b), kwargs={}, capabilities=Capabilities(), result=result)
    assert bound_affine_products(call)["upstream"].tolist() == [[0.5, 0.5]] * 2


@pytest.mark.rule("NUM-04")
def test_errors_of_two_causes_multiply_too() -> None:
    x = Value(real=torch.tensor([2.0]).double(), errors={"upstream": torch.tensor([0.5]).double()})
    y = Value(real=torch.tensor([3.0]).double(), errors={"weights": torch.tensor([0.25]).double()})
    total = sum(float(propagate_product(torch.mul, x, y, cause)) for cause in ("upstream", "weights"))
    assert total == 2.5 * 3.25 - 2 * 3
