"""explain: the decision log of a prepared (or converted) model, as data and as a table (rules OBS-15, DTY-09)."""

from __future__ import annotations

from dataclasses import dataclass

from tabulate import tabulate
from torch import nn

from refimpl.decide import Decision, Plan, Slot
from refimpl.errors import ModelError
from refimpl.tracing import notes_of

PLAN = "refimpl_plan"  # the key under which a model's meta keeps the plan that made it


@dataclass(frozen=True, slots=True, kw_only=True)
class DecisionLog:
    """What prepare decided for every match, and where it placed observers. ``str()`` gives a table."""

    plan: Plan

    def rows(self) -> list[dict[str, str]]:
        """Return one dict of strings per decision, in graph order."""
        return [_decision_row(decision, self.plan.slots) for decision in self.plan.decisions]

    def __str__(self) -> str:
        return tabulate(self.rows(), headers="keys", tablefmt="simple", maxcolwidths=48)


def explain(model: nn.Module) -> DecisionLog:
    """Return the decision log of a model that prepare_fx or convert made.

    Raises ModelError for any other model.
    """
    plan = notes_of(model).get(PLAN)
    if not isinstance(plan, Plan):
        raise ModelError(f"{type(model).__name__} has no decision log: it was not made by refimpl's prepare_fx")
    return DecisionLog(plan=plan)


def _decision_row(decision: Decision, slots: tuple[Slot, ...]) -> dict[str, str]:
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
        "dtype config": _dtypes(decision),
        "observation": decision.observation.name,
        "observers": "; ".join(observers),
        "reason": decision.reason or "; ".join(map(str, decision.refusals)),
    }


def _dtypes(decision: Decision) -> str:
    chosen = decision.dtype_config
    if chosen is None:
        return "float"
    roles = {"in": chosen.input_dtype, "w": chosen.weight_dtype, "out": chosen.output_dtype}
    return ", ".join(f"{role}={str(dtype).removeprefix('torch.')}" for role, dtype in roles.items())
