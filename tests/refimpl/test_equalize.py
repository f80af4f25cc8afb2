"""Equalization: placed where torch places it, and the same numbers wherever torch's are right (rule EQL-01)."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.fx.node import map_arg

from fx_quant_conformance import refimpl
from fx_quant_conformance.refimpl.config.qconfig import QConfigMapping
from fx_quant_conformance.refimpl.errors import QConfigError
from fx_quant_conformance.refimpl.prepare.equalize import (
    EQUALIZATION,
    EqualizationQConfig,
    InputEqualizationObserver,
    WeightEqualizationObserver,
)
from tests.refimpl.support.both_equalized import (
    DYNAMIC,
    EVERYWHERE,
    ONLY_LINEAR,
    OURS,
    STATIC,
    WHOLE,
    Both,
    Net,
    TorchMapping,
    both,
    conv,
    equalized,
    linear,
    prepare_with_torch,
    sample,
    selected,
    torch_equalize,
    torchs,
    weight,
)

pytestmark = pytest.mark.rule("EQL-01")


class Case(NamedTuple):
    """A model; the shape of its input; the activation quantizes, by their number in the graph, with stale factors."""

    make: Callable[[], nn.Module]
    shape: tuple[int, ...] = (16, 6)
    mapping: Any = WHOLE
    stale: tuple[int, ...] = ()


def without_column(layer: Any) -> Any:
    with torch.no_grad():
        layer.weight[:, 2] = 0
    return layer


IMAGE = (4, 6, 5, 5)
CASES = {
    "linear": Case(lambda: Net(lambda m, x: m.a(x), a=linear())),
    "a column of zeros": Case(lambda: Net(lambda m, x: m.a(x), a=without_column(linear()))),
    "linear and relu": Case(lambda: nn.Sequential(linear(), nn.ReLU())),
    "linear and F.relu": Case(lambda: Net(lambda m, x: F.relu(m.a(x)), a=linear())),
    "F.linear": Case(lambda: Net(lambda m, x: F.linear(x, m.w, m.b), w=weight(linear()), b=torch.randn(6))),
    "conv1d": Case(lambda: Net(lambda m, x: m.a(x), a=conv(dims=1)), (4, 6, 5)),
    "conv2d": Case(lambda: Net(lambda m, x: m.a(x), a=conv()), IMAGE),
    "conv3d": Case(lambda: Net(lambda m, x: m.a(x), a=conv(dims=3)), (2, 6, 4, 4, 4)),
    "conv2d and relu": Case(lambda: nn.Sequential(conv(padding=1), nn.ReLU()), IMAGE),
    "F.conv1d": Case(lambda: Net(lambda m, x: F.conv1d(x, m.w), w=weight(conv(dims=1))), (4, 6, 5)),
    "F.conv2d": Case(lambda: Net(lambda m, x: F.conv2d(x, m.w, m.b, 2), w=weight(conv()), b=torch.randn(6)), IMAGE),
    "dynamic": Case(lambda: Net(lambda m, x: m.a(x), a=linear()), mapping=TorchMapping().set_global(DYNAMIC)),
    "linear, add, linear": Case(lambda: Net(lambda m, x: m.b(m.a(x) + 5), a=linear(), b=linear()), stale=(1,)),
    "linear, relu, add": Case(lambda: Net(lambda m, x: F.relu(m.a(x)) + 5, a=linear())),
    "a float branch": Case(lambda: Net(lambda m, x: m.a(x) + torch.sin(x), a=linear()), mapping=ONLY_LINEAR),
    "two layers on one input": Case(lambda: Net(lambda m, x: m.a(x) + m.b(x), a=linear(), b=linear())),
    "linear, linear": Case(lambda: nn.Sequential(linear(), linear(5)), stale=(1,)),
    "linear, linear, linear": Case(lambda: nn.Sequential(linear(7), linear(5, 7), linear(4, 5)), stale=(1, 2)),
    "without bias": Case(lambda: nn.Sequential(linear(bias=False), linear(5)), stale=(1,)),
    "linear, relu, linear": Case(lambda: nn.Sequential(linear(), nn.ReLU(), linear(5)), stale=(1,)),
    "F.linear, F.relu, F.linear": Case(
        lambda: Net(
            lambda m, x: F.linear(F.relu(F.linear(x, m.w, m.bias)), m.v),
            w=weight(linear()),
            v=weight(linear()),
            bias=torch.randn(6),
        ),
        stale=(2,),
    ),
    "conv, relu, conv": Case(lambda: nn.Sequential(conv(), nn.ReLU(), conv(5)), IMAGE, stale=(1,)),
}


@pytest.fixture(autouse=True)
def quiet_and_seeded() -> Iterator[None]:
    torch.manual_seed(0)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        yield


SHARED = "linear, add, linear"  # what the add gives has the observer of what it takes


OBSERVERS = [(name, "ours") for name in CASES]
OBSERVERS += [(name, "torch's") for name in ("linear and relu", "F.conv2d", "dynamic", "conv, relu, conv")]


@cache
def made(name: str, observers: str = "ours") -> Both:
    torch.manual_seed(0)
    case = CASES[name]
    return both(case.make(), case.shape, case.mapping, ours=OURS if observers == "ours" else EVERYWHERE)


@cache
def references(name: str, observers: str = "ours") -> tuple[GraphModule, GraphModule]:
    return made(name, observers).references()


def lines(model: GraphModule) -> list[str]:
    """A graph's nodes with callee and arguments, names of nodes and of attributes left out."""
    places: dict[Any, Any] = {node: f"%{place}" for place, node in enumerate(model.graph.nodes)}
    return [
        f"{node.op} {'' if node.op == 'get_attr' else node.target} {map_arg((node.args, node.kwargs), places.get)}"
        for node in model.graph.nodes
    ]


