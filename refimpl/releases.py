"""What differs between the releases of torch: a row for each difference, and no other place asks for a version.

Where a release lacks something, what needs it asks `has`, and says why it is left out with `explain_lack`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

OLDEST, NEWEST = (2, 4), (2, 15)
"""The oldest and the newest release that the suite is run on (docs/backends.md)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One difference.

    ``what`` older releases lack, ``since`` which release it is there, and what is done without it (``instead``).
    ``is_there`` looks in the torch that runs: a test holds ``since`` to it, on each release.
    """

    what: str
    since: tuple[int, int]
    instead: str
    is_there: Callable[[], bool]


def _takes(function: Any, argument: str) -> bool:
    return argument in inspect.signature(function).parameters


DIFFERENCES = {
    "norm_bias": Difference(
        what="argument bias of batch, instance and group norms",
        since=(2, 12),
        instead="cases without a bias are left out",
        is_there=lambda: all(_takes(norm, "bias") for norm in (nn.BatchNorm2d, nn.InstanceNorm2d, nn.GroupNorm)),
    ),
}
"""All differences, by the name that code asks for."""


def read_release() -> tuple[int, int]:
    """Return major and minor number of the torch that runs."""
    major, minor = str(torch.__version__).split(".")[:2]
    return int(major), int(minor)


def has(name: str) -> bool:
    """Tell whether the torch that runs has what a row of `DIFFERENCES` names. Raises KeyError for another name."""
    return read_release() >= DIFFERENCES[name].since


def explain_lack(name: str) -> str:
    """Return why something is left out: what this torch lacks, and the release that brought it."""
    row = DIFFERENCES[name]
    release = ".".join(map(str, row.since))
    return f"torch {torch.__version__} has no {row.what}, which came with {release}: {row.instead}"
