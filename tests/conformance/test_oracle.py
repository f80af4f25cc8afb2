"""The oracle against integer arithmetic done by hand, in Python's integers and fractions (rules NUM-01 to NUM-05)."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from flows import PROPERTY, activation_range, converted, drawn_integers, drawn_weight, on_grid
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.fx import GraphModule

from conformance.grids import Grid, NoOracleError, input_grids
from conformance.oracle import Exact, Walk, slack
from refimpl import BackendConfig, BackendPatternConfig, DTypeConfig, ObservationType

X = {"scale": 2.0**-5, "zero_point": 40}
Y = {"scale": 2.0**-4, "zero_point": 200}
SX, ZX = Fraction(2) ** -5, 40
SY, ZY = Fraction(2) ** -4, 200
both_forms = pytest.mark.parametrize("is_decomposed", (False, True), ids=("quantized", "decomposed"))
both_schemes = pytest.mark.parametrize("per_channel", (False, True), ids=("per_tensor", "per_channel"))


def quantized(model: nn.Module, *inputs: Tensor, **how: Any) -> GraphModule:
    ranges = [activation_range(**grid) for grid in (X, Y)[: len(inputs)]]  # type: ignore[arg-type]
    return converted(model, ranges, output=[inputs], **how)


def weighted(layer: Any, per_channel: bool) -> tuple[Tensor, list[Fraction]]:
    """Give a layer a weight on its grid; return the integers and the scale of every channel."""
    integers, scales = drawn_weight(*layer.weight.shape, seed=3)
    if not per_channel:
        scales = torch.full_like(scales, 2.0**-7)
    layer.weight.data = integers * scales.reshape(-1, *[1] * (integers.dim() - 1))
    return integers, [Fraction(scale) for scale in scales.tolist()]


def on_output(exact: Exact, real: Fraction) -> Fraction:
    """v: the real result in steps of the output's grid, plus zero point, clamped. (NUM-03)"""
    grid = exact.grid
    return min(max(real / Fraction(grid.scale) + grid.zero_point, Fraction(grid.low)), Fraction(grid.high))


def agree(exact: Exact, reals: Sequence[Fraction]) -> None:
    expected = [float(on_output(exact, real)) for real in reals]
    assert exact.integers.flatten().tolist() == pytest.approx(expected, rel=0, abs=1e-9)
    assert len(set(expected)) > 1


@pytest.mark.rule("NUM-03")
@both_schemes
@both_forms
def test_linear(is_decomposed: bool, per_channel: bool) -> None:
    layer = nn.Linear(9, 5)
    w, scales = weighted(layer, per_channel)
    q = drawn_integers(3, 9, seed=1)
    x = on_grid(q, **X)  # type: ignore[arg-type]
    model = quantized(nn.Sequential(layer), x, is_decomposed=is_decomposed, per_channel=per_channel)
    bias = [Fraction(b) for b in layer.bias.tolist()]
    reals = [
        sum((int(q[n, k]) - ZX) * int(w[c, k]) for k in range(9)) * SX * scales[c] + bias[c]
        for n in range(3) for c in range(5)
    ]  # fmt: skip
    agree(Walk(model).exact((x,)), reals)


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
@both_schemes
@both_forms
def test_conv2d(is_decomposed: bool, per_channel: bool, geometry: dict[str, Any]) -> None:
    layer = nn.Conv2d(4, 4, (3, 2), **geometry)
    w, scales = weighted(layer, per_channel)
    q = drawn_integers(2, 4, 5, 6, seed=2)
    x = on_grid(q, **X)  # type: ignore[arg-type]
    model = quantized(nn.Sequential(layer), x, is_decomposed=is_decomposed, per_channel=per_channel)
    bias = [Fraction(b) for b in layer.bias.tolist()] if layer.bias is not None else [Fraction(0)] * 4
    layer.bias = None
    agree(Walk(model).exact((x,)), [total * SX * scales[c] + bias[c] for c, total in convolved(q, w, layer)])


class Two(nn.Module):
    def __init__(self, op: Any) -> None:
        super().__init__()
        self.op = op

    def forward(self, x: Tensor, y: Tensor) -> Any:
        return self.op(x, y)


