"""Cases: every exercised claim has models that can be built, and inputs that reach where faults are."""

from __future__ import annotations

from collections import defaultdict
from functools import cache

import pytest
import torch
from torch import Tensor, nn

from backends.base import Capabilities
from backends.native_tables import TABLES, native_config
from conformance import recipes
from conformance.claims import Claim, enumerate_claims
from conformance.grids import Grid
from conformance.models import (
    RANGES,
    Case,
    OneInput,
    build_model,
    calibration_inputs,
    integer_inputs,
    plan_cases,
    qconfig_for,
)
from refimpl import MinMaxObserver

each_backend = pytest.mark.parametrize("name", TABLES)


@cache
def planned(name: str) -> dict[Claim, tuple[Case, ...]]:
    """The exercised claims of a native config, one weight scheme each, with their cases."""
    claims = enumerate_claims(native_config(name), Capabilities())  # type: ignore[arg-type]
    found = {claim: plan_cases(claim) for claim in claims}
    return {claim: cases for claim, cases in found.items() if not isinstance(cases, str)}


def same(one: nn.Module, other: nn.Module) -> bool:
    first, second = one.state_dict(), other.state_dict()
    return first.keys() == second.keys() and all(torch.equal(first[key], second[key]) for key in first)


def one_claim_per_pattern() -> list[Claim]:
    """Claims of all native configs; the models of one pattern are the same for all its dtype configs."""
    return list({claim.pattern: claim for name in TABLES for claim in planned(name)}.values())


@each_backend
def test_a_good_part_of_every_config_is_exercised_by_cases_with_names_of_their_own(name: str) -> None:
    assert len(planned(name)) >= 80
    for cases in planned(name).values():
        assert len({case.name for case in cases}) == len(cases)


def test_every_case_builds_runs_traces_and_follows_the_seed() -> None:
    for claim in one_claim_per_pattern():
        cases = plan_cases(claim)
        assert not isinstance(cases, str)
        for case in cases:
            torch.manual_seed(7)
            model, inputs = build_model(case), calibration_inputs(case)[0]
            torch.manual_seed(7)
            assert same(model, build_model(case)), (claim.id, case.name)
            traced = torch.fx.symbolic_trace(model)
            expected = model(*(x.clone() for x in inputs))
            assert torch.equal(traced(*(x.clone() for x in inputs)), expected), (claim.id, case.name)
            assert expected.numel() and bool(expected.isfinite().all())


@each_backend
def test_zero_points_at_both_ends_and_between_are_met_for_every_op(name: str) -> None:
    for claim, cases in planned(name).items():
        for position in range(len(cases[0].shapes)):
            zeros = set()
            for case in cases:
                qconfig = qconfig_for(claim, is_symmetric=case.is_symmetric)
                observer = qconfig.activation()
                for inputs in calibration_inputs(case):
                    observer(inputs[position])
                assert isinstance(observer, MinMaxObserver)
                zero = int(observer.calculate_qparams()[1])
                low, high = observer.quant_min, observer.quant_max
                zeros.add("low" if zero == low else "high" if zero == high else "between")
            assert zeros == {"low", "high", "between"}, (claim.id, position)


@pytest.mark.rule("OBS-02")
def test_symmetric_observation_puts_the_zero_point_of_a_relu_inside_its_range() -> None:
    claim = next(claim for claim in planned("fbgemm") if claim.pattern == "nn.ReLU")
    for is_symmetric, expected in ((False, 0), (True, 128)):
        observer = qconfig_for(claim, is_symmetric=is_symmetric).activation()
        observer(torch.linspace(0, 3, 9))
        assert isinstance(observer, MinMaxObserver)
        assert int(observer.calculate_qparams()[1]) == expected
    assert all(sum(case.is_symmetric for case in cases) == 1 for cases in planned("fbgemm").values())


def test_calibration_reaches_both_ends_of_every_range_even_with_one_element() -> None:
    for shape in ((), (1,), (1, 1), (2, 3)):
        for low, high in RANGES:
            case = Case(name="c", build=lambda: OneInput([]), shapes=(shape,), ranges=((low, high),))
            seen = torch.cat([inputs[0].flatten() for inputs in calibration_inputs(case)])
            assert (float(seen.min()), float(seen.max())) == (low, high)


def test_a_model_that_gives_only_zeros_is_drawn_again() -> None:
    class Constant(OneInput):
        def forward(self, x: Tensor) -> Tensor:
            return x * self.get_buffer("factor")

    drawn = iter((0.0, 0.0, 2.0, 3.0))

    def build() -> OneInput:
        model = Constant([])
        model.register_buffer("factor", torch.tensor(next(drawn)))
        return model

    model = build_model(Case(name="c", build=build, shapes=((2,),), ranges=((-1.0, 1.0),)))
    assert float(model.get_buffer("factor")) == 2.0
    assert not model.training


@each_backend
def test_a_relu_after_a_weight_or_a_sum_never_hides_the_whole_output(name: str) -> None:
    for claim, cases in planned(name).items():
        if claim.pattern.endswith("ReLU") and "+" in claim.pattern:
            for case in cases:
                torch.manual_seed(1)
                model = build_model(case)
                assert any(bool((model(*inputs) > 0).any()) for inputs in calibration_inputs(case)), (
                    claim.id,
                    case.name,
                )


