"""The records of the ops without weights that the oracle's rules of arithmetic are about, of all their modules."""

from __future__ import annotations

from typing import Any

from fx_quant_conformance.conformance.ops import arithmetic, data_movement, pooling
from fx_quant_conformance.conformance.ops.variants import OpRecord

RECORDS: dict[Any, OpRecord] = {**pooling.RECORDS, **data_movement.RECORDS, **arithmetic.RECORDS}
