"""A parameter or buffer of a layer that forward also reads keeps its float value, whatever the flow makes of the layer.

Rule TRC-03.
"""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from fx_quant_conformance import refimpl
from tests.refimpl.support.ratios import decibels, make, run, torch_ratios

IMAGES = torch.randn(8, 3, 6, 6, generator=torch.Generator().manual_seed(0))
ROWS = torch.randn(16, 8, generator=torch.Generator().manual_seed(0))
IDS = torch.arange(12).reshape(3, 4)


class Folded(nn.Module):
    """A convolution and a norm, which becomes a part of it, a relu, and a reader of what they hold."""

    def __init__(self, read: Callable[[Any, Tensor], Any], conv: nn.Module | None = None) -> None:
        super().__init__()
        torch.default_generator.manual_seed(0)
        self.conv, self.norm = conv or nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3, momentum=0.0)  # no other in training
        self.relu, self.read = nn.ReLU(), read
        nn.init.uniform_(self.norm.weight, 2.0, 3.0)
        nn.init.uniform_(self.norm.bias, -1.0, 1.0)
        self.norm.running_mean, self.norm.running_var = torch.randn(3), torch.rand(3) + 0.5

    def forward(self, x: Tensor) -> Any:
        return self.read(self, self.relu(self.norm(self.conv(x))))


