"""Each invariant fires on a graph that was broken by hand (FUS-03, OBS-15, CVT-01, CVT-06)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from fx_quant_conformance import refimpl
from fx_quant_conformance.refimpl.graph.invariants import (
    INVARIANTS,
    InvariantError,
    check_graph,
    is_dequantize,
    is_quantize,
)
from tests.refimpl.support import both_flows as flows
from tests.refimpl.support.zoo import build_named

PASSES = ("fuse", "prepare", "convert", "lower")


def model_after(stage: str) -> Any:
    model, batches = build_named("Mlp")
    flow = flows.our_flow(model, flows.global_mapping(), batches)
    return flow.prepared if stage in ("fuse", "prepare") else flow.reference


def first(model: Any, test: Callable[[Any], bool]) -> Any:
    return next(node for node in model.graph.nodes if test(node))


def is_observer(node: Any) -> bool:
    return "activation_post_process" in str(node.target)


def break_order(model: Any) -> None:
    node = first(model, lambda node: node.op == "call_module")
    node.append(first(model, lambda node: node.op == "placeholder"))


def orphan_observer(model: Any) -> None:
    observer = first(model, is_observer)
    observer.replace_all_uses_with(observer.args[0])


def leave_an_observer(model: Any) -> None:
    model.add_module("activation_post_process_9", refimpl.MinMaxObserver())
    node = first(model, lambda node: node.op == "placeholder")
    with model.graph.inserting_after(node):
        model.graph.call_module("activation_post_process_9", (node,))


def dequantize_a_float(model: Any) -> None:
    one, other = [node for node in model.graph.nodes if is_dequantize(node)][:2]
    other.args = (one,)


def quantize_for_nobody(model: Any) -> None:
    node = first(model, is_dequantize)
    node.replace_all_uses_with(first(model, lambda node: node.op == "placeholder"))
    model.graph.erase_node(node)


BROKEN: list[tuple[Callable[[Any], None], str, str]] = [
    (break_order, "prepare", "FUS-03: .*was used before it has been defined"),
    (orphan_observer, "prepare", "OBS-15: observer activation_post_process_0 has no user"),
    (leave_an_observer, "convert", "CVT-01: observer activation_post_process_9 was not converted"),
    (dequantize_a_float, "convert", "CVT-01: dequantize_1 dequantizes dequantize, which nothing quantized"),
    (quantize_for_nobody, "convert", "CVT-06: quantize_per_tensor quantizes for no user"),
]


@pytest.mark.rule("FUS-03")
@pytest.mark.rule("OBS-15")
@pytest.mark.rule("CVT-01")
@pytest.mark.rule("CVT-06")
@pytest.mark.parametrize(("damage", "stage", "message"), BROKEN, ids=[damage.__name__ for damage, *_ in BROKEN])
def test_each_invariant_fires_with_its_rule_and_node(damage: Any, stage: str, message: str) -> None:
    model = model_after(stage)
    check_graph(model, stage)
    damage(model)
    with pytest.raises(InvariantError, match=f"after {stage}: {message}"):
        check_graph(model, stage)


@pytest.mark.rule("CVT-01")
def test_every_invariant_is_broken_above_and_holds_of_every_stage() -> None:
    assert {message[:6] for *_, message in BROKEN} == {invariant.rule for invariant in INVARIANTS}
    assert len(BROKEN) == len(INVARIANTS)
    assert all(set(invariant.passes) <= set(PASSES) for invariant in INVARIANTS)


@pytest.mark.rule("CVT-07")
def test_quantize_and_dequantize_are_known_in_both_forms() -> None:
    from fx_quant_conformance.refimpl import convert_to_reference_decomposed_fx

    model, batches = build_named("Functions")
    flow = flows.our_flow(model, flows.global_mapping(flows.PER_CHANNEL), batches)
    for converted in (flow.reference, convert_to_reference_decomposed_fx(flow.prepared)):
        assert flows.graph_counts(converted, is_quantize, is_dequantize) == [6, 6]
