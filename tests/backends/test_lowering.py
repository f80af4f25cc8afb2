"""Packs: several reference models lowered as one, which computes what each does, and names nodes by their parts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.fx import GraphModule

from backends.base import Backend, Capabilities, Representation
from backends.exporting import owner_of
from backends.lowering import join_graphs, lower_pack
from refimpl import BackendConfig
from refimpl.invariants import is_dequantize, is_quantize
from tests.runtimes.references import image, reference_of


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.conv(x))


class Sums(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return torch.cat([x + y, x], 1).reshape(-1, 6)


class Pairs(nn.Module):
    """Two outputs, and a weight that a function reads."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, 15).reshape(5, 3))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return F.linear(x, self.weight), x.sigmoid()


INPUTS = ((image(2, 3, 4, 4),), (image(5, 3), image(5, 3) * 2), (image(1, 3),))


@pytest.fixture
def references() -> list[GraphModule]:
    models = (Layers(), Sums(), Pairs())
    return [reference_of(model, *inputs) for model, inputs in zip(models, INPUTS, strict=True)]


class Takes(Backend):
    """Keeps what it is given to lower, and runs it."""

    name = "takes"

    def __init__(self, representation: Representation, *, dynamic_batch: bool = True) -> None:
        self.representation = representation
        self.given: Any = None
        self._dynamic_batch = dynamic_batch

    def backend_config(self) -> BackendConfig:
        return BackendConfig("takes")

    def capabilities(self) -> Capabilities:
        return Capabilities(dynamic_batch=self._dynamic_batch)

    def lower(self, reference_model: Any, example_inputs: tuple[Any, ...]) -> Callable[..., Any]:
        self.given = reference_model
        run = reference_model.module() if isinstance(reference_model, ExportedProgram) else reference_model
        return torch.no_grad()(run)


def values_of(inputs: tuple[tuple[Tensor, ...], ...]) -> list[Tensor]:
    return [value for own in inputs for value in own]


def is_same(found: Any, right: Any) -> bool:
    if isinstance(right, Tensor):
        return torch.equal(found, right)
    return len(found) == len(right) and all(map(is_same, found, right))


@pytest.mark.rule("LOW-01")
@pytest.mark.parametrize("representation", [Representation.DECOMPOSED, Representation.EXPORTED])
def test_a_pack_gives_what_each_of_its_models_gives(
    references: list[GraphModule], representation: Representation
) -> None:
    codes = [reference.code for reference in references]
    parts = [*zip(references, INPUTS, strict=True), (references[0], (image(3, 3, 5, 5),))]
    lowered = lower_pack(Takes(representation), parts)
    found = lowered(*[value for _, own in parts for value in own])
    assert isinstance(found, tuple)
    assert is_same(found, [reference(*own) for reference, own in parts]), "the first one is in it twice"
    assert [reference.code for reference in references] == codes, "the models themselves are left as they were"


@pytest.mark.rule("LOW-01")
def test_each_part_of_a_program_takes_its_own_number_of_rows(references: list[GraphModule]) -> None:
    lowered = lower_pack(Takes(Representation.EXPORTED), list(zip(references, INPUTS, strict=True)))
    others = ((image(7, 3, 4, 4),), (image(3, 3), image(3, 3)), (image(4, 3),))
    found = lowered(*values_of(others))
    assert is_same(found, [reference(*own) for reference, own in zip(references, others, strict=True)])


def test_no_axis_is_dynamic_where_the_backend_takes_none(references: list[GraphModule]) -> None:
    backend = Takes(Representation.EXPORTED, dynamic_batch=False)
    lower_pack(backend, list(zip(references, INPUTS, strict=True)))
    values = [node.meta["val"] for node in backend.given.graph.nodes if isinstance(node.meta.get("val"), Tensor)]
    assert values and not any(isinstance(size, torch.SymInt) for value in values for size in value.shape)


@pytest.mark.rule("LOW-04")
def test_the_names_of_nodes_begin_with_those_of_their_parts(references: list[GraphModule]) -> None:
    joined = join_graphs(references)
    assert not any(module.training for module in joined.modules()), "as the models themselves"
    inner = [node for node in joined.graph.nodes if node.op.startswith("call_")]
    counts = [sum(node.op.startswith("call_") for node in reference.graph.nodes) for reference in references]
    assert [sum(node.name.startswith(f"part{part}_") for node in inner) for part in range(3)] == counts
    assert not any(isinstance(joined.get_submodule(str(node.target)), GraphModule) for node in inner
                   if node.op == "call_module")  # fmt: skip


@pytest.mark.rule("LOW-04")
def test_in_a_program_every_op_that_computes_is_owned_by_its_part(references: list[GraphModule]) -> None:
    """Also what was a function or a method, of which a program keeps no name."""
    backend = Takes(Representation.EXPORTED)
    lower_pack(backend, list(zip(references, INPUTS, strict=True)))
    nodes = [node for node in backend.given.graph.nodes if node.op == "call_function"]
    owners = {
        owner_of(node) for node in nodes if not is_quantize(node) and not is_dequantize(node) and "sym" not in node.name
    }
    assert owners == {
        "part0_conv", "part1_add", "part1_cat", "part1_reshape", "part2_linear", "part2_sigmoid"
    }  # fmt: skip  # the relu is fused into the convolution
