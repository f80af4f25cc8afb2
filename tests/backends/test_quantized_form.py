"""A decomposed reference model on quantized tensors: as convert writes that form, within ranges (CVT-07, CVT-09)."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fx_quant_conformance import refimpl
from fx_quant_conformance.backends.quantized_form import to_quantized_form
from fx_quant_conformance.backends.torch_engines.engine import engine
from tests.mutants.custom_modules import Bend, ObservedBend, QuantizedBend
from tests.refimpl.support.qconfigs import minmax_qconfig

ROWS = torch.randn(5, 8, generator=torch.Generator().manual_seed(0))
STATIC = minmax_qconfig(torch.quint8, torch.qint8, per_channel=False)
PER_CHANNEL = minmax_qconfig(torch.quint8, torch.qint8, per_channel=True)
WEIGHT = STATIC.weight


def at_run_time(**asked: Any) -> refimpl.QConfig:
    return refimpl.QConfig(refimpl.PlaceholderObserver.with_args(**{"is_dynamic": True} | asked), WEIGHT)


def in_half(*, is_dynamic: bool) -> refimpl.QConfig:
    weight = refimpl.PlaceholderObserver.with_args(dtype=torch.float16)
    return refimpl.QConfig(weight.with_args(is_dynamic=is_dynamic) if is_dynamic else weight, weight)


NIBBLES = refimpl.QConfig(
    refimpl.PlaceholderObserver.with_args(dtype=torch.float32),
    refimpl.PerChannelMinMaxObserver.with_args(
        dtype=torch.quint4x2, qscheme=torch.per_channel_affine_float_qparams, ch_axis=0
    ),
)


class Functions(nn.Module):
    """Functions that take weights."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.randn(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(torch.sigmoid(F.linear(x, self.first)) + x, self.first)


class Sequence(nn.Module):
    """An LSTM, of rows as steps."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 4)

    def forward(self, x: Tensor) -> Any:
        return self.lstm(x.unsqueeze(1))[0]


class Table(nn.Module):
    """An embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(8, 6)

    def forward(self, x: Tensor) -> Any:
        return self.table(x.long().abs())


class Inner(nn.Sequential):
    """A standalone module."""


def layers() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))


KINDS: dict[str, tuple[Callable[[], nn.Module], refimpl.QConfig]] = {
    "static": (layers, STATIC),
    "per channel": (layers, PER_CHANNEL),
    "functions": (Functions, STATIC),
    "functions, per channel": (Functions, PER_CHANNEL),
    "dynamic": (layers, at_run_time(dtype=torch.quint8)),
    "dynamic of 7 bits": (layers, at_run_time(dtype=torch.quint8, reduce_range=True)),
    "dynamic of 8 bits": (layers, at_run_time(dtype=torch.quint8, reduce_range=False)),
    "half precision at run time": (layers, in_half(is_dynamic=True)),
    "half precision": (layers, in_half(is_dynamic=False)),
    "recurrent": (Sequence, at_run_time(dtype=torch.quint8)),
    "embedding of four bits": (Table, NIBBLES),
    "custom module": (lambda: nn.Sequential(nn.Linear(8, 8), Bend(), nn.Linear(8, 8)), STATIC),
    "standalone module": (lambda: nn.Sequential(nn.Linear(8, 8), Inner(nn.Linear(8, 8)), nn.Linear(8, 8)), STATIC),
}


def prepared(make: Callable[[], nn.Module], qconfig: refimpl.QConfig, config: Any = None) -> Any:
    torch.manual_seed(1)
    custom = refimpl.PrepareCustomConfig().set_float_to_observed_mapping(Bend, ObservedBend)
    custom.set_standalone_module_class(Inner, None, (ROWS,), None, None)
    mapping = refimpl.QConfigMapping().set_global(qconfig)
    found = refimpl.prepare_fx(make().eval(), mapping, (ROWS,), custom, backend_config=config)
    found(ROWS)
    return found


def spell(model: Any) -> str:
    """The code of a graph, with other names for buffers of qparams, and for getitem, which chosen qparams take too."""
    names: dict[str, str] = {}
    own = r"\b(?:\w*_(?:scale|zero_point)_\d+|getitem(?:_\d+)?)\b"
    text = re.sub(own, lambda m: names.setdefault(m[0], f"q{len(names)}"), model.code)
    return text + "".join(f"\n{name}: {spell(each)}" for name, each in model.named_children() if hasattr(each, "code"))


