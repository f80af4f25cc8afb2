"""Reference models as exported programs: that they are spelled as PT2E spells them, and compute the same bits."""

from __future__ import annotations

import copy
import inspect
import operator
from importlib import import_module
from typing import Any

import pytest
import torch
import torch.ao.nn.quantized.reference as nnqr
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.fx import GraphModule
from torch.utils._pytree import tree_leaves

from fx_quant_conformance import refimpl
from fx_quant_conformance.refimpl import ModelError, QConfig, QConfigMapping, export_reference
from fx_quant_conformance.refimpl.observers.decomposed import OPS
from fx_quant_conformance.refimpl.observers.observers import (
    MinMaxObserver,
    PerChannelMinMaxObserver,
    PlaceholderObserver,
)
from tests.support.torchao import require_torchao

ACTIVATION = MinMaxObserver.with_args(dtype=torch.quint8)
DYNAMIC = PlaceholderObserver.with_args(dtype=torch.quint8, is_dynamic=True)
PER_TENSOR = MinMaxObserver.with_args(dtype=torch.qint8, qscheme=torch.per_tensor_symmetric)
PER_CHANNEL = PerChannelMinMaxObserver.with_args(dtype=torch.qint8, qscheme=torch.per_channel_symmetric)
WEIGHTS = {"per tensor": PER_TENSOR, "per channel": PER_CHANNEL}
pytestmark = [pytest.mark.rule("CVT-02"), pytest.mark.rule("CVT-07")]


