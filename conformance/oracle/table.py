"""The oracle's table: a rule per op says what computes it exactly and how a right backend may differ (NUM-04).

Functions by identity, methods by name, modules by class. The rules stand in the records of the ops (ops/), where their
derivations are. An aten op, which torch.export may write for a call, has the rule of a function with the same meaning
and the same order of arguments.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.nn.functional as F

from fx_quant_conformance.conformance.bounds.error_bounds import OpRule
from fx_quant_conformance.conformance.ops import arithmetic, attention, data_movement, normalisations
from fx_quant_conformance.conformance.ops.table import RECORDS

OP_RULES: dict[Any, OpRule] = {
    **{op: record.rule for op, record in RECORDS.items() if record.rule is not None},
    **arithmetic.UNSAMPLED,
    **attention.UNSAMPLED,
    **data_movement.UNSAMPLED,
    **normalisations.UNSAMPLED,
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
