"""The samples of the ops without weights that the oracle's rules of arithmetic are about, of all their modules."""

from __future__ import annotations

from typing import Any

from fx_quant_conformance.conformance.ops import arithmetic, data_movement, pooling
from fx_quant_conformance.conformance.ops.variants import OpSamples

OP_SAMPLES: dict[Any, OpSamples] = {**pooling.OP_SAMPLES, **data_movement.OP_SAMPLES, **arithmetic.OP_SAMPLES}
