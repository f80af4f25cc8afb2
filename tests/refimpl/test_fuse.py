"""The fuse pass: what is fused, what is refused and why, and whose fault an error is (rules FUS-01 to FUS-07)."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.ao.nn.intrinsic as nni
import torch.ao.quantization.quantize_fx as torch_fx
import torch.nn.functional as F
from torch import Tensor, nn
from torch.ao.quantization import backend_config as torch_configs
from torch.ao.quantization.utils import MatchAllNode as TorchMatchAllNode

from fx_quant_conformance import refimpl
from fx_quant_conformance.refimpl import BackendPatternConfig, ConfigError, ModelError
from tests.refimpl.support import both_flows as flows
from tests.refimpl.support.fusing import CUBE, ROWS, Net, X, called, config_of


def fused(run: Callable[[Any, Tensor], Any], engine: str = "qnnpack") -> tuple[nn.Module, Any]:
    model = Net(run).eval()
    return model, refimpl.fuse_fx(model, backend_config=flows.native(engine))


def assert_unchanged(model: nn.Module, found: Any, x: Tensor = X) -> None:
    torch.testing.assert_close(found(x), model(x), rtol=1e-5, atol=1e-5)


def torchs_fused(model: nn.Module, engine: str = "qnnpack") -> Any:
    return torch_fx.fuse_fx(copy.deepcopy(model), backend_config=flows.torch_config(engine))


@pytest.mark.rule("FUS-01")
def test_without_a_backend_config_the_native_one_is_used() -> None:
    model = Net(lambda net, x: (net.relu(net.bn(net.conv(x))), net.relu(net.bn2(net.conv2(x) + x)))).eval()
    found = refimpl.fuse_fx(model)
    assert (
        called(found) == called(torch_fx.fuse_fx(copy.deepcopy(model))) == ["ConvReLU2d", "Conv2d", "add", "BNReLU2d"]
    )
    assert_unchanged(model, found)


@pytest.mark.rule("FUS-03")
def test_the_fused_module_stands_at_the_root_and_the_float_model_is_untouched() -> None:
    model = Net(lambda net, x: (y := net.relu(net.bn(net.conv(x))), y + x)).eval()
    before, names = copy.deepcopy(model.state_dict()), [name for name, _ in model.named_modules()]
    found = refimpl.fuse_fx(model, backend_config=flows.our_config("qnnpack"))
    assert type(found.get_submodule("conv")) is nni.ConvReLU2d
    assert [name for name, _ in model.named_modules()] == names
    assert type(model.conv) is nn.Conv2d
    assert flows.same(dict(model.state_dict()), dict(before))
    assert flows.same(found(X)[0], found(X)[0]) and not found.training
    assert {name.split(".")[0] for name, _ in found.named_modules()} == {"", "conv"}, "what is not called is dropped"


@pytest.mark.rule("FUS-03")
def test_a_root_that_is_no_module_is_blamed_on_the_config() -> None:
    entry = BackendPatternConfig((torch.add, nn.ReLU)).set_fuser_method(lambda is_qat, add, relu: relu)
    with pytest.raises(ConfigError, match="the root node 'add' calls no module to be replaced"):
        refimpl.fuse_fx(Net(lambda net, x: net.relu(torch.add(x, x))).eval(), backend_config=config_of(entry))


def last_of_three(matched: Any) -> Any:
    return matched[0]


@pytest.mark.rule("FUS-03")
def test_a_root_that_takes_what_goes_away_is_blamed_on_the_config() -> None:
    entry = BackendPatternConfig()._set_pattern_complex_format((nn.ReLU, nn.Conv2d))
    entry.set_fuser_method(lambda is_qat, relu, conv: conv)._set_root_node_getter(last_of_three)
    with pytest.raises(ConfigError, match=r"nn.Conv2d\+nn.ReLU: the root node 'relu' takes 'conv', which goes away"):
        refimpl.fuse_fx(Net(lambda net, x: net.relu(net.conv(x))).eval(), backend_config=config_of(entry))


@pytest.mark.rule("FUS-03")
def test_the_default_root_is_the_first_leaf_where_torch_takes_the_wildcards_node() -> None:
    pattern = (torch.add, nn.Conv2d, TorchMatchAllNode)
    model = Net(lambda net, x: torch.add(net.conv(x), x)).eval()

    def keep_conv(is_qat: bool, add: Any, conv: nn.Module, other: Any) -> nn.Module:
        return conv

    entry = BackendPatternConfig()._set_pattern_complex_format(pattern).set_fuser_method(keep_conv)
    assert called(refimpl.fuse_fx(model, backend_config=config_of(entry))) == ["Conv2d"]
    torchs = torch_configs.BackendPatternConfig()._set_pattern_complex_format(pattern).set_fuser_method(keep_conv)
    with pytest.raises(AssertionError, match="Expecting module node to be a call_module Node"):
        torch_fx.fuse_fx(model, backend_config=torch_configs.BackendConfig().set_backend_pattern_config(torchs))


BRANCHES: dict[str, Callable[[Any, Tensor], Any]] = {
    "conv left": lambda net, x: torch.add(net.conv(x), x),
    "conv right": lambda net, x: x + net.conv(x),
    "bn left": lambda net, x: net.bn(net.conv(x)) + x,
    "bn right": lambda net, x: torch.add(x, net.bn(net.conv(x))),
}


@pytest.mark.rule("FUS-04")
@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("branch", BRANCHES)
def test_the_convolution_may_be_either_operand_of_the_sum(branch: str, relu: bool) -> None:
    def run(net: Any, x: Tensor) -> Any:
        y = BRANCHES[branch](net, x)
        return net.relu(y) if relu else y

    model, found = fused(run, "onednn")
    theirs = torchs_fused(model, "onednn")
    assert called(found) == ["ConvAddReLU2d" if relu else "ConvAdd2d"] == called(theirs)
    assert flows.same(dict(found.state_dict()), dict(theirs.state_dict())), "to the bit"
    assert_unchanged(model, found)


@pytest.mark.rule("FUS-04")
@pytest.mark.parametrize("relu", [False, True])
def test_extra_inputs_become_arguments_though_they_were_fused_themselves(relu: bool) -> None:
    def run(net: Any, x: Tensor) -> Any:
        y = torch.add(net.bn(net.conv(x)), net.bn2(net.conv2(x)))
        return net.relu(y) if relu else y

    model, found = fused(run, "onednn")
    assert (
        called(found) == ["Conv2d", "ConvAddReLU2d" if relu else "ConvAdd2d"] == called(torchs_fused(model, "onednn"))
    )
    assert_unchanged(model, found)


@pytest.mark.rule("FUS-05")
@pytest.mark.parametrize(
    ("run", "engine", "expected"),
    [
        (lambda net, x: F.relu(net.bn(net.conv(x))), "qnnpack", ["ConvReLU2d"]),
        (lambda net, x: F.relu(net.conv(x), inplace=True), "qnnpack", ["ConvReLU2d"]),
        (lambda net, x: F.relu(input=net.conv(x)), "qnnpack", ["ConvReLU2d"]),
        (lambda net, x: torch.tanh(net.fc(x.mean((2, 3)))), "onednn", ["LinearTanh"]),
        (lambda net, x: F.leaky_relu(net.fc(x.mean((2, 3))), negative_slope=0.3), "onednn", ["LinearLeakyReLU"]),
        (lambda net, x: net.leaky(net.fc(x.mean((2, 3)))), "onednn", ["LinearLeakyReLU"]),
    ],
)
def test_functions_are_fused_like_their_modules(run: Any, engine: str, expected: list[str]) -> None:
    model, found = fused(run, engine)
    assert called(found) == expected
    assert_unchanged(model, found)


@pytest.mark.rule("FUS-07")
def test_a_module_with_state_called_twice_is_not_folded() -> None:
    """Torch folds the batch norm into the one convolution, and the other call gets it too."""
    model, found = fused(lambda net, x: net.bn(net.conv(x)) + net.conv(net.relu(x)))
    assert_unchanged(model, found)
    assert not torch.allclose(torchs_fused(model)(X), model(X), atol=1e-2), "torch is right now: drop this deviation"
    (refusal,) = found.meta["not_fused"]
    assert "FUS-07: module 'conv' is called at more than one place" in refusal


@pytest.mark.rule("FUS-07")
def test_a_shared_batch_norm_is_not_folded_either() -> None:
    model, found = fused(lambda net, x: net.bn(net.conv(x)) + net.bn(net.conv2(x)))
    assert called(found) == ["Conv2d", "BatchNorm2d", "Conv2d", "BatchNorm2d", "add"]
    assert_unchanged(model, found)


@pytest.mark.rule("FUS-07")
def test_a_shared_module_under_two_names_is_one_module() -> None:
    model = Net(lambda net, x: net.bn(net.conv(x)) + net.alias(x))
    model.add_module("alias", model.conv)
    found = refimpl.fuse_fx(model.eval(), backend_config=flows.our_config("qnnpack"))
    assert_unchanged(model, found)


@pytest.mark.rule("FUS-07")
def test_a_shared_relu_has_no_state_and_is_fused_everywhere() -> None:
    model, found = fused(lambda net, x: net.relu(net.conv2(net.relu(net.conv(x)))))
    assert called(found) == ["ConvReLU2d", "ConvReLU2d"]
    assert_unchanged(model, found)


@pytest.mark.rule("FUS-07")
def test_a_module_without_state_is_not_replaced_for_its_other_call() -> None:
    entry = BackendPatternConfig((nn.ReLU, nn.Conv2d)).set_fuser_method(
        lambda is_qat, relu, conv: nn.Sequential(relu, conv)
    )
    model = Net(lambda net, x: net.relu(net.conv(net.relu(x)))).eval()
    found = refimpl.fuse_fx(model, backend_config=config_of(entry))
    assert called(found) == ["ReLU", "Conv2d", "ReLU"]
    assert_unchanged(model, found)


@pytest.mark.rule("FUS-05")
@pytest.mark.rule("LOW-03")
def test_a_keyword_argument_of_a_method_blocks_fusing_as_that_of_a_function_does() -> None:
    for last in ("clamp", torch.clamp):
        entry = BackendPatternConfig((nn.Conv2d, last)).set_fuser_method(lambda is_qat, conv, clamp: conv)
        model = Net(lambda net, x: torch.clamp(net.conv(x), min=0.5)).eval()
        if last == "clamp":
            model = Net(lambda net, x: net.conv(x).clamp(min=0.5)).eval()
        found = refimpl.fuse_fx(model, backend_config=config_of(entry))
        assert "LOW-03: the fused module cannot express clamp's arguments {'min': 0.5}" in found.meta["not_fused"][0]
        assert_unchanged(model, found)


@pytest.mark.rule("LOW-03")
def test_a_scaled_add_is_not_fused_into_a_convolution() -> None:
    """Torch drops alpha, and the sum is another one."""
    model, found = fused(lambda net, x: torch.add(net.conv(x), x, alpha=2), "onednn")
    assert called(found) == ["Conv2d", "add"]
    assert "LOW-03: the fused module cannot express add's arguments {'alpha': 2}" in found.meta["not_fused"][0]
    assert_unchanged(model, found)
    assert not torch.allclose(torchs_fused(model, "onednn")(X), model(X), atol=1e-2)
    neutral, found = fused(lambda net, x: torch.add(net.conv(x), x, alpha=1), "onednn")
    assert called(found) == ["ConvAdd2d"]
    assert_unchanged(neutral, found)


def linear_bn() -> nn.Module:
    return Net(lambda net, x: net.bn1d(net.fc(x))).eval()


@pytest.mark.rule("FUS-06")
def test_a_batch_norm_over_another_axis_is_not_folded_into_a_linear() -> None:
    """On inputs of rank 3 BatchNorm1d normalises axis 1; torch folds it over the last axis."""
    config, mapping = flows.our_config("qnnpack"), flows.global_mapping(None)
    model = linear_bn()
    ours = refimpl.prepare_fx(model, mapping, (CUBE,), backend_config=config)
    assert "FUS-06: BatchNorm1d normalises axis 1, not the last, of an output of rank 3" in ours.meta["not_fused"][0]
    assert_unchanged(model, ours, CUBE)
    theirs = torch_fx.prepare_fx(copy.deepcopy(model), mapping, (CUBE,), backend_config=flows.torch_config("qnnpack"))
    assert not torch.allclose(theirs(CUBE), model(CUBE), atol=1e-2)


@pytest.mark.rule("FUS-06")
def test_of_rank_two_or_unknown_it_is_folded() -> None:
    config, mapping, model = flows.our_config("qnnpack"), flows.global_mapping(None), linear_bn()
    for inputs in ((ROWS,), ROWS, None):
        found = refimpl.prepare_fx(model, mapping, inputs, backend_config=config)
        assert called(found) == ["Linear"]
        assert_unchanged(model, found, ROWS)
    assert called(refimpl.fuse_fx(model, backend_config=config)) == ["Linear"], "fuse_fx knows no ranks"


def broken(*_: Any) -> nn.Module:
    raise KeyError("inside")


@pytest.mark.rule("FUS-02")
@pytest.mark.parametrize(
    ("fuser", "fused_module", "message"),
    [
        (broken, None, "it raised KeyError: 'inside'"),
        (lambda is_qat, conv: conv, None, "it raised TypeError: .*takes 2 positional arguments but 3 were given"),
        (lambda *_: 3, None, r"returned int; expected torch.nn.modules.module.Module"),
        (lambda is_qat, conv, relu: conv, nni.ConvReLU2d, r"returned Conv2d; expected .*ConvReLU2d"),
    ],
)
def test_a_fuser_that_fails_is_blamed_with_its_pattern(fuser: Any, fused_module: Any, message: str) -> None:
    entry = BackendPatternConfig((nn.Conv2d, nn.ReLU)).set_fuser_method(fuser)
    if fused_module is not None:
        entry.set_fused_module(fused_module)
    where = r"fuser method of nn.Conv2d\+nn.ReLU, called at 'conv' with \(is_qat=False, Conv2d, ReLU\):? "
    with pytest.raises(ConfigError, match=where + message):
        refimpl.fuse_fx(Net(lambda net, x: net.relu(net.conv(x))).eval(), backend_config=config_of(entry))


class Mine(nni.ConvReLU2d):
    """A vendor's own form of a fused class."""


