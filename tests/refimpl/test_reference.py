"""Reference modules, each against what torch's flow makes of a one-layer model (rules CVT-02, CVT-11, OBS-13)."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fx_quant_conformance import refimpl
from fx_quant_conformance.refimpl import QConfigMapping
from fx_quant_conformance.refimpl.convert.reference import make_reference
from fx_quant_conformance.refimpl.errors import ConfigError
from tests.refimpl.support import both_flows as flows
from tests.refimpl.support.one_layer import (
    ENGINES,
    FORMS,
    NAMED,
    ROOTS,
    QConfig,
    assert_same_modules,
    each_form,
    ids,
    prepared_by_torch,
    references,
)

SIGNED = QConfig(  # within the constraints of qnnpack and executorch
    activation=flows.torchs.MinMaxObserver.with_args(**flows.SIGNED_WEIGHT, eps=2**-12),
    weight=flows.torchs.MinMaxObserver.with_args(**flows.SIGNED_WEIGHT, quant_min=-127, quant_max=127, eps=2**-12),
)
QCONFIGS = (
    flows.QCONFIG,
    flows.PER_CHANNEL,
    SIGNED,
    NAMED.default_dynamic_qconfig,
    NAMED.per_channel_dynamic_qconfig,
    NAMED.float16_dynamic_qconfig,
    NAMED.float_qparams_weight_only_qconfig,
    NAMED.float_qparams_weight_only_qconfig_4bit,
)


def qconfigs(engine: str, root: type[nn.Module]) -> list[Any]:
    """The QConfigs that an engine's config accepts for a root; torch refuses weights per channel of some."""
    (dtypes,) = (entry.dtype_configs for entry in flows.torch_config(engine).configs if entry.pattern is root)
    accepted = {(dtype.input_dtype, dtype.weight_dtype, bool(dtype.is_dynamic)) for dtype in dtypes}
    found = []
    for qconfig in QCONFIGS:
        activation, weight = qconfig.activation(), qconfig.weight()
        is_per_channel = weight.qscheme == torch.per_channel_symmetric if hasattr(weight, "qscheme") else False
        if (activation.dtype, weight.dtype, activation.is_dynamic) not in accepted:
            continue
        if not (is_per_channel and root.__name__.startswith("ConvTranspose")):
            found.append(qconfig)
    return found


def cases() -> list[Any]:
    """Every root with every QConfig, of the first engine that accepts it, in both forms where torch has both."""
    engines: dict[tuple[type[nn.Module], Any], str] = {}
    for engine in ENGINES:
        for root in references(engine):
            for qconfig in qconfigs(engine, root):
                engines.setdefault((root, qconfig), engine)
    return [
        pytest.param(engine, root, qconfig, form, id=f"{engine}-{root.__name__}-{QCONFIGS.index(qconfig)}-{form}")
        for (root, qconfig), engine in engines.items()
        for form in FORMS
        if not (form and qconfig.weight().dtype == torch.float16)
    ]


@pytest.mark.slow
@pytest.mark.rule("CFG-11")
@pytest.mark.rule("CVT-02")
@pytest.mark.rule("CVT-11")
@pytest.mark.rule("OBS-13")
@pytest.mark.parametrize(("engine", "root", "qconfig", "is_decomposed"), cases())
def test_every_root_becomes_torchs_reference_module_bit_for_bit(
    engine: str, root: type[nn.Module], qconfig: Any, is_decomposed: bool
) -> None:
    torch.manual_seed(0)
    make, inputs = ROOTS[root]
    value = inputs()
    prepared = prepared_by_torch(nn.Sequential(make()), qconfig, value, engine)
    has_real_zero_points = qconfig.activation().dtype == torch.float32  # those have one form
    convert = FORMS[is_decomposed and not has_real_zero_points]
    theirs = convert(copy.deepcopy(prepared), backend_config=flows.torch_config(engine))
    assert type(theirs.get_submodule("0")) is references(engine)[root], "torch did not quantize: the case tests nothing"
    assert_same_modules(prepared, theirs, value, engine, is_decomposed=is_decomposed)


def narrow(per_channel: bool, dtype: torch.dtype = torch.qint8) -> Any:
    """A weight observer whose range is narrower than its dtype's, and narrower than the weight: some values clip."""
    observer = flows.torchs.PerChannelMinMaxObserver if per_channel else flows.torchs.MinMaxObserver
    scheme = torch.per_channel_affine if per_channel else torch.per_tensor_affine
    inner = observer.with_args(dtype=dtype, qscheme=scheme, quant_min=-7, quant_max=5)

    class Half(nn.Module):  # scales are half of what the weight needs
        def __init__(self) -> None:
            super().__init__()
            self.inner = inner()
            self.dtype, self.qscheme, self.ch_axis = dtype, scheme, 0
            self.quant_min, self.quant_max = -7, 5

        def forward(self, x: Tensor) -> Tensor:
            self.inner(x)
            return x

        def calculate_qparams(self) -> tuple[Tensor, Tensor]:
            scale, zero_point = self.inner.calculate_qparams()
            return scale / 2, zero_point

    return QConfig(activation=flows.QCONFIG.activation, weight=Half)


