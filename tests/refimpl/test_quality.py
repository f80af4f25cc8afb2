"""explain with sample inputs: each layer against the float model, the worst first (rule OBS-15)."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fx_quant_conformance import refimpl
from fx_quant_conformance.backends.torch_engines.engine import engine
from fx_quant_conformance.refimpl import LayerQuality, ModelError, QConfigMapping, QualityReport
from fx_quant_conformance.refimpl.observers.fake_quantize import disable_fake_quant
from tests.refimpl.support import both_core as core
from tests.refimpl.support import both_flows as flows
from tests.refimpl.test_custom_modules import configs
from tests.refimpl.test_custom_modules import net as with_custom_module
from tests.refimpl.test_qat_flow import IMAGE, ConvNet

X = core.X
FORMS: dict[str, Callable[[Any], Any]] = {
    "prepared": lambda prepared: prepared,
    "reference": refimpl.convert_to_reference_fx,
    "decomposed": refimpl.convert_to_reference_decomposed_fx,
}


def calibrated(run: Callable[..., Any], *inputs: Tensor, mapping: Any = None, **parts: nn.Module) -> Any:
    return core.prepared(core.Net(run, **parts).eval(), mapping, *inputs)


def layer(report: QualityReport, node: str, pattern: str = "") -> LayerQuality:
    (found,) = (each for each in report.layers if each.node == node and each.pattern.startswith(pattern))
    return found


def sqnr(floating: Tensor, quantized: Tensor) -> float:
    floating, quantized = floating.detach().double(), quantized.detach().double()
    return float(20 * torch.log10(floating.norm() / (floating - quantized).norm()))


def rounded(x: Tensor, observer: Any) -> Tensor:
    scale, zero_point = observer.calculate_qparams()
    return torch.quantize_per_tensor(x, float(scale), int(zero_point), torch.quint8).dequantize()


# ---- the numbers ------------------------------------------------------------------------------------------


@pytest.mark.rule("OBS-15")
def test_a_uniform_value_has_the_sqnr_that_its_step_explains() -> None:
    """Values uniform on 0..255 s have a mean square of (255 s)² / 3, rounding errors, uniform on ± s/2, of s² / 12.

    So the SQNR is 20 log10(2 * 255) dB = 54.15. The variance of the square of a uniform variable centred on 0 is 0.8 of
    its mean squared, and no less than that of one from 0: of N values, a mean square is off by less than 5 sigma =
    5 sqrt(0.8 / N), 2.2 % for N = 40,000, which both are: 10 log10(1.022 / 0.978) = 0.2 dB.
    """
    x = torch.rand(10_000, 4, generator=torch.Generator().manual_seed(0)) * 255
    x[0, 0], x[0, 1] = 0, 255  # the range, so that the step is 1
    report = refimpl.explain(calibrated(lambda net, x: net.a(x), x), (x,))
    found = layer(report, "x")
    assert found.scale == 1 and (found.low, found.high) == (0, 255) and found.clipped == 0
    assert abs(found.sqnr_alone - 20 * math.log10(2 * 255)) < 0.2
    assert found.sqnr_alone == found.sqnr_accumulated
    assert math.isclose(found.error_alone, 1 / math.sqrt(12), rel_tol=0.011)  # half of 2.2 %, as a root


@pytest.mark.rule("OBS-15")
def test_what_a_layer_adds_and_what_it_inherits_are_as_computed_by_hand() -> None:
    prepared = calibrated(lambda net, x: net.b(net.a(x)))
    report = refimpl.explain(prepared, X)
    into, middle, out = (prepared.get_submodule(f"activation_post_process_{index}") for index in range(3))
    reference: Any = refimpl.convert_to_reference_fx(prepared)
    a, b = prepared.get_submodule("a"), prepared.get_submodule("b")

    def quantized(name: str, x: Tensor) -> Tensor:
        module = reference.get_submodule(name)
        return F.linear(x, module.get_weight(), module.bias)

    y = a(X)
    given_a, given_b = rounded(X, into), rounded(y, middle)
    actual_y = rounded(quantized("a", given_a), middle)
    expected = {
        "x": (sqnr(X, given_a), sqnr(X, given_a)),
        "a": (sqnr(a(given_a), actual_y), sqnr(y, actual_y)),
        "b": (
            sqnr(b(given_b), rounded(quantized("b", given_b), out)),
            sqnr(b(y), rounded(quantized("b", actual_y), out)),
        ),
    }
    for name, (alone, accumulated) in expected.items():
        found = layer(report, name)
        assert math.isclose(found.sqnr_alone, alone, rel_tol=1e-6), name
        assert math.isclose(found.sqnr_accumulated, accumulated, rel_tol=1e-6), name
    assert report.outputs == (layer(report, "b").sqnr_accumulated,)
    assert (layer(report, "b").module, layer(report, "b").pattern) == ("b", "nn.Linear")
    assert layer(report, "x").pattern == "input of a"


def spoil_narrow(observer: Any) -> None:
    for bound in (observer.min_val, observer.max_val):
        bound.div_(8)


def spoil_wide(observer: Any) -> None:
    for bound in (observer.min_val, observer.max_val):
        bound.mul_(64)


@pytest.mark.rule("OBS-15")
@pytest.mark.parametrize("spoil", [spoil_narrow, spoil_wide])
def test_the_layer_that_was_spoiled_is_the_first_and_those_behind_it_add_nothing_more(
    spoil: Callable[[Any], None],
) -> None:
    prepared = calibrated(lambda net, x: net.c(net.b(net.a(x))))
    sound = refimpl.explain(prepared, X)
    spoil(prepared.get_submodule("activation_post_process_2"))  # that of b's output
    report = refimpl.explain(prepared, X)
    assert report.layers[0].node == "b"
    assert report.layers[0].sqnr_alone < layer(sound, "b").sqnr_alone - 10
    assert layer(report, "c").sqnr_accumulated < layer(sound, "c").sqnr_accumulated - 6
    for name in ("x", "a"):
        assert layer(report, name) == layer(sound, name)
    assert layer(report, "c").sqnr_alone > report.layers[0].sqnr_alone + 6
    clipped = layer(report, "b").clipped
    assert clipped is not None and (clipped > 0.3) == (spoil is spoil_narrow)
    assert list(report.layers) == sorted(report.layers, key=lambda each: (each.sqnr_alone, each.sqnr_accumulated))


@pytest.mark.rule("OBS-15")
def test_a_second_range_on_a_value_is_a_layer_of_its_own() -> None:
    """OBS-14: what a consumer asks for is not laid at its producer's door, nor at its own."""
    narrow = flows.torchs.FixedQParamsObserver.with_args(scale=2.0, zero_point=0, quant_max=127)  # steps of 2
    mapping = flows.global_mapping().set_module_name("b", core.NAMED.QConfig(narrow, flows.QCONFIG.weight))
    report = refimpl.explain(calibrated(lambda net, x: net.b(net.a(x)), mapping=mapping), X)
    second = layer(report, "a", "input of b")
    assert (second.low, second.high) == (0, 2 * 255)  # quantized tensors have the dtype's range (CVT-09)
    assert second.sqnr_alone < 15 < 30 < layer(report, "a", "nn.Linear").sqnr_alone


