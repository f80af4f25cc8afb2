"""Convert a prepared model to the reference model (rules CVT-01, CVT-02, CVT-06, CVT-07, CVT-09, CVT-10).

Observers become quantize and dequantize with the qparams that they measured; root modules become reference modules that
carry their weight's qparams; the ops between still run in float.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
import torch.ao.nn.intrinsic as nni
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from refimpl.backend_config import as_backend_config
from refimpl.decide import Decision, Plan, Slot
from refimpl.decomposed import OPS, PLAIN_DTYPE
from refimpl.errors import ConfigError, ModelError, NotBuiltError, QConfigError, reject_unbuilt
from refimpl.explain import PLAN
from refimpl.invariants import OBSERVER_PREFIX, check_graph
from refimpl.observers import QParams, dtype_range, is_quantized_dtype, read_qparams
from refimpl.prepare import PREPARED, Claim, Prepared, claims_of
from refimpl.tracing import attribute_of, draft_of, module_type, no_collection, notes_of


def convert_to_reference_fx(
    graph_module: GraphModule,
    convert_custom_config: object | None = None,
    _remove_qconfig: bool = True,
    qconfig_mapping: object | None = None,
    backend_config: object | None = None,
) -> GraphModule:
    """Convert to the reference model on torch's quantized tensors. The prepared model is not changed. (CVT-01)

    Without `backend_config` the one of prepare is used (CVT-10). Raises ModelError for a model that prepare_fx did not
    make, QConfigError for an observer without data, ConfigError where the config cannot be executed.
    """
    reject_unbuilt("convert", convert_custom_config=convert_custom_config, qconfig_mapping=qconfig_mapping)
    return _convert(graph_module, backend_config, is_decomposed=False)


def convert_to_reference_decomposed_fx(
    graph_module: GraphModule,
    convert_custom_config: object | None = None,
    qconfig_mapping: object | None = None,
    backend_config: object | None = None,
) -> GraphModule:
    """Convert to the reference model on plain integer tensors with ``quantized_decomposed`` ops. (CVT-07)

    Arguments and errors are those of convert_to_reference_fx.
    """
    reject_unbuilt("convert", convert_custom_config=convert_custom_config, qconfig_mapping=qconfig_mapping)
    return _convert(graph_module, backend_config, is_decomposed=True)


_convert_to_reference_decomposed_fx = convert_to_reference_decomposed_fx


@no_collection()
def _convert(prepared: GraphModule, backend_config: object | None, *, is_decomposed: bool) -> GraphModule:
    notes = notes_of(prepared)
    plan, state = notes.get(PLAN), notes.get(PREPARED)
    if not isinstance(plan, Plan) or not isinstance(state, Prepared):
        raise ModelError(f"convert: {type(prepared).__name__} was not made by refimpl's prepare_fx")
    if backend_config is not None and claims_of(as_backend_config(backend_config)) != state.claims:
        raise NotBuiltError("convert: a backend_config other than that of prepare_fx is not built yet")
    model = draft_of(prepared)
    emit = _Decomposed(model) if is_decomposed else _QuantizedTensors(model)
    _replace_observers(model, plan, emit)
    _swap_roots(model, plan, state.claims, is_decomposed=is_decomposed)
    check_graph(model, "convert")
    return model.finish()


class _QuantizedTensors:
    """Emits quantize and dequantize on torch's quantized tensors; qparams are buffers. (CVT-01)"""

    def __init__(self, model: GraphModule) -> None:
        self._model = model

    def __call__(self, value: Node, name: str, qparams: QParams) -> Node:
        """Insert after `value`, in the graph's current insertion point; return the dequantize node."""
        graph = self._model.graph
        scale = self._buffer(f"{name}_scale", qparams.scale)
        zero_point = self._buffer(f"{name}_zero_point", qparams.zero_point)
        if qparams.axis is not None:
            value = self._clamp_channels(value, name, qparams)
            arguments: tuple[Any, ...] = (value, scale, zero_point, qparams.axis, qparams.dtype)
            quantized = graph.call_function(torch.quantize_per_channel, arguments)
        else:
            value = self._clamp(value, qparams)
            quantized = graph.call_function(torch.quantize_per_tensor, (value, scale, zero_point, qparams.dtype))
        return graph.call_method("dequantize", (quantized,))

    def _clamp(self, value: Node, qparams: QParams) -> Node:
        """Honour a range narrower than the dtype's, which the quantize op itself cannot express. (CVT-09)"""
        if not is_narrow(qparams):
            return value
        low, high = (float(dequantize_integer(bound, qparams)) for bound in (qparams.quant_min, qparams.quant_max))
        return self._model.graph.call_function(torch.clamp, (value, low, high))  # rule: CVT-09

    def _clamp_channels(self, value: Node, name: str, qparams: QParams) -> Node:
        """Do the same with one range per channel; only of a weight that the model holds, whose rank is known."""
        if not is_narrow(qparams):
            return value
        if value.op != "get_attr":
            raise NotBuiltError(
                f"CVT-09: a narrow range per channel of {value.name}, which is computed, is not built yet"
            )
        bounds = real_bounds(qparams, attribute_of(self._model, str(value.target)).dim())  # rule: CVT-09
        nodes = [self._buffer(f"{name}_{end}", bound) for end, bound in zip(("low", "high"), bounds, strict=True)]
        return self._model.graph.call_function(torch.clamp, (value, *nodes))

    def _buffer(self, name: str, tensor: Tensor) -> Node:
        if not hasattr(self._model, name):
            self._model.register_buffer(name, tensor.detach().clone())
        return self._model.graph.get_attr(name)


