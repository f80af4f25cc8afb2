"""Messages that a child process sends: rows of the results file, and what else the parent must know.

Each is a line of JSON (`reports.codec`), without anything that differs from process to process or between machines.
"""

from __future__ import annotations

import json
import os
import re
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal, TypeVar, cast

from fx_quant_conformance.conformance.machine.release import ROOT, find_package
from fx_quant_conformance.reports.codec import KINDS, Message, decode, line_of, loads
from fx_quant_conformance.reports.numbers import Scalar

Sent = TypeVar("Sent", bound=Message)


@dataclass(frozen=True, slots=True, kw_only=True)
class Begin:
    """Which piece of work begins: what a process was doing when it died."""

    kind: ClassVar[str] = "begin"
    stage: str
    """Name of the stage."""
    case: str = ""
    """Name of the case; "" for a stage that looks at the claim as a whole."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """What the report shows of a claim in addition to its checks."""

    kind: ClassVar[str] = "trace"
    decisions: list[dict[str, Scalar]] = field(default_factory=list)
    """Decision log of prepare, row by row."""
    graphs: dict[str, str] = field(default_factory=dict)
    """Graphs of the pattern before and after, by name."""
    execution: Literal["", "reported", "numbers", "none"] = ""
    """What shows the execution: ``reported``, ``numbers`` or ``none``; "" if the claim did not come so far."""
    sureness: str = ""
    """How sure that is, in words."""


@dataclass(slots=True, kw_only=True)
class Tally:
    """What was done for a piece of work: counted while it goes on, and sent at its end."""

    kind: ClassVar[str] = "tally"
    lowerings: int = 0
    """Number of times that a process was asked to lower a model."""
    runs: int = 0
    """Number of runs of lowered models that a process has answered, with those that raised."""
    foreign_code: list[str] = field(default_factory=list)
    """Foreign code that the judge's process has imported by then."""


MESSAGES: Mapping[str, type[Message]] = {**KINDS, **{cls.kind: cls for cls in (Begin, Trace, Tally)}}

_FOLDERS = {*(sysconfig.get_path(name) for name in ("purelib", "platlib", "stdlib")), str(find_package(ROOT).parent)}
_PLACES = tuple(json.dumps(f"{folder}{os.sep}")[1:-1] for folder in sorted(_FOLDERS, key=len, reverse=True))
_VOLATILE = re.compile(r"(<eval_with_key>)\.\d+|(0x)[0-9a-f]{6,}")


def to_line(message: Message) -> str:
    """Return a message as a line of JSON without the newline, its text without lone surrogates.

    Its texts lose the counters and addresses that differ between processes. Their paths lose the folders of Python, of
    installed packages and of the suite, which differ between machines. Raises SchemaError for what JSON cannot hold.
    """
    text = _VOLATILE.sub(r"\1\2", line_of(message, ensure_ascii=False))
    for place in _PLACES:
        text = text.replace(place, "")
    return text.encode("utf-8", "replace").decode()


def from_line(line: str) -> Message:
    """Return the message of a line. Raises ValueError for a line that holds none."""
    return decode(loads(line), MESSAGES)


def make_portable(message: Sent) -> Sent:
    """Return a message as its receiver gets it."""
    return cast("Sent", from_line(to_line(message)))
