"""explain: prepare's decisions about every node, as data, as a table and as plain builtins (rules OBS-15, DTY-09)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from enum import Enum
from typing import Any

from tabulate import tabulate
from torch import nn

from fx_quant_conformance.refimpl.config.dtype_config import DTypeConfig
from fx_quant_conformance.refimpl.errors import ModelError
from fx_quant_conformance.refimpl.graph.tracing import notes_of
from fx_quant_conformance.refimpl.prepare.grid_losses import LOUD, GridLoss
from fx_quant_conformance.refimpl.prepare.plan import GRID_LOSSES, LEFT_FLOAT, PLAN, Decision, Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class DecisionLog:
    """All fusions, the decision about every match with its reason, and all observers. (OBS-15, DTY-09)

    ``str()`` gives the rows as a table.
    """

    plan: Plan
    """All decisions and observers as frozen data, the source of ``rows`` and ``to_dict``."""
    fusions: tuple[str, ...]
    """The fused patterns, as ``pattern at node``."""
    not_fused: tuple[str, ...]
    """The patterns that were not fused, with the rule and the reason."""
    left_float: Mapping[str, str] = field(default_factory=dict)
    """The quantized matches that convert left in float, by their last nodes, with the reason."""
    grid_losses: tuple[GridLoss, ...] = ()
    """What arithmetic with a number loses by sharing its input's grid, in a converted model. (OBS-19)"""

    def rows(self) -> list[dict[str, str]]:
        """Return a row for each match, then one for each call that no pattern matches.

        The keys, with text for each: ``node``, ``pattern``, ``qconfig`` (its key in the mapping), ``dtype config``,
        ``observation``, ``observers``, ``reason`` (why it stays float).
        """
        blank = {"qconfig": "", "observation": "", "observers": "", "dtype config": "float"}
        return [self._row_of(decision) for decision in self.plan.decisions] + [
            {"node": node, "pattern": kind, **blank, "reason": "no pattern matches"}
            for node, kind, _ in self.plan.unmatched
        ]

    def to_dict(self) -> dict[str, Any]:
        """Return the whole log as plain builtins.

        The keys: ``decisions``, ``observers``, ``unmatched``, ``fusions``, ``not_fused``, ``left_float``,
        ``grid_losses``; a list for each.
        """
        return {
            "decisions": _to_builtins(self.plan.decisions),
            "observers": _to_builtins(self.plan.slots),
            "unmatched": [{"node": node, "object_type": kind} for node, kind, _ in self.plan.unmatched],
            "fusions": list(self.fusions),
            "not_fused": list(self.not_fused),
            "left_float": [{"node": node, "reason": reason} for node, reason in self.left_float.items()],
            "grid_losses": [_to_builtins(loss) for loss in self.grid_losses],
        }

    def _row_of(self, decision: Decision) -> dict[str, str]:
        left = self.left_float.get(decision.node)
        losses = (str(loss) for loss in self.grid_losses if loss.node == decision.node and loss.decibels > LOUD)
        reasons = [left] if left else [decision.reason or "; ".join(map(str, decision.refusals)), *losses]
        inside = set(decision.nodes)
        observers = [
            f"{slot.role} {slot.value}: observer {slot.group} ({slot.rule})"
            for slot in self.plan.slots
            if (slot.role == "output" and slot.value == decision.node) or inside & set(slot.consumers or ())
        ]
        return {
            "node": decision.node,
            "pattern": decision.pattern,
            "qconfig": decision.source,
            "dtype config": "float" if left else dtypes_of(decision),
            "observation": decision.observation.name,
            "observers": "; ".join(observers),
            "reason": "; ".join(filter(None, reasons)),
        }

    def __str__(self) -> str:
        return tabulate(self.rows(), headers="keys", tablefmt="simple", maxcolwidths=48)


def read_decision_log(model: nn.Module) -> DecisionLog:
    """Return the decision log of a model from prepare or convert, or of its copy, loaded ones too. (OBS-15)

    Raises ModelError for any other model.
    """
    notes = notes_of(model)
    plan = notes.get(PLAN)
    if not isinstance(plan, Plan):
        raise ModelError(f"{type(model).__name__} has no decision log: it was not made by refimpl's prepare_fx")
    names = ("fusions", "not_fused", LEFT_FLOAT, GRID_LOSSES)
    return DecisionLog(plan=plan, **{name: notes[name] for name in names if name in notes})


def dtypes_of(decision: Decision) -> str:
    """Return the dtypes of a pattern as text, ``in=quint8, w=qint8, out=quint8`` or ``float``; else its kind."""
    if decision.kind != "pattern":
        return decision.kind
    config = decision.dtype_config
    if config is None:
        return "float"
    roles = {"in": config.input_dtype, "w": config.weight_dtype, "out": config.output_dtype}
    text = ", ".join(f"{role}={str(dtype).removeprefix('torch.')}" for role, dtype in roles.items())
    return f"{text}, dynamic" if config.is_dynamic else text


def _to_builtins(value: Any) -> Any:
    """Turn data into builtins: dataclasses into dicts, enums into names, other objects into their text."""
    if isinstance(value, DTypeConfig):
        return {key: str(part) for key, part in value.to_dict().items()}
    if is_dataclass(value):
        return {part.name: _to_builtins(getattr(value, part.name)) for part in fields(value)}
    if isinstance(value, (tuple, list)):
        return [_to_builtins(part) for part in value]
    if isinstance(value, Enum):
        return value.name
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)
