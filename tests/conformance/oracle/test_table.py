"""The oracle's table of ops is one table, though its rules stand in several modules (rule NUM-04)."""

from __future__ import annotations

import itertools

import pytest

from fx_quant_conformance.conformance.oracle import (
    rules_activations,
    rules_arithmetic,
    rules_attention,
    rules_dynamic,
    rules_weighted,
)

TABLES = (rules_weighted, rules_arithmetic, rules_activations, rules_attention, rules_dynamic)


@pytest.mark.rule("NUM-04")
@pytest.mark.parametrize(("one", "other"), itertools.combinations(TABLES, 2), ids=lambda table: table.__name__[12:])
def test_an_op_has_one_rule(one: object, other: object) -> None:
    both = one.OP_RULES.keys() & other.OP_RULES.keys()  # type: ignore[attr-defined]
    assert not both, f"only the later rule would count of {both}"
