"""The op table: how to build, call and vary each op that a pattern can name (variants.py)."""

from __future__ import annotations

from typing import Any

from conformance.ops import activations, arithmetic, data_movement, embeddings_and_recurrent, pooling, weighted
from conformance.ops.variants import OpSamples

OP_SAMPLES: dict[Any, OpSamples] = {
    **weighted.OP_SAMPLES,
    **pooling.OP_SAMPLES,
    **data_movement.OP_SAMPLES,
    **arithmetic.OP_SAMPLES,
    **activations.OP_SAMPLES,
    **embeddings_and_recurrent.OP_SAMPLES,
}
WEIGHTED = frozenset(weighted.OP_SAMPLES)
"""The ops that sum products with a weight."""