def dequantize_integer(q: int, qparams: QParams) -> Tensor:
    """Return the real value of one integer, per channel where the qparams are, in float32. (NUM-01)"""
    return (q - qparams.zero_point.to(torch.float32)) * qparams.scale


def is_narrow(qparams: QParams) -> bool:
    """Tell whether the range is narrower than the dtype's."""
    return (qparams.quant_min, qparams.quant_max) != dtype_range(qparams.dtype)


def real_bounds(qparams: QParams, rank: int) -> tuple[Tensor, Tensor]:
    """Return the real values of both ends of the range, in a shape that fits a tensor of that rank. (CVT-09)"""
    shape = [1] * rank
    if qparams.axis is not None:
        shape[qparams.axis] = -1
    low, high = (dequantize_integer(q, qparams).reshape(shape) for q in (qparams.quant_min, qparams.quant_max))
    return low, high


class _Decomposed:
    """Emits ``quantized_decomposed`` ops on plain integers; per-tensor qparams are literals. (CVT-07)"""

    def __init__(self, model: GraphModule) -> None:
        self._model = model

    def __call__(self, value: Node, name: str, qparams: QParams) -> Node:
        """Insert after `value`, in the graph's current insertion point; return the dequantize node."""
        graph = self._model.graph
        bounds = (qparams.quant_min, qparams.quant_max, PLAIN_DTYPE[qparams.dtype])  # rule: CVT-07
        if qparams.axis is None:
            numbers: tuple[Any, ...] = (float(qparams.scale), int(qparams.zero_point), *bounds)
            quantize, dequantize = OPS.quantize_per_tensor.default, OPS.dequantize_per_tensor.default
        else:
            self._model.register_buffer(f"{name}_scale", qparams.scale)
            self._model.register_buffer(f"{name}_zero_point", qparams.zero_point)
            scale, zero_point = (graph.get_attr(f"{name}_{part}") for part in ("scale", "zero_point"))
            numbers = (scale, zero_point, qparams.axis, *bounds)
            quantize, dequantize = OPS.quantize_per_channel.default, OPS.dequantize_per_channel.default
        return graph.call_function(dequantize, (graph.call_function(quantize, (value, *numbers)), *numbers))


