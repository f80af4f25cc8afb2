"""The op table: the record of each op that a pattern can name (variants.py)."""

from __future__ import annotations

from typing import Any

from fx_quant_conformance.conformance.ops import (
    activations,
    arithmetic,
    data_movement,
    embeddings_and_recurrent,
    normalisations,
    pooling,
    weighted,
)
from fx_quant_conformance.conformance.ops.variants import OpRecord

FAMILIES: dict[str, dict[Any, OpRecord]] = {
    "weighted": weighted.RECORDS,
    "pooling": pooling.RECORDS,
    "data_movement": data_movement.RECORDS,
    "arithmetic": arithmetic.RECORDS,
    "activations": activations.RECORDS | normalisations.RECORDS,
    "embeddings_and_recurrent": embeddings_and_recurrent.RECORDS,
}
"""The ops by what they have in common."""
RECORDS: dict[Any, OpRecord] = {op: record for family in FAMILIES.values() for op, record in family.items()}
WEIGHTED = frozenset(weighted.RECORDS)
"""The ops that sum products with a weight."""
