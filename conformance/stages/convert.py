"""The convert stage: quantize, dequantize and root as claimed; the reference model computes the float function (CVT).

A claim that is not static has other nodes: `conformance.stages.dynamic_checks`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from conformance.claims.case import Case
from conformance.claims.claim import Claim
from conformance.claims.inputs import NamedInputs, draw_inputs
from conformance.claims.qconfigs import INTEGERS, kind_of
from conformance.claims.traits import is_weighted_module
from conformance.machine.guard import guard
from conformance.oracle.evaluate import READS_SHAPE, Walk
from conformance.oracle.grids import Grid, NoOracleError, placeholder_grids, quantized_from
from conformance.stages.bench import Bench
from conformance.stages.calibration import keeps_statistics
from conformance.stages.dynamic_checks import check_reference_dynamic
from conformance.stages.meaning import evaluated
from conformance.stages.prepare import PreparedCase
from conformance.stages.stage import CaseResult, CaseStage, Problem, raise_problem, run_flow
from refimpl.decomposed import PLAIN_DTYPE
from refimpl.invariants import OBSERVER_PREFIX, is_dequantize, is_quantize
from refimpl.observers import is_quantized_dtype


@dataclass(frozen=True, kw_only=True)
class ReferenceCase(CaseResult):
    """The reference model of a case, and the inputs on which it is run.

    ``draw``: draws the inputs on the grids of the model's inputs.
    """

    prepared: PreparedCase
    model: GraphModule
    draw: Callable[[Sequence[Grid | None]], list[NamedInputs]]

    @property
    def case(self) -> Case:
        """The case."""
        return self.prepared.built.case

    @cached_property
    def grids(self) -> list[Grid | None]:
        """The grid of each input; None where it is not quantized on one."""
        return placeholder_grids(self.model)

    @cached_property
    def inputs(self) -> list[NamedInputs]:
        """The inputs, the same whenever they are drawn."""
        return self.draw(self.grids)


class ConvertStage(CaseStage[PreparedCase, ReferenceCase]):
    """Makes the reference model, in the backend's representation."""

    name = "convert"

    def __init__(self, bench: Bench, claim: Claim) -> None:
        super().__init__(bench, claim)
        self._proven: set[str] = set()

    def run(self, before: PreparedCase) -> ReferenceCase:
        """Make the reference model. Raises StageError for what convert refuses, or makes otherwise than claimed."""
        model = run_flow("CVT-01", lambda: self.bench.convert(before.model))
        case = before.built.case
        seed = self.bench.seed_for(self.claim.id, "inputs", case.name)
        draw = partial(draw_inputs, self.claim, case, effort=self.bench.effort, seed=seed)
        reference = self.made = ReferenceCase(prepared=before, model=model, draw=draw)
        raise_problem(check_reference(self.claim, model), model)
        if case.variant not in self._proven:
            is_trained = self.claim.flow == "qat" and keeps_statistics(before.model)
            meant = before.model if is_trained else before.built.model
            raise_problem(check_meaning(meant, model, reference.inputs[0].tensors), model)
            self._proven.add(case.variant)
        raise_problem(before.misfit, model)
        return reference


@guard("convert.check_reference")
def check_reference(claim: Claim, reference: GraphModule) -> Problem | None:
    """Inputs and output are quantized in the claimed dtypes, no observer is left, the root is a reference module."""
    if kind_of(claim.dtypes) not in INTEGERS:
        return check_reference_dynamic(claim, reference)
    names = [str(node.target) for node in reference.graph.nodes if node.op == "call_module"]
    if any(name.startswith(OBSERVER_PREFIX) for name in names):
        return Problem(rule="CVT-01", message="an observer is left in the reference model")
    output = next(node for node in reference.graph.nodes if node.op == "output").args[0]
    if not is_dequantize(output):
        return Problem(rule="CVT-06", message=f"the output {output} is not dequantized")
    ends = [("output", output.args[0])]
    for node in reference.graph.nodes:
        if node.op == "placeholder":
            ends += [("input", quantized_from(user)) for user in node.users if user.target not in READS_SHAPE]
    for role, node in ends:
        claimed = getattr(claim.dtypes, f"{role}_dtype")
        if not is_quantize(node):
            return Problem(rule="CVT-01", message=f"{role}: {node} is not a quantize node")
        if claimed is not None and not _are_same_integers(node.args[-1], claimed):
            return Problem(rule="CVT-01", message=f"{role} is quantized to {node.args[-1]}; the claim says {claimed}")
    return check_root(claim, reference)


def _are_same_integers(dtype: Any, claimed: torch.dtype) -> bool:
    return bool(dtype in (claimed, PLAIN_DTYPE.get(claimed)))


@guard("convert.check_root")
def check_root(claim: Claim, reference: GraphModule) -> Problem | None:
    """A pattern whose root module has a weight holds it as a quantized one. (CVT-02)"""
    if not is_quantized_dtype(claim.dtypes.weight_dtype) or not is_weighted_module(claim):
        return None
    if any(hasattr(module, "get_quantized_weight") for module in reference.modules()):
        return None
    return Problem(rule="CVT-02", message="the root was not swapped for its reference module: the weight is float")


@guard("convert.check_meaning")
def check_meaning(model: nn.Module, reference: GraphModule, inputs: tuple[Tensor, ...]) -> Problem | None:
    """The reference model computes the float model's function, up to its weights' rounding. (FUS-06, CVT-02)

    On inputs that lie on the grids, both in float64, the results may differ by the effect of half a step of each weight
    on the inputs' absolute values, by the float32 rounding of the inputs, and by that of a batch norm that fuse folded:
    2⁻¹⁶ of the largest result, far above any such rounding and far below any fault of structure.
    """
    try:
        exacts = Walk(reference, counts_weights=True).exact(inputs)
    except NoOracleError:
        return None  # numerics will say so
    for exact, right in zip(exacts, evaluated(model, inputs), strict=True):
        if not right.numel():
            continue
        bound = sum((each.expand_as(right) for each in exact.errors.values()), torch.zeros_like(right))
        largest = max((float(x.abs().max()) for x in inputs if x.is_floating_point() and x.numel()), default=0.0)
        bound = bound + 2.0**-16 * exact.real.abs().max() + 2.0**-22 * largest
        is_far = ~((exact.real - right).abs() <= bound)  # NaN is far
        if bool(is_far.any()):
            worst = int(((exact.real - right).abs() - bound).where(is_far, -math.inf).argmax())
            found, expected, explained = (float(each.flatten()[worst]) for each in (exact.real, right, bound))
            text = f"{found:.6g} for {expected:.6g}, and weight rounding explains {explained:.3g} only"
            return Problem(
                rule="CVT-02", message=f"the reference model computes something else than the float model: {text}"
            )
    return None