MINE: Any = Mine  # torch's constructors are not annotated


@pytest.mark.rule("FUS-02")
@pytest.mark.parametrize("fused_module", [nni.ConvReLU2d, None])
def test_a_subclass_of_the_fused_module_will_do_and_without_one_anything(fused_module: Any) -> None:
    entry = BackendPatternConfig((nn.Conv2d, nn.ReLU)).set_fuser_method(lambda is_qat, conv, relu: MINE(conv, relu))
    entry.fused_module = fused_module
    model = Net(lambda net, x: net.relu(net.conv(x))).eval()
    assert called(refimpl.fuse_fx(model, backend_config=config_of(entry))) == ["Mine"]
    entry.set_fuser_method(lambda is_qat, conv, relu: nn.Sequential(conv, relu))
    if fused_module is None:
        assert called(refimpl.fuse_fx(model, backend_config=config_of(entry))) == ["Sequential"]
    else:
        with pytest.raises(ConfigError, match=r"returned Sequential; expected .*ConvReLU2d"):
            refimpl.fuse_fx(model, backend_config=config_of(entry))


@pytest.mark.rule("FUS-06")
def test_parts_in_another_mode_are_the_models_fault_and_named_with_the_place() -> None:
    model = Net(lambda net, x: net.bn(net.conv(x))).eval()
    model.bn.train()
    with pytest.raises(
        ModelError, match=r"fuser method of nn.Conv2d\+nn.BatchNorm2d, called at 'conv' .*BatchNorm2d: train"
    ):
        refimpl.fuse_fx(model, backend_config=flows.native("qnnpack"))
    with pytest.raises(ModelError, match=r"at 'conv' .*Conv.*BN both must be.*; the modules are in train mode: call"):
        refimpl.fuse_fx(model, backend_config=flows.torch_config("qnnpack"))