@pytest.mark.rule("NUM-03")
@pytest.mark.parametrize("op", (torch.add, torch.mul), ids=("add", "mul"))
@both_forms
def test_binary(is_decomposed: bool, op: Any) -> None:
    q, r = drawn_integers(40, seed=1), drawn_integers(40, seed=2)
    x, y = on_grid(q, **X), on_grid(r, **Y)  # type: ignore[arg-type]
    exact = Walk(quantized(Two(op), x, y, is_decomposed=is_decomposed)).exact((x, y))
    pairs = [((a - ZX) * SX, (b - ZY) * SY) for a, b in zip(q.tolist(), r.tolist(), strict=True)]
    agree(exact, [a + b if op is torch.add else a * b for a, b in pairs])
    assert (exact.terms, exact.rescaled_apart) == (2, op is torch.add)
    scale = Fraction(exact.grid.scale)
    absolute = [float((abs(a) + abs(b) if op is torch.add else abs(a * b)) / scale) for a, b in pairs]
    assert exact.absolute.tolist() == pytest.approx(absolute, rel=1e-12)


@pytest.mark.rule("NUM-03")
@pytest.mark.parametrize("ceil_mode", (False, True))
@pytest.mark.parametrize("counted", (False, True))
@both_forms
def test_avg_pool(is_decomposed: bool, counted: bool, ceil_mode: bool) -> None:
    """A window counts what lies in the input or, where asked, in its padding; never what ceil_mode adds beyond."""
    q = drawn_integers(1, 2, 6, 6, seed=5)
    x = on_grid(q, **X)  # type: ignore[arg-type]
    pool = nn.AvgPool2d(3, stride=2, padding=1, count_include_pad=counted, ceil_mode=ceil_mode)
    exact = Walk(quantized(nn.Sequential(pool), x, is_decomposed=is_decomposed)).exact((x,))
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
@both_forms
def test_max_pool_selects_from_the_input_and_never_from_its_padding(is_decomposed: bool) -> None:
    q = drawn_integers(1, 1, 5, 5, seed=6) // 8  # all below the zero point but the last
    x = on_grid(q, **X)  # type: ignore[arg-type]
    model = quantized(nn.Sequential(nn.MaxPool2d(2, padding=1)), x, is_decomposed=is_decomposed)
    exact = Walk(model).exact((x,))
    windows = itertools.product([(0,), (1, 2), (3, 4)], repeat=2)
    expected = [float(max(int(q[0, 0, a, b]) for a in rows for b in columns)) for rows, columns in windows]
    assert exact.integers.flatten().tolist() == pytest.approx(expected, abs=1e-9)
    assert exact.terms == 0


@pytest.mark.rule("NUM-05")
@both_forms
def test_cat_with_relu(is_decomposed: bool) -> None:
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
    exact = Walk(quantized(CatRelu(), x, y, is_decomposed=is_decomposed, config=config)).exact((x, y))
    scale, zero = Fraction(exact.grid.scale), exact.grid.zero_point
    inputs = [[round((v - ZX) * SX / scale) for v in row] for row in torch.cat([q, r], 1).tolist()]
    expected = [float(max(v, 0) + zero) for row in inputs for v in row]
    assert exact.integers.round().flatten().tolist() == expected


@pytest.mark.rule("NUM-01")
@pytest.mark.rule("CVT-09")
@both_forms
def test_a_range_narrower_than_the_dtypes_is_kept(is_decomposed: bool) -> None:
    x = on_grid(drawn_integers(3, 9, seed=1, high=127), **X)  # type: ignore[arg-type]
    layer = nn.Linear(9, 5)
    weighted(layer, False)
    model = quantized(nn.Sequential(layer), x, is_decomposed=is_decomposed, quant_min=0, quant_max=127)
    assert [(grid.low, grid.high) for grid in input_grids(model)] == [(0, 127)]
    exact = Walk(model).exact((x * 3,))
    assert (exact.grid.low, exact.grid.high) == (0, 127)
    assert float(exact.integers.max()) <= 127