@pytest.mark.rule("OBS-15")
def test_a_pool_is_measured_where_its_dtype_config_names_a_weight_dtype() -> None:
    dtypes = refimpl.DTypeConfig(torch.quint8, torch.quint8, torch.qint8, torch.float32)  # one for all ops
    entries = [
        refimpl.BackendPatternConfig(nn.MaxPool2d).add_dtype_config(dtypes),
        refimpl.BackendPatternConfig(nn.ReLU).add_dtype_config(dtypes),
    ]
    config = refimpl.BackendConfig().set_backend_pattern_configs(entries)
    model, x = nn.Sequential(nn.ReLU(), nn.MaxPool2d(2)).eval(), torch.randn(1, 2, 4, 4)
    prepared = refimpl.prepare_fx(model, refimpl.get_default_qconfig_mapping("x86"), (x,), backend_config=config)
    prepared(x)
    report = refimpl.explain(refimpl.convert_to_reference_fx(prepared), x)
    assert math.isfinite(layer(report, "_1").sqnr_accumulated)


def test_the_forms_of_one_model_have_one_report_and_a_lowered_one_its_own_errors() -> None:
    prepared = calibrated(lambda net, x: torch.sigmoid(net.b(F.relu(net.a(x) + x))).reshape(-1, 2))
    of_prepared, of_reference, of_decomposed = (refimpl.explain(make(prepared), X) for make in FORMS.values())
    assert of_prepared.layers == of_reference.layers == of_decomposed.layers
    assert of_prepared.outputs == of_reference.outputs
    with engine("qnnpack"):
        lowered = refimpl.convert_fx(prepared)
        found = refimpl.explain(lowered, X, against=prepared)
        again = refimpl.explain(lowered, X, against=refimpl.convert_to_reference_fx(prepared))
    assert found.layers == again.layers and not found.unmeasured
    for each in found.layers:
        other = layer(of_prepared, each.node, each.pattern)
        assert each.sqnr_alone == other.sqnr_alone
        assert each.scale is not None  # a kernel may round a tie, or an input of it, the other way
        assert abs(each.error_accumulated - other.error_accumulated) <= each.scale
    kernel: Any = lowered.get_submodule("b")
    weight, bias = kernel._weight_bias()
    kernel.set_weight_bias(weight, bias + 1)
    with engine("qnnpack"):
        broken = refimpl.explain(lowered, X, against=prepared)
    assert layer(broken, "b").sqnr_accumulated < layer(found, "b").sqnr_accumulated - 10
    assert layer(broken, "a").sqnr_accumulated == layer(found, "a").sqnr_accumulated


