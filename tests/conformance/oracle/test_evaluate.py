"""The oracle against integer arithmetic done by hand, in Python's integers and fractions (rules NUM-01 to NUM-05)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, symbolic_trace

from fx_quant_conformance.backends.base import Requantize
from fx_quant_conformance.conformance.bounds.error_bounds import (
    NoOracleError,
    Value,
    bound_dequantizing,
    bound_rescaling,
)
from fx_quant_conformance.conformance.oracle.evaluate import Walk
from fx_quant_conformance.conformance.oracle.grids import is_constant, placeholder_grids
from fx_quant_conformance.refimpl import BackendConfig, BackendPatternConfig, DTypeConfig, ObservationType
from fx_quant_conformance.refimpl.observers.decomposed import OPS
from tests.conformance.support.by_hand import (
    SX,
    SY,
    ZX,
    ZY,
    U,
    X,
    Y,
    agree,
    both_schemes,
    exact_of,
    quantized,
    weighted,
)
from tests.conformance.support.flows import One, Two, drawn_integers, input_grids, on_grid


@pytest.mark.rule("NUM-03")
@both_schemes
def test_linear(per_channel: bool) -> None:
    layer = nn.Linear(9, 5)
    w, scales = weighted(layer, per_channel)
    q = drawn_integers(3, 9, seed=1)
    x = on_grid(q, **X)  # type: ignore[arg-type]
    model = quantized(nn.Sequential(layer), x, per_channel=per_channel)
    bias = [Fraction(b) for b in layer.bias.tolist()]
    reals = [
        sum((int(q[n, k]) - ZX) * int(w[c, k]) for k in range(9)) * SX * scales[c] + bias[c]
        for n in range(3)
        for c in range(5)
    ]
    agree(exact_of(model, x), reals)


def convolved(q: Tensor, w: Tensor, layer: nn.Conv2d) -> Iterator[tuple[int, int]]:
    """Yield (channel, exact integer sum) of a convolution of centred integers, tap by tap."""
    batch, _, height, width = q.shape
    c_out, c_group, k_h, k_w = w.shape
    out: Any = layer(torch.zeros(q.shape)).shape
    for n, c, i, j in itertools.product(range(batch), range(c_out), range(out[2]), range(out[3])):
        first = c // (c_out // layer.groups) * c_group
        total = 0
        for k, a, b in itertools.product(range(c_group), range(k_h), range(k_w)):
            row = i * layer.stride[0] - int(layer.padding[0]) + a * layer.dilation[0]
            column = j * layer.stride[1] - int(layer.padding[1]) + b * layer.dilation[1]
            if 0 <= row < height and 0 <= column < width:
                total += (int(q[n, first + k, row, column]) - ZX) * int(w[c, k, a, b])
        yield c, total


CONVOLUTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"padding": 1},
    {"padding": (2, 1), "stride": (1, 2)},
    {"groups": 2, "stride": 2},
    {"groups": 4, "padding": 1},
    {"dilation": 2, "padding": 2, "bias": False},
)


@pytest.mark.rule("NUM-03")
@pytest.mark.parametrize("geometry", CONVOLUTIONS, ids=str)
def test_conv2d(geometry: dict[str, Any]) -> None:
    layer = nn.Conv2d(4, 4, (3, 2), **geometry)
    w, scales = weighted(layer, per_channel=True)
    q = drawn_integers(2, 4, 5, 6, seed=2)
    x = on_grid(q, **X)  # type: ignore[arg-type]
    model = quantized(nn.Sequential(layer), x, per_channel=True)
    bias = [Fraction(b) for b in layer.bias.tolist()] if layer.bias is not None else [Fraction(0)] * 4
    layer.bias = None
    agree(exact_of(model, x), [total * SX * scales[c] + bias[c] for c, total in convolved(q, w, layer)])


@pytest.mark.rule("NUM-03")
@pytest.mark.rule("NUM-04")
@pytest.mark.parametrize("op", (torch.add, torch.mul), ids=("add", "mul"))
def test_binary(op: Any) -> None:
    """Beside the result: summands rescaled as k·s − z·s, each product of at most 255·s, in float32.

    Of a product nothing rounds, as the operands are on grids of powers of two.
    """
    q, r = drawn_integers(40, seed=1), drawn_integers(40, seed=2)
    x, y = on_grid(q, **X), on_grid(r, **Y)  # type: ignore[arg-type]
    exact = exact_of(quantized(Two(op), x, y), x, y)
    pairs = [((a - ZX) * SX, (b - ZY) * SY) for a, b in zip(q.tolist(), r.tolist(), strict=True)]
    agree(exact, [a + b if op is torch.add else a * b for a, b in pairs])
    scale, rounds = Fraction(float(exact.step)), op is torch.add
    off = [tuple(2 * U * rounds * (abs(value) + 255 * step) for value, step in ((a, SX), (b, SY))) for a, b in pairs]
    rescale = [
        float((da + db if op is torch.add else abs(a) * db + abs(b) * da) / scale)
        for (a, b), (da, db) in zip(pairs, off, strict=True)
    ]
    assert exact.slack_by_cause["rescale"].tolist() == pytest.approx(rescale, rel=1e-12)
    assert set(exact.slack_by_cause) == {"rescale", "final"}


@pytest.mark.rule("NUM-04")
@pytest.mark.parametrize(
    ("step", "bound"), [(2.0**-5, 0.0), (0.1, 2 * float(U) * (3.7 + 25.5)), (None, 2 * float(U) * 3.7)]
)
def test_dequantizing_rounds_but_on_a_grid_of_a_power_of_two(step: float | None, bound: Fraction) -> None:
    value = Value(real=torch.tensor([-3.7]).double(), step=None if step is None else torch.tensor(step))
    assert bound_dequantizing(value).tolist() == pytest.approx([float(bound)], rel=1e-6)
    assert bool((bound_rescaling(value, Requantize()) > 0).all()), "rescaled, it is multiplied by another factor"


@pytest.mark.rule("NUM-03")
@pytest.mark.parametrize("ceil_mode", (False, True))
@pytest.mark.parametrize("counted", (False, True))
def test_avg_pool(counted: bool, ceil_mode: bool) -> None:
    """A window counts what lies in the input or, where asked, in its padding; never what ceil_mode adds beyond."""
    q = drawn_integers(1, 2, 6, 6, seed=5)
    x = on_grid(q, **X)  # type: ignore[arg-type]
    pool = nn.AvgPool2d(3, stride=2, padding=1, count_include_pad=counted, ceil_mode=ceil_mode)
    exact = exact_of(quantized(nn.Sequential(pool), x), x)
    reals = []
    for c, i, j in itertools.product(range(2), range(exact.integers.shape[2]), range(exact.integers.shape[3])):
        rows, columns = (list(range(2 * k - 1, 2 * k + 2)) for k in (i, j))
        inside = [(a, b) for a in rows for b in columns if 0 <= a < 6 and 0 <= b < 6]
        padded = [(a, b) for a in rows for b in columns if a < 7 and b < 7]
        total = sum(int(q[0, c, a, b]) - ZX for a, b in inside)
        reals.append(Fraction(total, len(padded if counted else inside)) * SX)
    assert exact.integers.shape[2] == (4 if ceil_mode else 3)
    agree(exact, reals)


@pytest.mark.rule("NUM-05")
def test_max_pool_selects_from_the_input_and_never_from_its_padding() -> None:
    q = drawn_integers(1, 1, 5, 5, seed=6) // 8  # all below the zero point but the last
    x = on_grid(q, **X)  # type: ignore[arg-type]
    exact = exact_of(quantized(nn.Sequential(nn.MaxPool2d(2, padding=1)), x), x)
    windows = itertools.product([(0,), (1, 2), (3, 4)], repeat=2)
    expected = [float(max(int(q[0, 0, a, b]) for a in rows for b in columns)) for rows, columns in windows]
    assert exact.integers.flatten().tolist() == pytest.approx(expected, abs=1e-9)
    assert not exact.errors


@pytest.mark.rule("NUM-05")
def test_cat_with_relu() -> None:
    entry = BackendPatternConfig((torch.cat, nn.ReLU)).add_dtype_config(DTypeConfig(torch.quint8, torch.quint8))
    entry.set_observation_type(ObservationType.OUTPUT_SHARE_OBSERVER_WITH_INPUT)
    config = BackendConfig("c").set_backend_pattern_config(entry)

    class CatRelu(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.relu = nn.ReLU()

        def forward(self, x: Tensor, y: Tensor) -> Any:
            return self.relu(torch.cat([x, y], 1))

    q, r = drawn_integers(2, 3, seed=1), drawn_integers(2, 4, seed=2)
    x, y = on_grid(q, **X), on_grid(r, **X)  # type: ignore[arg-type]
    exact = exact_of(quantized(CatRelu(), x, y, config=config), x, y)
    assert exact.grid is not None
    scale, zero = Fraction(exact.grid.scale), exact.grid.zero_point
    inputs = [[round((v - ZX) * SX / scale) for v in row] for row in torch.cat([q, r], 1).tolist()]
    expected = [float(max(v, 0) + zero) for row in inputs for v in row]
    assert exact.integers.round().flatten().tolist() == expected


@pytest.mark.rule("NUM-01")
@pytest.mark.rule("CVT-09")
def test_a_range_narrower_than_the_dtypes_is_kept() -> None:
    x = on_grid(drawn_integers(3, 9, seed=1, high=127), **X)  # type: ignore[arg-type]
    layer = nn.Linear(9, 5)
    weighted(layer, False)
    model = quantized(nn.Sequential(layer), x, quant_min=0, quant_max=127)
    assert [(grid.low, grid.high) for grid in input_grids(model)] == [(0, 127)]
    exact = exact_of(model, x * 3)
    assert exact.grid is not None
    assert (exact.grid.low, exact.grid.high) == (0, 127)
    assert float(exact.integers.max()) <= 127


def test_outputs_are_given_in_order() -> None:
    q, r = drawn_integers(40, seed=1), drawn_integers(40, seed=2)
    x, y = on_grid(q, **X), on_grid(r, **Y)  # type: ignore[arg-type]
    model = quantized(Two(lambda x, y: (x.relu(), (x + y, y.relu()))), x, y)
    first, total, last = Walk(model).exact((x, y))
    agree(first, [max(v - ZX, 0) * SX for v in q.tolist()])
    agree(total, [(a - ZX) * SX + (b - ZY) * SY for a, b in zip(q.tolist(), r.tolist(), strict=True)])
    agree(last, [max(v - ZY, 0) * SY for v in r.tolist()])
    assert [set(each.errors) for each in (first, total, last)] == [set(), {"rescale"}, set()]


# -- what there is no oracle for --------------------------------------------------------------------------------------


def test_what_the_table_lacks_is_evaluated_by_its_primitives() -> None:
    entry = BackendPatternConfig(F.softsign).add_dtype_config(DTypeConfig(torch.quint8, torch.quint8))
    q = drawn_integers(40, seed=1)
    x = on_grid(q, **X)  # type: ignore[arg-type]
    config = BackendConfig("c").set_backend_pattern_config(entry)
    (exact,) = Walk(quantized(One(lambda x: F.softsign(x)), x, config=config)).exact((x,))
    agree(exact, [(v - ZX) * SX / (1 + abs((v - ZX) * SX)) for v in q.tolist()])
    assert 0 < float(exact.slack.max()) < 1e-3
    assert exact.accumulator is None  # it is evaluated in float


def test_a_random_result_has_no_oracle() -> None:
    model = symbolic_trace(One(lambda x: x + torch.rand_like(x)))
    with pytest.raises(NoOracleError, match="is random"):
        Walk(model).exact((torch.ones(3),))


def test_integers_and_none_are_outputs() -> None:
    q = drawn_integers(40, seed=1)
    x = on_grid(q, **X)  # type: ignore[arg-type]
    model = quantized(One(lambda x: {"value": x.relu(), "place": x.argmax(), "none": None}), x)
    value, place = Walk(model).exact((x,))
    assert place.is_discrete and not value.is_discrete
    assert float(place.real) == float(x.argmax()) and bool(place.decided.all())


def test_an_output_that_is_no_computed_tensor_has_no_oracle() -> None:
    sizes = symbolic_trace(One(lambda x: x.relu().size(0)))
    with pytest.raises(NoOracleError, match="the model's output size is not a computed tensor"):
        Walk(sizes).exact((torch.zeros(2),))


@pytest.mark.rule("NUM-03")
def test_a_constant_output_is_the_integer_of_the_model_or_one_beside_it() -> None:
    """The value before it was rounded, as another way of computing it may have it, is within half a step."""
    grid, quantizes = (0.5, 3, 0, 255, torch.uint8), OPS.quantize_per_tensor.default
    constant = symbolic_trace(One(lambda x: OPS.dequantize_per_tensor.default(quantizes(x, *grid), *grid)))
    (quantize,) = (node for node in constant.graph.nodes if node.target is quantizes)
    constant.weight = nn.Parameter(torch.tensor([1.0, 1.25, -9.0]))
    with constant.graph.inserting_before(quantize):
        quantize.replace_input_with(quantize.args[0], constant.graph.get_attr("weight"))
    (exact,) = Walk(constant).exact((torch.zeros(2),))
    assert exact.integers.tolist() == [5.0, 5.0, 0.0] and bool(exact.decided.all())
    assert 0.5 <= float(exact.slack.max()) < 0.5 + 1e-6


def test_inputs_that_are_not_quantized_have_no_grids() -> None:
    assert placeholder_grids(symbolic_trace(nn.Sequential(nn.ReLU()))) == [None]


def test_a_user_who_quantizes_has_no_oracle() -> None:
    x = on_grid(drawn_integers(8, seed=1), **X)  # type: ignore[arg-type]
    own = symbolic_trace(One(lambda x: torch.quantize_per_tensor(x, 0.5, 0, torch.quint8).dequantize()))
    with pytest.raises(NoOracleError, match="for quantize_per_tensor: it is not in the decomposed form"):
        Walk(own).exact((x,))


def test_an_op_in_place_leaves_the_walks_operands_as_they_are() -> None:
    q = drawn_integers(65, seed=8)
    x = on_grid(q, **X)  # type: ignore[arg-type]
    walk = Walk(quantized(One(lambda x: x.relu_()), x))
    (first,), (second,) = walk.exact((x,)), walk.exact((x,))
    assert torch.equal(first.integers, second.integers)
    assert first.integers.round().tolist() == [float(max(v, ZX)) for v in q.tolist()]


def test_what_is_constant_is_found_at_any_depth() -> None:
    graph = Graph()
    moved, made = graph.placeholder("x"), graph.call_function(torch.zeros, (3,))
    for _ in range(3000):
        moved, made = graph.call_function(torch.relu, (moved,)), graph.call_function(torch.relu, (made,))
    assert is_constant(made) and not is_constant(moved)
    assert not is_constant(graph.call_function(torch.add, (made, moved)))


def test_a_module_of_two_names_is_found_by_each() -> None:
    graph, grid, layers = Graph(), (0.5, 128, 0, 255, torch.uint8), nn.Module()
    layers.first = layers.second = nn.ReLU()
    value = graph.placeholder("x")
    for layer in (None, "first", "second"):
        value = value if layer is None else graph.call_module(layer, (value,))
        integers = graph.call_function(OPS.quantize_per_tensor.default, (value, *grid))
        value = graph.call_function(OPS.dequantize_per_tensor.default, (integers, *grid))
    graph.output(value)
    exact = exact_of(GraphModule(layers, graph), torch.tensor([-2.0, 0.0, 3.0]))
    assert exact.real.tolist() == [0, 0, 3]


class Turning(nn.Module):
    """A value times the cosines of angles, which are computed of a parameter whenever the model runs."""

    def __init__(self) -> None:
        super().__init__()
        self.angles = nn.Parameter(torch.linspace(0.1, 2.0, 8))

    def forward(self, x: Tensor) -> Tensor:
        """Return the product."""
        return x * self.angles.cos()


@pytest.mark.rule("NUM-04")
def test_what_is_computed_of_constants_when_a_model_runs_has_a_bound() -> None:
    model, x = symbolic_trace(Turning()), torch.full((8,), 2.0)
    (exact,) = Walk(model).exact((x,))
    right = 2.0 * Turning().angles.detach().double().cos()
    assert torch.allclose(exact.real, right, rtol=1e-15)
    error: Any = sum(exact.errors.values())
    unit = float(U)
    assert bool((error > unit * right.abs()).all()) and bool((error < 32 * unit).all())


@pytest.mark.rule("NUM-04")
def test_the_error_of_a_bias_is_that_of_the_result() -> None:
    weight = torch.ones(2, 3)

    def run(x: Tensor, bias: Tensor) -> Tensor:
        return F.linear(x, weight, bias.tanh())

    walk = Walk(symbolic_trace(Two(run)))
    for scale in (1.0, 100.0):  # tanh of the bias is within 8u, whatever the product is
        (exact,) = walk.exact((torch.zeros(4, 3) * scale, torch.ones(2)))
        error: Any = sum(exact.errors.values())
        assert bool((error >= 7 * float(U) * math.tanh(1)).all())


@pytest.mark.rule("NUM-04")
def test_a_module_whose_rule_declines_is_decomposed_as_a_function_is() -> None:
    walk = Walk(symbolic_trace(nn.Sequential(nn.Upsample(size=5, mode="area"))))
    x = torch.arange(14.0).reshape(1, 1, 14)
    (exact,) = walk.exact((x,))
    assert torch.allclose(exact.real, F.interpolate(x.double(), size=5, mode="area"))


@pytest.mark.rule("NUM-04")
def test_one_of_several_results_keeps_its_error_by_whatever_name() -> None:
    x, named = torch.tensor([[0.3, 0.1, 0.2]]), {0: lambda x: torch.sort(x, 1).values, 1: lambda x: x.exp().mT}
    for run in named.values():
        (exact,) = Walk(symbolic_trace(One(lambda x, run=run: run(x.tanh())))).exact((x,))
        error: Any = sum(exact.errors.values())
        assert bool((error > float(U) / 2).all())


@pytest.mark.rule("NUM-03")
def test_a_weight_that_a_model_computes_has_a_grid_for_each_channel() -> None:
    graph = Graph()
    scales, zeros = torch.tensor([0.5, 0.25]), torch.zeros(2, dtype=torch.int64)
    root = nn.Module()
    root.register_buffer("scales", scales)
    root.register_buffer("zeros", zeros)
    value = graph.placeholder("x")
    qparams = (graph.get_attr("scales"), graph.get_attr("zeros"), 0, -128, 127, torch.int8)
    integers = graph.call_function(OPS.quantize_per_channel.default, (value, *qparams))
    graph.output(
        graph.call_function(torch.sum, (graph.call_function(OPS.dequantize_per_channel.default, (integers, *qparams)),))
    )
    x = torch.tensor([[0.74, -3.0], [0.3, 0.375]])  # 0.375 is halfway between two steps of 0.25
    (exact,) = Walk(GraphModule(root, graph)).exact((x,))
    error: Any = sum(exact.errors.values())
    assert float(exact.real) in (-1.75, -1.5) and float(error.max()) >= 0.25
