"""The parity harness itself: it compares every stage, and every kind of seeded difference is found."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx import GraphModule, symbolic_trace

from tests.refimpl.support.canonical import canonical, difference, text_of
from tests.refimpl.support.parity import STAGES, TORCH, Case, Run, Side, compare, run
from tests.refimpl.support.zoo import CASES

BY_NAME = {case.name: case for case in CASES}
BASE = BY_NAME["CatThenConv, minmax"]


@pytest.fixture(scope="module")
def honest() -> Run:
    return run(TORCH, BASE)


def test_every_stage_has_a_result(honest: Run) -> None:
    assert tuple(honest.results) == STAGES
    assert compare(honest, honest) == {}


# ---- seeded differences -----------------------------------------------------------------------------------


def _observers(model: GraphModule) -> list[Any]:
    return [node for node in model.graph.nodes if "activation_post_process" in str(node.target)]


def drop_observer(model: GraphModule) -> None:
    observer = _observers(model)[0]
    observer.replace_all_uses_with(observer.args[0])
    model.graph.erase_node(observer)


def unshare_observer(model: GraphModule) -> None:
    calls: dict[Any, Any] = {}
    for node in _observers(model):
        if node.target in calls:
            model.add_module("unshared", copy.deepcopy(model.get_submodule(node.target)))
            node.target = "unshared"
            return
        calls[node.target] = node
    raise AssertionError("the model has no shared observer")


def rename_observer(model: GraphModule) -> None:
    node = _observers(model)[-1]
    model.add_module("renamed", model.get_submodule(node.target))
    delattr(model, node.target)
    node.target = "renamed"


def widen_range(model: GraphModule) -> None:
    observer: Any = model.get_submodule(_observers(model)[0].target)
    observer.quant_max = 127


def change_weight(model: GraphModule) -> None:
    weight: Any = next(iter(model.parameters())).data.view(-1)
    weight[0] = torch.nextafter(weight[0], torch.tensor(9.0))


def change_scale(model: GraphModule) -> None:
    name = next(name for name, _ in model.named_buffers() if name.endswith("_scale_0"))
    setattr(model, name, torch.nextafter(getattr(model, name), torch.tensor(9.0)))


def rename_scale(model: GraphModule) -> None:
    node = next(node for node in model.graph.nodes if node.op == "get_attr" and node.target.endswith("_scale_0"))
    model.register_buffer("renamed", getattr(model, node.target))
    delattr(model, node.target)
    node.target = "renamed"


def swap_operands(model: GraphModule) -> None:
    cat = next(node for node in model.graph.nodes if node.target is torch.cat)
    cat.update_arg(0, tuple(reversed(cat.args[0])))


def add_node(model: GraphModule) -> None:
    output = next(iter(reversed(model.graph.nodes)))
    with model.graph.inserting_before(output):
        output.update_arg(0, model.graph.call_function(torch.relu, (output.args[0],)))


def fail(model: GraphModule) -> None:
    raise RuntimeError("seeded")


Spoil = Callable[[GraphModule], None]
SEEDS: tuple[tuple[Spoil, str, str], ...] = (  # what is done to the result of which function, and the first stage hit
    (drop_observer, "prepare", "prepare"),
    (unshare_observer, "prepare", "prepare"),
    (rename_observer, "prepare", "prepare names"),
    (widen_range, "prepare", "prepare"),
    (change_weight, "reference", "reference"),
    (rename_scale, "reference", "reference names"),
    (swap_operands, "reference", "reference"),
    (add_node, "decomposed", "decomposed"),
    (change_scale, "lowered", "lowered"),
    (fail, "lowered", "lowered"),
)


def spoiled(where: str, spoil: Spoil) -> Side:
    """Return torch's front door with one function whose results are spoiled."""

    def after(function: Callable[..., GraphModule]) -> Callable[..., GraphModule]:
        def call(*args: Any, **kwargs: Any) -> GraphModule:
            model = function(*args, **kwargs)
            spoil(model)
            model.recompile()
            return model

        return call

    if where == "prepare":
        return replace(TORCH, prepare=after(TORCH.prepare))
    return replace(TORCH, converts={**TORCH.converts, where: after(TORCH.converts[where])})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spoil", "where", "stage"), [pytest.param(*seed, id=f"{seed[0].__name__} in {seed[1]}") for seed in SEEDS]
)
def test_a_seeded_difference_is_found_where_it_is(spoil: Spoil, where: str, stage: str, honest: Run) -> None:
    found = compare(honest, run(spoiled(where, spoil), BASE))
    assert next(iter(found)) == stage, f"found only: {found}"


def test_an_observer_that_sees_nothing_is_found_after_calibration(honest: Run) -> None:
    def deafen(model: GraphModule) -> None:
        observer: Any = model.get_submodule(_observers(model)[0].target)
        observer.forward = lambda x: x

    found = compare(honest, run(spoiled("prepare", deafen), BASE))
    assert next(iter(found)) == "calibrated"


# ---- canonical forms --------------------------------------------------------------------------------------


def test_dead_ends_count() -> None:
    plain, dead = symbolic_trace(nn.ReLU()), symbolic_trace(nn.ReLU())
    with dead.graph.inserting_before(next(iter(reversed(dead.graph.nodes)))):
        dead.graph.call_function(torch.neg, (next(iter(dead.graph.nodes)),))
    assert difference(canonical(plain), canonical(dead)).startswith("only refimpl: 1 torch.neg")


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (torch.tensor([1.0]), torch.tensor([1.0], dtype=torch.float64)),
        (torch.tensor([0.0]), torch.tensor([-0.0])),
        (torch.ones(9), torch.ones(9).index_fill(0, torch.tensor([8]), 2.0)),
        (torch.ones(3, 2), torch.ones(2, 3)),
        [torch.quantize_per_tensor(torch.ones(2), 0.5, zero_point, torch.qint8) for zero_point in (0, 1)],
        ((1, 2), (1, 2.0)),
    ],
)
def test_other_values_have_other_texts(left: Any, right: Any) -> None:
    assert text_of(left) != text_of(right)
    assert text_of(left) == text_of(copy.deepcopy(left))


def test_a_case_with_qat_learns() -> None:
    """Else the QAT cases would compare initial weights."""
    case: Case = BY_NAME["Mlp, qat qnnpack"]
    found = run(TORCH, case)
    weights = [[line.numbers for line in found.results[stage]] for stage in ("prepare", "calibrated")]  # type: ignore[union-attr]
    assert weights[0] != weights[1]
