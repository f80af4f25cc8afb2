"""Rooms that the suite does without: each adds a stage, jobs and commands, and no other room imports it by name.

A room registers by a module, which imports neither torch nor the rest of the room until it is asked.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any

_REGISTERED = ("fx_quant_conformance.conformance.pt2e.room",)
Command = tuple[str, Callable[[argparse.ArgumentParser], None]]
"""What help says of a command, and what adds its arguments, and what it does, to its parser."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """What a room adds."""

    applies: Callable[[Any], bool]
    """Tells whether a backend's claims have the stage, and whether there are the jobs."""
    stage: str
    """The name of the stage, which comes after config, and looks at a claim as a whole."""
    rule: str
    """The rule that the stage names when it finds no fault."""
    check: Callable[[Any], Iterable[Any]]
    """Yields the faults that the stage finds, of a claim's state."""
    list_jobs: Callable[[Sequence[Any]], Sequence[Any]]
    """Returns the jobs beside a config's claims."""
    commands: Mapping[str, Command]
    """By name."""


@cache
def list_rooms() -> tuple[Room, ...]:
    """Return what the rooms add."""
    return tuple(import_module(name).ROOM for name in _REGISTERED)


def find_rooms(backend: object) -> list[Room]:
    """Return what the rooms add that a backend has a use for."""
    return [room for room in list_rooms() if room.applies(backend)]
