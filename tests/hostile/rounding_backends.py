"""Backends that round otherwise than they say, or than they should."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fx_quant_conformance.backends.base import Execution, RoundingMode
from tests.conformance.support.told import name_ops
from tests.mutants.integer_kernels import IntegerBackend
from tests.mutants.reference_kernels import Stepped
from tests.mutants.requantize_kinds import declares, rounded

FLOORS_AS_DECLARED = IntegerBackend(rounded(torch.floor), "floors_as_declared", **declares(mode=RoundingMode.DOWN))
"""Rounds down, and says so."""
FLOORS_UNLIKE_DECLARED = IntegerBackend(rounded(torch.floor), "floors", **declares(mode=RoundingMode.HALF_EVEN))
"""Rounds down, and says that it rounds half to even."""

FLOORS_AS_DECLARED_OF_LINEAR = IntegerBackend(
    rounded(torch.floor), "floors_linear", requantize_of={"nn.Linear": declares(mode=RoundingMode.DOWN)["requantize"]}
)
"""Rounds down, and says so of linear layers alone."""


def _approximate(honest: Any, module: nn.Module, *arguments: Any, **keywords: Any) -> Any:
    result: Tensor = honest(module, *arguments, **keywords)
    return result + 0.4 / 256 if isinstance(module, nn.Sigmoid) else result


class _Reporting(Stepped):
    def execution(self, lowered: Any) -> Execution:
        return Execution(quantized_ops=name_ops(lowered), float_fallbacks=())


ROUGH_SIGMOID = _Reporting("called", _approximate)
"""Its sigmoid is 0.4 steps too high before it is rounded."""
