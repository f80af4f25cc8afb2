"""The first node that differs is found, and roundings that add up are none (rules OBS-15, FUS-06)."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import GraphModule, symbolic_trace

from fx_quant_conformance.conformance.stages.following import Divergence, find_difference
from fx_quant_conformance.conformance.stages.meaning import format_difference, in_float64, run_in_float64
from fx_quant_conformance.conformance.whole_models.architectures import settle
from fx_quant_conformance.refimpl import fuse_fx

X = torch.randn(2, 3, 5, 5, generator=torch.Generator().manual_seed(0))


class Net(nn.Module):
    """Convolutions with norms, whose forward is a function of it and the input."""

    def __init__(self, compute: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.compute = compute
        self.a, self.b = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 3, 1)
        self.norm_a, self.norm_b, self.relu = nn.BatchNorm2d(4), nn.BatchNorm2d(3), nn.ReLU()

    def forward(self, x: Tensor) -> Any:
        return self.compute(self, x)


def chain(net: Any, x: Tensor) -> Any:
    x = net.relu(net.norm_a(net.a(x)))
    return F.relu(net.norm_b(net.b(x + 0.5)))


def made(compute: Callable[[Any, Tensor], Any] = chain) -> Any:
    torch.manual_seed(1)
    return settle(Net(compute))


def made_of(net: Any, compute: Callable[[Any, Tensor], Any]) -> Any:
    """The same modules, called otherwise."""
    other = copy.deepcopy(net)
    other.compute = compute
    return other


def found(model: Any, derived: Any, x: Tensor = X) -> Divergence:
    difference = find_difference(model, derived, (x,))
    assert difference is not None
    return difference


def edited(derived: GraphModule, name: str, **changes: Any) -> GraphModule:
    """A graph in which a node has other attributes."""
    [node] = [node for node in derived.graph.nodes if node.name == name]
    for attribute, value in changes.items():
        setattr(node, attribute, value)
    derived.recompile()
    return derived


@pytest.mark.rule("FUS-06")
def test_folded_norms_differ_by_rounding_alone() -> None:
    model, fused = made(), fuse_fx(made())
    with torch.no_grad():
        assert not torch.equal(model(X), fused(X))
    assert find_difference(model, fused, (X,)) is None


@pytest.mark.rule("FUS-06")
def test_a_norm_that_is_folded_wrongly_is_named_with_values_and_bound() -> None:
    model, other = made(), made()
    other.norm_a.weight.data[1] *= 2
    difference = found(model, fuse_fx(other))
    assert (difference.node, difference.reader) == ("a", "add")
    assert "rounding explains" in difference.text
    assert str(difference).startswith("the first node that differs is a, as add reads it: ")
    value, right = (float(text) for text in difference.text.partition(";")[0].split(" for "))
    for side, known in ((other, value), (model, right)):
        values = run_in_float64(made_of(side, lambda net, x: net.relu(net.norm_a(net.a(x)))), (X,))[0]
        assert float((values - known).abs().min()) < 1e-5


def test_what_comes_before_the_first_difference_and_after_it_is_not_blamed() -> None:
    fused = edited(fuse_fx(made()), "add", args=(None, 0.25))
    [node] = [node for node in fused.graph.nodes if node.name == "add"]
    node.args = (next(each for each in fused.graph.nodes if each.name == "a"), 0.25)
    fused.recompile()
    assert (found(made(), fused).node, found(made(), fused).reader) == ("add", "b")


def test_a_difference_between_the_last_node_and_the_output() -> None:
    derived = symbolic_trace(made())
    [output] = derived.graph.find_nodes(op="output")
    with derived.graph.inserting_before(output):
        output.args = (derived.graph.call_function(torch.neg, (output.args[0],)),)
    derived.recompile()
    assert (found(made(), derived).node, found(made(), derived).reader) == ("neg", "output")


def statement(net: Any, x: Tensor) -> Any:
    y = net.a(x)
    y[:, 1].mul_(0.25)
    return net.b(y)


def test_what_an_op_in_place_writes_through_a_view_counts() -> None:
    model = made(statement)
    derived = symbolic_trace(made(statement))
    assert find_difference(model, derived, (X,)) is None
    [node] = [node for node in derived.graph.nodes if node.name == "mul_"]
    derived.graph.erase_node(node)
    derived.recompile()
    assert (found(model, derived).node, found(model, derived).reader) == ("a", "b")


def flips(net: Any, x: Tensor) -> Any:
    return torch.round(net.norm_a(net.a(x)) * 2.0**16) * 2.0**-3


@pytest.mark.rule("FUS-06")
def test_roundings_that_flip_what_comes_after_are_no_difference() -> None:
    """Some of the products are nearly ties: another bit of a folded weight, and the results are a step apart."""
    x = torch.randn(8, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    model, fused = made(flips), fuse_fx(made(flips))
    assert format_difference(model, fused, (x,)), "the outputs alone would not tell"
    assert find_difference(model, fused, (x,)) is None


@pytest.mark.rule("FUS-06")
def test_large_terms_that_cancel_round_by_their_size() -> None:
    """Of sums near zero, of terms near 1000; the rounding of a folded weight is one of the terms'."""

    def layers() -> nn.Module:
        conv, norm = nn.Conv2d(2, 1, 1, bias=False), nn.BatchNorm2d(1)
        conv.weight = nn.Parameter(torch.tensor([1.1, -0.7]).view(1, 2, 1, 1))
        norm.weight = nn.Parameter(torch.tensor([0.37]))
        return nn.Sequential(conv, norm).eval()

    x = torch.tensor([700.0, 1100.0]).view(1, 2, 1, 1) + torch.randn(1, 2, 8, 8) * 2.0**-10
    assert format_difference(layers(), fuse_fx(layers()), (x,)), "the outputs alone would not tell"
    assert find_difference(layers(), fuse_fx(layers()), (x,)) is None


