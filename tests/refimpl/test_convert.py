"""Convert to the reference model, in both forms (rules CVT-01 to CVT-12, OBS-13, CFG-11)."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.ao.nn.quantized.reference as nnqr
import torch.ao.quantization.quantize_fx as torch_fx
from torch import Tensor, nn
from torch.ao.quantization import backend_config as torch_backend_config
from torch.ao.quantization.fx import _equalize

from fx_quant_conformance import refimpl
from fx_quant_conformance.refimpl import ConfigError, QConfigError
from fx_quant_conformance.refimpl.graph.invariants import is_dequantize, is_quantize
from tests.refimpl.support import both_core as core
from tests.refimpl.support import both_flows as flows
from tests.refimpl.support.qconfigs import minmax_qconfig
from tests.refimpl.support.zoo import build_named

U8, S8 = torch.quint8, torch.qint8
FORMS: list[Callable[..., Any]] = [refimpl.convert_to_reference_fx, refimpl.convert_to_reference_decomposed_fx]
each_form = pytest.mark.parametrize("convert", FORMS, ids=["quantized tensors", "decomposed"])


def mapping(**arguments: Any) -> refimpl.QConfigMapping:
    defaults: dict[str, Any] = {"per_channel": False}
    return refimpl.QConfigMapping().set_global(minmax_qconfig(U8, S8, **(defaults | arguments)))


def prepared(name: str = "Residual", qconfigs: Any = None, *, calibrated: bool = True) -> tuple[Any, Any]:
    model, batches = build_named(name)
    found = refimpl.prepare_fx(model, qconfigs or mapping(), batches[0], backend_config=flows.our_config("qnnpack"))
    if calibrated:
        flows.calibrate(found, batches)
    return found, batches


@pytest.mark.rule("CVT-07")
@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize("name", ["Residual", "Functions", "DenseBlock"])
def test_both_forms_give_the_same_numbers(name: str, per_channel: bool) -> None:
    found, batches = prepared(name, mapping(per_channel=per_channel))
    quantized, decomposed = (convert(found) for convert in FORMS)
    assert not flows.kinds(decomposed)["call_function quantize_per_tensor"]
    with torch.no_grad():
        assert all(flows.same(quantized(*batch), decomposed(*batch)) for batch in batches)


def interpreted(model: Any, *inputs: Tensor) -> list[Tensor]:
    """The integers after each quantize of a graph."""

    class Spy(torch.fx.Interpreter):
        def run_node(self, n: torch.fx.Node) -> Any:
            value = super().run_node(n)
            if is_quantize(n):
                seen.append(value.int_repr() if value.is_quantized else value)
            return value

    seen: list[Tensor] = []
    with torch.no_grad():
        Spy(model).run(*inputs)
    return seen


@pytest.mark.rule("CVT-09")
@pytest.mark.parametrize("per_channel", [False, True])
def test_the_decomposed_form_has_a_narrow_range_and_quantized_tensors_the_dtypes_as_torchs(per_channel: bool) -> None:
    """Inputs far outside of calibration saturate at the range's end, or use the headroom that the dtype has."""
    model, batches = build_named("Mlp")
    narrow = flows.torchs.MinMaxObserver.with_args(quant_min=0, quant_max=127)
    weight = (flows.PER_CHANNEL if per_channel else flows.QCONFIG).weight
    qconfigs = flows.global_mapping(flows.torch_qconfigs.QConfig(narrow, weight))
    torchs, ours = flows.torch_flow(model, qconfigs, batches), flows.our_flow(model, qconfigs, batches)
    decomposed = torch_fx._convert_to_reference_decomposed_fx(
        copy.deepcopy(torchs.prepared), backend_config=flows.torch_config("qnnpack")
    )
    ours_decomposed = refimpl._convert_to_reference_decomposed_fx(ours.prepared)  # by torch's name
    far = batches[0][0] * 100
    quantizes = [node for node in ours_decomposed.graph.nodes if is_quantize(node)]
    assert (0, 127, torch.uint8) in {node.args[3:] for node in quantizes}
    for reference, end in ((torchs.reference, 255), (ours.reference, 255), (decomposed, 127), (ours_decomposed, 127)):
        assert max(int(value.max()) for value in interpreted(reference, far)) == end
    with torch.no_grad():
        assert flows.same(ours_decomposed(far), decomposed(far)), "the decomposed forms agree"
        assert flows.same(ours.reference(far), torchs.reference(far)), "and so do those on quantized tensors"
        inside = batches[0][0]
        assert flows.same(ours_decomposed(inside), ours.reference(inside)), "inside of calibration all four do"


