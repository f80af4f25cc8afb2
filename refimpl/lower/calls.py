"""Lowering's decisions, as data: calls to be made, grids of values, refusals with reasons (LOW-01, LOW-04)."""

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
    """A reference pattern that stays a float op, or a requantization that stays, and why. (LOW-04)"""

    node: str
    op: str
    reason: str

    def __str__(self) -> str:
        return f"{self.node} ({self.op}): {self.reason}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A node to be made, of nodes of the reference graph and further calls."""

    op: str
    target: Any
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    origin: Node | None = None
    """Gives it its name and meta."""

    @property
    def all_input_nodes(self) -> list[Node]:
        """The nodes of the reference graph that it reads."""
        leaves: list[Any] = []
        map_aggregate((self.args, dict(self.kwargs)), leaves.append)
        inputs = (leaf.all_input_nodes if isinstance(leaf, Call) else [leaf] for leaf in leaves)
        return [leaf for part in inputs for leaf in part if isinstance(leaf, Node)]


class InputGrid(NamedTuple):
    """The qparams of a quantized value; or the value that comes quantized, and only it knows them. (OBS-11)"""

    scale: float | Node
    zero_point: int | Node
    dtype: torch.dtype


class Tail(NamedTuple):
    """A call that replaces an op and all nodes up to the node that quantizes."""

    quantize: Node
    grid: InputGrid
    target: Any
    """What is called."""


class Blocked(Exception):
    """Why a site cannot be rewritten. (LOW-03)"""
