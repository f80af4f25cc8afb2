"""What differs between the releases of torch: a row for each difference, and no other place asks for a version.

Where a release lacks something, what needs it asks `has`, and says why it is left out with `format_lack`. A torch that
cannot serve at all is refused when this module is imported, the first of refimpl's: ImportError says what it lacks.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

import torch

Release = tuple[int, int]
OLDEST: Release = (2, 6)
NEWEST: Release = (2, 15)
"""The oldest and the newest release that the suite is run on (docs/backends.md)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseDifference:
    """One difference. A test looks for each in the torch that runs."""

    what: str
    """What torch has from ``since`` on, and before ``until`` if that is given."""
    since: Release
    until: Release | None = None
    instead: str
    """What is done where torch lacks it."""
    leaves_out_cases: bool = False
    """The suite tries less where torch lacks it, and its run says so."""


DIFFERENCES = {
    "dynamic_row": ReleaseDifference(
        what="setting with which torch.export keeps an axis of one element dynamic",
        since=(2, 7),
        instead="an example of one row is exported with its row twice",
    ),
    "names_of_calls": ReleaseDifference(
        what="argument name of torch.fx.Graph.call_function", since=(2, 8), instead="nodes keep the name that fx gives"
    ),
    "traces_lists": ReleaseDifference(
        what="trace of a built-in function that takes a traced value as its list or as its number",
        since=(2, 9),
        instead="models with torch.cat of a module's tuple, or torch.arange of a size, cannot be traced",
    ),
    "traces_buffers": ReleaseDifference(
        what="trace of a module that gives a buffer a new value",
        since=(2, 9),
        instead="a model that does so cannot be traced, and a write in place, such as copy_, can",
    ),
    "histogram_of_constant": ReleaseDifference(
        what="HistogramObserver that keeps the count of a constant batch in its bin once the range grows",
        since=(2, 9),
        instead="torch's counts differ from refimpl's",
    ),
    "norm_bias": ReleaseDifference(
        what="argument bias of batch, instance and group norms",
        since=(2, 12),
        instead="cases without a bias are left out",
        leaves_out_cases=True,
    ),
    "adds_before_rounding": ReleaseDifference(
        what="quantize_per_tensor that adds the zero point before it rounds",
        since=(2, 13),
        until=(2, 14),
        instead="ties go to the integer that is even before the zero point is added",
    ),
    "weight_of_two_ops": ReleaseDifference(
        what="convert_fx that lowers a linear function whose weight another op reads too",
        since=(2, 15),
        instead="torch's raises KeyError",
    ),
}
"""All differences, by the name that code asks for, the oldest first."""


def read_release() -> Release:
    """Return the major and the minor number of the torch that runs."""
    major, minor = str(torch.__version__).split(".")[:2]
    return int(major), int(minor)


def has(name: str) -> bool:
    """Tell whether the torch that runs has what a row of `DIFFERENCES` names. Raises KeyError for another name."""
    row = DIFFERENCES[name]
    return row.since <= read_release() and (row.until is None or read_release() < row.until)


def format_lack(name: str) -> str:
    """Return why something is left out: what this torch lacks, the releases that have it, and what is done instead."""
    row = DIFFERENCES[name]
    until = "" if row.until is None else f", until {format_release(row.until)}"
    releases = f"which is there since {format_release(row.since)}{until}"
    return f"torch {torch.__version__} has no {row.what}, {releases}: {row.instead}"


def list_left_out() -> list[str]:
    """Return a line for each thing that this torch lacks, and the suite therefore does not try."""
    return [format_lack(name) for name, row in DIFFERENCES.items() if row.leaves_out_cases and not has(name)]


def format_release(release: Release) -> str:
    """Return a release as torch spells it, such as ``2.6``."""
    return ".".join(map(str, release))


def find_torchs(module: str) -> Any | None:
    """Import a module of torch's that it announces to remove; None where it is gone."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if not module.startswith(str(error.name)):
            raise  # torch's module is there, but one that it needs is not
        return None


def refuse_old() -> None:
    """Raise ImportError for a torch that is older than `OLDEST`."""
    if read_release() < OLDEST:
        raise ImportError(f"torch {torch.__version__} is too old: refimpl needs {format_release(OLDEST)} or newer")


refuse_old()