@pytest.mark.rule("OBS-15")
def test_a_list_is_several_batches_over_which_all_is_summed() -> None:
    prepared = calibrated(lambda net, x: net.a(x))
    found, whole = refimpl.explain(prepared, [X, (2 * X,)]), refimpl.explain(prepared, torch.cat([X, 2 * X]))
    for one, other in zip(found.layers, whole.layers, strict=True):
        assert math.isclose(one.sqnr_alone, other.sqnr_alone, rel_tol=1e-6) and one.clipped == other.clipped
    assert layer(found, "x").clipped and not layer(refimpl.explain(prepared, X), "x").clipped


# ---- what is measured -------------------------------------------------------------------------------------

MODES: dict[str, tuple[Callable[..., Any], Any, float]] = {  # run, QConfig, and the least SQNR of every layer
    # 8 bits: rounding is uniform on ± s/2 at worst, s = range / 255; a value's root mean square is at least a tenth of
    # its range here: 20 log10(25.5 √12) = 38.9 dB for each of input and weight, 3 dB less for both together
    "dynamic": (lambda net, x: net.a(x), core.NAMED.default_dynamic_qconfig, 35.9),
    "dynamic function": (lambda net, x: F.linear(x, net.weight), core.NAMED.default_dynamic_qconfig, 35.9),
    # half precision: each error is at most 2^-11 of its value, 66.2 dB; an input's and a weight's add up in the worst
    # case, and so do the products that cancel in a sum, here less than 16 times as large as it
    "float16": (lambda net, x: net.a(x), core.NAMED.float16_dynamic_qconfig, 66.2 - 6 - 24),
}


@pytest.mark.rule("OBS-15")
@pytest.mark.parametrize("mode", MODES)
def test_other_modes_have_layers_too(mode: str) -> None:
    run, qconfig, least = MODES[mode]
    prepared = calibrated(run, mapping=flows.global_mapping(qconfig))
    for make in FORMS.values():
        report = refimpl.explain(make(prepared), X, against=prepared)
        assert report.layers and not report.unmeasured
        assert all(least < each.sqnr_alone < 100 for each in report.layers), str(report)


@pytest.mark.rule("OBS-15")
def test_a_reference_model_whose_weights_are_rounded_already_does_not_pass_for_exact() -> None:
    prepared = calibrated(lambda net, x: net.a(x), mapping=flows.global_mapping(core.NAMED.float16_dynamic_qconfig))
    report = refimpl.explain(refimpl.convert_to_reference_fx(prepared), X)
    reason = "Linear holds no float weights; give the prepared model as against="
    assert report.unmeasured == (("a", reason),)


