"""The oracle's table of ops is one table, though its rules stand in several modules (rule NUM-04)."""

from __future__ import annotations

import itertools
from types import ModuleType

import pytest

from fx_quant_conformance.conformance.ops import (
    activations,
    arithmetic,
    attention,
    data_movement,
    embeddings_and_recurrent,
    normalisations,
    pooling,
    weighted,
)

FAMILIES = (
    *(activations, arithmetic, attention, data_movement, embeddings_and_recurrent, normalisations, pooling, weighted),
)
PAIRS = list(itertools.combinations(FAMILIES, 2))


def list_ops(family: ModuleType) -> list[object]:
    return [*getattr(family, "RECORDS", ()), *getattr(family, "UNSAMPLED", ())]


@pytest.mark.rule("NUM-04")
@pytest.mark.parametrize(("one", "other"), PAIRS, ids=lambda family: family.__name__)
def test_an_op_has_one_record(one: ModuleType, other: ModuleType) -> None:
    both = set(list_ops(one)) & set(list_ops(other))
    assert not both, f"only the later record would count of {both}"


@pytest.mark.rule("NUM-04")
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.__name__)
def test_an_op_of_a_family_has_one_record(family: ModuleType) -> None:
    found = list_ops(family)
    assert found and len(found) == len(set(found))