@pytest.mark.rule("NUM-04")
@PROPERTY
@given(
    v=st.floats(0, 255), zero=st.integers(0, 255), step=st.floats(1e-6, 1e-2), absolute=st.floats(0, 1e4),
    terms=st.integers(0, 600), int32_bias=st.booleans(), accumulates=st.booleans(), apart=st.booleans(),
)  # fmt: skip
def test_the_slack_is_the_rules_formula(
    v: float, zero: int, step: float, absolute: float, terms: int, int32_bias: bool, accumulates: bool, apart: bool
) -> None:
    grid = Grid(scale=0.03, zero_point=zero, low=0, high=255, dtype="quint8")
    one = torch.ones(1, 1).double()
    exact = Exact(
        integers=one * v, absolute=one * absolute, grid=grid, terms=terms, bias_step=one[0] * step, rescaled_apart=apart
    )  # fmt: skip
    u = Fraction(1, 2**24)
    r = Fraction(v) - zero
    expected = (3 * abs(r) + abs(r + zero)) * u
    if apart:
        expected += 2 * Fraction(absolute) * u
    if int32_bias:
        expected += Fraction(step) / Fraction(0.03) / 2
    if accumulates and terms:
        n = terms + 2
        expected += n * u / (1 - n * u) * Fraction(absolute)
    found = float(slack(exact, int32_bias=int32_bias, float_accumulation=accumulates))
    assert found == pytest.approx(float(expected), rel=1e-12, abs=0)


@pytest.mark.rule("NUM-04")
@both_schemes
@both_forms
def test_the_step_of_an_int32_bias_is_that_of_input_and_weight(is_decomposed: bool, per_channel: bool) -> None:
    layer = nn.Conv2d(2, 3, 1)
    _, scales = weighted(layer, per_channel)
    x = on_grid(drawn_integers(1, 2, 4, 4, seed=4), **X)  # type: ignore[arg-type]
    exact = Walk(quantized(nn.Sequential(layer), x, is_decomposed=is_decomposed, per_channel=per_channel)).exact((x,))
    assert exact.bias_step is not None
    steps = exact.bias_step.expand_as(exact.integers)[0, :, 0, 0].tolist()
    assert steps == [float(SX * scale) for scale in scales]
    layer.bias = None
    assert Walk(quantized(nn.Sequential(layer), x, is_decomposed=is_decomposed)).exact((x,)).bias_step is None


@pytest.mark.rule("CVT-02")
@settings(PROPERTY, max_examples=30)
@given(seed=st.integers(0, 2**31), per_channel=st.booleans(), is_decomposed=st.booleans(), n=st.integers(1, 40))
def test_the_bound_holds_for_any_weights(seed: int, per_channel: bool, is_decomposed: bool, n: int) -> None:
    torch.manual_seed(seed)
    layer = nn.Linear(n, 3)
    x = torch.randn(4, n) * 3
    wanted = nn.Linear(n, 3).double()
    wanted.load_state_dict(layer.state_dict())
    walk = Walk(converted(nn.Sequential(layer), [(-9.0, 9.0)], output=[[x]], is_decomposed=is_decomposed,
                          per_channel=per_channel))  # fmt: skip
    real, on, bound = walk.weight_bound((x,))
    assert bool(((real - wanted(on[0])).abs() <= bound).all())
    wanted.weight.data[0, 0] += 4 * (real.abs().max() + 1) / on[0][:, 0].abs().max().clamp(min=1e-3)
    assert bool(((real - wanted(on[0])).abs() > bound).any())


@both_forms
def test_what_the_table_lacks_is_named(is_decomposed: bool) -> None:
    entry = BackendPatternConfig(F.softsign).add_dtype_config(DTypeConfig(torch.quint8, torch.quint8))

    class Softsign(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return F.softsign(x)

    x = torch.linspace(-1, 1, 9)
    config = BackendConfig("c").set_backend_pattern_config(entry)
    model = quantized(Softsign(), x, is_decomposed=is_decomposed, config=config)
    with pytest.raises(NoOracleError, match=r"no row in the oracle's table for call_function .*softsign"):
        Walk(model).exact((x,))


def test_a_model_that_does_not_end_in_dequantize_has_no_oracle() -> None:
    with pytest.raises(NoOracleError, match="is not a computed value that was quantized"):
        Walk(torch.fx.symbolic_trace(nn.Sequential(nn.Identity()))).exact((torch.zeros(2),))
    with pytest.raises(NoOracleError, match="is not quantized"):
        input_grids(torch.fx.symbolic_trace(nn.Sequential(nn.ReLU())))


@both_forms
def test_an_op_in_place_leaves_the_walks_operands_as_they_are(is_decomposed: bool) -> None:
    class InPlace(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return x.relu_()

    q = drawn_integers(65, seed=8)
    x = on_grid(q, **X)  # type: ignore[arg-type]
    walk = Walk(quantized(InPlace(), x, is_decomposed=is_decomposed))
    first, second = walk.exact((x,)).integers, walk.exact((x,)).integers
    assert torch.equal(first, second)
    assert first.round().tolist() == [float(max(v, ZX)) for v in q.tolist()]
