"""What lowering decides, as data: calls to be made, grids of values, what stays with its reason (LOW-01, LOW-04)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.fx import Node
from torch.fx.node import map_aggregate

REQUANTIZE = "requantize"  # the op of a value that is quantized a second time, to another range


@dataclass(frozen=True, slots=True, kw_only=True)
class NotLowered:
    """A reference pattern that stays a float op between dequantize and quantize, or none, and why. (LOW-04)"""

    node: str
    op: str
    reason: str

    def __str__(self) -> str:
        return f"{self.node} ({self.op}): {self.reason}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A node to be made, of nodes of the reference graph and further calls; ``origin`` gives it its name and meta."""

    op: str
    target: Any
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    origin: Node | None = None

    @property
    def all_input_nodes(self) -> list[Node]:
        """The nodes of the reference graph that it reads."""
        found: list[Any] = []
        map_aggregate((self.args, dict(self.kwargs)), found.append)
        parts = (leaf.all_input_nodes if isinstance(leaf, Call) else [leaf] for leaf in found)
        return [leaf for part in parts for leaf in part if isinstance(leaf, Node)]


class InputGrid(NamedTuple):
    """Where a quantized value lies: its qparams, or the value that alone knows them, which comes quantized. (OBS-11)"""

    scale: float | Node
    zero_point: int | Node
    dtype: torch.dtype


class Tail(NamedTuple):
    """What an op and all up to the node that quantizes become: a call of ``target``."""

    quantize: Node
    grid: InputGrid
    target: Any


class Blocked(Exception):
    """Why a site cannot be rewritten. (LOW-03)"""
