"""Checks of the flow on a whole model: that what is judged is the float model, but for its roundings. (OBS-15, CVT-01)

The backend is compared with the reference model. If the flow had changed the model, both would compute the changed one,
and agree. The flow is then at fault, and not the backend: nothing is shown of the model, which is UNEXERCISED.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from fx_quant_conformance.backends.names import format_error
from fx_quant_conformance.conformance.claims.inputs import Batch
from fx_quant_conformance.conformance.machine.fault import Fault
from fx_quant_conformance.conformance.machine.guard import guard
from fx_quant_conformance.conformance.oracle.evaluate import READS_SHAPE
from fx_quant_conformance.conformance.oracle.grids import lay_along
from fx_quant_conformance.conformance.stages.following import find_difference
from fx_quant_conformance.conformance.stages.meaning import tensors_of
from fx_quant_conformance.conformance.stages.prepare import find_change
from fx_quant_conformance.conformance.stages.reruns import REPETITION, compare_outputs
from fx_quant_conformance.conformance.stages.unrounded import ModuleCall, find_written, list_modules, without_roundings
from fx_quant_conformance.refimpl import explain
from fx_quant_conformance.refimpl.graph.invariants import is_dequantize, is_quantize
from fx_quant_conformance.refimpl.graph.tracing import layer_of
from fx_quant_conformance.refimpl.legacy.dtypes import PLAIN_DTYPE
from fx_quant_conformance.refimpl.observers.decomposed import OPS
from fx_quant_conformance.refimpl.observers.qparams import fill_range, is_quantized_dtype
from fx_quant_conformance.reports.schema import Where
from fx_quant_conformance.reports.verdicts import Verdict

TAKES_INTEGERS = READS_SHAPE
"""What reads of a quantized value something else than its numbers."""


@guard("models.check_prepared")
def check_prepared(model: nn.Module, floating: GraphModule, batch: Batch, *, is_qat: bool) -> Iterator[Fault]:
    """Check that a model that is prepared, and not trained yet, is the float model. (OBS-15, FUS-06, QAT-01)

    ``floating``: the prepared model without observers.
    """
    for fault in find_change(model, floating, batch, is_qat=is_qat):
        yield replace(fault, verdict=Verdict.UNEXERCISED)


@guard("models.check_reference")
def check_reference(floating: GraphModule, reference: GraphModule, batch: Batch) -> Iterator[Fault]:
    """Check that a reference model, its roundings left out, is the prepared model. (CVT-01)"""
    found = find_difference(floating, without_roundings(reference, floating), batch)
    if found is not None:
        yield _make_fault("CVT-01", found.node, f"convert changed what the model computes, beside rounding it: {found}")


@guard("models.check_roundings")
def check_roundings(floating: GraphModule, reference: GraphModule, *, can_clip: bool) -> Iterator[Fault]:
    """Check that what is rounded is read as numbers, and each weight is within half a step. (CVT-06, CVT-02)

    What is quantized as the model runs has a range that a QConfig asks for. (CVT-03)

    ``can_clip``: weights may also be left beyond the ends of their range, by an observer that is not the suite's.
    """
    others = (each for each in explain(reference).plan.decisions if each.kind != "pattern")
    taking = {name for each in others for name in each.nodes}  # custom and standalone modules may take integers
    asked = _find_dynamic_ranges(reference)
    for node in filter(is_quantize, find_written(reference, floating)):
        value = node.all_input_nodes[0].name
        if node.target is OPS.quantize_per_tensor.tensor and node.args[3:5] not in asked:
            text = f"{value} is quantized to {node.args[3:5]} as the model runs; the QConfigs ask for {sorted(asked)}"
            yield _make_fault("CVT-03", value, text)
        for user in node.users:
            if not _takes_integers(user) and user.name not in taking:
                text = f"{user.name} reads the integers of {value}, and not the numbers that they stand for"
                yield _make_fault("CVT-06", user.name, text)
            if is_dequantize(user) and len(user.args) > 1 and user.args[1:] != node.args[1:]:
                text = f"{value} is quantized by {node.args[1:]}, and dequantized by {user.args[1:]}"
                yield _make_fault("CVT-01", value, text)
    for call in list_modules(reference, floating):
        if call.weights:
            yield from _check_weights(call, can_clip=can_clip)


def blame_hooks(model: nn.Module, faults: Iterable[Fault]) -> Iterator[Fault]:
    """Say of faults of a model with hooks that convert leaves these out, as torch's does. No backend is at fault."""
    hooked = [name for name, module in model.named_modules() if any(map(_is_own, _hooks_of(module)))]
    for fault in faults:
        text = f"{fault.message}; convert leaves out the hooks of {', '.join(hooked)}, as torch's does"
        yield replace(fault, message=text, verdict=Verdict.UNEXERCISED) if hooked else fault