class Rows(nn.Module):
    """Two layers, and a reader of what they hold."""

    def __init__(self, read: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        torch.default_generator.manual_seed(0)
        self.a, self.b, self.read = nn.Linear(8, 8), nn.Linear(8, 8), read

    def forward(self, x: Tensor) -> Any:
        return self.read(self, F.relu(self.a(x)))


class Tied(nn.Module):
    """A decoder that reads the weight of the embedding."""

    def __init__(self) -> None:
        super().__init__()
        torch.default_generator.manual_seed(0)
        self.embed, self.layer = nn.Embedding(12, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Any:
        return self.layer(self.embed(x)) @ self.embed.weight.t()


READERS: dict[str, tuple[Callable[[], nn.Module], Tensor]] = {
    "weight": (lambda: Folded(lambda net, y: y + net.conv.weight.sum()), IMAGES),
    "norm's weight": (lambda: Folded(lambda net, y: y * net.norm.weight[:, None, None]), IMAGES),
    "norm's statistics": (lambda: Folded(lambda net, y: y + net.norm.running_mean[:, None, None]), IMAGES),
    "weight in a convolution": (lambda: Folded(lambda net, y: F.conv2d(y, net.conv.weight)), IMAGES),
    "dtype": (lambda: Rows(lambda net, y: net.b(y.to(net.b.weight.dtype))), ROWS),
    "shape": (lambda: Rows(lambda net, y: net.b(y.reshape(-1, net.b.weight.shape[1]))), ROWS),
    "transposed": (lambda: Rows(lambda net, y: net.b(y) @ net.a.weight.t()), ROWS),
    "as a weight": (lambda: Rows(lambda net, y: F.linear(net.b(y), net.a.weight, net.a.bias)), ROWS),
    "penalty": (lambda: Rows(lambda net, y: (net.b(y), net.b.weight.square().mean() + net.a.bias.abs().sum())), ROWS),
    "tied": (Tied, IDS),
}


@pytest.mark.rule("TRC-03")
@pytest.mark.parametrize("is_qat", [False, True], ids=["ptq", "qat"])
@pytest.mark.parametrize("name", READERS)
def test_a_reader_keeps_the_float_value(name: str, is_qat: bool) -> None:
    build, x = READERS[name]
    made = make(build(), x, is_qat=is_qat)
    if not is_qat:
        assert decibels(made.want, run(made.prepared, (x,))) > 110, "the prepared model is the float model"
    assert made.worst > 22, made.ratios()


@pytest.mark.rule("TRC-03")
@pytest.mark.parametrize("name", ["weight", "as a weight"])
def test_torchs_reader_gets_another_value_or_none(name: str) -> None:
    """The other side of the row of deviations.md."""
    build, x = READERS[name]
    ratios = torch_ratios(build(), x)
    assert min(ratios.values(), default=0.0) < 15 or "lowered" not in ratios, ratios


@pytest.mark.slow
@pytest.mark.rule("TRC-03")
@pytest.mark.parametrize("name", ["norm's statistics", "dtype", "tied"])
def test_models_with_readers_are_fused_exported_and_saved(name: str) -> None:
    build, x = READERS[name]
    model = build().eval()
    assert decibels(run(model, (x,)), run(refimpl.fuse_fx(model), (x,))) > 110
    made = make(model, x)
    program = refimpl.export_reference(made.forms["decomposed"], (x,)).module()
    assert decibels(made.want, program(x)) > 22
    for form in ("reference", "decomposed"):
        buffer = io.BytesIO()
        torch.save(made.forms[form], buffer)
        buffer.seek(0)
        loaded = torch.load(buffer, weights_only=False)
        assert decibels(run(made.forms[form], (x,)), run(loaded, (x,))) == float("inf")


@pytest.mark.rule("TRC-03")
def test_what_is_read_of_a_tensor_that_is_no_tensor_does_not_keep_the_tensor() -> None:
    for name in ("dtype", "shape"):
        build, x = READERS[name]
        for model in make(build(), x).forms.values():
            tensors = {key: value for key, value in model.state_dict().items() if isinstance(value, Tensor)}
            assert not [key for key, value in tensors.items() if value.dim() == 2 and key[:2] not in ("a.", "b.")], name


@pytest.mark.rule("TRC-03")
def test_in_training_the_reader_sees_the_trained_parameter() -> None:
    def train(prepared: Any) -> None:
        with torch.no_grad():
            prepared.conv.weight.mul_(3.0)

    made = make(READERS["weight"][0](), IMAGES, is_qat=True, train=train)
    read: Any = made.prepared.get_parameter("conv_weight")
    assert read is made.prepared.get_parameter("conv.weight")
    held = made.forms["reference"].get_parameter("conv_weight")
    assert torch.equal(held, READERS["weight"][0]().get_parameter("conv.weight") * 3.0)


@pytest.mark.rule("TRC-03")
def test_a_parametrized_weight_that_is_read_is_the_parametrized_one() -> None:
    torch.default_generator.manual_seed(0)
    model = Folded(lambda net, y: y + net.conv.weight.sum(), weight_norm(nn.Conv2d(3, 3, 1))).eval()
    prepared = refimpl.prepare_fx(model, refimpl.get_default_qconfig_mapping("qnnpack"), (IMAGES,))
    want = run(model, (IMAGES,))
    assert decibels(want, prepared(IMAGES)) > 110
    for convert in (refimpl.convert_to_reference_fx, refimpl.convert_to_reference_decomposed_fx, refimpl.convert_fx):
        assert decibels(want, run(convert(prepared), (IMAGES,))) > 22


@pytest.mark.rule("TRC-03")
def test_two_readers_share_one_name_and_no_reader_changes_nothing() -> None:
    twice = refimpl.fuse_fx(Folded(lambda net, y: y + net.conv.weight.sum() + net.conv.weight.mean()).eval())
    assert [name for name, _ in twice.named_parameters() if not name.startswith("conv.")] == ["conv_weight"]
    never = refimpl.fuse_fx(Folded(lambda net, y: y + 1).eval())
    assert [name for name, _ in never.named_parameters() if not name.startswith("conv.")] == []


@pytest.mark.rule("OBS-15")
def test_explain_compares_with_the_users_model() -> None:
    build, x = READERS["weight"]
    model = build().eval()
    made = make(model, x)
    reference = made.forms["reference"]
    quality = refimpl.explain(reference, (x,), against=made.prepared, float_model=model)
    assert quality.outputs[0] == pytest.approx(made.ratios()["reference"], abs=0.01)
    other = copy.deepcopy(model)
    torch.nn.init.constant_(other.norm.bias, 50.0)  # type: ignore[union-attr, arg-type]
    assert refimpl.explain(reference, (x,), float_model=other).outputs[0] < 2
    with pytest.raises(refimpl.ModelError, match="explain: float_model"):
        refimpl.explain(reference, (x,), float_model="a model")  # type: ignore[call-overload]
