"""The fuse pass: what is fused, what is refused and why, and whose fault an error is (rules FUS-01 to FUS-07)."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import both_flows as flows
import pytest
import torch
import torch.ao.nn.intrinsic as nni
import torch.ao.quantization.quantize_fx as torch_fx
import torch.nn.functional as F
from flow_zoo import settle
from torch import Tensor, nn

import refimpl
from refimpl import BackendConfig, BackendPatternConfig, ConfigError, ModelError

X = torch.randn(2, 4, 5, 5, generator=torch.Generator().manual_seed(1))


class Net(nn.Module):
    """Layers for the forward function that a test gives."""

    def __init__(self, run: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.conv2, self.bn, self.bn2 = (
            *(nn.Conv2d(4, 4, 1) for _ in "12"),
            nn.BatchNorm2d(4),
            nn.BatchNorm2d(4),
        )
        self.relu, self.fc, self.bn1d, self.leaky = nn.ReLU(), nn.Linear(4, 4), nn.BatchNorm1d(4), nn.LeakyReLU(0.2)
        for norm in (self.bn, self.bn2, self.bn1d):
            settle(norm)
        self.run = run

    def forward(self, x: Tensor) -> Any:
        return self.run(self, x)


def fused(run: Callable[[Any, Tensor], Any], engine: str = "qnnpack") -> tuple[nn.Module, Any]:
    model = Net(run).eval()
    return model, refimpl.fuse_fx(model, backend_config=flows.our_config(engine))


def called(model: Any) -> list[str]:
    """The classes of the modules that a graph calls, and the names of the functions."""
    return [
        type(model.get_submodule(node.target)).__name__ if node.op == "call_module" else node.target.__name__
        for node in model.graph.nodes
        if node.op in ("call_module", "call_function")
    ]


def assert_unchanged(model: nn.Module, found: Any, x: Tensor = X) -> None:
    torch.testing.assert_close(found(x), model(x), rtol=1e-5, atol=1e-5)


def torchs_fused(model: nn.Module, engine: str = "qnnpack") -> Any:
    return torch_fx.fuse_fx(copy.deepcopy(model), backend_config=flows.torch_config(engine))


@pytest.mark.rule("FUS-01")
def test_a_custom_config_is_refused_until_it_is_built() -> None:
    config, model = flows.our_config("qnnpack"), Net(lambda net, x: net.conv(x)).eval()
    with pytest.raises(refimpl.NotBuiltError, match="fuse_fx: fuse_custom_config is not built yet"):
        refimpl.fuse_fx(model, {"preserved_attributes": ["a"]}, backend_config=config)


@pytest.mark.rule("FUS-01")
def test_a_model_in_train_mode_is_refused() -> None:
    config, model = flows.our_config("qnnpack"), Net(lambda net, x: net.conv(x))
    with pytest.raises(ModelError, match=r"needs a model in eval mode; Net is in train mode: call .eval\(\)"):
        refimpl.fuse_fx(model, backend_config=config)
    with pytest.raises(
        ModelError, match=r"prepare_fx needs a model in eval mode; Net is in train mode: call .eval\(\)"
    ):
        refimpl.prepare_fx(model, flows.global_mapping(), backend_config=config)
    with pytest.raises(ConfigError, match="pass backend_config"):
        refimpl.fuse_fx(model.eval())


@pytest.mark.rule("FUS-01")
def test_an_untraceable_model_is_named() -> None:
    model = Net(lambda net, x: net.conv(x) if x.sum() > 0 else x).eval()
    with pytest.raises(ModelError, match=r"Net cannot be traced by torch.fx: .*control flow"):
        refimpl.fuse_fx(model, backend_config=flows.our_config("qnnpack"))


@pytest.mark.rule("FUS-01")
@pytest.mark.rule("FUS-03")
@pytest.mark.parametrize(
    ("run", "expected"),
    [
        (lambda net, x: net.relu(net.bn(net.conv(x))), ["ConvReLU2d"]),
        (lambda net, x: net.bn(net.conv(x)), ["Conv2d"]),
        (lambda net, x: net.relu(net.conv(x)) + net.bn2(net.conv2(x)), ["ConvReLU2d", "Conv2d", "add"]),
        (lambda net, x: F.relu(net.fc(x.mean((2, 3)))), ["LinearReLU"]),
        (lambda net, x: net.relu(torch.add(x, x)), ["add", "ReLU"]),
    ],
)
def test_only_entries_with_a_fuser_take_part(run: Any, expected: list[str]) -> None:
    model, found = fused(run)
    assert called(found) == expected == called(torchs_fused(model))
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


@pytest.mark.rule("LOW-03")
@pytest.mark.parametrize("engine", ["onednn"])
def test_a_scaled_add_is_not_fused_into_a_convolution(engine: str) -> None:
    """Torch drops alpha, and the sum is another one."""
    model, found = fused(lambda net, x: torch.add(net.conv(x), x, alpha=2), engine)
    assert called(found) == ["Conv2d", "add"]
    assert "LOW-03: the fused module cannot express add's arguments {'alpha': 2}" in found.meta["not_fused"][0]
    assert_unchanged(model, found)
    assert not torch.allclose(torchs_fused(model, engine)(X), model(X), atol=1e-2)
    neutral, found = fused(lambda net, x: torch.add(net.conv(x), x, alpha=1), engine)
    assert called(found) == ["ConvAdd2d"]
    assert_unchanged(neutral, found)


ROWS = torch.randn(6, 4, generator=torch.Generator().manual_seed(2))
CUBE = torch.randn(6, 4, 4, generator=torch.Generator().manual_seed(3))


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


@pytest.mark.rule("FUS-06")
def test_a_rank_that_cannot_be_found_out_is_no_two() -> None:
    model = Net(lambda net, x: net.bn1d(net.fc(x[torch.nonzero(x[:, 0, 0] > 9).reshape(-1)].flatten(1)))).eval()
    wrong = torch.randn(3)
    found = refimpl.prepare_fx(model, flows.global_mapping(None), (wrong,), backend_config=flows.our_config("qnnpack"))
    assert "of an output of rank unknown" in found.meta["not_fused"][0]


@pytest.mark.rule("FUS-06")
def test_ranks_are_read_without_running_the_model() -> None:
    class Counter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))
            self.calls: Tensor
            self.fc, self.bn = nn.Linear(4, 4), nn.BatchNorm1d(4)

        def forward(self, x: Tensor) -> Any:
            self.calls.add_(1)
            return self.bn(self.fc(x))

    model = Counter().eval()
    traced_calls = float(model.calls)
    refimpl.prepare_fx(model, flows.global_mapping(None), (ROWS,), backend_config=flows.our_config("qnnpack"))
    assert float(model.calls) - traced_calls <= 1, "tracing runs the buffer's update once; reading ranks must not"


def config_of(entry: BackendPatternConfig) -> BackendConfig:
    return BackendConfig("test").set_backend_pattern_config(entry)


def broken(*_: Any) -> nn.Module:
    raise KeyError("inside")


@pytest.mark.rule("FUS-02")
@pytest.mark.parametrize(
    ("fuser", "message"),
    [
        (broken, r"fuser method of nn.Conv2d\+nn.ReLU raised KeyError: 'inside'"),
        (lambda *_: 3, "returned int; expected a torch.nn.Module"),
        (lambda *_: nn.ReLU, "returned type; expected a torch.nn.Module"),
    ],
)
def test_a_fuser_that_fails_is_blamed_with_its_pattern(fuser: Any, message: str) -> None:
    config = config_of(BackendPatternConfig((nn.Conv2d, nn.ReLU)).set_fuser_method(fuser))
    with pytest.raises(ConfigError, match=message):
        refimpl.fuse_fx(Net(lambda net, x: net.relu(net.conv(x))).eval(), backend_config=config)


@pytest.mark.rule("FUS-06")
def test_parts_in_another_mode_are_the_models_fault_and_named_with_the_place() -> None:
    model = Net(lambda net, x: net.bn(net.conv(x))).eval()
    model.bn.train()
    with pytest.raises(ModelError, match=r"fuser method of nn.Conv2d\+nn.BatchNorm2d, at 'conv': .*BatchNorm2d: train"):
        fused_config = flows.native("qnnpack")
        refimpl.fuse_fx(model, backend_config=fused_config)
