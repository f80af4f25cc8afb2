"""Backends that return memory of their own, and write over it in the next run, or in the next but one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.fx import GraphModule

from tests.conformance.support.fake_backends.fakes import Good
from tests.mutants.reference_run_faults import keep_in_turn


class Reuses(Good):
    buffers = 1

    def lower(self, reference_model: GraphModule, example_inputs: tuple[Any, ...]) -> Callable[..., Any]:
        return keep_in_turn(reference_model, self.buffers)


class ReusesTwo(Reuses):
    buffers = 2