GRIDS = (
    Grid(scale=2 / 255, zero_point=127, low=0, high=255, dtype="quint8"),
    Grid(scale=0.0117647061124444, zero_point=-128, low=-128, high=127, dtype="qint8"),
    Grid(scale=1e-7, zero_point=0, low=-127, high=127, dtype="qint8"),
    Grid(scale=700.0, zero_point=255, low=0, high=255, dtype="quint8"),
)


@pytest.mark.rule("NUM-01")
@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_inputs_are_on_the_grid_and_reach_its_ends(grid: Grid) -> None:
    torch.manual_seed(0)
    bounds = [(grid.low, grid.high, grid.zero_point)] * 2
    drawn = integer_inputs(((3, 300), (5,)), bounds, 3)
    assert [name for name, _ in drawn[:4]] == [
        "all at the low end", "all at the high end", "alternating ends", "all at the zero point"
    ]  # fmt: skip
    assert len(drawn) == 7
    dtype = torch.int8 if grid.low < 0 else torch.uint8
    for _, integers in drawn:
        for q in integers:
            again = torch.ops.quantized_decomposed.quantize_per_tensor(
                grid.values(q), grid.scale, grid.zero_point, grid.low, grid.high, dtype
            )
            assert torch.equal(again.long(), q.long())
    ends = torch.cat([integers[0].flatten() for name, integers in drawn if name.startswith("random")])
    assert (int(ends.min()), int(ends.max())) == (grid.low, grid.high)


def test_every_quint8_and_qint8_integer_survives_dequantize_and_quantize_for_the_suites_ranges() -> None:
    for low, high in RANGES:
        for dtype in (torch.quint8, torch.qint8):
            observer = MinMaxObserver(dtype=dtype)
            observer(torch.tensor([low, high]))
            scale, zero = observer.calculate_qparams()
            grid = Grid(scale=float(scale), zero_point=int(zero), low=observer.quant_min, high=observer.quant_max,
                        dtype="")  # fmt: skip
            q = torch.arange(grid.low, grid.high + 1)
            found = torch.quantize_per_tensor(grid.values(q), float(scale), int(zero), dtype).int_repr()
            assert torch.equal(found.long(), q)


def test_variants_vary_what_their_names_say() -> None:
    tables = [*recipes.UNARY.values(), *recipes.LIST_OPS.values(), recipes.binary_variants()]
    for variants in tables:
        assert len({variant.name for variant in variants}) == len(variants)
        assert len({str((v.shapes, v.arguments, v.keywords)) for v in variants}) == len(variants)
        for variant in variants:
            for key, value in variant.keywords.items():
                assert f"{key}{value}" in variant.name


def test_geometries_cover_what_kernels_get_wrong() -> None:
    defaults = recipes.Convolution(c_in=1, c_out=1)
    varied: dict[str, set[object]] = defaultdict(set)
    for geometry in recipes.CONVOLUTIONS:
        for field in ("kernel", "stride", "padding", "dilation", "groups", "bias", "batch"):
            value = getattr(geometry, field)
            varied[field] |= {value} - {getattr(defaults, field)}
            shown = "x".join(map(str, value)) if isinstance(value, tuple) else str(value)
            if field in ("stride", "padding", "dilation", "groups", "batch") and value != getattr(defaults, field):
                assert f"{field[0]}{shown}" in geometry.name.split("_")
    assert all(varied.values())
    assert len({geometry.name for geometry in recipes.CONVOLUTIONS}) == len(recipes.CONVOLUTIONS)
    assert any(g.groups == g.c_in == g.c_out > 1 for g in recipes.CONVOLUTIONS)
    assert any(g.groups == g.c_in < g.c_out for g in recipes.CONVOLUTIONS)
    assert any(isinstance(g.kernel, tuple) and len(set(g.kernel)) > 1 for g in recipes.CONVOLUTIONS)


@pytest.mark.parametrize("rank", (1, 2, 3))
def test_ceil_mode_adds_a_window(rank: int) -> None:
    kind = getattr(nn, f"MaxPool{rank}d")
    for variant in recipes.UNARY[kind]:
        if variant.keywords.get("ceil_mode"):
            x = torch.zeros(variant.shapes[0])
            floor = kind(*variant.arguments, **variant.keywords | {"ceil_mode": False})
            assert floor(x).shape != kind(*variant.arguments, **variant.keywords)(x).shape


@pytest.mark.parametrize(("low", "high"), RANGES)
def test_a_range_holds_zero(low: float, high: float) -> None:
    assert low <= 0 <= high and low < high


@pytest.mark.parametrize("pattern", ("nn.Linear", "torch.conv2d", "nni.ConvReLU3d"))
def test_output_channels_differ_in_magnitude_by_powers_of_two(pattern: str) -> None:
    claim = next(claim for claim in planned("qnnpack") if claim.pattern == pattern)
    torch.manual_seed(2)
    models = [build_model(case) for case in planned("qnnpack")[claim]]
    weights = [next(p for name, p in model.named_parameters() if "weight" in name) for model in models]
    spreads = [w.detach().abs().flatten(1).amax(1) for w in weights if w.shape[0] >= 4 and w[0].numel() >= 9]
    assert len(spreads) >= 2
    assert all(4 < float(spread[0] / spread[3]) < 16 for spread in spreads)
