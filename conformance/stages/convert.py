"""The convert stage: checks the reference model's nodes, its function and its grids. (CVT)

A claim that is not static has other nodes: `conformance.stages.dynamic_checks`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from fx_quant_conformance.conformance.bounds.error_bounds import NoOracleError
from fx_quant_conformance.conformance.claims.claim import Claim
from fx_quant_conformance.conformance.claims.inputs import draw_inputs
from fx_quant_conformance.conformance.claims.kinds import INTEGERS
from fx_quant_conformance.conformance.machine.fault import Fault
from fx_quant_conformance.conformance.machine.guard import guard
from fx_quant_conformance.conformance.oracle.evaluate import READS_SHAPE, Walk
from fx_quant_conformance.conformance.oracle.grids import integers_of, lay_along
from fx_quant_conformance.conformance.oracle.vendor_modules import HELD, find_reference_kind, is_custom
from fx_quant_conformance.conformance.stages.calibration import keeps_statistics
from fx_quant_conformance.conformance.stages.dynamic_checks import check_reference_dynamic
from fx_quant_conformance.conformance.stages.fixed_grids import check_fixed_grids
from fx_quant_conformance.conformance.stages.meaning import run_in_float64
from fx_quant_conformance.conformance.stages.state import CaseState, ClaimState, run_flow, show_graph
from fx_quant_conformance.refimpl.graph.invariants import find_observers, is_dequantize, is_quantize
from fx_quant_conformance.refimpl.legacy.dtypes import PLAIN_DTYPE
from fx_quant_conformance.refimpl.observers.observers import is_quantized_dtype


def convert_to_reference(run: ClaimState, state: CaseState) -> Iterator[Fault]:
    """Convert a prepared model to the reference model.

    Judged are its quantize and dequantize nodes and its root (CVT-01, CVT-02, CVT-06), once per variant the function
    that it computes (FUS-06, CVT-02), and the grids after calibration (CVT-01).
    """
    claim, case, bench = run.claim, state.case, run.bench
    model = state.reference = run_flow("CVT-01", lambda: bench.convert(state.prepared))
    seed = bench.seed_for(claim.id, "inputs", case.name)
    state.draw = partial(draw_inputs, claim, case, effort=bench.effort, seed=seed)
    yield from show_graph(model, check_reference(claim, model))
    yield from show_graph(model, check_fixed_grids(model))
    if case.variant not in run.proven["convert"]:
        is_trained = claim.flow == "qat" and keeps_statistics(state.prepared)
        original = state.prepared if is_trained else state.model
        can_clip = claim.preparation.qconfigs is not None
        yield from show_graph(model, check_meaning(original, model, state.inputs[0].tensors, can_clip=can_clip))
        run.proven["convert"].add(case.variant)
    if state.misfit is not None:
        yield from show_graph(model, [state.misfit])


@guard("convert.check_reference")
def check_reference(claim: Claim, reference: GraphModule) -> Iterator[Fault]:
    """Check that both ends are quantized in the claimed dtypes, no observer is left, and the root was swapped."""
    if claim.kind not in INTEGERS:
        yield from check_reference_dynamic(claim, reference)
        return
    nodes = list(reference.graph.nodes)
    if find_observers(reference):
        yield Fault(rule="CVT-01", message="an observer is left in the reference model")
    output: Any = reference.graph.output_node().args[0]
    if not is_dequantize(output):
        yield Fault(rule="CVT-06", message=f"the output {output} is not dequantized")
        return
    ends = [("output", output.args[0])]
    users = (user for node in nodes if node.op == "placeholder" for user in node.users)
    ends += [("input", user) for user in users if user.target not in READS_SHAPE]
    for role, node in ends:
        claimed = getattr(claim.dtypes, f"{role}_dtype")
        custom = reference.get_submodule(str(node.target)) if node.op == "call_module" else None
        if custom is not None and is_custom(custom):  # it quantizes its result itself (CUS-01)
            if custom.dtype is not claimed:
                yield Fault(rule="CVT-01", message=f"{role} is quantized to {custom.dtype}; the claim says {claimed}")
        elif not is_quantize(node):
            yield Fault(rule="CVT-01", message=f"{role}: {node} is not a quantize node")
        elif claimed is not None and node.args[-1] not in (claimed, PLAIN_DTYPE.get(claimed)):
            yield Fault(rule="CVT-01", message=f"{role} is quantized to {node.args[-1]}; the claim says {claimed}")
    yield from check_root(claim, reference)
    yield from check_own_weights(claim, reference)


@guard("convert.check_root")
def check_root(claim: Claim, reference: GraphModule) -> Iterator[Fault]:
    """Check that a root module with a weight holds a quantized one. (CVT-02)"""
    if not is_quantized_dtype(claim.dtypes.weight_dtype) or not claim.has_weighted_module:
        return
    if any(hasattr(module, "get_quantized_weight") for module in reference.modules()):
        return
    own = claim.entry.reference_quantized_module
    text = "the root was not swapped for its reference module: the weight is float"
    if own is not None and any(type(module) is own for module in reference.modules()):
        text = f"reference module {own.__name__} shows no integers: it has no get_quantized_weight()"
    yield Fault(rule="CVT-02", message=text)


@guard("convert.check_own_weights")
def check_own_weights(claim: Claim, reference: GraphModule) -> Iterator[Fault]:
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
            yield Fault(rule="CVT-02", message=text)


@guard("convert.check_meaning")
def check_meaning(
    model: nn.Module, reference: GraphModule, inputs: tuple[Tensor, ...], *, can_clip: bool = False
) -> Iterator[Fault]:
    """Check that the reference model computes the float model's function, up to its weights' rounding. (FUS-06, CVT-02)

    On inputs that lie on the grids, both in float64, the results may differ by the effect of half a step of each weight
    on the inputs' absolute values, by the float32 rounding of the inputs, and by that of a batch norm that fuse folded:
    2⁻¹⁶ of the largest result, far above any such rounding and far below any fault of structure. ``can_clip``: weights
    may also be left beyond their range, by a vendor's own observer.
    """
    try:
        exacts = Walk(reference, counts_weights=True, can_clip=can_clip).exact(inputs)
    except NoOracleError:
        return  # numerics will say so
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
            yield Fault(rule="CVT-02", message=message)
