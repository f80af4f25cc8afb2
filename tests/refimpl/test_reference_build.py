"""Modules that are built the short way are those of torch's own constructors, attribute by attribute."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.ao.nn.intrinsic.quantized as nniq
import torch.ao.nn.quantized as nnq
import torch.ao.nn.quantized.dynamic as nnqd
import torch.ao.nn.quantized.reference as nnqr
import torch.ao.quantization.quantize_fx  # torch's observers need it loaded before them
from torch import Tensor, nn

from fx_quant_conformance.refimpl import QConfig
from fx_quant_conformance.refimpl.convert.reference import measure_weights
from fx_quant_conformance.refimpl.convert.reference_build import build_reference
from fx_quant_conformance.refimpl.lower.packing import pack_native
from fx_quant_conformance.refimpl.observers import observers
from fx_quant_conformance.refimpl.observers.qparams import read_qparams
from tests.refimpl.support.both_flows import torchs

_LAYERS: dict[str, nn.Module] = {
    "linear": nn.Linear(3, 4),
    "linear without bias": nn.Linear(3, 4, bias=False),
    "conv1d": nn.Conv1d(2, 4, 3, padding=1),
    "conv2d": nn.Conv2d(2, 4, (3, 1), stride=2, padding=(2, 1), dilation=2, groups=2, bias=False),
    "conv2d, same": nn.Conv2d(2, 4, 3, padding="same"),
    "conv2d, reflect": nn.Conv2d(2, 4, 3, padding=(2, 1), padding_mode="reflect"),
    "conv3d": nn.Conv3d(2, 4, 1),
    "conv transpose 1d": nn.ConvTranspose1d(4, 2, 3, 2, 1, 1),
    "conv transpose 2d": nn.ConvTranspose2d(4, 4, 3, stride=2, output_padding=1, groups=2),
    "conv transpose 3d": nn.ConvTranspose3d(4, 2, 1, bias=False),
}
_ONE: dict[str, Any] = {
    "scale": torch.tensor([0.1]),
    "zero_point": torch.tensor([0]),
    "qscheme": torch.per_tensor_affine,
}


def _qparams() -> dict[str, Any]:
    return {**_ONE, "dtype": torch.qint8, "quant_min": -128, "quant_max": 127, "is_decomposed": False}


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return type(value), value.dtype, value.requires_grad, value.tolist()
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    return type(value) if isinstance(value, torch.ScriptObject) else value


def _facts(module: nn.Module) -> dict[str, Any]:
    """Return every attribute of a module and of what is in it; tensors as lists, packed weights unpacked."""
    own = {name: _plain(value) for name, value in vars(module).items() if name != "_modules"}
    parts = {name: _facts(part) for name, part in module.named_children()}
    state = [(name, str(value)) for name, value in module.state_dict().items()]
    return {"class": type(module), "own": own, "parts": parts, "state": state, "text": repr(module)}


@pytest.mark.rule("CVT-02")
@pytest.mark.parametrize("name", _LAYERS)
def test_a_reference_module_is_the_one_of_from_float(name: str) -> None:
    layer = _LAYERS[name]
    reference: Any = getattr(nnqr, type(layer).__name__)
    made = build_reference(reference, layer, _qparams())
    theirs = reference.from_float(layer, _qparams())
    assert _facts(made) == _facts(theirs)
    assert made.weight.data_ptr() == layer.weight.data_ptr()  # type: ignore[operator]


@pytest.mark.rule("CVT-02")
def test_building_draws_no_random_numbers() -> None:
    before = torch.get_rng_state()
    layer = nn.Linear(3, 4)
    torch.set_rng_state(before)
    build_reference(nnqr.Linear, layer, _qparams())
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.rule("LOW-01")
@pytest.mark.parametrize("name", [name for name in _LAYERS if "same" not in name and "transpose" not in name])
def test_a_quantized_module_is_the_one_of_from_reference(name: str) -> None:
    layer = _LAYERS[name]
    reference = build_reference(getattr(nnqr, type(layer).__name__), layer, _qparams())
    native: Any = getattr(nnq, type(layer).__name__)
    assert _facts(pack_native(native, reference, 0.5, 3)) == _facts(native.from_reference(reference, 0.5, 3))


@pytest.mark.rule("LOW-01")
def test_fused_and_dynamic_linears_are_those_of_from_reference() -> None:
    reference = build_reference(nnqr.Linear, nn.Linear(3, 4), _qparams())
    cases: list[tuple[Any, Any]] = [
        (nnqd.Linear, (reference,)),
        (nniq.LinearReLU, (nn.Sequential(reference, nn.ReLU()), 0.5, 3)),
        (nniq.LinearLeakyReLU, (nn.Sequential(reference, nn.LeakyReLU(0.2)), 0.5, 3)),
    ]
    for native, arguments in cases:
        assert _facts(pack_native(native, *arguments)) == _facts(native.from_reference(*arguments))


@pytest.mark.rule("OBS-13")
@pytest.mark.parametrize("module", (observers, torchs), ids=("ours", "torch's"))
def test_weights_measured_at_once_have_the_qparams_of_each_alone(module: Any) -> None:
    symmetric = {"dtype": torch.qint8, "qscheme": torch.per_channel_symmetric}
    makers = (
        module.MinMaxObserver.with_args(dtype=torch.qint8, qscheme=torch.per_tensor_symmetric),
        module.PerChannelMinMaxObserver.with_args(**symmetric),
        module.PerChannelMinMaxObserver.with_args(**symmetric, ch_axis=1),
        module.MovingAveragePerChannelMinMaxObserver.with_args(dtype=torch.quint8, qscheme=torch.per_channel_affine),
    )
    torch.manual_seed(0)
    layers: list[Any] = [nn.Linear(3, 5), nn.Conv2d(2, 5, 3), nn.Linear(300, 2), nn.Linear(3, 1)]
    with torch.no_grad():
        layers[0].weight[0] = 0.0
        layers[1].weight[1] -= 9.0
    anything = observers.MinMaxObserver
    asked: list[tuple[Any, Any]] = [
        (copy.deepcopy(layer), QConfig(anything, maker)) for maker in makers for layer in layers
    ]
    found = measure_weights(asked)
    assert len(found) == len(asked)
    for layer, qconfig in asked:
        observer = qconfig.weight()
        observer(layer.weight)
        together, alone = found[id(layer)].weight_dict(is_decomposed=False), read_qparams(observer)
        assert {k: _plain(v) for k, v in together.items()} == {
            k: _plain(v) for k, v in alone.weight_dict(is_decomposed=False).items()
        }