def tensors(model: GraphModule, stale: tuple[int, ...] = ()) -> list[Tensor]:
    """Every tensor of a graph in its order, flat; without the qparams of the quantizes with these numbers."""
    quantizes = [node for node in model.graph.nodes if node.target is torch.quantize_per_tensor]
    left_out = {part for number in stale for part in quantizes[number].args[1:3]}
    found = []
    for node in model.graph.nodes:
        if node.op == "get_attr" and node not in left_out:
            found.append(model.get_buffer(node.target))
        elif node.op == "call_module":
            found.extend(model.get_submodule(node.target).state_dict().values())
    return [tensor.reshape(-1) for tensor in found if isinstance(tensor, Tensor)]


@pytest.mark.parametrize(("name", "observers"), OBSERVERS)
def test_the_reference_model_has_torchs_graph_weights_scales_and_results(name: str, observers: str) -> None:
    """But for the qparams of a value whose factors went into the layer before it: torch's there are stale."""
    case, found = CASES[name], made(name, observers)
    torchs, ours = references(name, observers)
    assert lines(ours) == lines(torchs)
    assert [t.tolist() for t in tensors(ours, case.stale)] == [t.tolist() for t in tensors(torchs, case.stale)]
    torchs = copy.deepcopy(torchs)
    for at in case.stale:
        adopt(torchs, ours, at)
    assert torch.equal(ours(found.x), torchs(found.x))


def adopt(into: GraphModule, model: GraphModule, number: int) -> None:
    """Put the qparams of one quantize of a model in the place of those of another with the same graph."""
    theirs, mine = ([n for n in m.graph.nodes if n.target is torch.quantize_per_tensor][number] for m in (into, model))
    for target, source in zip(theirs.args[1:3], mine.args[1:3], strict=True):
        into.get_buffer(target.target).copy_(model.get_buffer(source.target))


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.mapping is not CASES["dynamic"].mapping])
def test_equalization_does_not_change_what_a_float_model_computes(name: str) -> None:
    found = made(name)
    doubled = equalized(copy.deepcopy(found.ours).double())
    exact = copy.deepcopy(found.model).double()(found.x.double())
    torch.testing.assert_close(doubled(found.x.double()), exact, rtol=1e-6, atol=1e-6)  # the factors are float32
    assert not torch.equal(doubled(found.x.double()), exact) or not any(item.observer for item in found.found)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.stale and name != SHARED])
def test_the_range_of_a_value_with_folded_factors_is_that_of_the_scaled_value(name: str) -> None:
    """Torch documents that the input's observer gets the scaled range, and keeps the old one here."""
    found = made(name)
    seen = observed_ranges(equalized(found.ours), found.x)
    assert len(seen) > 1
    for held, actual in seen.values():
        torch.testing.assert_close(held, actual)
    theirs = observed_ranges(torch_equalize._convert_equalization_ref(copy.deepcopy(found.torchs)), found.x)
    wrong = [at for at, (held, actual) in theirs.items() if not torch.allclose(held, actual, rtol=0.01)]
    assert len(wrong) == len(CASES[name].stale)
    before: Any = found.torchs
    assert all(
        theirs[at][0].tolist() == [*map(float, (getattr(before, at).min_val, getattr(before, at).max_val))]
        for at in wrong
    )


def observed_ranges(model: GraphModule, x: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
    """The range that each observer of an activation holds, and that of what it then sees."""
    model, found = copy.deepcopy(model), {}

    def note(name: str, module: Any, value: Tensor) -> None:
        found[name] = torch.stack([module.min_val, module.max_val]), torch.stack(value.aminmax())

    for name, module in model.named_children():
        if isinstance(module, torchs.MinMaxObserver) and module.dtype == torch.quint8:
            module.register_forward_pre_hook(lambda module, inputs, name=name: note(name, module, inputs[0]))
    model(x)
    return found


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"module_name": ("1",)}, ["1_0", "1_2"]),
        ({"module_name_regex": ("1[.][01]",)}, ["1_0"]),
        ({"object_type": (nn.Linear,), "module_name": ("1", None)}, ["0", "2"]),
        ({"module_name_object_type_order": ("1", nn.Linear, 1)}, ["1_2"]),
    ],
)
def test_the_keys_of_the_mapping_select_what_they_select_for_torch(keys: Any, expected: list[str]) -> None:
    inner = nn.Sequential(linear(), nn.Sigmoid(), linear())
    torchs, ours = selected(**keys)
    found = both(nn.Sequential(linear(), inner, linear()), torchs=torchs, ours=ours)
    assert lines(found.ours) == lines(found.torchs)
    assert [item.op.removeprefix("_") for item in found.found] == expected


