"""Prepare's decisions, as frozen data that can be printed, copied and saved (rules OBS-15, DTY-09, CVT-12)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from torch import nn

from fx_quant_conformance.refimpl.config.backend_config import ObservationType
from fx_quant_conformance.refimpl.config.dtype_config import DTypeConfig
from fx_quant_conformance.refimpl.config.qconfig import QConfig
from fx_quant_conformance.refimpl.prepare.dtype_choice import Refusal

LSTM_RESULT = (0, (0, 0))  # the shape of an LSTM's result: outputs, and two states
# Keys of a model's notes: the plan that made it; the matches that convert left in float, by the last node, with the
# reasons; and what shared grids lose.
PLAN, LEFT_FLOAT, GRID_LOSSES = "refimpl_plan", "left_float", "grid_losses"
Kind = Literal["pattern", "custom module", "standalone module"]
Role = Literal["input", "output", "weight", "bias"]


class Place(NamedTuple):
    """A node's place, as QConfigMapping keys see it; types by name, as some functions cannot be pickled. (QCM-02)"""

    object_types: tuple[str, ...]
    name: str
    order: tuple[str, str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """The decision about one match, and its reason. Nodes are named: a decision outlives its graph."""

    kind: Kind
    node: str
    nodes: tuple[str, ...]
    root: str
    target: str | None
    """The full name of the root's module; None if the root is a function."""
    pattern: str
    qconfig: QConfig | None
    source: str
    dtype_config: DTypeConfig | None
    """None in a pattern: it stays float, for ``reason``."""
    refusals: tuple[Refusal, ...]
    reason: str
    observation: ObservationType
    """The type in force. (OBS-07)"""
    places: tuple[Place, ...]
    """One per node."""
    entry: int | None = None
    """The index of the matching entry in the config; None for custom and standalone modules."""
    quantized_inputs: tuple[int, ...] | None = None
    """Which positional arguments a standalone module takes quantized; None: all. (STD-01)"""
    quantized_output: bool = True
    """Whether a standalone module returns its result quantized. (STD-01)"""

    @property
    def is_quantized(self) -> bool:
        """Whether prepare acts on the match; custom and standalone modules decide for themselves what they do."""
        if self.kind == "standalone module":
            return True
        return self.dtype_config is not None or (self.kind == "custom module" and self.qconfig is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """One observer call."""

    name: str
    """The observer's attribute."""
    value: str
    group: int
    """Slots of one group call the same observer instance. (OBS-02)"""
    make: Callable[..., nn.Module]
    role: Role
    consumers: tuple[str, ...] | None
    """The users that see the observed value; None: all of them."""
    rule: str
    scope: str
    """The module that the value belongs to, after which its qparams are named."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """All decisions of prepare: which matches are quantized, and where observers go. (OBS-15)"""

    # rule: OBS-15
    decisions: tuple[Decision, ...]
    slots: tuple[Slot, ...]
    unmatched: tuple[tuple[str, str, QConfig | None], ...]
    """The calls that no pattern matches, with the readable name of their callee, and the QConfig there."""
    carried: tuple[tuple[str, str], ...] = ()
    """The results of sharing ops on the grid of a value that comes quantized, with that value. (OBS-11)"""

    def __deepcopy__(self, memo: dict[int, Any]) -> Plan:
        return self  # frozen, and all of it names nodes: copies of a model share it
