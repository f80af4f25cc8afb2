"""The op table: how to build, call and vary each op that a pattern can name (variants.py)."""

from __future__ import annotations

from typing import Any

from fx_quant_conformance.conformance.ops import (
    activations,
    arithmetic,
    data_movement,
    embeddings_and_recurrent,
    pooling,
    weighted,
)
from fx_quant_conformance.conformance.ops.variants import OpSamples

FAMILIES: dict[str, dict[Any, OpSamples]] = {
    "weighted": weighted.OP_SAMPLES,
    "pooling": pooling.OP_SAMPLES,
    "data_movement": data_movement.OP_SAMPLES,
    "arithmetic": arithmetic.OP_SAMPLES,
    "activations": activations.OP_SAMPLES,
    "embeddings_and_recurrent": embeddings_and_recurrent.OP_SAMPLES,
}
"""The ops by what they have in common."""
OP_SAMPLES: dict[Any, OpSamples] = {op: samples for family in FAMILIES.values() for op, samples in family.items()}
WEIGHTED = frozenset(weighted.OP_SAMPLES)
"""The ops that sum products with a weight."""