def test_models_and_prepared_models_are_not_changed_and_convert_again() -> None:
    found = made("F.linear, F.relu, F.linear"), made("linear, relu, linear")
    for case in found:
        before = copy.deepcopy(case.model.state_dict()), copy.deepcopy(case.ours.state_dict())
        first, second = equalized(case.ours), equalized(case.ours)
        for old, new in zip(before, (case.model.state_dict(), case.ours.state_dict()), strict=True):
            assert all(torch.equal(old[name], new[name]) for name in old)
        assert torch.equal(first(case.x), second(case.x))
        assert all(torch.equal(a, b) for a, b in zip(tensors(first), tensors(second), strict=True))


def test_an_op_that_is_left_alone_is_warned_of_and_noted_with_its_reason() -> None:
    model, x = CASES["two layers on one input"].make().eval(), sample((16, 6))
    with pytest.warns(UserWarning, match="Cannot equalize a .*global.*: its input x is part of a branch: b"):
        prepared = refimpl.prepare_fx(model, WHOLE, (x,), _equalization_config=OURS)
    first, second = prepared.meta[EQUALIZATION]
    assert not first.observer
    assert not second.observer
    assert "part of a branch: a" in second.reason


@pytest.mark.parametrize("observers", [OURS, EVERYWHERE])
def test_without_data_an_op_is_multiplied_by_one_with_a_warning_as_torch_does(observers: Any) -> None:
    x = sample((16, 6))
    linear_net = nn.Sequential(linear()).eval()
    prepared = refimpl.prepare_fx(linear_net, WHOLE, (x,), _equalization_config=observers)
    with pytest.warns(UserWarning, match="seen no data: _0 is equalized by factors of 1"):
        unscaled = equalized(prepared)
    assert torch.equal(unscaled(x), linear_net(x))
    torchs = torch_equalize._convert_equalization_ref(prepare_with_torch(linear_net, x, WHOLE, EVERYWHERE))
    assert [node.target for node in unscaled.graph.nodes] == [node.target for node in torchs.graph.nodes]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (EqualizationQConfig(InputEqualizationObserver(), WeightEqualizationObserver), "no instances"),
        (STATIC, "expected an EqualizationQConfig"),
        (EqualizationQConfig(torchs.MinMaxObserver, WeightEqualizationObserver), "no get_input_minmax"),
    ],
)
def test_what_is_no_equalization_qconfig_is_refused(value: Any, message: str) -> None:
    with pytest.raises(QConfigError, match=message):
        both(nn.Sequential(linear()), ours=QConfigMapping().set_global(value))


def test_the_inputs_observer_refuses_a_scheme_per_channel_as_torchs_does() -> None:
    with pytest.raises(TypeError):
        torch_equalize._InputEqualizationObserver(qscheme=torch.per_channel_affine)
    with pytest.raises(QConfigError, match="must be per tensor"):
        InputEqualizationObserver(qscheme=torch.per_channel_affine)


def test_observers_measure_what_torchs_measure() -> None:
    x, y = torch.randn(4, 3, 5), torch.randn(2, 3, 7)
    pairs: list[tuple[Any, Any, str]] = [
        (InputEqualizationObserver(), torch_equalize._InputEqualizationObserver(), "get_input_minmax"),
        (WeightEqualizationObserver(), torch_equalize._WeightEqualizationObserver(), "get_weight_col_minmax"),
    ]
    for ours, theirs, read in pairs:
        for batch in (x, y):
            assert torch.equal(ours(batch), batch)
            theirs(batch)
        assert [t.tolist() for t in getattr(ours, read)()] == [t.tolist() for t in getattr(theirs, read)()]


def test_torchs_private_equalization_takes_our_prepared_model_with_functions_as_its_own() -> None:
    found = made("F.linear, F.relu, F.linear", "torch's")
    theirs, ours = (
        torch_equalize._convert_equalization_ref(copy.deepcopy(made)) for made in (found.torchs, found.ours)
    )
    assert [str(node) for node in ours.graph.nodes] == [str(node) for node in theirs.graph.nodes]
    assert "x_equalization_scale0" in [str(node) for node in ours.graph.nodes]
    assert torch.equal(ours(found.x), theirs(found.x))
    assert all(map(torch.equal, tensors(ours), tensors(theirs)))