class Words(nn.Module):
    """Takes indices, gives tuples; has a recurrent layer and integers among its outputs."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.lstm = nn.Embedding(8, 4), nn.LSTM(4, 4)

    def forward(self, words: Tensor, scale: Tensor, *, twice: bool = False) -> Any:
        y, (h, _) = self.lstm(self.table(words))
        return {"y": y * scale, "best": y.argmax(-1), "h": h}


@pytest.mark.rule("OBS-15")
def test_recurrent_layers_embeddings_and_models_with_several_inputs_and_outputs_are_measured() -> None:
    mapping = flows.global_mapping(core.NAMED.default_dynamic_qconfig)
    mapping = mapping.set_object_type(nn.Embedding, core.NAMED.float_qparams_weight_only_qconfig)
    inputs = (torch.arange(6).reshape(3, 2), torch.ones(4))
    prepared = core.prepared(Words().eval(), mapping, *inputs)
    for make in FORMS.values():
        report = refimpl.explain(make(prepared), inputs)
        assert {each.node for each in report.layers} == {"table", "lstm"} and not report.unmeasured
        assert len(report.outputs) == 2 and all(15 < each.sqnr_alone < 80 for each in report.layers), str(report)
    one_hot = layer(report, "table")
    weight = refimpl.convert_to_reference_fx(prepared).get_submodule("table")
    found = weight.get_weight()[inputs[0]]  # type: ignore[operator]
    assert math.isclose(one_hot.sqnr_alone, sqnr(weight.weight[inputs[0]], found), rel_tol=1e-6)  # type: ignore[index]


@pytest.mark.rule("OBS-15")
def test_the_layers_of_a_standalone_module_are_in_the_report() -> None:
    config = refimpl.PrepareCustomConfig().set_standalone_module_name("inner", None, (X,), None, None)
    model = core.Net(lambda net, x: net.b(net.inner(x)), inner=nn.Sequential(nn.Linear(4, 4), nn.ReLU())).eval()
    prepared = core.prepared(model, None, X, prepare_custom_config=config)
    report = refimpl.explain(prepared, X)
    assert {(each.node, each.module) for each in report.layers} >= {("inner._0", "inner.0"), ("b", "b")}
    assert report.layers == refimpl.explain(refimpl.convert_to_reference_fx(prepared), X).layers
    assert not report.unmeasured and all(each.sqnr_alone > 30 for each in report.layers)


@pytest.mark.rule("OBS-15")
def test_the_float_side_of_a_custom_module_is_in_the_prepared_model_alone() -> None:
    prepare_config, convert_config = (make() for make in configs())
    prepared = core.prepared(with_custom_module(), None, X, prepare_custom_config=prepare_config)
    with pytest.raises(ModelError, match=r"observed_to_quantized_mapping has no class for Observed.* as against="):
        refimpl.explain(prepared, X)
    reference = refimpl.convert_to_reference_fx(prepared, convert_config)
    with engine("qnnpack"):  # saturates on no CPU
        alone, both = refimpl.explain(reference, X), refimpl.explain(reference, X, against=prepared)
    reason = "Quantized holds no float weights; give the prepared model as against="
    assert alone.unmeasured == (("own", reason),) and not both.unmeasured
    assert f"not measured: own: {reason}" in str(alone)
    assert {each.node for each in both.layers} - {each.node for each in alone.layers} == {"own"}
    assert layer(both, "own").sqnr_alone > 30


# ---- ends -------------------------------------------------------------------------------------------------


@pytest.mark.rule("OBS-15")
def test_what_is_exact_what_has_no_signal_and_what_is_not_finite_can_be_told_apart_in_json() -> None:
    """1 - 2 · 0.5 = 0 in float; 0.5 is no integer times 1 / 255, so that it is not 0 in the quantized model."""

    def run(net: Any, x: Any) -> Any:
        return net.a(x), torch.flatten(x), net.b(x) / 0

    prepared = calibrated(run, mapping=flows.global_mapping().set_object_type(torch.div, None))
    report = refimpl.explain(prepared, X)
    assert layer(report, "flatten").sqnr_alone == math.inf
    found = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    exact = next(each for each in found["layers"] if each["node"] == "flatten")
    assert exact["sqnr_alone"] is None and exact["error_alone"] == 0 and exact["signal"] > 0
    assert found["outputs"][2] is None  # infinite in both
    assert "exact" in str(report)

    model = nn.Sequential(nn.Linear(2, 1, bias=False)).eval()
    model[0].weight.data = torch.tensor([[1.0, -2.0]])
    x = torch.tensor([[1.0, 0.5]])
    report = refimpl.explain(core.prepared(model, None, x), x)
    assert report.layers[0].sqnr_accumulated == -math.inf and report.layers[0].signal == 0
    assert report.layers[0].error_accumulated > 0 and "no signal" in str(report)
    assert json.loads(json.dumps(report.to_dict(), allow_nan=False))["layers"][0]["sqnr_accumulated"] is None

    report = refimpl.explain(calibrated(lambda net, x: net.a(x)), X / 0)
    assert ("x", "its values are not finite, or too large") in report.unmeasured and not report.layers


@pytest.mark.rule("OBS-15")
@pytest.mark.parametrize("is_training", [True, False])
def test_the_models_are_not_changed_and_observe_nothing(is_training: bool) -> None:
    mapping = QConfigMapping().set_global(refimpl.get_default_qat_qconfig("qnnpack"))
    prepared = refimpl.prepare_qat_fx(ConvNet().train(), mapping, (IMAGE,))
    prepared(IMAGE)
    prepared.train(is_training)
    before, modes = copy.deepcopy(prepared.state_dict()), [part.training for part in prepared.modules()]
    given = 3 * IMAGE
    report = refimpl.explain(prepared, given)
    assert {key: value.tolist() for key, value in prepared.state_dict().items()} == {
        key: value.tolist() for key, value in before.items()
    }
    assert [part.training for part in prepared.modules()] == modes
    assert torch.equal(given, 3 * IMAGE) and report.log.rows() == refimpl.explain(prepared).rows()
    assert refimpl.explain(prepared, given).layers == report.layers


@pytest.mark.rule("OBS-15")
def test_the_float_side_of_a_trained_model_is_what_was_trained_without_its_fake_quantizes() -> None:
    mapping = QConfigMapping().set_global(refimpl.get_default_qat_qconfig("qnnpack"))
    prepared = refimpl.prepare_qat_fx(ConvNet().train(), mapping, (IMAGE,))
    for _ in range(3):
        prepared(IMAGE)  # moves the statistics of the batch norms
    floating = copy.deepcopy(prepared).eval().apply(disable_fake_quant)
    seen: dict[str, Tensor] = {}
    for name in ("stem.0", "conv"):
        floating.get_submodule(name).register_forward_hook(lambda *of, name=name: seen.update({name: of[2].detach()}))
    expected = sqnr(floating(IMAGE), refimpl.convert_to_reference_fx(prepared).eval()(IMAGE))
    for make in FORMS.values():
        report = refimpl.explain(make(prepared), IMAGE)
        assert not report.unmeasured and math.isclose(report.outputs[0], expected, rel_tol=1e-3)
        for node, name in (("stem_0", "stem.0"), ("conv", "conv")):  # batch norm is folded, which rounds float32
            assert math.isclose(layer(report, node).signal, float(seen[name].square().mean().sqrt()), rel_tol=1e-5)


@pytest.mark.rule("OBS-15")
def test_works_in_place_leave_the_values_of_others_alone() -> None:
    """Both models run side by side on one graph: each op in place must see its own model's values, once."""

    def run(net: Any, x: Any) -> Any:
        y = net.a(x)
        y += x
        return F.relu(net.b(y), inplace=True).add_(1)

    x = X.clone()
    report = refimpl.explain(calibrated(run), x)
    assert torch.equal(x, X) and all(each.sqnr_alone > 30 for each in report.layers), str(report)
    assert report.outputs[0] > 25


