"""The oracle's table: a row per op says what computes it exactly and how a right backend may differ (rule NUM-04).

Functions by identity, methods by name, modules by class. The rows stand where their derivations are.
"""

from __future__ import annotations

from typing import Any

from conformance.rows_dynamic import ROWS as _DYNAMIC
from conformance.rows_functions import ROWS as _FUNCTIONS
from conformance.rows_values import ROWS as _VALUES
from conformance.rows_weighted import ROWS as _WEIGHTED
from conformance.spreads import Row

ROWS: dict[Any, Row] = {**_WEIGHTED, **_VALUES, **_FUNCTIONS, **_DYNAMIC}