def _replace_observers(model: GraphModule, plan: Plan, emit: _QuantizedTensors | _Decomposed) -> None:
    """Put quantize and dequantize in the place of every observer call. (CVT-01)"""
    slots = {slot.group: slot for slot in plan.slots}
    qparams: dict[str, QParams] = {}
    for node in list(model.graph.nodes):
        target = str(node.target)
        if node.op != "call_module" or not target.startswith(OBSERVER_PREFIX):
            continue
        if target not in qparams:
            group = int(target.removeprefix(OBSERVER_PREFIX))
            qparams[target] = _measured(model, node, slots[group])
        with model.graph.inserting_before(node):
            dequantized = emit(node.args[0], target.replace(OBSERVER_PREFIX, "qparams_"), qparams[target])
        node.replace_all_uses_with(dequantized)  # rule: CVT-01
        model.graph.erase_node(node)


def _measured(model: GraphModule, node: Node, slot: Slot) -> QParams:
    """Read an observer's qparams; a weight held by the model is observed now (OBS-06, OBS-13)."""
    observer = model.get_submodule(str(node.target))
    value = node.args[0]
    if slot.role == "weight" and isinstance(value, Node) and value.op == "get_attr":
        observer(attribute_of(model, str(value.target)))  # rule: OBS-06
    try:
        return read_qparams(observer)
    except QConfigError as error:
        raise QConfigError(f"observer of {slot.value!r} ({slot.role}): {error}") from error


def _swap_roots(model: GraphModule, plan: Plan, claims: tuple[Claim, ...], *, is_decomposed: bool) -> None:
    """Put reference modules in the place of the root modules of everything that is quantized. (CVT-02)"""
    references = {  # rule: CFG-11
        claim.root_module: claim.reference_quantized_module
        for claim in claims
        if claim.root_module is not None and claim.reference_quantized_module is not None
    }
    swapped: set[str] = set()
    for decision in plan.decisions:
        target = decision.target
        if decision.dtype_config is None or target is None:
            continue
        if target not in swapped and is_quantized_dtype(decision.dtype_config.weight_dtype):
            swapped.add(target)
            _swap_root(model, target, decision, references, is_decomposed=is_decomposed)


def _swap_root(
    model: GraphModule,
    target: str,
    decision: Decision,
    references: Mapping[type[nn.Module], type[nn.Module]],
    *,
    is_decomposed: bool,
) -> None:
    module = model.get_submodule(target)
    is_fused = isinstance(module, nni._FusedModule)  # type: ignore[attr-defined]
    floating: Any = module[0] if is_fused else module  # type: ignore[index]
    weight = getattr(floating, "weight", None)
    reference = references.get(module_type(floating))
    if reference is None:
        if weight is None:
            return  # an op without weight: the dtype config names a weight dtype all the same
        raise ConfigError(  # rule: CVT-10
            f"{decision.pattern} at {target!r}: quantized by prepare, but no entry gives a reference module for root "
            f"{module_type(floating).__name__}: set root_module and reference_quantized_module together"
        )
    if not hasattr(reference, "from_float"):
        raise ConfigError(f"{decision.pattern}: reference module {reference.__name__} has no from_float")
    assert decision.qconfig is not None
    observer = decision.qconfig.weight()
    observer(weight)  # rule: OBS-13
    measured = read_qparams(observer)
    qparams = measured.weight_dict(is_decomposed=is_decomposed)
    from_float: Any = reference.from_float  # type: ignore[attr-defined]
    replacement: nn.Module = from_float(floating, qparams).train(floating.training)  # rule: CVT-02
    if is_narrow(measured) and not is_decomposed and isinstance(replacement.weight, Tensor):  # rule: CVT-09
        clamped = torch.clamp(replacement.weight.detach(), *real_bounds(measured, replacement.weight.dim()))
        replacement.weight = nn.Parameter(clamped, replacement.weight.requires_grad)
    if is_fused:
        fused: Any = copy.copy(module)
        fused._modules = dict(module._modules)
        fused[0] = replacement
        replacement = fused
    model.set_submodule(target, replacement)