class Net(nn.Module):
    """Two convolutions that share a module, a nested linear layer, a function with a weight, and several outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 3, 3, padding=1), nn.Sequential(nn.Linear(3, 4), nn.ReLU())
        self.weight = nn.Parameter(torch.linspace(-1, 1, 20).reshape(5, 4))

    def forward(self, x: Tensor) -> dict[str, Any]:
        x = self.conv(self.conv(x)).mean((2, 3))
        x = self.head(x)
        return {"joined": torch.cat([x, x]), "rest": (nn.functional.linear(x, self.weight), None)}


def reference_of(model: nn.Module, *inputs: Tensor, weight: Any = PER_CHANNEL, activation: Any = ACTIVATION) -> Any:
    mapping = QConfigMapping().set_global(QConfig(activation, weight))
    prepared = refimpl.prepare_fx(model.eval(), mapping, inputs)
    prepared(*inputs)
    return refimpl.convert_to_reference_decomposed_fx(prepared)


def rows(number: int, *shape: int) -> Tensor:
    size = (number, *(shape or (3, 6, 6)))
    return torch.linspace(-1, 2, int(torch.Size(size).numel())).reshape(size)


def spelled(program: ExportedProgram) -> list[tuple[str, tuple[str, ...]]]:
    """Each call of an op: its name, and the kinds of its arguments."""
    calls = [node for node in program.graph.nodes if node.op == "call_function"]
    return [(str(node.target), tuple(type(each).__name__ for each in node.args)) for node in calls]


@pytest.mark.parametrize("weight", WEIGHTS)
@pytest.mark.parametrize("activation", [ACTIVATION, DYNAMIC], ids=["static", "dynamic"])
def test_a_program_computes_the_same_bits_for_any_batch(weight: str, activation: Any) -> None:
    reference = reference_of(Net(), rows(2), weight=WEIGHTS[weight], activation=activation)
    before = str(reference.graph), copy.deepcopy(reference.state_dict())
    run = export_reference(reference, (rows(1),)).module()
    for number in (1, 2, 7):
        found, right = run(rows(number)), reference(rows(number))
        assert found.keys() == right.keys() and found["rest"][1] is None
        assert all(map(torch.equal, tree_leaves(found)[:2], tree_leaves(right)[:2]))
    assert str(reference.graph) == before[0] and str(reference.state_dict()) == str(before[1])


@pytest.mark.parametrize("weight", WEIGHTS)
def test_weights_are_integers_and_qparams_of_one_element_are_numbers(weight: str) -> None:
    program = export_reference(reference_of(Net(), rows(2), weight=WEIGHTS[weight]), (rows(2),))
    calls, numbers = spelled(program), ("Node", "float", "int", "int", "int", "dtype")
    for name, kinds in calls:
        if name.startswith("quantized_decomposed") and "per_tensor" in name:
            assert name.endswith("quantize_per_tensor.default") and kinds == numbers
    weights = [each for each in calls if each[0].endswith("dequantize_per_channel.default")]
    if weight == "per channel":
        assert weights == [(weights[0][0], ("Node", "Node", "Node", "int", "int", "int", "dtype"))] * 4  # conv twice
    else:
        assert weights == []
    assert "quantized_decomposed.quantize_per_channel.default" not in [name for name, _ in calls]
    held = {name: value for name, value in program.state_dict.items() if name.endswith("integers")}
    assert len(held) == 3 and {value.dtype for value in held.values()} == {torch.int8}


@pytest.mark.parametrize("weight", WEIGHTS)
def test_weights_stay_floats_where_a_converter_wants_them(weight: str) -> None:
    reference = reference_of(Net(), rows(2), weight=WEIGHTS[weight])
    program = export_reference(reference, (rows(2),), fold_weights=False)
    assert {value.dtype for name, value in program.state_dict.items() if name.endswith("weight")} == {torch.float32}
    assert not [name for name in program.state_dict if name.endswith("integers")]
    of_parameters = [node for node in program.graph.nodes if "quantize_per" in str(node.target)]
    scheme = "channel" if weight == "per channel" else "tensor"
    names = [str(node.target) for node in of_parameters if str(node.args[0]).startswith("p_")]
    assert names == [f"quantized_decomposed.quantize_per_{scheme}.default"] * 4  # conv twice
    assert all(map(torch.equal, tree_leaves(program.module()(rows(2)))[:2], tree_leaves(reference(rows(2)))[:2]))


def test_qparams_chosen_at_run_time_are_tensors() -> None:
    reference = reference_of(nn.Sequential(nn.Linear(4, 3)), rows(2, 4), activation=DYNAMIC, weight=PER_TENSOR)
    targets = [node.target for node in export_reference(reference, (rows(2, 4),)).graph.nodes if node.args]
    assert targets[:5] == [
        OPS.choose_qparams.tensor,
        operator.getitem,
        operator.getitem,
        OPS.quantize_per_tensor.tensor,
        OPS.dequantize_per_tensor.tensor,
    ]


@pytest.mark.slow
@pytest.mark.parametrize("folds", [True, False], ids=["folded", "not folded"])
@pytest.mark.parametrize("kind", ["x86", "xnnpack", "xnnpack dynamic"])
def test_it_is_what_pt2e_gives(kind: str, folds: bool) -> None:
    """For the same model, the same calls with arguments of the same kinds, but for their order."""
    require_torchao()
    pt2e = import_module("torchao.quantization.pt2e.quantize_pt2e")
    model, x = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)).eval(), (rows(2, 4),)
    prepared = pt2e.prepare_pt2e(torch.export.export(model, x).module(), quantizer_of(kind))
    prepared(*x)
    theirs = torch.export.export(pt2e.convert_pt2e(prepared, fold_quantize=folds), x)
    activation = DYNAMIC if kind.endswith("dynamic") else ACTIVATION
    weight = PER_CHANNEL if kind == "x86" else PER_TENSOR
    ours = export_reference(reference_of(model, *x, weight=weight, activation=activation), x, fold_weights=folds)
    assert set(spelled(theirs)) <= set(spelled(ours)) and len(set(spelled(theirs))) >= 4


def quantizer_of(kind: str) -> Any:
    if kind == "x86":
        x86 = import_module("torchao.quantization.pt2e.quantizer.x86_inductor_quantizer")
        return x86.X86InductorQuantizer().set_global(x86.get_default_x86_inductor_quantization_config())
    xnnpack = pytest.importorskip("executorch.backends.xnnpack.quantizer.xnnpack_quantizer")
    config = xnnpack.get_symmetric_quantization_config(is_per_channel=False, is_dynamic=kind.endswith("dynamic"))
    return xnnpack.XNNPACKQuantizer().set_global(config)


FLOAT_QPARAMS = PerChannelMinMaxObserver.with_args(dtype=torch.quint8, qscheme=torch.per_channel_affine_float_qparams)
HALF = PlaceholderObserver.with_args(dtype=torch.float16)
INDICES = torch.tensor([[0, 2], [4, 1]])


@pytest.mark.parametrize(
    ("model", "x", "qconfig", "count"),
    [
        (nn.GRUCell(4, 3), rows(2, 4), QConfig(DYNAMIC, PER_TENSOR), 2),
        (nn.LSTMCell(4, 3), rows(2, 4), QConfig(DYNAMIC, PER_CHANNEL), 2),
        (nn.LSTM(4, 3, num_layers=2), rows(2, 5, 4), QConfig(DYNAMIC, PER_TENSOR), 4),
        (nn.Embedding(5, 3), INDICES, QConfig(PlaceholderObserver, FLOAT_QPARAMS), 1),
        (nn.EmbeddingBag(5, 3), INDICES, QConfig(PlaceholderObserver, FLOAT_QPARAMS), 1),
        (nn.Linear(4, 3), rows(2, 4), QConfig(HALF.with_args(is_dynamic=True), HALF), 0),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_every_kind_of_weight_is_held_as_integers(model: nn.Module, x: Tensor, qconfig: QConfig, count: int) -> None:
    prepared = refimpl.prepare_fx(nn.Sequential(model).eval(), QConfigMapping().set_global(qconfig), (x,))
    prepared(x)
    reference = refimpl.convert_to_reference_decomposed_fx(prepared)
    program = export_reference(reference, (x,))
    held = [name for name, value in program.state_dict.items() if value.dtype in (torch.int8, torch.uint8)]
    assert len(held) == count and [name for name, _ in spelled(program) if name.startswith("aten.quantize")] == []
    unguarded = {"check_guards"} & inspect.signature(program.module).parameters.keys()
    run = program.module(**dict.fromkeys(unguarded, False))  # torch 2.9 writes guards of sizes that do not run
    assert all(map(torch.equal, tree_leaves(run(x)), tree_leaves(reference(x))))


class Derived(nnqr.Linear):
    """A vendor's class with torch's weight."""


class OwnWeight(nnqr.Linear):
    """A vendor's class that reads its weight in its own way."""

    def get_weight(self) -> Tensor:
        found: Tensor = super().get_weight() * 2  # type: ignore[no-untyped-call]
        return found


