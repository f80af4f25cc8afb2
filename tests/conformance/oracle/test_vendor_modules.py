"""A vendor's own reference modules: exact is their own forward in float64, on the weight as integers have it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fx_quant_conformance.conformance.bounds.error_bounds import NoOracleError, U, gamma
from fx_quant_conformance.conformance.claims.claim import enumerate_claims
from fx_quant_conformance.conformance.oracle.evaluate import Walk
from fx_quant_conformance.conformance.oracle.grids import placeholder_grids
from fx_quant_conformance.conformance.pipeline.claim_run import run_claim
from fx_quant_conformance.conformance.stages.bench import Bench
from fx_quant_conformance.refimpl import (
    PrepareCustomConfig,
    QConfigMapping,
    convert_to_reference_decomposed_fx,
    prepare_fx,
)
from fx_quant_conformance.reports.schema import Check
from fx_quant_conformance.reports.verdicts import Verdict
from tests.mutants import own_modules
from tests.mutants.own_modules import LAYERS, OwnModules, OwnWeight
from tests.refimpl.support.qconfigs import minmax_qconfig

X = torch.randn(5, 17, generator=torch.Generator().manual_seed(3)) * 0.7


def checks_of(backend: OwnModules, profile: str = "quick") -> list[Check]:
    bench = Bench(backend, seed=0, profile=profile)
    claims = enumerate_claims(bench.config, bench.capabilities)
    return [each for claim in claims for each in run_claim(bench, claim) if isinstance(each, Check)]


def reference_of(layer: str) -> Any:
    root, _ = LAYERS[layer]
    torch.manual_seed(1)
    built = root(17) if root is own_modules.Gains else root(17, 9)
    config = OwnModules(layer).backend_config()
    qconfig = minmax_qconfig(torch.quint8, torch.qint8, per_channel=False)
    mapping = QConfigMapping().set_global(qconfig)
    custom = PrepareCustomConfig().set_non_traceable_module_classes([root])
    prepared = prepare_fx(nn.Sequential(built).eval(), mapping, None, custom, backend_config=config)
    prepared(X)
    return convert_to_reference_decomposed_fx(prepared)


@pytest.mark.slow
@pytest.mark.rule("CVT-02")
@pytest.mark.rule("NUM-03")
@pytest.mark.parametrize("layer", LAYERS)
def test_an_own_reference_module_is_verified(layer: str) -> None:
    checks = checks_of(OwnModules(layer))
    assert len(checks) >= 9
    assert [(each.stage, each.message) for each in checks if each.verdict is not Verdict.VERIFIED] == []


class Other(nn.Module):
    """What a kernel computes in the place of an own module."""

    def __init__(self, module: Any, change: Any) -> None:
        super().__init__()
        self.module, self.change = module, change

    def forward(self, x: Tensor) -> Any:
        return self.change(self.module, x)


def without_bend(module: Any, x: Tensor) -> Any:
    return F.linear(x, module.get_weight(), module.bias)


def without_bias(module: Any, x: Tensor) -> Any:
    return F.linear(x, module.get_weight())


def next_factor(module: Any, x: Tensor) -> Any:
    return x * module.get_weight().roll(1)


@pytest.mark.slow
@pytest.mark.rule("NUM-03")
@pytest.mark.parametrize(
    ("layer", "wrong"),
    [("independent reference", without_bias), ("derived root", without_bend), ("own root", next_factor)],
)
def test_a_kernel_that_computes_something_else_is_refuted(layer: str, wrong: Any) -> None:
    """Of the derived root torch's function of the base class is wrong, which the suite took for right."""
    checks = checks_of(OwnModules(layer, lambda module: Other(module, wrong)))
    assert {each.rule for each in checks if each.verdict is Verdict.REFUTED} == {"NUM-03"}
    assert any(each.verdict is Verdict.REFUTED for each in checks)


@pytest.mark.rule("NUM-03")
def test_exact_is_the_own_forward_in_float64() -> None:
    model = reference_of("derived root")
    (exact,) = Walk(model).exact((X,))
    module = model.get_submodule("0")
    scale, zero_point = module.weight_scale.double(), module.weight_zero_point.double()
    weight = (module.get_quantized_weight().double() - zero_point) * scale
    x = model_input(model)
    expected = own_modules.bend(F.linear(x, weight, module.bias.detach().double()))
    assert exact.real.dtype is torch.float64
    assert torch.equal(exact.real, expected)