@pytest.mark.rule("CVT-09")
@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize("root", [nn.Linear, nn.LSTM, nn.GRUCell])
def test_a_narrow_range_of_a_weight_is_the_decomposed_forms(root: type[nn.Module], per_channel: bool) -> None:
    """The oracle is torch's fake quantize, which takes the range as arguments; quantized tensors have the dtype's."""
    torch.manual_seed(0)
    module = ROOTS[root][0]().eval()
    for is_decomposed in FORMS:
        made: Any = make_reference(
            module, narrow(per_channel), references("native"), is_decomposed=is_decomposed, where="layer"
        )
        name = next(name for name, _ in module.named_parameters() if name.startswith("weight"))
        weight = module.get_parameter(name)
        scale, zero_point = getattr(made, f"{name}_scale"), getattr(made, f"{name}_zero_point")
        ends = (-7, 5) if is_decomposed and name == "weight" else (-128, 127)  # recurrent modules have one form only
        if per_channel:
            expected = torch.fake_quantize_per_channel_affine(weight, scale, zero_point.int(), 0, *ends)
        else:
            expected = torch.fake_quantize_per_tensor_affine(weight, scale, zero_point.int(), *ends)
        found = made.get_weight() if name == "weight" else _read(made, name)
        assert torch.equal(found, expected), f"quantized within {ends}"
        assert torch.equal(getattr(made, name), weight), "the float weight is the module's own"


def _read(made: Any, name: str) -> Any:
    """What a recurrent reference module computes with."""
    if isinstance(made, nn.RNNCellBase):
        return getattr(made, f"get_{name}")()
    return made.get_flat_weights()[made._flat_weights_names.index(name)]


class VendorReference(nn.Linear):
    """A vendor's own reference class: only from_float is asked of it."""

    qparams: Mapping[str, Any]

    @classmethod
    def from_float(cls, module: nn.Linear, qparams: Mapping[str, Any]) -> VendorReference:
        made = cls(module.in_features, module.out_features)
        made.weight, made.qparams = module.weight, qparams
        return made


@pytest.mark.rule("CVT-02")
def test_a_vendors_reference_class_gets_the_measured_qparams() -> None:
    module = nn.Linear(2, 2).eval()
    with torch.no_grad():
        module.weight.copy_(torch.tensor([[-1.275, 0.5], [0.25, 0.0]]))
    references_of: Mapping[type[nn.Module], type[nn.Module]] = {nn.Linear: VendorReference}
    made: Any = make_reference(module, flows.QCONFIG, references_of, is_decomposed=True, where="layer")
    assert type(made) is VendorReference
    expected = {"dtype": torch.qint8, "qscheme": torch.per_tensor_affine, "quant_min": -128, "quant_max": 127}
    assert {name: made.qparams[name] for name in expected} == expected
    assert float(made.qparams["scale"]) == pytest.approx(0.01), "max |w| / 127.5"
    assert int(made.qparams["zero_point"]) == 0
    assert made.qparams["is_decomposed"] is True


@pytest.mark.rule("CVT-02")
def test_torchs_lstm_drops_values_out_after_convert_and_ours_does_not() -> None:
    torch.manual_seed(0)
    module = nn.LSTM(4, 3, num_layers=2, dropout=0.5).eval()
    value = torch.randn(3, 2, 4)
    prepared = prepared_by_torch(nn.Sequential(module), NAMED.default_dynamic_qconfig, value, "native")
    theirs: Any = FORMS[False](prepared).get_submodule("0")
    assert theirs.training, "torch leaves it in train mode in an eval model"
    made = make_reference(
        module, NAMED.default_dynamic_qconfig, references("native"), is_decomposed=False, where="lstm"
    )
    assert not made.training
    assert flows.same(made(value), made(value)), "no dropout: twice the same"


@pytest.mark.rule("CVT-04")
@each_form
@pytest.mark.parametrize("root", [nn.Linear, nn.LSTM, nn.GRUCell])
def test_a_float16_weight_is_rounded_to_float16_and_torchs_is_not(root: Any, is_decomposed: bool) -> None:
    torch.manual_seed(0)
    module, qconfig = root(4, 3).eval(), NAMED.float16_dynamic_qconfig
    made = make_reference(module, qconfig, references("native"), is_decomposed=is_decomposed, where="layer")
    theirs = FORMS[False](prepared_by_torch(nn.Sequential(module), qconfig, torch.randn(2, 4), "native"))
    weights = [name for name, _ in module.named_parameters() if name.startswith("weight")]
    for name in weights:
        given, found = module.get_parameter(name), made.get_parameter(name)
        assert torch.equal(found, given.half().float()) and not torch.equal(found, given)
        kept = theirs.get_submodule("0").get_parameter(name)
        assert torch.equal(kept, given), "torch rounds it now: drop this deviation"