def test_a_model_that_differs_as_traced_is_said_to() -> None:
    def branching(net: Any, x: Tensor) -> Any:
        x = net.a(x)
        if not isinstance(x, torch.fx.Proxy):
            x = x * 2
        return net.b(net.norm_a(x))

    difference = found(made(branching), symbolic_trace(made(branching)))
    assert (difference.node, difference.reader) == ("a", "norm_a")
    assert difference.text.endswith(", as soon as it is traced")


def test_what_does_not_run_is_a_difference_and_names_the_node() -> None:
    derived = symbolic_trace(made())
    derived.b = nn.Conv2d(5, 3, 1)
    difference = found(made(), derived)
    assert difference.node == "b" and difference.text.startswith("it does not run: RuntimeError: ")


def test_another_number_of_outputs_and_another_shape_are_differences() -> None:
    two = symbolic_trace(made(lambda net, x: (net.a(x), x)))
    assert "the number of its outputs: 2 for 1" in format_difference(made(lambda net, x: net.a(x)), two, (X,))
    flat = symbolic_trace(made(lambda net, x: net.a(x).flatten()))
    difference = found(made(lambda net, x: net.a(x)), flat)
    assert difference.node == "flatten" and "of shape (200,), not (2, 4, 5, 5)" in difference.text


def test_tensors_in_any_structure_that_is_returned_count() -> None:
    def named(net: Any, x: Tensor) -> Any:
        return {"rest": [net.norm_a(net.a(x))], "sum": (net.a(x).sum(), x)}

    assert find_difference(made(named), fuse_fx(made(named)), (X,)) is None
    other = made(named)
    other.norm_a.weight.data[1] *= 2
    assert (found(made(named), fuse_fx(other)).node, found(made(named), fuse_fx(other)).reader) == ("norm_a", "output")


@pytest.mark.parametrize("value", (float("nan"), float("inf")))
def test_a_value_that_is_not_finite_in_one_is_a_difference(value: float) -> None:
    derived = symbolic_trace(made())
    norm: Any = derived.norm_b
    norm.bias.data[0] = value
    assert found(made(), derived).node == "norm_b"
    assert format_difference(made(), derived, (X,))


def test_values_that_are_not_finite_in_both_are_equal() -> None:
    def infinite(net: Any, x: Tensor) -> Any:
        return torch.log(net.a(x) * 0), torch.sqrt(net.a(x) - 100)

    assert find_difference(made(infinite), symbolic_trace(made(infinite)), (X,)) is None


def test_whatever_is_random_is_so_in_both() -> None:
    def drops(net: Any, x: Tensor) -> Any:
        return F.dropout(net.norm_a(net.a(x)), 0.5, training=True)

    model, fused = made(drops), fuse_fx(made(drops))
    torch.manual_seed(3)
    expected = torch.rand(3)
    torch.manual_seed(3)
    assert find_difference(model, fused, (X,)) is None
    assert torch.equal(torch.rand(3), expected), "and leaves the generator alone"


def test_a_model_that_writes_to_its_buffers_runs_from_the_same_state() -> None:
    def counts(net: Any, x: Tensor) -> Any:
        net.norm_a.running_mean.add_(x.mean())
        return net.norm_b(net.b(net.norm_a(net.a(x))))

    model, derived = made(counts), symbolic_trace(made(counts))
    kept = copy.deepcopy(model.state_dict())
    assert find_difference(model, derived, (X,)) is None
    assert format_difference(model, derived, (X,)) == ""
    assert all(torch.equal(kept[name], value) for name, value in model.state_dict().items())


class NamesFloat32(nn.Module):
    """Its code says float32 in every way that it can, and holds a tensor that is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.held = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), torch.randn(5, 5)

    def forward(self, x: Tensor) -> Any:
        x = self.norm(self.conv(x.float())).to(torch.float32) @ self.held
        x = x + torch.zeros(5, dtype=torch.float32) + torch.arange(5, dtype=torch.float32)
        return F.softmax(x, -1, dtype=torch.float32).type_as(self.held)


def test_code_that_names_float32_runs_in_float64() -> None:
    torch.manual_seed(0)
    model = settle(NamesFloat32())
    [value] = run_in_float64(copy.deepcopy(model), (X,))
    with torch.no_grad():
        distance = (value - copy.deepcopy(model)(X).double()).abs().max()
    assert value.dtype is torch.float64 and 0 < float(distance) < 1e-5
    assert find_difference(model, fuse_fx(copy.deepcopy(model)), (X,)) is None
    assert {each.dtype for each in (*model.parameters(), model.held)} == {torch.float32}


def test_models_are_float32_again_and_dtypes_the_default_after_an_error() -> None:
    model = made()
    kept = copy.deepcopy(model.state_dict())
    with pytest.raises(ZeroDivisionError), in_float64(model):
        assert model.a.weight.dtype is torch.float64 is torch.get_default_dtype()
        raise ZeroDivisionError
    assert torch.get_default_dtype() is torch.float32
    assert all(
        torch.equal(kept[name], value) and value.dtype is kept[name].dtype for name, value in model.state_dict().items()
    )
