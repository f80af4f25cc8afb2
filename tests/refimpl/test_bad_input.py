"""Bad input through the front door: one clear error that names the node or the entry, never a wrong model. (Shows 6)"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping
from typing import Any, cast

import pytest
import torch
import torch.ao.quantization.quantize_fx as torch_fx
import torch.nn.functional as F
from torch import Tensor, nn

import refimpl
from refimpl import (
    BackendConfig,
    BackendPatternConfig,
    ConfigError,
    DTypeConfig,
    ModelError,
    QConfig,
    QConfigError,
    QConfigMapping,
    RefimplError,
)
from tests.refimpl.support import both_flows as flows
from tests.refimpl.support.both_core import NAMED, Net, X

DTYPES = DTypeConfig(torch.quint8, torch.quint8, torch.qint8, torch.float)


def net() -> nn.Module:
    return Net(lambda net, x: net.b(net.relu(net.a(x)))).eval()


def prepare(model: nn.Module | None = None, mapping: Any = None, inputs: Any = (X,), **options: Any) -> Any:
    return refimpl.prepare_fx(
        net() if model is None else model, flows.global_mapping() if mapping is None else mapping, inputs, **options
    )


def fusing(method: Callable[..., Any], fused: type = torch.ao.nn.intrinsic.LinearReLU) -> BackendConfig:
    entry = BackendPatternConfig((nn.Linear, nn.ReLU)).add_dtype_config(DTYPES).set_fuser_method(method)
    return BackendConfig("vendor").set_backend_pattern_config(entry.set_fused_module(fused))


class Looping(nn.Module):
    def forward(self, x: Any) -> Any:
        return x if x.sum() > 0 else -x


def not_a_qconfig(activation: Any, weight: Any = flows.QCONFIG.weight) -> Any:
    return QConfigMapping().set_global(QConfig(activation, weight))


def failing() -> nn.Module:
    raise RuntimeError("no memory")


BAD: Mapping[str, tuple[Callable[[], Any], type[RefimplError], str]] = {
    "a model that cannot be traced": (lambda: prepare(Looping()), ModelError, "Looping cannot be traced by torch.fx"),
    "the same for training": (
        lambda: refimpl.prepare_qat_fx(Looping().train(), flows.global_mapping(), (X,)),
        ModelError,
        "Looping cannot be traced by torch.fx",
    ),
    "the same in fuse": (lambda: refimpl.fuse_fx(Looping().eval()), ModelError, "Looping cannot be traced"),
    "train mode for fuse": (lambda: refimpl.fuse_fx(net().train()), ModelError, r"fuse_fx needs a model in eval mode"),
    "a mapping that is none": (lambda: prepare(mapping=3), QConfigError, "expected a QConfigMapping, found 3"),
    "a config that is none": (lambda: prepare(backend_config=3), ConfigError, "expected a BackendConfig, found 3"),
    "a custom config that is none": (
        lambda: prepare(prepare_custom_config=3),
        ConfigError,
        "expected a PrepareCustomConfig, found 3",
    ),
    "a QConfig of instances": (
        lambda: prepare(mapping=not_a_qconfig(refimpl.MinMaxObserver())),
        QConfigError,
        "expected constructors|observer constructor",
    ),
    "a QConfig that is a number": (
        lambda: prepare(mapping=QConfigMapping().set_module_name("a", 3)),
        QConfigError,
        "expected constructors 'activation' and 'weight'",
    ),
    "a constructor that fails": (
        lambda: prepare(mapping=not_a_qconfig(failing)),
        QConfigError,
        r"the observer constructor .*failing.* raised \w+: no memory",
    ),
    "a weight's constructor that fails": (
        lambda: prepare(mapping=not_a_qconfig(flows.QCONFIG.activation, failing)),
        QConfigError,
        r"the observer constructor .*failing.* raised \w+: no memory",
    ),
    "a regex that does not compile": (
        lambda: prepare(mapping=QConfigMapping().set_module_name_regex("a(", flows.QCONFIG)),
        QConfigError,
        r"module_name_regex 'a\(' does not compile",
    ),
    "a fuser method of the wrong class": (
        lambda: prepare(backend_config=fusing(lambda is_qat, linear, relu: linear)),
        ConfigError,
        r"nn.Linear\+nn.ReLU.*returned Linear; expected .*LinearReLU",
    ),
    "a fuser method with too few arguments": (
        lambda: prepare(backend_config=fusing(lambda is_qat, linear: linear)),
        ConfigError,
        r"nn.Linear\+nn.ReLU",
    ),
    "a fuser method that returns nothing": (
        lambda: prepare(backend_config=fusing(lambda is_qat, linear, relu: None)),
        ConfigError,
        r"nn.Linear\+nn.ReLU.*returned NoneType",
    ),
}


@pytest.mark.parametrize("what", BAD)
@pytest.mark.rule("OBS-15")
def test_bad_input_is_one_clear_error(what: str) -> None:
    call, kind, message = BAD[what]
    with pytest.raises(kind, match=message):
        call()


@pytest.mark.rule("OBS-15")
@pytest.mark.parametrize("inputs", [(X,), [X], X], ids=["tuple", "list", "tensor"])
def test_example_inputs_may_be_a_tuple_a_list_or_one_tensor(inputs: Any) -> None:
    assert prepare(inputs=inputs)(X).shape == X.shape


UNMATCHED: Mapping[str, tuple[Callable[[QConfigMapping], Any], str]] = {
    "module_name": (lambda mapping: mapping.set_module_name("aa", None), r"module_name aa matches nothing.*'a'"),
    "module_name_regex": (
        lambda mapping: mapping.set_module_name_regex("z.*", None),
        r"module_name_regex z\.\* matches",
    ),
    "object_type": (lambda mapping: mapping.set_object_type(Looping, None), "object_type Looping matches nothing"),
    "order": (
        lambda mapping: mapping.set_module_name_object_type_order("", nn.Linear, 7, None),
        r"module_name_object_type_order \('', Linear, 7\) matches nothing",
    ),
}


@pytest.mark.rule("QCM-02")
def test_calls_are_counted_after_fusing_in_the_warning_as_in_the_decision() -> None:
    """Two pairs of Linear and ReLU are two fused calls of their roots' class, and no ReLU is left to be named."""
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU()).eval()
    held = QConfigMapping().set_module_name_object_type_order("", nn.Linear, 1, flows.QCONFIG)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = refimpl.prepare_fx(model, held, (X,))
    assert [decision.is_quantized for decision in refimpl.explain(found).plan.decisions] == [False, True]
    idle = QConfigMapping().set_module_name_object_type_order("", nn.ReLU, 0, flows.QCONFIG)
    with pytest.warns(UserWarning, match=r"\('', ReLU, 0\) matches nothing"):
        refimpl.prepare_fx(model, idle, (X,))


