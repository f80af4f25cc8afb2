"""Constants that the mode decides follow it: they do not go from training to deployment (QAT-04, QAT-05)."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fx_quant_conformance import refimpl
from fx_quant_conformance.refimpl.graph.graph_modules import ModeConstant
from tests.refimpl.support.ratios import decibels, make, run, torch_ratios

X = torch.randn(64, 16, generator=torch.Generator().manual_seed(0))
IMAGES = torch.randn(8, 4, 6, 6, generator=torch.Generator().manual_seed(0))
Body = Callable[[Any, Tensor], Any]


class Net(nn.Module):
    """Layers for rows and images; `forward` is the test's."""

    def __init__(self, body: Body) -> None:
        super().__init__()
        torch.default_generator.manual_seed(0)
        self.a, self.b, self.conv, self.body = nn.Linear(16, 16), nn.Linear(16, 4), nn.Conv2d(4, 4, 1), body
        self.weight = nn.Parameter(torch.randn(16, 16))
        self.register_buffer("mean", torch.randn(4))
        self.register_buffer("var", torch.rand(4) + 0.5)

    def forward(self, x: Tensor) -> Any:
        return self.body(self, x)


def drop_path(x: Tensor, p: float, is_training: bool) -> Tensor:
    """Drop samples, by arithmetic on the flag."""
    keep = 1 - p * is_training
    mask = torch.rand_like(x[:, :1]) < keep
    return x * mask / keep


def attend(net: Net, x: Tensor) -> Tensor:
    heads = net.a(x).reshape(4, 16, 16)
    return F.scaled_dot_product_attention(heads, heads, heads, dropout_p=0.5 if net.training else 0.0).reshape(64, 16)


FOLLOWING: dict[str, tuple[Body, Tensor]] = {
    "dropout": (lambda net, x: net.b(F.dropout(F.relu(net.a(x)), 0.5, net.training)), X),
    "dropout by keyword": (lambda net, x: net.b(F.dropout(net.a(x), p=0.5, training=net.training)), X),
    "dropout1d": (lambda net, x: net.b(F.dropout1d(net.a(x), 0.5, net.training)), X),
    "alpha_dropout": (lambda net, x: net.b(F.alpha_dropout(net.a(x), 0.5, net.training)), X),
    "drop path": (lambda net, x: net.b(drop_path(net.a(x), 0.5, net.training)), X),
    "attention": (lambda net, x: net.b(attend(net, x)), X),
    "batch_norm": (
        lambda net, x: F.batch_norm(net.conv(x), net.mean, net.var, training=net.training, momentum=0.0),
        IMAGES,
    ),
    "number": (lambda net, x: net.b(net.a(x) * (3.0 if net.training else 1.0)), X),
    "number of a weight": (lambda net, x: net.b(F.linear(x, net.weight * (3.0 if net.training else 1.0))), X),
    "slice": (lambda net, x: net.b(net.a(x))[: 2 if net.training else 64], X),
}


@pytest.mark.rule("QAT-04")
@pytest.mark.parametrize("name", FOLLOWING)
def test_a_constant_of_the_mode_is_that_of_deployment_after_convert(name: str) -> None:
    body, x = FOLLOWING[name]
    made = make(Net(body), x, is_qat=True)
    assert made.worst > 15, made.ratios()  # of alpha_dropout training has seen a wider range
    assert made.ratios() == made.ratios(), "the same result on each call"
    for model in made.forms.values():
        assert not any(isinstance(module, ModeConstant) for module in model.modules())


@pytest.mark.rule("QAT-04")
@pytest.mark.parametrize("name", FOLLOWING)
def test_the_prepared_model_follows_its_mode(name: str) -> None:
    body, x = FOLLOWING[name]
    net = Net(body).train()
    mapping = refimpl.QConfigMapping()  # nothing is quantized: the prepared model is the float model in both modes
    prepared = refimpl.prepare_qat_fx(copy.deepcopy(net), mapping, (x,))
    for is_training in (True, False, True):
        torch.default_generator.manual_seed(5)
        expected = copy.deepcopy(net).train(is_training)(x)
        torch.default_generator.manual_seed(5)
        assert torch.equal(prepared.train(is_training)(x), expected), is_training


@pytest.mark.rule("QAT-04")
@pytest.mark.parametrize("name", ["dropout", "number"])
def test_in_torchs_reference_model_it_is_that_of_training(name: str) -> None:
    """The other side of the row of deviations.md; of the kinds here its lowering mends F.dropout only."""
    body, x = FOLLOWING[name]
    ratios = torch_ratios(Net(body), x, is_qat=True)
    assert ratios["reference"] < 10, ratios
    assert (ratios["lowered"] > 20) == (name == "dropout"), ratios


@pytest.mark.rule("QAT-04")
def test_a_constant_that_the_user_means_stays() -> None:
    net = Net(lambda net, x: net.b(F.dropout(net.a(x), 0.5, training=True))).train()
    prepared = refimpl.prepare_qat_fx(net, refimpl.get_default_qat_qconfig_mapping("x86"), (X,))
    prepared(X)
    reference = refimpl.convert_to_reference_fx(prepared.eval())
    dropout = next(node for node in reference.graph.nodes if node.target is F.dropout)
    assert dropout.kwargs["training"] is True
    assert decibels(reference(X), reference(X)) < 10, "it drops other values on each call"


