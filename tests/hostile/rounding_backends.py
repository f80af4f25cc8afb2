"""Backends that round otherwise than they say, or than they should."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from backends.base import RoundingMode
from tests.mutants.integer_kernels import IntegerBackend
from tests.mutants.reference_kernels import SmallReference, Stepped
from tests.mutants.requantize_kinds import declares, rounded


def floors() -> IntegerBackend:
    """Rounds down, and says nothing."""
    return IntegerBackend(rounded(torch.floor), "floors")


def floors_as_declared() -> IntegerBackend:
    """Rounds down, and says so."""
    return IntegerBackend(rounded(torch.floor), "floors_as_declared", **declares(mode=RoundingMode.DOWN))


def floors_unlike_declared() -> IntegerBackend:
    """Rounds down, and says that it rounds half to even."""
    return IntegerBackend(rounded(torch.floor), "floors_unlike_declared", **declares(mode=RoundingMode.HALF_EVEN))


def _approximate(honest: Any, module: nn.Module, *arguments: Any, **keywords: Any) -> Any:
    result: Tensor = honest(module, *arguments, **keywords)
    return result + 0.4 / 256 if isinstance(module, nn.Sigmoid) else result


def rough_sigmoid() -> SmallReference:
    """Its sigmoid is 0.4 steps too high before it is rounded."""
    return Stepped("called", _approximate)
