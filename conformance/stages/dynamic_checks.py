"""Checks of prepared and reference models of claims that are not static: dynamic, float16, weight-only.

`conformance.stages.prepare` checks what holds of every claim: one decision, the claim's dtype config.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule, Node

from fx_quant_conformance.conformance.claims.claim import Claim
from fx_quant_conformance.conformance.claims.kinds import Kind
from fx_quant_conformance.conformance.claims.qconfigs import dynamic_range_of
from fx_quant_conformance.conformance.machine.fault import Fault
from fx_quant_conformance.conformance.machine.guard import guard
from fx_quant_conformance.refimpl import explain
from fx_quant_conformance.refimpl.graph.invariants import find_observers, is_dequantize, is_quantize
from fx_quant_conformance.refimpl.legacy import is_dtype
from fx_quant_conformance.refimpl.legacy.dtypes import PLAIN_DTYPE
from fx_quant_conformance.refimpl.observers.decomposed import OPS


@guard("prepare.check_prepared_dynamic")
def check_prepared_dynamic(claim: Claim, prepared: GraphModule) -> Iterator[Fault]:
    """Check that observers stand where rules OBS-05, OBS-06 and CVT-11 put them.

    Dynamic and float16: one on the first input, which asks for the claim's dtype, at run time. Weight-only: none on
    inputs. Never one on the output; one on a weight that is a function's argument, none on a module's.
    """
    plan, kind = explain(prepared).plan, claim.kind
    placeholders = [node.name for node in prepared.graph.nodes if node.op == "placeholder"]
    observed = [slot.value for slot in plan.slots if slot.role == "input"]
    expected = [] if kind is Kind.WEIGHT_ONLY else placeholders[:1]
    if observed != expected:
        rule = "CVT-11" if kind is Kind.WEIGHT_ONLY else "OBS-05"
        yield _make_fault(rule, f"observers on inputs {observed or 'none'}; expected on {expected or 'none'}")
    outputs = [slot.value for slot in plan.slots if slot.role == "output"]
    if outputs:
        yield _make_fault("OBS-05", f"the output is observed ({', '.join(outputs)}), though it stays float")
    is_function = all(decision.target is None for decision in plan.decisions)
    weights = [slot.value for slot in plan.slots if slot.role == "weight"]
    if len(weights) != is_function:
        yield _make_fault("OBS-06", f"observers on weights {weights or 'none'}; expected {int(is_function)}")
    for slot in plan.slots:
        observer: Any = getattr(prepared, slot.name)
        is_input = slot.role == "input"
        dtype = claim.dtypes.input_dtype if is_input else claim.dtypes.weight_dtype
        claimed = (dtype, is_input and claim.dtypes.is_dynamic)
        requested = (observer.dtype, bool(getattr(observer, "is_dynamic", False)))
        if requested != claimed:
            text = f"the observer of {slot.value} asks for (dtype, dynamic) {requested}; the claim says {claimed}"
            yield _make_fault("OBS-05", text)


@guard("convert.check_reference_dynamic")
def check_reference_dynamic(claim: Claim, reference: GraphModule) -> Iterator[Fault]:
    """Check that only the first input and the weight are quantized, as claimed; the output is float. (CVT-02, -03, -11)

    No observer is left. (CVT-01)
    """
    nodes = list(reference.graph.nodes)
    if find_observers(reference):
        yield _make_fault("CVT-01", "an observer is left in the reference model")
    first, *others = (node for node in nodes if node.op == "placeholder")
    kind, outputs = claim.kind, reference.graph.output_node().all_input_nodes
    floating = others if kind is not Kind.WEIGHT_ONLY else [first, *others]
    for node in floating:
        if any(map(_quantizes, node.users)):
            yield _make_fault("OBS-05", f"input {node.name} is quantized; only the first one should be")
    if any(map(is_dequantize, outputs)):
        yield _make_fault("DTY-07", "the output is quantized; the claim says float")
    if kind is not Kind.WEIGHT_ONLY:
        yield from _check_input(claim, kind, first)
    dtypes = {*_find_module_dtypes(reference), *_find_function_dtypes(reference)}
    claimed = claim.dtypes.weight_dtype
    if claimed is not None and dtypes not in ({claimed}, {PLAIN_DTYPE.get(claimed)}):
        text = ", ".join(sorted(map(str, dtypes))) or "float32"
        yield _make_fault("CVT-02", f"the weight's dtype is {text}; the claim says {claimed}")


def _check_input(claim: Claim, kind: Kind, first: Node) -> Iterator[Fault]:
    """Check that every use of the input goes through one quantization, to the claim's dtype and range. (CVT-03, -04)"""
    quantizes = [user for user in first.users if _quantizes(user)]
    rule = "CVT-04" if kind is Kind.FLOAT16 else "CVT-03"
    uses = [user for user in first.users if user not in quantizes and user.target != OPS.choose_qparams.tensor]
    if len(quantizes) != 1 or uses:
        text = f"input {first.name}: {len(quantizes)} quantizations, {len(uses)} other uses; expected 1, 0"
        yield _make_fault(rule, text)
        return
    dtype, claimed = _dtype_of(quantizes[0]), claim.dtypes.input_dtype
    assert claimed is not None
    if dtype not in (claimed, PLAIN_DTYPE.get(claimed)):
        yield _make_fault(rule, f"the input is quantized to {dtype}; the claim says {claimed}")
    bounds = dynamic_range_of(claim)
    if bounds is not None and (actual := _range_of(quantizes[0])) != bounds:
        yield _make_fault("CVT-03", f"the input is quantized to {actual}; the claim's QConfig says {bounds}")


def _quantizes(node: Node) -> bool:
    """Tell whether a node quantizes or casts to half precision."""
    return is_quantize(node) or (node.target is OPS.convert_element_type.no_fuse and torch.float16 in node.args)


def _dtype_of(quantize: Node) -> Any:
    """Return the dtype of a quantize node: the last argument that is one."""
    return [argument for argument in quantize.args if is_dtype(argument)][-1]


def _range_of(quantize: Node) -> tuple[int, int]:
    """Return the ends of its integers."""
    low, high = (int(end) for end in quantize.args[3:5])  # type: ignore[arg-type]
    return low, high


def _find_module_dtypes(reference: GraphModule) -> Iterator[torch.dtype]:
    """Yield the dtypes of reference modules' weights; a recurrent module or cell has several, by their names."""
    for module in reference.modules():
        if isinstance(module, (nn.RNNBase, nn.RNNCellBase)):
            names = [name for name, _ in module.named_parameters() if name.startswith("weight")]
            yield from (getattr(module, f"{name}_dtype", torch.float32) for name in names)
        elif hasattr(module, "get_quantized_weight"):
            yield module.weight_dtype  # type: ignore[misc]


def _find_function_dtypes(reference: GraphModule) -> Iterator[torch.dtype]:
    for node in reference.graph.nodes:
        if _quantizes(node) and node.all_input_nodes[0].op == "get_attr":
            yield _dtype_of(node)


def _make_fault(rule: str, message: str) -> Fault:
    return Fault(rule=rule, message=message)