@pytest.mark.rule("CVT-09")
@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize("name", ["Functions", "Residual"])
def test_a_weight_has_the_observers_range_in_the_decomposed_form_alone(name: str, per_channel: bool) -> None:
    """The largest weight lies at 7.5 steps of the range -8..7: 8 where the op knows the dtype's range only."""
    found, batches = prepared(name, mapping(weight_quant_min=-8, weight_quant_max=7, per_channel=per_channel))
    quantized, decomposed = (convert(found) for convert in FORMS)
    held: list[Any] = [part for part in quantized.modules() if hasattr(part, "get_quantized_weight")]
    weights = [part.get_quantized_weight().int_repr() for part in held]
    weights += interpreted(quantized, *batches[0])[1:2] if name == "Functions" else []
    assert max(int(weight.max()) for weight in weights) == 8
    within: list[Any] = [part for part in decomposed.modules() if hasattr(part, "get_weight")]
    steps = [part.get_weight() / (part.weight_scale.reshape(-1, *[1] * (part.weight.dim() - 1))) for part in within]
    steps += interpreted(decomposed, *batches[0])[1:2] if name == "Functions" else []
    assert steps and all(int(step.min().round()) >= -8 and int(step.max().round()) <= 7 for step in steps)


def linear_config(*, swap: bool, root: bool = True, of: Any = refimpl) -> Any:
    """A config of one claim; `of`: refimpl or torch.ao.quantization.backend_config."""
    entry = of.BackendPatternConfig(nn.Linear).add_dtype_config(of.DTypeConfig(U8, U8, S8, torch.float))
    if root:
        entry.set_root_module(nn.Linear)
    if swap:
        entry.set_reference_quantized_module(nnqr.Linear)
    return of.BackendConfig("test").set_backend_pattern_config(entry)


@pytest.mark.rule("CVT-10")
@pytest.mark.rule("CFG-11")
@each_form
@pytest.mark.parametrize(("root", "swap"), [(True, False), (False, True), (False, False)])
def test_without_a_reference_module_convert_raises(convert: Callable[..., Any], root: bool, swap: bool) -> None:
    """Torch leaves the layer in float between quantize and dequantize, and says nothing."""
    model, inputs = nn.Sequential(nn.Linear(4, 4)).eval(), torch.randn(2, 4)
    found = refimpl.prepare_fx(model, mapping(), backend_config=linear_config(swap=swap, root=root))
    found(inputs)
    with pytest.raises(
        ConfigError, match=r"'0': prepare accepted a weight of torch.qint8, but no entry gives a reference"
    ):
        convert(found)
    torchs = linear_config(swap=swap, root=root, of=torch_backend_config)
    theirs = torch_fx.prepare_fx(model, flows.global_mapping(), (inputs,), backend_config=torchs)
    theirs(inputs)
    converted = torch_fx.convert_to_reference_fx(theirs, backend_config=torchs)
    assert type(converted.get_submodule("0")) is nn.Linear
    assert flows.graph_counts(converted, is_quantize, is_dequantize) == [2, 2]


@pytest.mark.rule("CVT-10")
def test_a_reference_module_without_from_float_is_the_configs_fault() -> None:
    config = linear_config(swap=False)
    config.configs[0].set_reference_quantized_module(nn.Identity)
    found = refimpl.prepare_fx(nn.Sequential(nn.Linear(4, 4)).eval(), mapping(), backend_config=config)
    found(torch.randn(2, 4))
    with pytest.raises(ConfigError, match=r"'0': Identity.from_float raised AttributeError"):
        refimpl.convert_to_reference_fx(found)


@pytest.mark.rule("CVT-10")
def test_convert_uses_prepares_config_and_takes_an_equal_one() -> None:
    found, batches = prepared("Mlp")
    expected = refimpl.convert_to_reference_fx(found)(*batches[0])
    for config in (flows.our_config("qnnpack"), flows.torch_config("qnnpack"), flows.native("qnnpack")):
        assert flows.same(refimpl.convert_to_reference_fx(found, backend_config=config)(*batches[0]), expected)
    with pytest.raises(ConfigError, match=r"'layers.0': prepare accepted a weight of torch.qint8"):
        refimpl.convert_to_reference_fx(found, backend_config=linear_config(swap=False))


class Own(nnqr.Linear):
    """A vendor's reference module."""

    @classmethod
    def from_float(cls, float_linear: Any, weight_qparams: Any) -> Any:
        made = cls(float_linear.in_features, float_linear.out_features, weight_qparams=weight_qparams)
        made.weight, made.bias = float_linear.weight, float_linear.bias
        return made


@pytest.mark.rule("CVT-10")
@pytest.mark.rule("CFG-11")
@each_form
def test_a_reference_module_of_a_vendors_is_used_without_a_word_to_convert(convert: Callable[..., Any]) -> None:
    """Torch takes the native config there."""
    config = linear_config(swap=False)
    config.configs[0].set_reference_quantized_module(Own)
    found = refimpl.prepare_fx(nn.Sequential(nn.Linear(4, 4)).eval(), mapping(), backend_config=config)
    found(torch.randn(2, 4))
    assert type(convert(found).get_submodule("0")) is Own