@pytest.mark.rule("QCM-02")
@pytest.mark.parametrize("kind", UNMATCHED)
def test_a_key_that_matches_nothing_is_a_warning_that_names_the_nearest(kind: str) -> None:
    add, message = UNMATCHED[kind]
    mapping = QConfigMapping().set_global(flows.QCONFIG)
    add(mapping)
    with pytest.warns(UserWarning, match=message):
        found = prepare(mapping=mapping)
    assert found(X).shape == X.shape


@pytest.mark.rule("QCM-02")
def test_default_mappings_and_keys_that_match_give_no_warning() -> None:
    named = QConfigMapping().set_global(flows.QCONFIG).set_module_name("a", None).set_object_type(nn.ReLU, None)
    for mapping in (named, flows.torch_mappings.get_default_qconfig_mapping("qnnpack")):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert prepare(mapping=mapping)(X).shape == X.shape


@pytest.mark.rule("CVT-01")
@pytest.mark.parametrize("model", [nn.Linear(2, 2), torch.fx.symbolic_trace(nn.Linear(2, 2))], ids=["module", "traced"])
def test_convert_names_what_it_was_given(model: Any) -> None:
    with pytest.raises(ModelError, match=rf"convert: {type(model).__name__} was not made by refimpl's prepare_fx"):
        refimpl.convert_to_reference_fx(model)


