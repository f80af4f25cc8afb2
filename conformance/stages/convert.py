"""The convert stage: checks the reference model's nodes, its function and its grids. (CVT)

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
from conformance.claims.kinds import INTEGERS
from conformance.machine.guard import guard
from conformance.oracle.evaluate import READS_SHAPE, Walk
from conformance.oracle.grids import Grid, NoOracleError, integers_of, lay_along, placeholder_grids, quantized_from
from conformance.oracle.own_modules import HELD, find_reference_kind, is_custom
from conformance.stages.calibration import keeps_statistics
from conformance.stages.dynamic_checks import check_reference_dynamic
from conformance.stages.fixed_grids import check_fixed_grids
from conformance.stages.meaning import run_in_float64
from conformance.stages.prepare import PreparedCase
from conformance.stages.stage import CaseResult, CaseStage, Problem, raise_problem, run_flow
from refimpl.decomposed import PLAIN_DTYPE
from refimpl.invariants import find_observers, is_dequantize, is_quantize
from refimpl.observers import is_quantized_dtype


@dataclass(frozen=True, kw_only=True)
class ReferenceCase(CaseResult):
    """The reference model of a case, and its inputs, which ``draw`` draws on the grids of the model's inputs."""

    prepared: PreparedCase
    model: GraphModule
    draw: Callable[[Sequence[Grid | None]], list[NamedInputs]]

    @property
    def case(self) -> Case:
        """The case that was built."""
        return self.prepared.built.case

    @cached_property
    def grids(self) -> list[Grid | None]:
        """Grid of each input; None where it is not quantized on one."""
        return placeholder_grids(self.model)

    @cached_property
    def inputs(self) -> list[NamedInputs]:
        """Inputs of the case, the same whenever they are drawn."""
        return self.draw(self.grids)


class ConvertStage(CaseStage[PreparedCase, ReferenceCase]):
    """Converts a prepared model to the reference model, in the backend's representation.

    Judged are its quantize and dequantize nodes and its root (CVT-01, CVT-02, CVT-06), once per variant the function
    that it computes (FUS-06, CVT-02), and the grids after calibration (CVT-01). A fault refutes the claim; its evidence
    is the graph.
    """

    name = "convert"

    def run(self, before: PreparedCase) -> ReferenceCase:
        """Make and check the reference model. Raises StageError for a fault, or if convert refuses."""
        model = run_flow("CVT-01", lambda: self.bench.convert(before.model))
        case = before.built.case
        seed = self.bench.seed_for(self.claim.id, "inputs", case.name)
        draw = partial(draw_inputs, self.claim, case, effort=self.bench.effort, seed=seed)
        reference = self.partial_result = ReferenceCase(prepared=before, model=model, draw=draw)
        raise_problem(check_reference(self.claim, model), model)
        raise_problem(check_fixed_grids(model), model)
        if case.variant not in self.proven:
            is_trained = self.claim.flow == "qat" and keeps_statistics(before.model)
            original = before.model if is_trained else before.built.model
            can_clip = self.claim.preparation.qconfigs is not None
            raise_problem(check_meaning(original, model, reference.inputs[0].tensors, can_clip=can_clip), model)
            self.proven.add(case.variant)
        raise_problem(before.misfit, model)
        return reference


@guard("convert.check_reference")
def check_reference(claim: Claim, reference: GraphModule) -> Problem | None:
    """Check that both ends are quantized in the claimed dtypes, no observer is left, and the root was swapped."""
    if claim.kind not in INTEGERS:
        return check_reference_dynamic(claim, reference)
    nodes = list(reference.graph.nodes)
    if find_observers(reference):
        return Problem(rule="CVT-01", message="an observer is left in the reference model")
    output: Any = reference.graph.output_node().args[0]
    if not is_dequantize(output):
        return Problem(rule="CVT-06", message=f"the output {output} is not dequantized")
    ends = [("output", output.args[0])]
    users = (user for node in nodes if node.op == "placeholder" for user in node.users)
    ends += [("input", quantized_from(user)) for user in users if user.target not in READS_SHAPE]
    for role, node in ends:
        claimed = getattr(claim.dtypes, f"{role}_dtype")
        custom = reference.get_submodule(str(node.target)) if node.op == "call_module" else None
        if custom is not None and is_custom(custom):  # it quantizes its result itself (CUS-01)
            if custom.dtype is not claimed:
                return Problem(
                    rule="CVT-01", message=f"{role} is quantized to {custom.dtype}; the claim says {claimed}"
                )
            continue
        if not is_quantize(node):
            return Problem(rule="CVT-01", message=f"{role}: {node} is not a quantize node")
        if claimed is not None and node.args[-1] not in (claimed, PLAIN_DTYPE.get(claimed)):
            return Problem(rule="CVT-01", message=f"{role} is quantized to {node.args[-1]}; the claim says {claimed}")
    return check_root(claim, reference) or check_own_weights(claim, reference)


