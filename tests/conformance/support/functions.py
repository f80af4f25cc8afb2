"""The records of activation functions and normalisations."""

from __future__ import annotations

from typing import Any

from fx_quant_conformance.conformance.ops import activations, normalisations
from fx_quant_conformance.conformance.ops.variants import OpRecord

RECORDS: dict[Any, OpRecord] = {**activations.RECORDS, **normalisations.RECORDS}
