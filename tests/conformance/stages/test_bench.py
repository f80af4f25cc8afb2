"""The judge's models have the decomposed form; what a backend on quantized tensors is given has the same integers."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node

from backends.base import Representation
from backends.discovery import find_backend
from backends.lowering import in_form
from conformance.claims.claim import Claim, enumerate_claims
from conformance.machine.fault import FaultFound
from conformance.pipeline.claim_run import take_through
from conformance.stages.bench import Bench
from conformance.stages.config import plan_cases_of_claim
from conformance.stages.state import CaseState, ClaimState
from refimpl import (
    MinMaxObserver,
    QConfig,
    QConfigMapping,
    convert_to_reference_decomposed_fx,
    convert_to_reference_fx,
    prepare_fx,
)
from refimpl.invariants import is_quantize
from refimpl.observers import dtype_range
from tests.mutants.fixed_grids import FixedGridBackend
from tests.mutants.honest import SEVEN


def converted_cases(bench: Bench) -> Iterator[tuple[Claim, GraphModule, CaseState]]:
    """The prepared model and the state of the first case of each pattern and dtype config, up to convert."""
    of = {(claim.pattern, str(claim.dtypes)): claim for claim in enumerate_claims(bench.config, bench.capabilities)}
    for claim in (replace(each, preparation=bench.preparation) for each in of.values()):
        run = ClaimState(bench=bench, claim=claim)
        try:
            state = take_through(run, plan_claim(bench, claim)[0], ("fuse", "prepare", "convert"))
        except FaultFound:
            continue  # a claim that ends before
        yield claim, state


def integers_in(model: GraphModule, inputs: tuple[Tensor, ...]) -> list[tuple[Tensor, Tensor]]:
    """The value before each quantize of a graph, and the integers behind it."""
    seen = []

    class Spy(Interpreter):
        def run_node(self, n: Node) -> Any:
            value = super().run_node(n)
            if is_quantize(n):
                seen.append((self.env[n.all_input_nodes[0]], value.int_repr() if value.is_quantized else value))
            return value

    with torch.no_grad():
        Spy(model).run(*copy.deepcopy(inputs))
    return seen
