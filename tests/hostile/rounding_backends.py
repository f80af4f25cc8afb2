"""Backends that round otherwise than they say, or than they should."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from fx_quant_conformance.backends.base import Capabilities, Execution, RoundingMode, Tolerance
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
FLOORS_WITHIN_A_TOLERANCE = IntegerBackend(
    rounded(torch.floor), "floors_tolerated", tolerance={"nn.Linear": Tolerance(lsb=1)}
)
"""Rounds down, and has linear layers tolerated."""


def _round_down_but_once(r: Tensor) -> Tensor:
    found = r.floor()
    found.flatten()[:1] += 2
    return found


WRONG_WITHIN_A_TOLERANCE = IntegerBackend(
    rounded(_round_down_but_once), "wrong_tolerated", tolerance={"nn.*": Tolerance(lsb=1)}
)
"""Rounds down, and gives a first result that is beyond a step off."""


def _approximate(honest: Any, module: nn.Module, *arguments: Any, **keywords: Any) -> Any:
    result: Tensor = honest(module, *arguments, **keywords)
    return result + 0.4 / 256 if isinstance(module, nn.Sigmoid) else result


class _Reporting(Stepped):
    def execution(self, lowered: Any) -> Execution:
        return Execution(quantized_ops=name_ops(lowered), float_fallbacks=())


ROUGH_SIGMOID = _Reporting("called", _approximate)
"""Its sigmoid is 0.4 steps too high before it is rounded."""


class _Tolerated(_Reporting):
    def capabilities(self) -> Capabilities:
        return replace(super().capabilities(), tolerance={"nn.Sigmoid": Tolerance(lsb=0.95)})


TOLERATED_SIGMOID = _Tolerated("called", _approximate)
"""The same, declared."""