@pytest.mark.rule("OBS-13")
def test_a_module_weight_is_observed_in_convert() -> None:
    found, _ = prepared("Mlp", mapping(per_channel=True))
    with torch.no_grad():
        found.get_submodule("layers.0.0").weight.mul_(3)
    reference: Any = refimpl.convert_to_reference_fx(found).get_submodule("layers.0.0")
    expected = found.get_submodule("layers.0.0").weight.abs().amax(1) / 127.5
    torch.testing.assert_close(reference.weight_scale, expected)


@pytest.mark.rule("NUM-02")
@each_form
@pytest.mark.parametrize("observer", ["ours", "torch's"])
def test_without_calibration_the_scale_is_1_with_a_warning(convert: Callable[..., Any], observer: str) -> None:
    """As torch does."""
    found, _ = prepared("Mlp", mapping() if observer == "ours" else flows.global_mapping(), calibrated=False)
    with pytest.warns(UserWarning, match=r"must run observer before calling calculate_qparams|has seen no data"):
        reference = convert(found)
    quantizes = [node for node in reference.graph.nodes if is_quantize(node)]
    assert {flows.numbers_of(reference, node)[:8] for node in quantizes} <= {"[[1.0], ", "[1.0, 0,"}


@pytest.mark.rule("CVT-01")
@each_form
def test_an_observer_without_qparams_is_named_with_its_value(convert: Callable[..., Any]) -> None:
    class Mute(nn.Identity):
        dtype = torch.quint8

    found, _ = prepared(
        "Mlp", refimpl.QConfigMapping().set_global(refimpl.QConfig(Mute, mapping().global_qconfig.weight))
    )
    with pytest.raises(QConfigError, match=r"observer of 'x' \(input\)"):
        convert(found)


@pytest.mark.rule("CVT-12")
@each_form
def test_convert_leaves_the_prepared_model_as_it_was(convert: Callable[..., Any]) -> None:
    found, batches = prepared("Functions")
    code, state = found.code, copy.deepcopy(found.state_dict())
    modules = {name: id(module) for name, module in found.named_modules()}
    first = convert(found)(*batches[0])
    weights = {key for key in state if "activation_post_process_1" in key}
    now = found.state_dict()
    assert found.code == code and {name: id(module) for name, module in found.named_modules()} == modules
    assert all(torch.equal(now[key], state[key]) for key in state if key not in weights), "other than weight observers"
    assert flows.same(convert(found)(*batches[0]), first), "and can be converted again"


def saved_and_loaded(model: Any) -> Any:
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


def dynamic() -> Any:
    return core.prepared(
        core.Net(lambda net, x: net.b(net.a(x))).eval(), flows.global_mapping(core.NAMED.default_dynamic_qconfig)
    )


def half() -> Any:
    return core.prepared(
        core.Net(lambda net, x: net.a(x)).eval(), flows.global_mapping(core.NAMED.float16_dynamic_qconfig)
    )


def nested() -> Any:
    config = refimpl.PrepareCustomConfig().set_standalone_module_name("inner", None, (core.X,), None, None)
    inner = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    return core.prepared(core.Net(lambda net, x: net.b(net.inner(x)), inner=inner).eval(), prepare_custom_config=config)


def trained() -> Any:
    qconfigs = flows.global_mapping(core.NAMED.get_default_qat_qconfig("qnnpack"))
    found = refimpl.prepare_qat_fx(core.Net(lambda net, x: net.relu(net.a(x)) + x).train(), qconfigs, (core.X,))
    found(core.X)
    return found.eval()


def equalized() -> Any:
    asked = {"": _equalize.default_equalization_qconfig}
    return core.prepared(core.Net(lambda net, x: net.b(net.a(x))).eval(), _equalization_config=asked)


@pytest.mark.rule("CVT-12")
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("make", [dynamic, half, nested, trained, equalized], ids=lambda make: make.__name__)
@pytest.mark.parametrize(
    "travel",
    [copy.deepcopy, lambda model: saved_and_loaded(copy.deepcopy(model))],
    ids=["deepcopy", "a saved copy"],
)
def test_every_mode_survives_with_its_decisions(make: Callable[[], Any], travel: Any) -> None:
    found = make()
    travelled = travel(found)
    expected, reference = refimpl.convert_to_reference_fx(found), refimpl.convert_to_reference_fx(travelled)
    assert refimpl.explain(travelled).rows() == refimpl.explain(found).rows()
    assert core.calls(reference) == core.calls(expected)
    with torch.no_grad():
        assert flows.same(reference(core.X), expected(core.X))


@pytest.mark.rule("CVT-12")
def test_a_state_dict_carries_the_calibration() -> None:
    found, _ = prepared("Residual")
    fresh, _ = prepared("Residual", calibrated=False)
    fresh.load_state_dict(found.state_dict())
    converted = [refimpl.convert_to_reference_fx(model) for model in (fresh, found)]
    assert flows.qparams(converted[0]) == flows.qparams(converted[1])
