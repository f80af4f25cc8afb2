"""The oracle's table: a rule per op says what computes it exactly and how a right backend may differ (NUM-04).

Functions by identity, methods by name, modules by class. The rules stand where their derivations are.
"""

from __future__ import annotations

from typing import Any

from conformance.oracle import rules_activations, rules_arithmetic, rules_attention, rules_dynamic, rules_weighted
from conformance.oracle.error_bounds import OpRule

OP_RULES: dict[Any, OpRule] = {
    **rules_weighted.OP_RULES,
    **rules_arithmetic.OP_RULES,
    **rules_activations.OP_RULES,
    **rules_attention.OP_RULES,
    **rules_dynamic.OP_RULES,
}
_vendor_rules: dict[Any, OpRule] = {}


def rule_of(op: Any) -> OpRule | None:
    """Return the rule of an op; None if neither the table nor a vendor has one."""
    return OP_RULES.get(op) or _vendor_rules.get(op)


def add_vendor_rule(op: Any, rule: OpRule) -> None:
    """Add the rule of a vendor's own op, in place of an earlier one; an op of the table keeps its rule."""
    _vendor_rules[op] = rule