def test_running_the_example_inputs_changes_neither_them_nor_buffers_nor_the_random_state() -> None:
    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))
            self.calls: Tensor

        def forward(self, x: Tensor) -> Tensor:
            return F.dropout(x.add_(1), training=True) + self.calls.add_(1)

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.noisy = Noisy()

        def forward(self, x: Tensor) -> Tensor:
            return cast(Tensor, self.noisy(x))

    model, inputs = Outer().eval(), torch.zeros(2)
    random = torch.random.get_rng_state()
    custom = refimpl.PrepareCustomConfig().set_non_traceable_module_classes([Noisy])
    refimpl.prepare_fx(model, flows.global_mapping(), (inputs,), custom)
    assert float(model.noisy.calls) == 0 and torch.equal(inputs, torch.zeros(2))
    assert torch.equal(random, torch.random.get_rng_state())


def made(stage: str, model: nn.Module | None = None) -> Any:
    """A model that a pass has made: of refimpl's, or prepared by torch."""
    if stage == "torch's prepared":
        return torch_fx.prepare_fx(net(), flows.global_mapping(), (X,))
    if stage == "trained":
        qconfig = flows.torch_qconfigs.get_default_qat_qconfig("x86")
        return refimpl.prepare_qat_fx(net().train(), flows.global_mapping(qconfig), (X,))
    prepared = prepare(model)
    prepared(X)
    passes: Mapping[str, Callable[[Any], Any]] = {
        "prepared": lambda prepared: prepared,
        "reference": refimpl.convert_to_reference_fx,
        "decomposed": refimpl.convert_to_reference_decomposed_fx,
        "lowered": refimpl.convert_fx,
    }
    return passes[stage](prepared)


PREPARED = ("prepared", "trained", "torch's prepared")
CONVERTED = ("reference", "decomposed", "lowered")


@pytest.mark.rule("OBS-15")
@pytest.mark.parametrize("is_qat", [False, True], ids=["ptq", "qat"])
@pytest.mark.parametrize("stage", [*PREPARED, *CONVERTED])
def test_preparing_what_a_pass_has_made_says_so(stage: str, is_qat: bool) -> None:
    door: Any = refimpl.prepare_qat_fx if is_qat else refimpl.prepare_fx
    model, word = made(stage), "prepared" if stage in PREPARED else "converted"
    name = type(model).__name__
    for given in (model, copy.deepcopy(model)):
        with pytest.raises(ModelError, match=rf"prepare: (GraphModule|{name}) was {word} already; give .* the float"):
            door(given.train(is_qat), flows.global_mapping(), (X,))


@pytest.mark.rule("OBS-15")
@pytest.mark.parametrize("stage", ["trained", *CONVERTED])
def test_torch_prepares_it_once_more_in_silence_and_ours_says_so(stage: str) -> None:
    model = made(stage).train(stage == "trained")
    for flow in (torch_fx, refimpl):
        door: Any = flow.prepare_qat_fx if stage == "trained" else flow.prepare_fx
        if flow is refimpl:
            with pytest.raises(ModelError, match="already"):
                door(model, flows.global_mapping(), (X,))
        else:
            assert door(copy.deepcopy(model), flows.global_mapping(), (X,))(X).shape == X.shape


class Holder(nn.Module):
    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.parts = nn.ModuleList([inner])
        self.last = nn.Linear(4, 4)

    def forward(self, x: Any) -> Any:
        return self.last(self.parts[0](x))


