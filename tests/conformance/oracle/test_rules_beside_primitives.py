"""A rule for claims beside the primitives that its op is decomposed into: equal results, no wider bound (NUM-04)."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_map

from fx_quant_conformance.backends.base import Capabilities
from fx_quant_conformance.conformance.bounds.error_bounds import MOVES, OpCall, Value
from fx_quant_conformance.conformance.oracle.decompose import evaluate_opened, open_op
from fx_quant_conformance.conformance.oracle.table import OP_RULES

STEP = (1 + 2.0**-9) / 32
ERRORS = (0.0, 1e-3, 5e-2)
CAPABILITIES = Capabilities(float_accumulation=True)

draw = torch.Generator().manual_seed(0)
X, ROWS = torch.randn(2, 8, 6, 6, generator=draw) * 2, torch.randn(2, 6, 16, generator=draw)
Y, WEIGHT = torch.rand(2, 8, 6, 6, generator=draw) + 0.5, torch.randn(4, 8, 3, 3, generator=draw)
CALLS: dict[Callable[..., Any], tuple[Any, ...]] = {
    **dict.fromkeys((F.leaky_relu, F.elu, F.hardswish, F.hardsigmoid, torch.sigmoid, torch.tanh), (X,)),
    **dict.fromkeys((F.silu, F.mish, F.softplus, F.gelu, F.relu, F.instance_norm), (X,)),
    **dict.fromkeys((operator.add, operator.sub, operator.mul), (X, Y)),
    F.prelu: (X, torch.rand(8, generator=draw)),
    F.softmax: (ROWS, -1),
    F.layer_norm: (ROWS, (16,)),
    F.group_norm: (X, 2),
    F.batch_norm: (X, torch.zeros(8), torch.ones(8)),
    operator.truediv: (X, 3.0),
    operator.floordiv: (X, 0.7),
    F.interpolate: (X, None, 2.0, "bilinear"),
    torch.matmul: (ROWS, ROWS.mT),
    torch.addmm: (ROWS[0][:, :6], ROWS[0], ROWS[1].T.contiguous()[:, :6]),
    torch.mean: (X, (2, 3)),
    F.avg_pool2d: (X, 2),
    F.adaptive_avg_pool2d: (X, 3),
    F.max_pool2d: (X, 2),
    F.pad: (X, (1, 1)),
    F.dropout: (X, 0.5, False),
    F.linear: (ROWS, torch.randn(5, 16, generator=draw)),
    F.conv2d: (X, WEIGHT),
    F.conv_transpose2d: (X, WEIGHT.transpose(0, 1).contiguous()),
    F.scaled_dot_product_attention: (ROWS, ROWS, ROWS),
    torch.clamp: (X, -1.0, 1.0),
    torch.cat: ([X, Y],),
    torch.flatten: (X, 1),
}
WIDER: dict[Callable[..., Any], tuple[float, str]] = {
    **dict.fromkeys((F.layer_norm, F.group_norm), (1.4, "may be evaluated as a·x + (b − μ·a)")),
    F.prelu: (2.0, "has slopes that may be dequantized first: two roundings more"),
    F.softmax: (1.3, "holds for what is on no grid as well: its largest element is rounded to float32"),
    F.scaled_dot_product_attention: (1.8, "may be summed block by block, and rescaled"),
}
"""By how much a rule's bound is wider than that of the primitives, and why it is right all the same."""


def evaluate_both(op: Callable[..., Any], error: float) -> tuple[Value, Value]:
    """What the rule and the primitives give for operands on a grid, all of them off by an error."""

    def lay(operand: Any) -> Any:
        if not isinstance(operand, Tensor):
            return operand
        errors = {"upstream": torch.full(operand.shape, error, dtype=torch.float64)} if error else {}
        real = (operand.double() / STEP).round() * STEP
        return Value(real=real, step=torch.tensor(STEP, dtype=torch.float64), errors=errors)

    args, rule = tree_map(lay, CALLS[op]), OP_RULES[op]
    call = OpCall(function=rule.exact or op, args=args, kwargs={}, capabilities=CAPABILITIES)
    result = call.evaluate(lambda value: value.real.clone(), Tensor.double)
    found, _ = evaluate_opened(open_op(op, args, {}), args, {}, CAPABILITIES)
    return Value(real=result, errors=rule.bound(replace(call, result=result))), found


def find_worst(bound: Tensor, primitive: Tensor) -> float:
    """The largest ratio of the rule's bound to that of the primitives."""
    ratios = bound[bound > 0] / primitive[bound > 0]
    return float(ratios.max()) if ratios.numel() else 1.0


@pytest.mark.rule("NUM-04")
@pytest.mark.parametrize("op", CALLS, ids=lambda op: op.__name__)
def test_a_rule_is_no_wider_than_the_primitives(op: Callable[..., Any]) -> None:
    worst = 1.0
    for error in ERRORS:
        own, primitive = evaluate_both(op, error)
        assert torch.allclose(own.real, primitive.real, rtol=1e-12, atol=1e-13)
        assert bool((primitive.error() >= 0).all())
        worst = max(worst, find_worst(own.error(), primitive.error()))
    allowed, _ = WIDER.get(op, (1.0, ""))
    assert worst <= allowed * (1 + 1e-9)
    assert op not in WIDER or worst > 1.0, "it is no exception any more"


def test_what_is_compared_is_what_rules_are_for() -> None:
    kinds = {OP_RULES[op].arithmetic for op in CALLS}
    assert len(kinds) == 4 and MOVES in kinds
    bounds = {getattr(rule.bound, "func", rule.bound) for rule in OP_RULES.values()}
    tried = {getattr(OP_RULES[op].bound, "func", OP_RULES[op].bound) for op in CALLS}
    assert {bound.__name__ for bound in bounds - tried} == {"bound_float_bags"}  # of modules with a table