def _hooks_of(module: nn.Module) -> list[Any]:
    return [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]


def _is_own(hook: Any) -> bool:
    """Tell whether a hook is the user's; torch's, as of pruning, compute a weight, which is taken."""
    written = hook if hasattr(hook, "__qualname__") else type(hook)
    return not str(written.__module__).startswith("torch.")


@guard("models.check_repeats")
def check_repeats(reference: GraphModule, batch: Batch) -> Iterator[Fault]:
    """Check that a reference model runs, and gives the same for the same input again: no state reaches its results.

    What it keeps from run to run would have to be a backend's as well, which calls it in another order. (NUM-07)
    """
    model = copy.deepcopy(reference)
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}

    def run() -> list[Tensor]:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(0)
            return [each.clone() for each in tensors_of(model(*(value.clone() for value in batch)))]

    try:
        first = run()
        changed = [name for name, buffer in model.named_buffers() if not torch.equal(buffer, before[name])]
        second = run() if changed else first
    except Exception as error:  # a model may hold anything
        text = f"what convert made of the model does not run: {format_error(error)}"
        yield _make_fault("CVT-01", "", text)
        return
    if compare_outputs(Where(), REPETITION, first, second) is not None:
        text = f"the model keeps {', '.join(changed)} from run to run, so that the same input gives another output"
        yield _make_fault("NUM-07", "", f"{text}; make it an input and an output")


def _find_dynamic_ranges(reference: GraphModule) -> set[tuple[int, int]]:
    """Return the lowest and the highest integers that the QConfigs ask for dynamic inputs. (CVT-03)"""
    decisions = [
        each for each in explain(reference).plan.decisions if each.dtype_config and each.dtype_config.is_dynamic
    ]
    observers: list[Any] = [each.qconfig.activation() for each in decisions if each.qconfig is not None]
    return {fill_range(each.dtype, each.quant_min, each.quant_max) for each in observers if each.dtype in PLAIN_DTYPE}


def _takes_integers(node: Node) -> bool:
    return is_dequantize(node) or node.op == "output" or node.target in TAKES_INTEGERS


def _check_weights(call: ModuleCall, *, can_clip: bool) -> Iterator[Fault]:
    """Check that a reference module's weights are the float ones, each rounded by half a step at most. (CVT-02)"""
    module: Any = layer_of(call.quantized)
    for method, read in call.weights.items():
        is_flat = method == "get_flat_weights"
        names = module._flat_weights_names if is_flat else [method.removeprefix("get_")]
        pairs = (getattr(module, method)(), read()) if is_flat else ([getattr(module, method)()], [read()])
        for name, found, right in zip(names, *pairs, strict=True):
            if found.shape != right.shape or _is_far(module, name, found, right, can_clip=can_clip):
                text = f"{call.target}'s {name} is not that of the float model, rounded by half a step at most"
                yield _make_fault("CVT-02", call.target, text)


def _is_far(module: Any, name: str, found: Tensor, right: Tensor, *, can_clip: bool) -> bool:
    """Tell whether a weight is farther from the float one than its rounding explains, or that and clipping."""
    found, right = found.detach().double(), right.detach().double()
    dtype = getattr(module, f"{name}_dtype", None)
    bound = torch.zeros(())
    if dtype is torch.float16:
        bound = 2.0**-11 * right.abs() + 2.0**-25  # half a step of 10 bits, or of the smallest numbers
    elif is_quantized_dtype(dtype):
        scale, axis = getattr(module, f"{name}_scale"), int(getattr(module, f"{name}_axis", 0))
        (step,) = lay_along(axis, found, scale.double()) if scale.numel() > 1 else (scale.double(),)
        bound = (0.5 + 2.0**-10) * step  # float32 rounds the quotient
    is_far = ~((found - right).abs() <= bound)  # NaN is far
    if can_clip:
        is_far &= (found * right < 0) | (found.abs() > right.abs())  # what is clipped comes nearer to zero
    return bool(is_far.any())


def _make_fault(rule: str, node: str, message: str) -> Fault:
    shown = {"node": node} if node else {}
    return Fault(rule=rule, message=message, verdict=Verdict.UNEXERCISED, evidence=shown)