@pytest.mark.rule("OBS-15")
@pytest.mark.parametrize("stage", PREPARED)
def test_a_prepared_model_inside_another_is_named_unless_it_is_not_traced_into(stage: str) -> None:
    model = Holder(made(stage)).eval()
    with pytest.raises(ModelError, match=r"prepare: Holder's submodule 'parts\.0' was prepared already"):
        prepare(model)
    custom = refimpl.PrepareCustomConfig().set_non_traceable_module_names(["parts.0"])
    assert prepare(model, prepare_custom_config=custom)(X).shape == X.shape


@pytest.mark.rule("OBS-15")
@pytest.mark.parametrize("stage", CONVERTED)
def test_a_converted_model_inside_another_is_a_part_of_it_as_in_torch(stage: str) -> None:
    for door in (refimpl.prepare_fx, torch_fx.prepare_fx):
        prepared: Any = door(Holder(made(stage)).eval(), flows.global_mapping(), (X,))
        prepared(X)
        assert type(prepared.get_submodule("last")) is nn.Linear


def standalone(inner: Any) -> Any:
    """A prepared model with that standalone module."""
    custom = refimpl.PrepareCustomConfig().set_standalone_module_name("parts.0", None, (X,), None, None)
    return prepare(Holder(inner).eval(), prepare_custom_config=custom)


@pytest.mark.rule("STD-01")
@pytest.mark.parametrize("convert", [refimpl.convert_to_reference_fx, refimpl.convert_fx], ids=lambda c: c.__name__)
@pytest.mark.parametrize("stage", CONVERTED)
def test_a_standalone_module_that_was_converted_is_named(stage: str, convert: Callable[[Any], Any]) -> None:
    with pytest.raises(ModelError, match=r"standalone module 'parts\.0': prepare: .* was converted already"):
        standalone(made(stage))
    prepared = standalone(net())
    prepared(X)
    replaced: Any = made(stage)
    prepared.set_submodule("parts.0", replaced)
    with pytest.raises(ModelError, match=r"standalone module 'parts\.0': convert: .* was converted already"):
        convert(prepared)
    for other in (nn.Linear(4, 4), torch.jit.script(nn.Linear(4, 4))):
        prepared.set_submodule("parts.0", other)
        with pytest.raises(ModelError, match=r"standalone module 'parts\.0': convert: \w+ was not made by refimpl's"):
            convert(prepared)


@pytest.mark.rule("CVT-01")
@pytest.mark.parametrize("convert", [refimpl.convert_to_reference_fx, refimpl.convert_fx], ids=lambda c: c.__name__)
@pytest.mark.parametrize("stage", CONVERTED)
def test_converting_what_was_converted_says_so(stage: str, convert: Callable[[Any], Any]) -> None:
    with pytest.raises(ModelError, match="was converted already, and convert takes a prepared one"):
        convert(made(stage))


def embedding_net() -> nn.Module:
    return Net(lambda net, x: net.e(x.to(torch.int64).clamp(0, 3)), e=nn.Embedding(4, 4)).eval()


def function_net() -> nn.Module:
    return Net(lambda net, x: F.linear(x, net.weight)).eval()


DTYPES_OF_FLOATS = (torch.float64, torch.float16, torch.bfloat16)
EMBEDDING = flows.torch_qconfigs.float_qparams_weight_only_qconfig
DYNAMIC = flows.torch_qconfigs.default_dynamic_qconfig
DECOMPOSED = torch_fx._convert_to_reference_decomposed_fx
MODELS: Mapping[str, tuple[Callable[[], nn.Module], Any, str]] = {
    "layers": (net, flows.QCONFIG, r"the weight of 'a' is torch\.\w+, and \d more"),
    "dynamic": (net, DYNAMIC, r"the weight of 'a' is torch\.\w+, and \d more"),
    "per channel": (net, flows.PER_CHANNEL, r"the weight of 'a' is torch\.\w+, and \d more"),
    "a function": (function_net, flows.QCONFIG, r"the weight 'weight' is torch\.\w+|'x', with .*torch\.\w+"),
    "an embedding": (embedding_net, EMBEDDING, r"the weight of 'e' is torch\.\w+"),
}
WITHOUT_BIAS = ("a function", "an embedding")


