"""The samples of ops without weights: what they call, and that none is missing."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch

from fx_quant_conformance.backends.torch_engines.tables import native_config
from fx_quant_conformance.conformance.ops.op_model import MODEL_OF
from fx_quant_conformance.refimpl import ObservationType
from fx_quant_conformance.refimpl.config.patterns import leaf_name, leaves
from tests.conformance.support.ops_without_weights import RECORDS


@pytest.mark.rule("OBS-02")
def test_every_op_of_the_native_configs_that_shares_its_observer_has_samples() -> None:
    for entry in native_config("qnnpack").configs:
        if entry.observation_type is ObservationType.OUTPUT_SHARE_OBSERVER_WITH_INPUT:
            assert all(leaf in RECORDS for leaf in leaves(entry.normal_pattern)), entry


def called(op: Any, **away: Any) -> list[Any]:
    """The nodes of a variant: the base with some arguments away from it."""
    samples = RECORDS[op]
    arguments = {**samples.base(), **away}
    assert samples.is_valid(arguments)
    model = MODEL_OF[len(samples.inputs(arguments))]([samples.step(op, arguments)])
    return [node for node in torch.fx.symbolic_trace(model).graph.nodes if node.op.startswith("call")]


@pytest.mark.parametrize("op", (operator.add, torch.sub, torch.mul), ids=leaf_name)
def test_a_number_is_the_second_operand_or_the_first(op: Callable[..., Any]) -> None:
    (second,), (first,) = called(op, other=0.3), called(op, other=0.3, _number_first=True)
    assert (second.target, first.target) == (op, op)
    assert second.args[1] == 0.3 and first.args[0] == 0.3
    (twice,) = called(op, other="itself")
    assert twice.args[0] is twice.args[1]


def test_addmm_takes_its_bias_first_and_its_weight_last() -> None:
    (node,) = called(torch.addmm, beta=0.5)
    bias, x, weight = node.args
    assert (bias.op, x.op, weight.op, dict(node.kwargs)) == ("get_attr", "placeholder", "get_attr", {"beta": 0.5})


def test_a_shape_is_read_once_and_used_on_the_tensor() -> None:
    for away in ({}, {"dim": None}):
        size, reshape = called("size", **away)
        assert (size.target, reshape.target) == ("size", "reshape")
        assert size in reshape.args
    attribute, item, reshape = called("shape")
    assert attribute.args[1] == "shape" and item in reshape.args


def test_operands_are_broadcast_on_either_side_and_across_ranks() -> None:
    pairs = RECORDS[torch.add].arguments["shape"]
    assert isinstance(pairs, tuple)
    results = [(torch.zeros(left) + torch.zeros(right)).shape for left, right in pairs]
    zipped = list(zip(pairs, results, strict=True))
    assert any(left == result != right for (left, right), result in zipped)
    assert any(right == result != left for (left, right), result in zipped)
    assert any(left != result != right for (left, right), result in zipped)
    assert any(len(left) < len(right) for left, right in pairs) and any(len(left) > len(right) for left, right in pairs)
    assert {len(result) for result in results} >= {1, 3, 4, 5}
