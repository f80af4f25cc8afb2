"""Fuser methods: torch's bits where torch is right, else the definition (rules FUS-02 to FUS-04, FUS-06)."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
import torch.ao.nn.intrinsic as nni
import torch.ao.quantization.quantize_fx  # torch's fuser methods need it loaded before them
from torch import nn
from torch.ao.quantization import fuser_method_mappings
from torch.ao.quantization.backend_config import onednn
from torch.nn.utils import parametrize
from torch.nn.utils.fusion import fuse_conv_bn_eval, fuse_linear_bn_eval

from fx_quant_conformance.backends import onednn_fusers
from fx_quant_conformance.refimpl.config import fusers
from fx_quant_conformance.refimpl.config.patterns import MatchAllNode
from fx_quant_conformance.refimpl.errors import ConfigError, ModelError

theirs: Any = fuser_method_mappings
their_onednn: Any = onednn

DIMS = (1, 2, 3)
each_dim = pytest.mark.parametrize("d", DIMS)


def of(namespace: Any, name: str, d: int) -> Any:
    return getattr(namespace, f"{name}{d}d")


def norm(d: int, features: int, **arguments: Any) -> Any:
    """A batch norm in eval mode whose parameters and statistics are not the initial ones."""
    made = of(nn, "BatchNorm", d)(features, **arguments).eval()
    for tensor in (made.running_mean, made.weight, made.bias):
        if tensor is not None:
            tensor.data.normal_()
    if made.running_var is not None:
        made.running_var.uniform_(0.25, 4.0)
    return made


def layer(name: str, d: int, **arguments: Any) -> Any:
    return of(nn, name, d)(4, 8, 3, **arguments).eval()


def same_bits(one: nn.Module, other: nn.Module) -> bool:
    """Same class, same parameters and buffers, bit for bit."""
    ours, torchs = one.state_dict(), other.state_dict()
    assert ours.keys() == torchs.keys()
    kinds = [type(module) for module in one.modules()] == [type(module) for module in other.modules()]
    grads = [p.requires_grad for p in one.parameters()] == [p.requires_grad for p in other.parameters()]
    return kinds and grads and all(torch.equal(ours[key], torchs[key]) for key in ours)


def assert_stands_for(fused: nn.Module, x: torch.Tensor, *modules: nn.Module) -> None:
    """In float64 the fused module computes what the modules do, one after the other."""
    expected = x = x.double()
    for module in modules:
        expected = copy.deepcopy(module).double()(expected)
    found = copy.deepcopy(fused).double()(x)
    assert found.shape == expected.shape
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


# ---- folding in eval mode ---------------------------------------------------------------------------------


@each_dim
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.rule("FUS-06")
def test_conv_bn_is_folded_with_torchs_bits(d: int, bias: bool, groups: int, affine: bool) -> None:
    conv, bn, relu = layer("Conv", d, bias=bias, groups=groups), norm(d, 8, affine=affine), nn.ReLU().eval()
    fused = fusers.fuse_bn(False, conv, bn)
    assert same_bits(fused, theirs.fuse_conv_bn(False, conv, bn))
    assert_stands_for(fused, torch.randn(2, 4, *[5] * d), conv, bn)
    with_relu = fusers.fuse_bn(False, conv, bn, relu)
    assert same_bits(with_relu, theirs.fuse_conv_bn_relu(False, conv, bn, relu))
    assert_stands_for(with_relu, torch.randn(2, 4, *[5] * d), conv, bn, relu)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.rule("FUS-06")
def test_linear_bn_is_folded_with_torchs_bits(bias: bool) -> None:
    linear, bn, leaky = nn.Linear(4, 8, bias=bias).eval(), norm(1, 8), nn.LeakyReLU(0.2).eval()
    fused = fusers.fuse_bn(False, linear, bn)
    assert same_bits(fused, theirs.fuse_linear_bn(False, linear, bn))
    assert_stands_for(fused, torch.randn(3, 4), linear, bn)
    with_leaky = fusers.fuse_bn(False, linear, bn, leaky)
    assert same_bits(with_leaky, their_onednn._fuse_linear_bn_leaky_relu(False, linear, bn, leaky))
    assert_stands_for(with_leaky, torch.randn(3, 4), linear, bn, leaky)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.rule("FUS-06")
def test_folding_keeps_the_dtype_and_torchs_bits(dtype: torch.dtype) -> None:
    for name, transpose in (("Conv", False), ("ConvTranspose", True)):
        conv, bn = layer(name, 2).to(dtype), norm(2, 8).to(dtype)
        fused = fusers.fold_bn(conv, bn)
        assert fused.weight.dtype == dtype
        assert same_bits(fused, fuse_conv_bn_eval(conv, bn, transpose=transpose))


@each_dim
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.rule("FUS-06")
def test_transposed_conv_bn_is_folded_with_torchs_bits(d: int, bias: bool) -> None:
    conv, bn = layer("ConvTranspose", d, bias=bias), norm(d, 8)
    fused = fusers.fuse_bn(False, conv, bn)
    assert same_bits(fused, theirs.fuse_convtranspose_bn(False, conv, bn))
    assert_stands_for(fused, torch.randn(2, 4, *[5] * d), conv, bn)


@each_dim
@pytest.mark.parametrize("groups", [2, 4])
@pytest.mark.rule("FUS-06")
def test_grouped_transposed_conv_bn_is_folded_where_torch_cannot(d: int, groups: int) -> None:
    conv, bn = layer("ConvTranspose", d, groups=groups), norm(d, 8)
    assert_stands_for(fusers.fuse_bn(False, conv, bn), torch.randn(2, 4, *[5] * d), conv, bn)
    with pytest.raises(RuntimeError, match="must match the size"):
        fuse_conv_bn_eval(conv, bn, transpose=True)


@pytest.mark.rule("FUS-06")
def test_depthwise_transposed_conv_bn_is_folded_where_torch_makes_a_wrong_weight() -> None:
    conv, bn = nn.ConvTranspose2d(4, 4, 3, groups=4).eval(), norm(2, 4)
    assert_stands_for(fusers.fuse_bn(False, conv, bn), torch.randn(2, 4, 5, 5), conv, bn)
    torchs = fuse_conv_bn_eval(conv, bn, transpose=True)
    assert conv.weight.shape == (4, 1, 3, 3) != torchs.weight.shape == (4, 4, 3, 3)


@pytest.mark.rule("FUS-06")
def test_linear_and_bn_without_parameters_are_folded_where_torch_fails() -> None:
    linear, bn = nn.Linear(4, 8).eval(), norm(1, 8, affine=False)
    assert_stands_for(fusers.fuse_bn(False, linear, bn), torch.randn(3, 4), linear, bn)
    with pytest.raises(TypeError):
        fuse_linear_bn_eval(linear, bn)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.rule("FUS-06")
def test_linear_and_bn_of_one_feature_keep_the_bias_shape(bias: bool) -> None:
    linear, bn = nn.Linear(4, 8, bias=bias).eval(), norm(1, 1)
    fused = fusers.fold_bn(linear, bn)
    assert fused.bias.shape == (8,)
    assert fuse_linear_bn_eval(linear, bn).bias.shape == ((8,) if bias else (1,))
    assert_stands_for(fused, torch.randn(3, 1, 4), linear, bn)


@pytest.mark.rule("FUS-06")
def test_linear_bn_is_foldable_over_the_last_axis_only() -> None:
    assert fusers.linear_bn_is_foldable(norm(1, 8), 2)
    assert not fusers.linear_bn_is_foldable(norm(1, 8), 3)
    assert fusers.linear_bn_is_foldable(norm(1, 1), 3)


class Doubled(nn.Module):
    """A parametrization that cannot be inverted."""

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight * 2


@pytest.mark.rule("FUS-06")
def test_a_parametrized_weight_is_folded_as_the_weight_that_it_stands_for() -> None:
    conv, bn = layer("Conv", 2), norm(2, 8)
    parametrize.register_parametrization(conv, "weight", Doubled())
    fused = fusers.fuse_bn(False, conv, bn)
    assert type(fused) is nn.Conv2d
    assert_stands_for(fused, torch.randn(2, 4, 5, 5), conv, bn)
    assert parametrize.is_parametrized(conv)


@pytest.mark.rule("FUS-06")
def test_the_modules_given_are_not_changed() -> None:
    for conv in (layer("Conv", 2), layer("ConvTranspose", 2, groups=2)):
        bn = norm(2, 8)
        before = copy.deepcopy(nn.ModuleList([conv, bn]).state_dict())
        fused = fusers.fold_bn(conv, bn)
        assert fused is not conv
        after = nn.ModuleList([conv, bn]).state_dict()
        assert all(torch.equal(before[key], after[key]) for key in before)


# ---- fused modules ----------------------------------------------------------------------------------------


@each_dim
@pytest.mark.rule("FUS-02")
def test_qat_keeps_batch_norm_in_the_fused_module(d: int) -> None:
    conv, bn, relu = layer("Conv", d).train(), norm(d, 8).train(), nn.ReLU()
    fused = fusers.fuse_bn(True, conv, bn)
    assert type(fused) is of(nni, "ConvBn", d)
    assert same_bits(fused, theirs.fuse_conv_bn(True, conv, bn))
    with_relu = fusers.fuse_bn(True, conv, bn, relu)
    assert type(with_relu) is of(nni, "ConvBnReLU", d)
    assert list(with_relu.children()) == [conv, bn, relu]


@pytest.mark.rule("FUS-06")
def test_a_fused_module_is_in_the_mode_of_its_parts_where_torchs_says_train() -> None:
    conv, bn, relu = layer("Conv", 2), norm(2, 8), nn.ReLU().eval()
    for ours, torchs, modules in (
        (fusers.sequential(nni.ConvReLU2d), theirs._sequential_wrapper2(nni.ConvReLU2d), (conv, relu)),
        (fusers.fuse_bn, theirs.fuse_conv_bn_relu, (conv, bn, relu)),
    ):
        assert not any(module.training for module in ours(False, *modules).modules())
        assert torchs(False, *modules).training
    assert all(module.training for module in fusers.fuse_bn(True, conv.train(), bn.train()).modules())


@pytest.mark.rule("FUS-04")
def test_getters_follow_the_wildcards_of_any_complex_pattern() -> None:
    pattern = (nn.ReLU, (torch.add, MatchAllNode, (nn.BatchNorm2d, nn.Conv2d), MatchAllNode))
    nested = ("relu", ("add", "x", ("bn", "conv"), "y"))
    assert onednn_fusers.root_node_getter(pattern)(nested) == "conv"
    assert onednn_fusers.extra_inputs_getter(pattern)(nested) == ["x", "y"]
    assert onednn_fusers.extra_inputs_getter((nn.ReLU, nn.Linear))(("relu", "linear")) == []


@pytest.mark.rule("FUS-02")
def test_callables_and_what_they_return_can_be_copied_and_saved() -> None:
    conv, bn, relu = layer("Conv", 2), norm(2, 8), nn.ReLU().eval()
    for fuser, modules in (
        (fusers.fuse_bn, (conv, bn, relu)),
        (fusers.sequential(nni.ConvReLU2d), (conv, relu)),
        (onednn_fusers.conv_add(conv_side=0, relu=True), (relu, (torch.add, (bn, conv), MatchAllNode))),
    ):
        fused = pickle.loads(pickle.dumps(copy.deepcopy(fuser)))(False, *modules)
        file = io.BytesIO()
        torch.save(copy.deepcopy(fused), file)
        file.seek(0)
        assert same_bits(fused, torch.load(file, weights_only=False))


# ---- errors -----------------------------------------------------------------------------------------------

CONV, BN, LINEAR, BN1 = layer("Conv", 2), norm(2, 8), nn.Linear(4, 8).eval(), norm(1, 8)
RELU, TRANSPOSED = nn.ReLU().eval(), layer("ConvTranspose", 2)


def trained(module: nn.Module) -> nn.Module:
    return copy.deepcopy(module).train()


@pytest.mark.rule("FUS-06")
@pytest.mark.parametrize(
    ("fuser", "modules"),
    [
        (fusers.fuse_bn, (CONV, trained(BN))),
        (fusers.fuse_bn, (CONV, BN, trained(RELU))),
        (fusers.fuse_bn, (trained(LINEAR), BN1)),
    ],
)
@pytest.mark.parametrize("is_qat", [False, True])
def test_modes_that_differ_are_named(fuser: Any, modules: Any, is_qat: bool) -> None:
    with pytest.raises(ModelError, match=r"all in eval mode; found .*(: train.*: eval|: eval.*: train)"):
        fuser(is_qat, *modules)


@pytest.mark.rule("FUS-06")
@pytest.mark.parametrize(
    ("fuser", "modules"),
    [
        (fusers.fuse_bn, (trained(CONV), trained(BN))),
        (fusers.fuse_bn, (trained(LINEAR), trained(BN1))),
        (onednn_fusers.conv_add(conv_side=0, relu=False), (torch.add, (trained(BN), trained(CONV)), MatchAllNode)),
    ],
)
def test_folding_in_train_mode_is_refused(fuser: Any, modules: Any) -> None:
    with pytest.raises(ModelError, match="folded in eval mode only"):
        fuser(False, *modules)


@pytest.mark.rule("FUS-06")
@pytest.mark.parametrize(
    ("is_qat", "bn", "message"),
    [
        (False, norm(2, 4), "needs num_features=8, one per output; found 4"),
        (False, norm(2, 8, track_running_stats=False), "found track_running_stats=False"),
        (True, norm(2, 4), "needs num_features=8, one per output; found 4"),
        (True, norm(2, 8, affine=False), "affine=True; found False"),
        (True, norm(2, 8, track_running_stats=False), "track_running_stats=True; found False"),
    ],
)
def test_a_batch_norm_that_does_not_fit_is_described(is_qat: bool, bn: nn.Module, message: str) -> None:
    conv = copy.deepcopy(CONV).train(is_qat)
    bn.train(is_qat)
    with pytest.raises(ModelError, match=message):
        fusers.fuse_bn(is_qat, conv, bn)


@pytest.mark.rule("FUS-02")
@pytest.mark.parametrize(
    ("fuser", "is_qat", "modules", "message"),
    [
        (fusers.fuse_bn, False, (RELU, BN), "ReLU \\+ BatchNorm2d: expected a convolution or a Linear, then a batch"),
        (fusers.fuse_bn, False, (CONV, RELU), "Conv2d \\+ ReLU: expected a convolution or a Linear, then a batch"),
        (fusers.fuse_bn, False, (TRANSPOSED, BN, RELU), "in eval mode: there is no fused class"),
        (fusers.fuse_bn, False, (CONV, BN, nn.Tanh().eval()), "Tanh in eval mode: there is no fused class"),
        (fusers.fuse_bn, True, (TRANSPOSED, BN), "for QAT: there is no fused class"),
        (fusers.fuse_bn, True, (LINEAR, BN1, RELU), "for QAT: there is no fused class"),
        (fusers.sequential(nni.LinearReLU), False, (CONV, RELU), "LinearReLU cannot hold Conv2d \\+ ReLU"),
        (fusers.sequential(nni.LinearReLU), False, (CONV,), "LinearReLU cannot hold Conv2d: .*missing"),
        (onednn_fusers.conv_add(conv_side=0, relu=False), True, (torch.add, (BN, CONV), None), "addition for QAT"),
        (onednn_fusers.conv_add(conv_side=1, relu=False), False, (torch.add, CONV, "mul"), "found 'mul'"),
    ],
)
def test_unsupported_modules_are_named(fuser: Any, is_qat: bool, modules: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        fuser(is_qat, *modules)