@pytest.mark.rule("OBS-15")
@pytest.mark.parametrize("dtype", DTYPES_OF_FLOATS, ids=str)
@pytest.mark.parametrize("what", MODELS)
def test_a_weight_that_torch_cannot_quantize_is_an_error_where_no_form_of_torchs_runs(
    what: str, dtype: torch.dtype
) -> None:
    make, qconfig, message = MODELS[what]
    mapping, x = flows.global_mapping(qconfig), X.to(dtype)
    runs = what in WITHOUT_BIAS and dtype is not torch.float64
    for is_qat in (False, True):
        door: Any = refimpl.prepare_qat_fx if is_qat else refimpl.prepare_fx
        expected = f"prepare: ({message}).*float32 alone.*"
        with pytest.warns(UserWarning, match=expected) if runs else pytest.raises(ModelError, match=expected):
            door(make().to(dtype).train(is_qat), mapping, (x,))
    kept = refimpl.prepare_fx(make().to(dtype), QConfigMapping(), (x,))
    assert refimpl.convert_fx(kept)(x).dtype is dtype, "what stays float may be of any dtype"
    theirs: Any = torch_fx.prepare_fx(make().to(dtype), mapping, (x,))
    theirs(x)
    for convert in (torch_fx.convert_to_reference_fx, DECOMPOSED):
        if runs and convert is DECOMPOSED:
            assert convert(copy.deepcopy(theirs))(x).shape == kept(x).shape
        else:
            with pytest.raises((RuntimeError, AssertionError)):
                convert(copy.deepcopy(theirs))(x)


@pytest.mark.rule("OBS-15")
@pytest.mark.parametrize("dtype", DTYPES_OF_FLOATS, ids=str)
def test_a_value_that_torch_cannot_quantize_is_a_warning_as_the_inputs_are_an_example(dtype: torch.dtype) -> None:
    model = Net(lambda net, x: torch.add(x, x)).eval()
    said = rf"'x', with these example_inputs, is {dtype}"
    with pytest.warns(UserWarning, match=rf"{said}, and 1 more .* float32 alone"):
        prepared = prepare(model, inputs=(X.to(dtype),))
    prepared(X)
    assert refimpl.convert_fx(prepared)(X).dtype is torch.float32
    with pytest.warns(UserWarning, match=said):
        refimpl.prepare_qat_fx(net().train(), flows.global_mapping(), (X.to(dtype),))


QUIET: Mapping[str, Callable[[Any, Any], Any]] = {
    "a cast before": lambda net, x: net.a(x.float()),
    "a buffer": lambda net, x: net.a(x.float()) * net.odd.float(),
    "a cast behind": lambda net, x: net.a(x.float()).double(),
}


@pytest.mark.rule("OBS-15")
@pytest.mark.filterwarnings("error:prepare:UserWarning")
@pytest.mark.parametrize("dtype", DTYPES_OF_FLOATS, ids=str)
@pytest.mark.parametrize("what", QUIET)
def test_other_dtypes_where_nothing_is_quantized_are_no_matter(what: str, dtype: torch.dtype) -> None:
    model, x = Net(QUIET[what]).eval(), X.to(dtype)
    model.register_buffer("odd", torch.ones(1, dtype=dtype))
    prepared = prepare(model, inputs=(x,))
    prepared(x)
    assert refimpl.convert_fx(prepared)(x).shape == x.shape
    half = refimpl.prepare_fx(net().to(dtype), flows.global_mapping(NAMED.float16_static_qconfig), (x,))
    assert half(x).dtype is dtype, "nothing becomes integers"