def model_input(model: Any) -> Tensor:
    """X on the grid of the model's input, in float64."""
    (grid,) = placeholder_grids(model)
    assert grid is not None
    integers = grid.integers(X).clamp(grid.low, grid.high).round()
    return (integers - grid.zero_point) * torch.tensor(grid.scale, dtype=torch.float64)


@pytest.mark.rule("NUM-04")
def test_the_bound_of_a_root_without_a_dot_product_is_that_of_its_roundings() -> None:
    model = reference_of("own root")
    (exact,) = Walk(model).exact((X,))
    function = exact.errors["function"] - gamma(3) * exact.real.abs()
    module: Any = model.get_submodule("0")
    (grid,), x = placeholder_grids(model), model_input(model)
    assert grid is not None
    moved = module.get_weight().double().abs() * U * (2 * x.abs() + 2 * 255 * grid.scale)  # x, dequantized in float32
    assert torch.allclose(function, moved, rtol=1e-6, atol=0.0)


@pytest.mark.rule("NUM-04")
def test_the_bound_of_a_module_that_has_a_dot_product_is_that_of_dot_products() -> None:
    capabilities = OwnModules("derived root").capabilities()
    models = [reference_of("derived reference"), reference_of("independent reference")]
    bounds = [Walk(model, capabilities).exact((X,))[0].errors["accumulation"] for model in models]
    assert torch.allclose(bounds[0], bounds[1]) and bool((bounds[0] > 0).all())


class InFloat32(OwnWeight):
    """Computes in float32 whatever it is given."""

    def forward(self, x: Tensor) -> Tensor:
        own: Any = self
        return F.linear(x.float(), own.get_weight().float(), own.bias.float())


class Mixed(OwnWeight):
    def forward(self, x: Tensor) -> Tensor:
        own: Any = self
        return F.linear(x, (own.integers * 0.5).float(), self.bias)


class WithoutQParams(OwnWeight):
    def __init__(self, layer: Any, qparams: dict[str, Any]) -> None:
        super().__init__(layer, qparams)
        self.held = self.get_weight()
        del self.weight_zero_point

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.held, self.bias)


class FloatWeight(OwnWeight):
    """Shows integers, and computes with the float weight."""

    def forward(self, x: Tensor) -> Tensor:
        own: Any = self
        return F.linear(x, own.weight, own.bias)


@pytest.mark.rule("NUM-03")
@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (InFloat32, "gives torch.float32 for float64; let it compute in the dtype of its input"),
        (Mixed, "raised RuntimeError in float64"),
        (WithoutQParams, "has no weight_zero_point"),
        (FloatWeight, "does not call get_weight"),
    ],
)
def test_a_module_that_cannot_be_judged_says_why(
    kind: type[nn.Module], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(LAYERS, "independent reference", (nn.Linear, kind))
    with pytest.raises(NoOracleError, match=message):
        Walk(reference_of("independent reference")).exact((X,))


@pytest.mark.slow
@pytest.mark.rule("CVT-02")
def test_integers_that_are_not_the_nearest_are_found() -> None:
    """Forward, kernel and exact result agree on them; the float weight does not."""
    checks = checks_of(OwnModules("independent reference", reference=own_modules.RoundedDown))
    failed = [each for each in checks if each.outcome == "fail"]
    assert {(each.stage, each.rule, each.verdict) for each in failed} == {("convert", "CVT-02", Verdict.REFUTED)}
    assert all("RoundedDown's integers are up to 0.9" in each.message for each in failed)


class AssertingGains(own_modules.GainsReference):
    """Quantizes its weight whenever it is asked for it, as torch's do: with an op that takes float32 alone."""

    def get_weight(self) -> Any:
        own: Any = self
        numbers = (own.weight_scale, own.weight_zero_point, -128, 127, torch.int8)
        quantized = torch.ops.quantized_decomposed.quantize_per_tensor.tensor(own.weight.detach(), *numbers)
        return torch.ops.quantized_decomposed.dequantize_per_tensor.tensor(quantized, *numbers)


@pytest.mark.slow
@pytest.mark.rule("NUM-03")
def test_a_registered_module_that_quantizes_its_weight_itself_is_judged_in_float64() -> None:
    """An op that takes float32 alone ended the claim as an internal error of the suite."""
    checks = checks_of(OwnModules("own root", reference=AssertingGains))
    assert [(each.stage, each.message) for each in checks if each.verdict is not Verdict.VERIFIED] == []
