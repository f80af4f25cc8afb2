"""The oracle's table of ops is one table, though its rows stand in several modules (rule NUM-04)."""

from __future__ import annotations

import itertools

import pytest

from conformance.oracle import rules_activations as rows_functions
from conformance.oracle import rules_arithmetic as rows_values
from conformance.oracle import rules_dynamic as rows_dynamic
from conformance.oracle import rules_weighted as rows_weighted

TABLES = (rows_weighted, rows_values, rows_functions, rows_dynamic)


@pytest.mark.rule("NUM-04")
@pytest.mark.parametrize(("one", "other"), itertools.combinations(TABLES, 2), ids=lambda table: table.__name__[12:])
def test_an_op_has_one_row(one: object, other: object) -> None:
    both = one.ROWS.keys() & other.ROWS.keys()  # type: ignore[attr-defined]
    assert not both, f"only the later row would count of {both}"