@pytest.mark.rule("CVT-07")
@pytest.mark.parametrize("bits", [8, 4])
def test_zero_points_that_are_reals_are_kept_in_the_decomposed_form_where_torch_truncates_them(bits: int) -> None:
    torch.manual_seed(0)
    table = nn.Embedding(6, 4).eval()
    suffix = "" if bits == 8 else "_4bit"
    qconfig = getattr(NAMED, f"float_qparams_weight_only_qconfig{suffix}")
    made: Any = make_reference(table, qconfig, references("native"), is_decomposed=True, where="table")
    theirs: Any = FORMS[True](prepared_by_torch(nn.Sequential(table), qconfig, ids(2, 3), "native")).get_submodule("0")
    half_a_step = made.weight_scale.reshape(-1, 1) / 2 * 1.001  # float32 arithmetic beside it
    assert ((made.get_weight() - table.weight).abs() <= half_a_step).all(), "rounded to the nearest"
    if bits == 4:
        with pytest.raises(ValueError, match="Unsupported dtype"):
            theirs.get_weight()
    else:
        assert ((theirs.get_weight() - table.weight).abs() > half_a_step).any(), "torch is right: drop this deviation"


@pytest.mark.rule("CVT-02")
def test_a_projected_lstm_is_refused_where_torchs_reference_module_drops_the_projection() -> None:
    module, qconfig = nn.LSTM(4, 3, proj_size=2).eval(), NAMED.default_dynamic_qconfig
    with pytest.raises(ConfigError, match=r"'body.lstm': proj_size=2: the reference module has no projection"):
        make_reference(module, qconfig, references("native"), is_decomposed=False, where="body.lstm")
    theirs = FORMS[False](prepared_by_torch(nn.Sequential(module), qconfig, torch.randn(3, 1, 4), "native"))
    assert theirs.get_submodule("0").proj_size == 0, "torch keeps it now: drop this deviation"


PADDINGS: Mapping[str, dict[str, Any]] = {
    "reflect": {"padding": 2, "padding_mode": "reflect"},
    "circular": {"padding": 1, "padding_mode": "circular"},
    "replicate, same": {"padding": "same", "padding_mode": "replicate"},
}


@pytest.mark.rule("CVT-02")
@pytest.mark.parametrize(("dims", "name"), [(1, "reflect"), (2, "circular"), (2, "replicate, same")])
def test_a_reference_convolution_pads_as_the_float_one_where_torchs_pads_with_zeros(dims: int, name: str) -> None:
    torch.manual_seed(0)
    conv = getattr(nn, f"Conv{dims}d")(2, 3, 3, **PADDINGS[name]).eval()
    x = torch.randn(1, 2, *[6] * dims)
    made: Any = make_reference(conv, flows.QCONFIG, references("native"), is_decomposed=True, where="conv")
    plain = copy.deepcopy(conv)
    plain.weight = nn.Parameter(made.get_weight())
    theirs = references("native")[type(conv)].from_float(copy.deepcopy(conv), made_like(made))  # type: ignore[attr-defined]
    with torch.no_grad():
        assert torch.equal(made(x), plain(x)), "the float convolution with the quantized weight"
        assert not torch.allclose(theirs(x), plain(x), atol=0.1), "torch pads right now: drop this deviation"


class Sized(nn.Module):
    """A transposed convolution that is called with the size of its output."""

    def __init__(self, dims: int) -> None:
        super().__init__()
        self.up = getattr(nn, f"ConvTranspose{dims}d")(2, 3, 3, stride=2, padding=1)
        self.size = [12] * dims

    def forward(self, x: Tensor) -> Any:
        return self.up(x, output_size=self.size)


@pytest.mark.rule("CVT-02")
@pytest.mark.parametrize(("dims", "is_decomposed"), [(1, False), (2, True), (3, False)])
def test_a_reference_transposed_convolution_takes_an_output_size_and_torchs_raises(
    dims: int, is_decomposed: bool
) -> None:
    torch.manual_seed(0)
    model, x = Sized(dims).eval(), torch.randn(1, 2, *[6] * dims)
    prepared = refimpl.prepare_fx(model, QConfigMapping().set_global(flows.QCONFIG), (x,))
    prepared(x)
    convert = refimpl.convert_to_reference_decomposed_fx if is_decomposed else refimpl.convert_to_reference_fx
    made = convert(prepared)
    with torch.no_grad():
        found = made(x)
        assert found.shape == (1, 3, *[12] * dims) == model(x).shape
        assert (found - model(x)).abs().max() < 0.05
        theirs = FORMS[is_decomposed](prepared_by_torch(model, flows.QCONFIG, x, "native"))
        with pytest.raises(AttributeError, match="object has no attribute 'dim'"):  # it reads the builtin `input`
            theirs(x)


def made_like(made: Any) -> dict[str, Any]:
    """The qparams of a reference module's weight, as torch's ``from_float`` takes them."""
    return {
        "qscheme": made.weight_qscheme,
        "dtype": made.weight_dtype,
        "scale": made.weight_scale,
        "zero_point": made.weight_zero_point,
        "axis": made.weight_axis,
        "quant_min": made.weight_quant_min,
        "quant_max": made.weight_quant_max,
        "is_decomposed": made.is_decomposed,
    }
