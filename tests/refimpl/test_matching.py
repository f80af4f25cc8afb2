"""Matching patterns in a graph (rules PAT-03 to PAT-09)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize

from fx_quant_conformance.refimpl import BackendPatternConfig, MatchAllNode
from fx_quant_conformance.refimpl.graph.matching import Match, find_matches
from fx_quant_conformance.refimpl.graph.tracer import trace
from fx_quant_conformance.refimpl.graph.tracing import CALLS, Places, positional_arguments_of
from tests.refimpl.support import both_flows as flows


class Net(nn.Module):
    """Layers for the forward function that a test gives."""

    def __init__(self, run: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.conv, self.bn, self.relu = nn.Conv2d(2, 2, 1), nn.BatchNorm2d(2), nn.ReLU()
        self.other, self.fc, self.weight = nn.Conv2d(2, 2, 1), nn.Linear(2, 2), nn.Parameter(torch.randn(2, 2))
        self.run = run

    def forward(self, x: Tensor) -> Any:
        return self.run(self, x)


def entry(pattern: Any, *, is_complex: bool = False) -> BackendPatternConfig:
    return BackendPatternConfig()._set_pattern_complex_format(pattern) if is_complex else BackendPatternConfig(pattern)


def matches(run: Callable[[Any, Tensor], Any], *entries: BackendPatternConfig) -> list[Match]:
    traced = trace(Net(run).eval())
    return find_matches(traced.graph, Places(traced), entries)


def found(run: Callable[[Any, Tensor], Any], *patterns: Any) -> list[list[str]]:
    """Names of the claimed nodes of each match, in forward order."""
    return [[node.name for node in match.nodes] for match in matches(run, *map(entry, patterns))]


CHAIN = (nn.Conv2d, nn.BatchNorm2d, nn.ReLU)


@pytest.mark.rule("PAT-03")
def test_classes_match_exactly_functions_by_identity_methods_by_name() -> None:
    class Special(nn.Conv2d):
        pass

    def run(net: Any, x: Tensor) -> Any:
        return torch.add(net.conv(x).relu(), F.relu(x))

    assert found(run, nn.Conv2d) == [["conv"]]
    assert found(run, Special) == []
    assert found(run, nn.modules.conv._ConvNd) == [], "a base class is another class"
    assert found(run, "relu") == [["relu"]]
    assert found(run, F.relu) == [["relu_1"]]
    assert found(run, torch.relu) == []


@pytest.mark.rule("PAT-03")
def test_parametrized_modules_match_as_their_class() -> None:
    class Twice(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * 2

    net = Net(lambda net, x: net.relu(net.conv(x))).eval()
    parametrize.register_parametrization(net.conv, "weight", Twice())
    assert type(net.conv) is not nn.Conv2d
    traced = trace(net)
    (match,) = find_matches(traced.graph, Places(traced), [entry((nn.Conv2d, nn.ReLU))])
    assert match.root.target == "conv"


@pytest.mark.rule("PAT-04")
def test_argument_patterns_agree_in_number_with_the_arguments() -> None:
    adds = (torch.add, nn.Conv2d, MatchAllNode)

    def run(net: Any, x: Tensor) -> Any:
        return torch.add(net.conv(x), x)

    assert len(matches(run, entry(adds, is_complex=True))) == 1
    assert matches(run, entry((torch.add, nn.Conv2d, MatchAllNode, MatchAllNode), is_complex=True)) == []
    assert matches(run, entry((torch.add, MatchAllNode, nn.Conv2d), is_complex=True)) == [], "on the other side"
    assert found(run, (nn.Conv2d, torch.add)) == [], "add has two arguments, the pattern one"


@pytest.mark.rule("PAT-05")
@pytest.mark.rule("PAT-09")
def test_the_wildcard_captures_without_claiming() -> None:
    def run(net: Any, x: Tensor) -> Any:
        return torch.add(net.conv(x), net.other(x))

    both = matches(run, entry((torch.add, nn.Conv2d, MatchAllNode), is_complex=True), entry(nn.Conv2d))
    assert [[node.name for node in match.nodes] for match in both] == [["other"], ["conv", "add"]]
    _, conv, captured = both[1].nested
    assert (conv.name, captured.name) == ("conv", "other"), "the nested form shows the wildcard's node"
    number = matches(
        lambda net, x: torch.add(net.conv(x), 3), entry((torch.add, nn.Conv2d, MatchAllNode), is_complex=True)
    )
    assert number[0].nested[2] == 3, "it matches what is no node too"
    bounds = (torch.clamp, nn.Conv2d, MatchAllNode, MatchAllNode)
    found = matches(lambda net, x: torch.clamp(net.conv(x), None, 5), entry(bounds, is_complex=True))
    assert found[0].nested[2:] == (None, 5), "None as well"


@pytest.mark.rule("PAT-06")
def test_an_inner_node_with_a_second_user_blocks_the_match() -> None:
    def run(net: Any, x: Tensor) -> Any:
        y = net.conv(x)
        return net.relu(y), y

    assert found(run, (nn.Conv2d, nn.ReLU)) == []
    assert found(run, (nn.Conv2d, nn.ReLU), nn.Conv2d, nn.ReLU) == [["conv"], ["relu"]]


@pytest.mark.rule("PAT-06")
def test_the_last_node_may_have_any_number_of_users() -> None:
    def run(net: Any, x: Tensor) -> Any:
        y = net.relu(net.conv(x))
        return y + y, y

    assert found(run, (nn.Conv2d, nn.ReLU)) == [["conv", "relu"]]


@pytest.mark.rule("PAT-07")
@pytest.mark.parametrize("patterns", [(CHAIN, (nn.BatchNorm2d, nn.ReLU), nn.ReLU), (nn.ReLU, CHAIN[1:], CHAIN)])
def test_the_pattern_with_most_leaves_wins_whatever_the_order(patterns: Any) -> None:
    assert found(lambda net, x: net.relu(net.bn(net.conv(x))), *patterns, nn.Conv2d) == [["conv", "bn", "relu"]]


@pytest.mark.rule("PAT-07")
def test_ties_go_to_the_earlier_registered() -> None:
    left, right = ((torch.add, *sides) for sides in ((nn.Conv2d, MatchAllNode), (MatchAllNode, nn.Conv2d)))

    def run(net: Any, x: Tensor) -> Any:
        return torch.add(net.conv(x), net.other(x))

    for order, claimed in (((left, right), "conv"), ((right, left), "other")):
        (match,) = matches(run, *(entry(pattern, is_complex=True) for pattern in order))
        assert match.nodes[0].name == claimed


@pytest.mark.rule("PAT-07")
def test_matching_goes_from_the_output_backwards_and_a_node_is_claimed_once() -> None:
    def run(net: Any, x: Tensor) -> Any:
        return net.relu(net.bn(net.conv(x)))

    assert found(run, (nn.Conv2d, nn.BatchNorm2d), (nn.BatchNorm2d, nn.ReLU), nn.Conv2d) == [["conv"], ["bn", "relu"]]


@pytest.mark.rule("PAT-07")
def test_a_node_is_in_one_place_of_a_match() -> None:
    both = entry((torch.add, nn.Conv2d, nn.Conv2d), is_complex=True)

    def twice(net: Any, x: Tensor) -> Any:
        y = net.conv(x)
        return torch.add(y, y)

    assert matches(twice, both) == [], "one convolution is not two"
    assert len(matches(lambda net, x: torch.add(net.conv(x), net.other(x)), both)) == 1


@pytest.mark.rule("FUS-03")
def test_the_root_is_the_first_node_unless_a_getter_says_otherwise() -> None:
    def run(net: Any, x: Tensor) -> Any:
        return net.relu(net.bn(net.conv(x)))

    assert matches(run, entry(CHAIN))[0].root.name == "conv"
    getter = entry(CHAIN)._set_root_node_getter(lambda nested: nested[1][0])
    assert matches(run, getter)[0].root.name == "bn"


@pytest.mark.rule("PAT-08")
@pytest.mark.parametrize(
    ("run", "patterns", "names"),
    [
        (lambda net, x: F.relu(input=net.conv(x)), (nn.Conv2d, F.relu), ["conv", "relu"]),
        (lambda net, x: net.relu(input=net.conv(input=x)), (nn.Conv2d, nn.ReLU), ["conv", "relu"]),
        (lambda net, x: F.relu(F.linear(x, weight=net.weight, bias=None)), (F.linear, F.relu), ["linear", "relu"]),
        (lambda net, x: F.relu(torch.add(input=net.conv(x), other=x)), (torch.add, F.relu), ["add", "relu"]),
        (lambda net, x: torch.relu(input=net.conv(x)), (nn.Conv2d, torch.relu), ["conv", "relu"]),
        (lambda net, x: net.conv(x).add(other=x).relu(), ("add", "relu"), ["add", "relu"]),
    ],
)
def test_keywords_count_as_the_arguments_that_they_are(run: Any, patterns: Any, names: list[str]) -> None:
    assert found(run, patterns) == [names]


@pytest.mark.rule("PAT-08")
@pytest.mark.parametrize(
    ("call", "shown"),
    [
        (lambda net, x: F.linear(x, weight=net.weight, bias=net.weight[0]), ["x", "weight", "getitem"]),
        (lambda net, x: F.linear(input=x, weight=net.weight), ["x", "weight"]),
        (lambda net, x: F.conv2d(x, weight=net.conv.weight, stride=2), ["x", "conv_weight"]),
        (lambda net, x: torch.cat(tensors=[x, x], dim=1), ["[x, x]", "1"]),
        (lambda net, x: torch.flatten(x, start_dim=1), ["x", "1"]),
        (lambda net, x: F.max_pool2d(x, kernel_size=2), ["x", "2"]),
        (lambda net, x: x.add(other=net.weight), ["x", "weight"]),
        (lambda net, x: x.add(other=net.weight, alpha=2), ["x", "weight"]),
    ],
)
def test_arguments_are_put_in_their_place_up_to_the_first_gap(call: Any, shown: list[str]) -> None:
    node = next(node for node in reversed(trace(Net(call)).graph.nodes) if node.op in CALLS)
    assert [str(argument) for argument in positional_arguments_of(node, at_least=3)][: len(shown)] == shown


class Leaf(nn.Module):
    """A user's module that is not traced into."""

    def forward(self, x: Tensor, other: Tensor | None = None, *, flag: bool = False) -> Tensor:
        return x if other is None or flag else x + other


