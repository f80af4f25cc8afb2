"""Prepared models and plans of small forward functions, for the tests of where observers go."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fx_quant_conformance import refimpl
from fx_quant_conformance.refimpl import QConfigMapping
from fx_quant_conformance.refimpl.prepare.plan import Plan
from tests.refimpl.support import both_flows as flows
from tests.refimpl.support.qconfigs import minmax_qconfig

U8, S8 = torch.quint8, torch.qint8
OURS = minmax_qconfig(U8, S8, per_channel=False)


class Net(nn.Module):
    """Layers for the forward function that a test gives."""

    def __init__(self, run: Callable[..., Any]) -> None:
        super().__init__()
        torch.default_generator.manual_seed(0)
        self.a, self.b, self.c, self.relu = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4), nn.ReLU()
        self.weight, self.bias = nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.randn(4))
        self.run = run

    def forward(self, x: Tensor, y: Tensor) -> Any:
        return self.run(self, x, y)


INPUTS = (torch.randn(3, 4, generator=torch.Generator().manual_seed(5)), torch.ones(3, 4))


def prepared(run: Callable[..., Any], mapping: Any = None, engine: str = "qnnpack") -> Any:
    mapping = QConfigMapping().set_global(OURS) if mapping is None else mapping
    return refimpl.prepare_fx(Net(run).eval(), mapping, INPUTS, backend_config=flows.our_config(engine))


def plan(run: Callable[..., Any], mapping: Any = None) -> Plan:
    return refimpl.explain(prepared(run, mapping)).plan


def groups(found: Plan, role: str = "") -> list[tuple[str, int]]:
    """(value, observer) of each slot."""
    return [(slot.value, slot.group) for slot in found.slots if not role or slot.role == role]
