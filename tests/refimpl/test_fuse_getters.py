"""What getters of a config may name, and what fuse makes of drawn ones (rules PAT-06, FUS-03, FUS-04)."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, TypeAlias

import pytest
import torch
import torch.ao.nn.intrinsic
import torch.ao.quantization.quantize_fx as torch_fx
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.ao.quantization import backend_config as torch_configs
from torch.ao.quantization.utils import MatchAllNode as TorchMatchAllNode

import refimpl
from refimpl import BackendConfig, BackendPatternConfig, ConfigError, MatchAllNode
from tests.refimpl.support.fusing import Net, X, called
from tests.refimpl.support.odd_values import fuzz

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


Expression: TypeAlias = Any  # "x", or (op, expression, …)
HEADS: Mapping[str, Any] = {"linear": nn.Linear, "relu": nn.ReLU, "add": torch.add, "double": torch.add}


class Drawn(nn.Module):
    """Computes an expression; each op of it is a module, or a call, of its own."""

    def __init__(self, expression: Expression) -> None:
        super().__init__()
        self.op, *parts = expression
        self.parts = nn.ModuleList([Drawn(part) if part != "x" else nn.Sequential() for part in parts])
        self.layer: Any = nn.Linear(4, 4) if self.op == "linear" else nn.ReLU()

    def forward(self, x: Tensor) -> Any:
        values = [part(x) for part in self.parts]
        return torch.add(values[0], values[-1]) if self.op in ("add", "double") else self.layer(*values)


EXPRESSIONS = st.recursive(
    st.just("x"),
    lambda inner: (
        st.tuples(st.sampled_from(["linear", "relu", "double"]), inner) | st.tuples(st.just("add"), inner, inner)
    ),
    max_leaves=5,
)


def draw_pattern(draw: st.DrawFn, expression: Expression) -> Any:
    """A pattern that matches an expression, as deep as is drawn."""
    if expression == "x" or draw(st.integers(0, 4)) == 0:
        return MatchAllNode
    op, *parts = expression
    if op in ("linear", "relu") and draw(st.booleans()):
        return HEADS[op]
    inner = [draw_pattern(draw, part) for part in parts]
    return (HEADS[op], *inner, *([draw_pattern(draw, parts[0])] if op == "double" else []))


def parts_of(expression: Expression) -> list[Expression]:
    return [] if expression == "x" else [expression, *(each for part in expression[1:] for each in parts_of(part))]


def nodes_of(nested: Any) -> list[Any]:
    return [node for part in nested for node in nodes_of(part)] if isinstance(nested, tuple) else [nested]


@st.composite
def models_and_entries(draw: st.DrawFn) -> tuple[Expression, list[BackendPatternConfig]]:
    """An expression, and entries that match in it; their getters take any node that is matched, or one near it."""
    expression = draw(EXPRESSIONS.filter(lambda each: each != "x"))
    entries = []
    for part in draw(st.lists(st.sampled_from(parts_of(expression)), min_size=1, max_size=2)):
        entry = BackendPatternConfig()._set_pattern_complex_format(draw_pattern(draw, part))
        entry.set_fuser_method(lambda is_qat, *parts: Adding())
        root, taken = draw(st.none() | st.integers(0, 3)), draw(st.none() | st.lists(st.integers(0, 5), max_size=2))
        near = draw(st.sampled_from(["", "args", "users"]))
        if root is not None:
            entry._set_root_node_getter(lambda nested, root=root: take(nodes_of(nested), root, ""))
        if taken is not None:
            entry._set_extra_inputs_getter(
                lambda nested, taken=taken, near=near: [take(nodes_of(nested), index, near) for index in taken]
            )
        entries.append(entry)
    return expression, entries


def take(nodes: list[Any], index: int, near: str) -> Any:
    node = nodes[index % len(nodes)]
    around = list(getattr(node, near, ()))
    return around[0] if around else node


class Adding(nn.Module):
    """Stands for whatever is fused, and takes any arguments."""

    def forward(self, *values: Any) -> Any:
        return sum(values)


@pytest.mark.slow
@pytest.mark.rule("FUS-03")
@pytest.mark.rule("FUS-04")
@pytest.mark.rule("CFG-14")
@settings(fuzz, max_examples=200)
@given(models_and_entries())
def test_drawn_patterns_and_getters_give_a_model_that_runs_or_an_error_of_refimpls(
    drawn: tuple[Expression, list[BackendPatternConfig]],
) -> None:
    expression, entries = drawn
    with suppress(ConfigError):
        config = BackendConfig().set_backend_pattern_configs(entries)
        found = refimpl.fuse_fx(Drawn(expression).eval(), backend_config=config)
        assert found(torch.ones(2, 4)).shape == (2, 4)
