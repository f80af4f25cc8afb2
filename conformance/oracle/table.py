"""The oracle's table: a rule per op says what computes it exactly and how a right backend may differ (NUM-04).

Functions by identity, methods by name, modules by class. The rules stand where their derivations are. An aten op, which
torch.export may write for a call, has the rule of a function with the same meaning and the same order of arguments.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.nn.functional as F

from fx_quant_conformance.conformance.oracle import (
    rules_activations,
    rules_arithmetic,
    rules_attention,
    rules_dynamic,
    rules_weighted,
)
from fx_quant_conformance.conformance.oracle.error_bounds import OpRule

OP_RULES: dict[Any, OpRule] = {
    **rules_weighted.OP_RULES,
    **rules_arithmetic.OP_RULES,
    **rules_activations.OP_RULES,
    **rules_attention.OP_RULES,
    **rules_dynamic.OP_RULES,
}
_aten: Any = torch.ops.aten
_ATEN_OPS: dict[Any, Any] = {
    _aten.linear.default: F.linear,
    _aten.scaled_dot_product_attention.default: F.scaled_dot_product_attention,
    **dict.fromkeys(
        (
            _aten.contiguous.default,
            _aten.expand.default,
            _aten.permute.default,
            _aten.reshape.default,
            _aten.select.int,
            _aten.slice.Tensor,
            _aten.squeeze.dim,
            _aten.transpose.int,
            _aten.unflatten.int,
            _aten.unsqueeze.default,
        ),
        operator.getitem,  # it moves values, and computes none
    ),
    _aten.view.default: "view",
}
_vendor_rules: dict[Any, OpRule] = {}


def rule_of(op: Any) -> OpRule | None:
    """Return the rule of an op; None if neither the table nor a vendor has one."""
    op = _ATEN_OPS.get(op, op)
    return OP_RULES.get(op) or _vendor_rules.get(op)


def add_vendor_rule(op: Any, rule: OpRule) -> None:
    """Add the rule of a vendor's own op, in place of an earlier one; an op of the table keeps its rule."""
    _vendor_rules[op] = rule