@pytest.mark.rule("CVT-07")
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("runs_on", ["x86", "qnnpack"])
def test_it_is_what_convert_writes_on_quantized_tensors(name: str, runs_on: str) -> None:
    found = prepared(*KINDS[name])
    custom = refimpl.ConvertCustomConfig().set_observed_to_quantized_mapping(ObservedBend, QuantizedBend)
    with engine(runs_on):
        decomposed = refimpl.convert_to_reference_decomposed_fx(found, custom)
        kept = copy.deepcopy(decomposed)
        right, made = refimpl.convert_to_reference_fx(found, custom), to_quantized_form(decomposed)
        again = to_quantized_form(made)
    assert spell(made) == spell(right) == spell(again)
    assert torch.equal(made(ROWS), right(ROWS)) and torch.equal(again(ROWS), right(ROWS))
    assert not any(hasattr(part, "qconfig") for part in made.modules())
    assert made.meta["refimpl_converted"] and refimpl.explain(made).plan is refimpl.explain(decomposed).plan
    assert spell(decomposed) == spell(kept) and torch.equal(decomposed(ROWS), kept(ROWS))


@pytest.mark.rule("CVT-09")
@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize("make", [layers, Functions])
def test_no_integer_leaves_a_narrow_range(make: Callable[[], nn.Module], per_channel: bool) -> None:
    """Neither of a value, before whose quantize stands a clamp, nor of a weight, which is moved to the range's end."""
    qconfig = minmax_qconfig(
        torch.quint8,
        torch.qint8,
        per_channel=per_channel,
        weight_quant_min=-8,
        weight_quant_max=7,
        quant_min=0,
        quant_max=127,
    )
    found = prepared(make, qconfig)
    decomposed, whole = refimpl.convert_to_reference_decomposed_fx(found), refimpl.convert_to_reference_fx(found)
    made = to_quantized_form(decomposed)
    assert torch.equal(made(50 * ROWS), decomposed(50 * ROWS))
    assert not torch.equal(whole(50 * ROWS), decomposed(50 * ROWS))


@pytest.mark.rule("CVT-07")
def test_a_weight_at_a_tie_keeps_the_decomposed_forms_integer() -> None:
    """Where the zero point is odd, quantized tensors of torch 2.13 take another one for 0.5 steps."""
    found = prepared(layers, STATIC)
    decomposed = refimpl.convert_to_reference_decomposed_fx(found)
    layer: Any = decomposed.get_submodule("2")
    layer.weight_scale, layer.weight_zero_point = torch.tensor(0.25), torch.tensor(3, dtype=torch.int32)
    layer.weight = nn.Parameter(torch.arange(-32, 32).reshape(8, 8) * 0.125)
    moved: Any = to_quantized_form(decomposed).get_submodule("2")
    assert torch.equal(moved.get_quantized_weight().int_repr(), layer.get_quantized_weight())
    assert torch.equal(moved.weight[:, ::2], layer.weight[:, ::2]) and moved.weight is not layer.weight


@pytest.mark.rule("CVT-10")
@pytest.mark.parametrize("dtype", [torch.int16, torch.int8, torch.uint8], ids=str)
def test_plain_integers_are_refused(dtype: torch.dtype) -> None:
    entry = refimpl.BackendPatternConfig(nn.ReLU).add_dtype_config(refimpl.DTypeConfig(dtype, dtype))
    config = refimpl.BackendConfig("wide").set_backend_pattern_config(entry)
    qconfig = refimpl.QConfig(refimpl.MinMaxObserver.with_args(dtype=dtype), WEIGHT)
    found = prepared(lambda: nn.Sequential(nn.ReLU()), qconfig, config)
    with pytest.raises(refimpl.QConfigError, match=f"CVT-10: .*{dtype}"):
        to_quantized_form(refimpl.convert_to_reference_decomposed_fx(found))


@pytest.mark.rule("CVT-10")
@pytest.mark.parametrize(
    "asked", [{"quant_min": 0, "quant_max": 100}, {"qscheme": torch.per_tensor_symmetric}], ids=["range", "scheme"]
)
def test_what_the_dynamic_op_cannot_express_is_refused(asked: dict[str, Any]) -> None:
    found = prepared(layers, at_run_time(dtype=torch.quint8, **asked))
    with pytest.raises(refimpl.QConfigError, match="can express dynamic"):
        to_quantized_form(refimpl.convert_to_reference_decomposed_fx(found))