@pytest.mark.rule("QAT-04")
def test_without_training_nothing_is_traced_twice() -> None:
    traces: list[bool] = []

    def body(net: Net, x: Tensor) -> Any:
        traces.append(net.training)
        return net.b(F.dropout(net.a(x), 0.5, net.training))

    refimpl.prepare_fx(Net(body).eval(), refimpl.get_default_qconfig_mapping("x86"))
    assert traces == [False]
    refimpl.prepare_qat_fx(Net(body).train(), refimpl.get_default_qat_qconfig_mapping("x86"))
    assert traces == [False, True, False]


@pytest.mark.rule("QAT-04")
def test_modes_of_single_modules_are_restored_and_train_is_not_called() -> None:
    class Frozen(Net):
        def train(self, mode: bool = True) -> Any:
            raise AssertionError("the flow calls no method of the user's for its second trace")

    net = Frozen(FOLLOWING["dropout"][0])
    net.a.training = False
    refimpl.prepare_qat_fx(net, refimpl.get_default_qat_qconfig_mapping("x86"), (X,))
    assert (net.training, net.a.training, net.b.training) == (True, False, True)


def other_ops(net: Net, x: Tensor) -> Any:
    y = net.a(x)
    if net.training:
        y = y + torch.rand_like(y)
    return net.b(y)


def other_ops_and_a_constant(net: Net, x: Tensor) -> Any:
    return F.dropout(other_ops(net, x), 0.5, net.training)


@pytest.mark.rule("QAT-04")
@pytest.mark.parametrize("body", [other_ops, other_ops_and_a_constant])
def test_where_the_ops_differ_convert_says_at_which_node(body: Body) -> None:
    prepared = refimpl.prepare_qat_fx(Net(body).train(), refimpl.get_default_qat_qconfig_mapping("x86"), (X,))
    prepared(X)
    for convert in (refimpl.convert_to_reference_fx, refimpl.convert_fx):
        with pytest.warns(
            UserWarning, match="forward has other ops in training than in deployment, first at rand_like"
        ):
            model = convert(copy.deepcopy(prepared).eval())
    flags = [node.kwargs["training"] for node in model.graph.nodes if node.target is F.dropout]
    assert True not in flags, "the constants follow all the same"


def only_traced_in_training(net: Net, x: Tensor) -> Any:
    return net.b(net.a(x)) if net.training or x.sum() > 0 else x


@pytest.mark.rule("QAT-04")
def test_where_the_other_mode_cannot_be_traced_convert_says_so() -> None:
    mapping = refimpl.get_default_qat_qconfig_mapping("x86")
    prepared = refimpl.prepare_qat_fx(Net(only_traced_in_training).train(), mapping, (X,))
    prepared(X)
    with pytest.warns(UserWarning, match="in the other mode it cannot be traced: Net cannot be traced by torch.fx"):
        refimpl.convert_to_reference_fx(prepared.eval())


@pytest.mark.rule("QAT-04")
def test_a_model_whose_modes_agree_is_converted_without_a_word() -> None:
    net = Net(lambda net, x: net.b(F.dropout(net.a(x), 0.5, net.training))).train()
    prepared = refimpl.prepare_qat_fx(net, refimpl.get_default_qat_qconfig_mapping("x86"), (X,))
    prepared(X)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        refimpl.convert_to_reference_fx(prepared.eval())


class ZeroNorm(nn.Module):
    """A residual branch that begins as zero: zero_init_residual."""

    def __init__(self) -> None:
        super().__init__()
        torch.default_generator.manual_seed(0)
        self.conv, self.norm = nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4, momentum=0.0)
        nn.init.zeros_(self.norm.weight)

    def forward(self, x: Tensor) -> Any:
        return x + self.norm(self.conv(x))


@pytest.mark.rule("QAT-05")
@pytest.mark.parametrize("relu", [False, True])
def test_a_norm_with_zero_weights_is_trained(relu: bool) -> None:
    model = nn.Sequential(ZeroNorm(), nn.ReLU()) if relu else ZeroNorm()
    made = make(model, IMAGES, is_qat=True)
    trained = copy.deepcopy(made.prepared).train()
    result = trained(IMAGES)
    assert result.isfinite().all()
    result.square().mean().backward()
    gradient = next(parameter.grad for name, parameter in trained.named_parameters() if name.endswith("bn.weight"))
    assert gradient is not None and gradient.isfinite().all() and bool((gradient != 0).any())
    assert made.worst > 25, made.ratios()


@pytest.mark.rule("QAT-05")
def test_torchs_prepared_model_ends_in_a_raw_error() -> None:
    assert torch_ratios(ZeroNorm(), IMAGES, is_qat=True) == {}
    assert run(ZeroNorm().eval(), (IMAGES,)).isfinite().all()
