"""What getters of a config may name (rules PAT-06, FUS-03, FUS-04)."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.ao.nn.intrinsic
import torch.ao.quantization.quantize_fx as torch_fx
from torch import Tensor, nn
from torch.ao.quantization import backend_config as torch_configs
from torch.ao.quantization.utils import MatchAllNode as TorchMatchAllNode

from fx_quant_conformance import refimpl
from fx_quant_conformance.refimpl import BackendConfig, BackendPatternConfig, ConfigError, MatchAllNode
from tests.refimpl.support.fusing import Net, X, called

nni: Any = torch.ao.nn.intrinsic  # not annotated
ADD = r"torch\.add\(nn\.Conv2d,\*\)"


def sum_entry(root: Any = None, extra: Any = lambda nested: [nested[2]]) -> BackendPatternConfig:
    """An entry for the sum of a convolution and anything, with these getters."""
    entry = BackendPatternConfig()._set_pattern_complex_format((torch.add, nn.Conv2d, MatchAllNode))
    entry.set_fuser_method(lambda is_qat, add, conv, other: nni.ConvAdd2d(conv, add)).set_fused_module(nni.ConvAdd2d)
    entry._set_extra_inputs_getter(extra)
    return entry if root is None else entry._set_root_node_getter(root)


def fuse(run: Callable[[Any, Tensor], Any], *entries: BackendPatternConfig) -> tuple[nn.Module, Any]:
    model = Net(run).eval()
    return model, refimpl.fuse_fx(model, backend_config=BackendConfig("test").set_backend_pattern_configs([*entries]))


@pytest.mark.rule("PAT-06")
@pytest.mark.rule("FUS-04")
def test_a_value_that_its_reader_takes_twice_is_not_inside_a_match_where_torch_fails() -> None:
    def run(net: Any, x: Tensor) -> Any:
        y = net.conv(x)
        return torch.relu(torch.add(y, y))

    model, found = fuse(run, sum_entry())
    assert called(found) == ["Conv2d", "add", "relu"] and found.meta["fusions"] == ()
    assert torch.equal(found(X), model(X))
    pattern = (torch.add, nn.Conv2d, TorchMatchAllNode)
    theirs = torch_configs.BackendPatternConfig()._set_pattern_complex_format(pattern)
    theirs.set_fuser_method(lambda is_qat, add, conv, other: nni.ConvAdd2d(conv, add))
    theirs._set_root_node_getter(lambda nested: nested[1])._set_extra_inputs_getter(lambda nested: [nested[2]])
    with pytest.raises(IndexError):
        config = torch_configs.BackendConfig().set_backend_pattern_config(theirs)
        torch_fx.fuse_fx(copy.deepcopy(model), backend_config=config)


def two_readers(net: Any, x: Tensor) -> Any:
    return torch.add(net.conv(x), net.relu(net.conv2(x)))


PAIR = BackendPatternConfig((nn.Conv2d, nn.ReLU)).set_fuser_method(
    lambda is_qat, conv, relu: nni.ConvReLU2d(conv, relu)
)
WRONG: Mapping[str, tuple[BackendPatternConfig, str]] = {
    "its own root": (
        sum_entry(extra=lambda nested: [nested[1]]),
        rf"extra inputs getter of {ADD}: it gives 'conv', which is fused, as a part of {ADD}",
    ),
    "its own last node": (
        sum_entry(extra=lambda nested: [nested[0]]),
        rf"extra inputs getter of {ADD}: it gives 'add', which is fused, as a part of {ADD}",
    ),
    "all its nodes": (sum_entry(extra=reversed), rf"extra inputs getter of {ADD}: it gives 'conv', which is fused"),
    "another match's inner node": (
        sum_entry(extra=lambda nested: [nested[2].args[0]]),
        rf"extra inputs getter of {ADD}: it gives 'conv2', which is fused, as a part of nn\.Conv2d\+nn\.ReLU",
    ),
    "a later node": (
        sum_entry(extra=lambda nested: list(nested[0].users)),
        rf"extra inputs getter of {ADD}: it gives 'output', which is computed after the match",
    ),
    "a root outside": (
        sum_entry(root=lambda nested: nested[2]),
        rf"root node getter of {ADD}: it gives 'relu', which is not matched",
    ),
}


@pytest.mark.rule("FUS-03")
@pytest.mark.rule("FUS-04")
@pytest.mark.parametrize("what", WRONG)
def test_a_node_that_cannot_be_the_root_or_an_argument_is_named_with_its_getter(what: str) -> None:
    entry, message = WRONG[what]
    with pytest.raises(ConfigError, match=message):
        fuse(two_readers, entry, PAIR)


@pytest.mark.rule("FUS-04")
def test_another_matchs_last_node_is_an_argument_and_its_fused_module_stands_for_it() -> None:
    model, found = fuse(two_readers, sum_entry(), PAIR)
    assert called(found) == ["ConvReLU2d", "ConvAdd2d"]
    torch.testing.assert_close(found(X), model(X))