@pytest.mark.rule("OBS-15")
def test_input_that_cannot_be_run_on_is_one_clear_error() -> None:
    prepared = calibrated(lambda net, x: net.b(net.a(x)))
    lowered = refimpl.convert_fx(prepared)
    for model, inputs, message in (
        (prepared, (X, X), r"takes \(x\), found 2 inputs; a tuple holds the inputs of one call, a list"),
        (prepared, [], "sample_inputs is an empty list"),
        (prepared, torch.ones(2, 5), "explain: node 'a': a raised RuntimeError: (addmm: )?mat1 and mat2 shapes"),
        (prepared, "text", "explain: node .*: .* raised "),
        (lowered, X, "is lowered, and its float weights are gone: give the prepared or the reference model"),
        (nn.Linear(2, 2), X, "Linear has no decision log"),
    ):
        with pytest.raises(ModelError, match=message):
            refimpl.explain(model, inputs)
    with pytest.raises(ModelError, match="is lowered"):
        refimpl.explain(lowered, X, against=lowered)
    with pytest.raises(ModelError, match="Linear has no decision log"):
        refimpl.explain(prepared, X, against=nn.Linear(2, 2))


@pytest.mark.rule("OBS-15")
def test_the_table_has_a_line_for_each_layer_and_the_outputs() -> None:
    report = refimpl.explain(calibrated(lambda net, x: net.b(net.a(x))), X)
    lines = str(report).splitlines()
    assert lines[0].split("  ")[0] == "node" and " ".join(lines[0].split()).endswith("clipped range scale")
    assert [line.split()[0] for line in lines[2:5]] == [each.node for each in report.layers]
    assert lines[-1] == f"outputs (dB): {report.outputs[0]:.1f}"
    assert set(report.to_dict()) == {"layers", "outputs", "unmeasured"}