class NoReader(nn.Linear):
    """A vendor's class with a weight that only looks like torch's."""


@pytest.mark.parametrize(("kind", "held"), [(Derived, 1), (OwnWeight, 0), (NoReader, 0)])
def test_a_module_that_reads_its_weight_in_its_own_way_keeps_it(kind: type[nn.Module], held: int) -> None:
    reference = reference_of(nn.Sequential(nn.Linear(4, 3)), rows(2, 4))
    reference.get_submodule("0").__class__ = kind
    program = export_reference(reference, (rows(2, 4),))
    assert [name.rpartition(".")[2] for name in program.state_dict].count("weight_integers") == held
    assert torch.equal(program.module()(rows(2, 4)), reference(rows(2, 4)))


def test_a_weight_of_one_channel_has_one_spelling() -> None:
    """Whether its scale is called one per tensor or one per channel."""
    models = [reference_of(nn.Sequential(nn.Linear(4, 1)), rows(2, 4), weight=each) for each in WEIGHTS.values()]
    found = [spelled(export_reference(model, (rows(2, 4),))) for model in models]
    assert found[0] == found[1] and "quantized_decomposed.dequantize_per_channel.default" in dict(found[0])


# -- shapes -----------------------------------------------------------------------------------------------------------


class Sum(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x + y


def shapes(program: ExportedProgram) -> list[list[bool]]:
    """Which axes of the inputs are dynamic."""
    names = program.graph_signature.user_inputs
    inputs = [node.meta["val"].shape for node in program.graph.nodes if node.name in names]
    return [[isinstance(size, torch.SymInt) for size in shape] for shape in inputs]


@pytest.mark.parametrize(
    ("y", "dynamic_batch", "expected"),
    [
        (rows(3, 4), True, [[True, False], [True, False]]),
        (rows(3, 4), False, [[False, False], [False, False]]),
        (rows(1, 4), True, [[True, False], [False, False]]),
        (torch.tensor(2.0), True, [[True, False], []]),
    ],
    ids=["both", "static", "one row is broadcast", "a number"],
)
def test_axis_0_of_the_inputs_with_the_most_rows_is_dynamic(y: Tensor, dynamic_batch: bool, expected: Any) -> None:
    reference = reference_of(Sum(), rows(3, 4), y)
    program = export_reference(reference, (rows(3, 4), y), dynamic_batch=dynamic_batch)
    assert shapes(program) == expected


def test_inputs_are_contiguous_whatever_the_examples_are() -> None:
    x = rows(2).to(memory_format=torch.channels_last)
    program = export_reference(reference_of(Net(), x), (x,))
    (value,) = (node.meta["val"] for node in program.graph.nodes if node.name in program.graph_signature.user_inputs)
    assert value.stride() == (108, 36, 6, 1)


# -- what has no program ----------------------------------------------------------------------------------------------


class Branches(nn.Module):
    """A reference module whose result depends on its input's numbers."""

    def forward(self, x: Tensor) -> Tensor:
        return x + 1 if x.sum() > 0 else x


def test_a_model_that_torch_does_not_export_is_named_with_what_torch_says() -> None:
    root = nn.Module()
    root.branches = Branches()
    graph = torch.fx.Graph()
    graph.output(graph.call_module("branches", (graph.placeholder("x"),)))
    with pytest.raises(ModelError) as caught:
        export_reference(GraphModule(root, graph), (rows(2, 4),))
    said = str(caught.value)
    assert said.startswith("the reference model (branches: Branches) has no exported program: torch says "), said
    assert "data-dependent" in said and len(said) < 700 and "\n" not in said


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: nn.Linear(2, 2), "found a Linear; give the GraphModule that convert_to_reference_decomposed_fx"),
        (lambda: quantized_form(), "quantize_per_tensor makes a quantized tensor, which torch.export does not take"),
    ],
    ids=["a module", "quantized tensors"],
)
def test_what_is_no_decomposed_reference_model_is_refused(make: Any, expected: str) -> None:
    with pytest.raises(ModelError, match=f"export_reference: {expected}"):
        export_reference(make(), (rows(2, 4),))


def quantized_form() -> GraphModule:
    prepared = refimpl.prepare_fx(
        Sum(), QConfigMapping().set_global(QConfig(ACTIVATION, PER_TENSOR)), (rows(1, 2),) * 2
    )
    prepared(rows(1, 2), rows(1, 2))
    return refimpl.convert_to_reference_fx(prepared)
