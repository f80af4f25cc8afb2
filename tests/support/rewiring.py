"""Wiring faults: a lowering that runs a reference model with one edge of it put elsewhere, or one op left out."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from fx_quant_conformance.backends.reference import ReferenceBackend
from fx_quant_conformance.conformance.oracle.grids import is_constant
from fx_quant_conformance.conformance.whole_models.subgraphs import record
from fx_quant_conformance.refimpl.graph.invariants import is_dequantize, is_quantize

OTHER, SKIP, SWAP = "reads another value", "is left out", "reads its operands in the other order"


@dataclass(frozen=True, slots=True)
class Fault:
    """A node, and what is done to it: ``source`` is what it reads instead of its operand of this number."""

    kind: str
    node: str
    operand: int = 0
    source: str = ""

    def __str__(self) -> str:
        return f"{self.node} {self.kind}" + (f": {self.source} for operand {self.operand}" if self.source else "")

    def apply(self, model: GraphModule) -> bool:
        """Put it into a model; tell whether that has what it is about."""
        nodes = {node.name: node for node in model.graph.nodes}
        if self.node not in nodes or (self.source and self.source not in nodes):
            return False
        node = nodes[self.node]
        inputs = node.all_input_nodes
        if self.operand >= len(inputs):
            return False
        if self.kind == SKIP:
            node.replace_all_uses_with(inputs[self.operand])
        elif self.kind == OTHER:
            node.replace_input_with(inputs[self.operand], nodes[self.source])
        else:
            first, second, *rest = node.args
            node.args = (second, first, *rest)
        model.recompile()
        return True


class Rewired(ReferenceBackend):
    """The reference backend with one wiring fault, in whatever holds the place."""

    def __init__(self, fault: Fault | None = None) -> None:
        self.fault = fault

    def lower(self, reference_model: GraphModule, example_inputs: tuple[Any, ...]) -> Callable[..., Any]:
        """Return the reference model, rewired."""
        model = copy.deepcopy(reference_model)
        if self.fault is not None:
            self.fault.apply(model)
        return super().lower(model, example_inputs)


def list_faults(model: GraphModule, batch: tuple[Tensor, ...]) -> Iterator[Fault]:
    """Yield what may be wired wrongly: ops without quantize and dequantize, whose operands have their shapes."""
    values, earlier = record(model, batch), list[Node]()
    for node in model.graph.nodes:
        value = values.get(node)
        is_op = node.op.startswith("call_") and not is_quantize(node) and not is_dequantize(node)
        if is_op and isinstance(value, Tensor) and value.is_floating_point() and not is_constant(node):
            inputs = node.all_input_nodes
            for number, source in enumerate(inputs):
                own = values[source]
                if not isinstance(own, Tensor) or not own.is_floating_point():
                    continue
                if own.shape == value.shape and not torch.equal(own, value):
                    yield Fault(SKIP, node.name, number)
                alike = [each for each in earlier if _is_like(own, values[each]) and each not in inputs]
                if alike:
                    yield Fault(OTHER, node.name, number, alike[-1].name)
            first, second = (*(values.get(each) for each in inputs), None, None)[:2]
            if isinstance(first, Tensor) and list(node.args[:2]) == inputs and _is_like(first, second):
                yield Fault(SWAP, node.name)
        earlier.append(node)


def _is_like(own: Tensor, other: Any) -> bool:
    is_same = isinstance(other, Tensor) and other.dtype is own.dtype and other.shape == own.shape
    return is_same and not torch.equal(own, other)


def changes(model: GraphModule, fault: Fault, batch: tuple[Tensor, ...], expected: Mapping[int, Tensor]) -> float:
    """Return how far a fault moves the outputs, as a part of their largest value; 0: nobody could see it."""
    rewired = copy.deepcopy(model)
    if not fault.apply(rewired):
        return 0.0
    try:
        with torch.no_grad():
            found = torch.utils._pytree.tree_leaves(rewired(*batch))
    except Exception:  # it does not run any more
        return 0.0
    moved = 0.0
    for number, right in expected.items():
        if found[number].shape != right.shape:
            return 0.0
        apart = (found[number].double() - right.double()).abs().nan_to_num(1e9)
        moved = max(moved, float(apart.max() / right.double().abs().max().clamp(min=1e-9)))
    return moved
