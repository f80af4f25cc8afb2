"""The reference model as a machine of its own: it multiplies integers, sums in floating point, and says so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fx_quant_conformance.backends.base import Execution
from fx_quant_conformance.backends.reference import ReferenceBackend
from tests.conformance.support.told import name_ops


class ReportingReference(ReferenceBackend):
    """Runs the reference model, and reports a quantized kernel: what holds is VERIFIED."""

    def execution(self, lowered: Callable[..., Any]) -> Execution | None:
        return Execution(quantized_ops=name_ops(lowered), float_fallbacks=())
