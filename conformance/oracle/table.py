"""The oracle's table: a row per op says what computes it exactly and how a right backend may differ (rule NUM-04).

Functions by identity, methods by name, modules by class. The rows stand where their derivations are.
"""

from __future__ import annotations

from typing import Any

from conformance.oracle.error_bounds import Row
from conformance.oracle.rules_activations import ROWS as _FUNCTIONS
from conformance.oracle.rules_arithmetic import ROWS as _VALUES
from conformance.oracle.rules_dynamic import ROWS as _DYNAMIC
from conformance.oracle.rules_weighted import ROWS as _WEIGHTED

ROWS: dict[Any, Row] = {**_WEIGHTED, **_VALUES, **_FUNCTIONS, **_DYNAMIC}
