"""explain: prepare's decisions about every node, as data, as a table and as plain builtins (rules OBS-15, DTY-09)."""

from __future__ import annotations

from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from typing import Any

from tabulate import tabulate
from torch import nn

from refimpl.dtype_config import DTypeConfig
from refimpl.errors import ModelError
from refimpl.plan import Decision, Plan, Slot
from refimpl.tracing import notes_of

PLAN = "refimpl_plan"  # the key under which a model's meta keeps the plan that made it


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

    def rows(self) -> list[dict[str, str]]:
        """Return a row for each match, then one for each call that no pattern matches.

        The keys, with text for each: ``node``, ``pattern``, ``qconfig`` (its key in the mapping), ``dtype config``,
        ``observation``, ``observers``, ``reason`` (why it stays float).
        """
        blank = {"qconfig": "", "observation": "", "observers": "", "dtype config": "float"}
        return [_row_of(decision, self.plan.slots) for decision in self.plan.decisions] + [
            {"node": node, "pattern": kind, **blank, "reason": "no pattern matches"}
            for node, kind, _ in self.plan.unmatched
        ]

    def to_dict(self) -> dict[str, Any]:
        """Return the whole log as plain builtins.

        The keys: ``decisions``, ``observers``, ``unmatched``, ``fusions``, ``not_fused``; a list for each.
        """
        return {
            "decisions": _to_builtins(self.plan.decisions),
            "observers": _to_builtins(self.plan.slots),
            "unmatched": [{"node": node, "object_type": kind} for node, kind, _ in self.plan.unmatched],
            "fusions": list(self.fusions),
            "not_fused": list(self.not_fused),
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
    return DecisionLog(plan=plan, fusions=notes.get("fusions", ()), not_fused=notes.get("not_fused", ()))


def _row_of(decision: Decision, slots: tuple[Slot, ...]) -> dict[str, str]:
    inside = set(decision.nodes)
    observers = [
        f"{slot.role} {slot.value}: observer {slot.group} ({slot.rule})"
        for slot in slots
        if (slot.role == "output" and slot.value == decision.node) or inside & set(slot.consumers or ())
    ]
    return {
        "node": decision.node,
        "pattern": decision.pattern,
        "qconfig": decision.source,
        "dtype config": dtypes_of(decision),
        "observation": decision.observation.name,
        "observers": "; ".join(observers),
        "reason": decision.reason or "; ".join(map(str, decision.refusals)),
    }


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