class Anything(nn.Module):
    """A user's module without named parameters."""

    def forward(self, **inputs: Tensor) -> Tensor:
        return inputs["input"]


@pytest.mark.rule("PAT-08")
def test_a_modules_arguments_are_put_in_their_place_by_its_own_signature() -> None:
    """What takes its place may have other names for them."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.leaf, self.anything = Leaf(), Anything()

        def forward(self, a: Tensor, b: Tensor) -> Any:
            calls = self.leaf(other=b, flag=True, x=a), self.leaf(a, other=b), self.leaf(a, flag=True)
            return *calls, self.anything(input=a)

    graph = trace(Two(), leaf_classes=(Leaf, Anything)).graph
    nodes = [node for node in graph.nodes if node.op == "call_module"]
    calls = [(tuple(map(str, node.args)), {name: str(value) for name, value in node.kwargs.items()}) for node in nodes]
    by_position = [(("a", "b"), {"flag": "True"}), (("a", "b"), {}), (("a",), {"flag": "True"})]
    assert calls == [*by_position, ((), {"input": "a"})]


@pytest.mark.rule("PAT-08")
def test_torchs_reference_module_cannot_be_called_by_keyword() -> None:
    model, batches = Net(lambda net, x: net.conv(input=x)).eval(), [(torch.randn(2, 2, 3, 3),)]
    torch.testing.assert_close(
        flows.our_flow(model, flows.global_mapping(), batches)(*batches[0]), model(*batches[0]), atol=0.1, rtol=0
    )
    with pytest.raises(TypeError, match="unexpected keyword argument 'input'"):
        flows.torch_flow(model, flows.global_mapping(), batches)(*batches[0])
