"""Backends whose kernels are wrong outside of some conditions on arguments and scales."""

from __future__ import annotations

from typing import Any

from torch import Tensor

import tests.mutants.integer_faults  # noqa: F401  (enters them in the table)
from tests.mutants.fault_table import FAULTS
from tests.mutants.integer_kernels import IntegerBackend, varied

_WRONG_GROUP = next(fault.kernels for fault in FAULTS if fault.name == "wrong group")
FINEST = 0.05
"""The ratio of the accumulator's step to the output's beyond which the kernels below are wrong."""


def _halve(honest: Any, total: Tensor, ratio: Tensor) -> Tensor:
    result: Tensor = honest(total / 2 if float(ratio.max()) > FINEST else total, ratio)
    return result


GROUPS = IntegerBackend(_WRONG_GROUP, "groups")
"""Convolves several groups wrongly."""
ONE_GROUP = IntegerBackend(_WRONG_GROUP, "one_group", where={"torch.conv?d": "groups == 1", "nn.Linear": "rank < 9"})
"""The same, and says that it takes one group."""
RATIOS = IntegerBackend(varied("rescale", _halve), "ratios")
"""Halves its sums where the output is much finer than the accumulator."""
COARSE = IntegerBackend(varied("rescale", _halve), "coarse", where={"nn.Linear": f"s_in * s_w / s_out <= {FINEST}"})
"""The same, and says so."""
NOTHING = IntegerBackend(name="nothing", where={"nn.Linear": "s_in < 0"})
"""Says that it takes no scale."""