@guard("convert.check_root")
def check_root(claim: Claim, reference: GraphModule) -> Problem | None:
    """Check that a root module with a weight holds a quantized one. (CVT-02)"""
    if not is_quantized_dtype(claim.dtypes.weight_dtype) or not claim.has_weighted_module:
        return None
    if any(hasattr(module, "get_quantized_weight") for module in reference.modules()):
        return None
    own = claim.entry.reference_quantized_module
    if own is not None and any(type(module) is own for module in reference.modules()):
        text = f"reference module {own.__name__} shows no integers: it has no get_quantized_weight()"
        return Problem(rule="CVT-02", message=text)
    return Problem(rule="CVT-02", message="the root was not swapped for its reference module: the weight is float")


@guard("convert.check_own_weights")
def check_own_weights(claim: Claim, reference: GraphModule) -> Problem | None:
    """Check that a vendor's own reference module holds the nearest integers of its float weight. (CVT-02)

    Up to the float32 rounding of the quotient. A vendor's own observer may leave weights beyond the ends of the range.
    """
    for module in reference.modules():
        own: Any = module
        is_own = hasattr(own, "get_quantized_weight") and find_reference_kind(own) is None
        if not is_own or type(own).__module__.startswith("torch.") or not all(hasattr(own, name) for name in HELD):
            continue
        integers = integers_of(own.get_quantized_weight())
        axis = int(own.weight_axis) if own.weight_scale.numel() > 1 else 0
        scale, zero_point = lay_along(axis, integers, own.weight_scale.double(), own.weight_zero_point.double())
        exact = own.weight.detach().double() / scale + zero_point
        if claim.preparation.qconfigs is not None:
            exact = exact.clamp(integers.min(), integers.max())
        distance = float((integers - exact).abs().max())
        if distance > 0.5 + 2.0**-10:
            text = f"{type(own).__name__}'s integers are up to {distance:.6g} steps from its float weight"
            return Problem(rule="CVT-02", message=text)
    return None


@guard("convert.check_meaning")
def check_meaning(
    model: nn.Module, reference: GraphModule, inputs: tuple[Tensor, ...], *, can_clip: bool = False
) -> Problem | None:
    """Check that the reference model computes the float model's function, up to its weights' rounding. (FUS-06, CVT-02)

    On inputs that lie on the grids, both in float64, the results may differ by the effect of half a step of each weight
    on the inputs' absolute values, by the float32 rounding of the inputs, and by that of a batch norm that fuse folded:
    2⁻¹⁶ of the largest result, far above any such rounding and far below any fault of structure. ``can_clip``: weights
    may also be left beyond their range, by a vendor's own observer.
    """
    try:
        exacts = Walk(reference, counts_weights=True, can_clip=can_clip).exact(inputs)
    except NoOracleError:
        return None  # numerics will say so
    largest = max((float(x.abs().max()) for x in inputs if x.is_floating_point() and x.numel()), default=0.0)
    for exact, right in zip(exacts, run_in_float64(model, inputs), strict=True):
        if not right.numel():
            continue
        bound = sum((each.expand_as(right) for each in exact.errors.values()), torch.zeros_like(right))
        bound = bound + 2.0**-16 * exact.real.abs().max() + 2.0**-22 * largest
        distance = (exact.real - right).abs()
        is_far = ~(distance <= bound)  # NaN is far
        if bool(is_far.any()):
            worst = int((distance - bound).where(is_far, -math.inf).argmax())
            actual, expected, explained = (float(each.flatten()[worst]) for each in (exact.real, right, bound))
            text = f"{actual:.6g} for {expected:.6g}, and weight rounding explains {explained:.3g} only"
            message = f"the reference model computes something else than the float model: {text}"
            return Problem(rule="CVT-02", message=message)
    return None
