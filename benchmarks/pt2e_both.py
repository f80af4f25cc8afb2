"""One float model through both flows, FX graph mode and PT2E, and how the results differ."""

from __future__ import annotations

import copy
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram, export
from torch.fx import GraphModule, Node
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_leaves
from torchao.quantization.pt2e import move_exported_model_to_eval
from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e, prepare_qat_pt2e

from fx_quant_conformance import refimpl
from fx_quant_conformance.conformance.claims.inputs import Batch
from fx_quant_conformance.conformance.stages.calibration import forget_ranges
from fx_quant_conformance.refimpl.exported.exported import Unnamed, hold_weights, open_module
from fx_quant_conformance.refimpl.exported.pt2e import BackendConfigQuantizer
from fx_quant_conformance.refimpl.graph.tracing import attribute_of

# -- the two flows -----------------------------------------------------------------------------------------------------


class Both(NamedTuple):
    """The reference model of the FX flow, the converted program's module, and the quantizer that annotated it."""

    reference: GraphModule
    converted: GraphModule
    quantizer: BackendConfigQuantizer


def convert_both(
    model: nn.Module,
    mapping: refimpl.QConfigMapping,
    config: refimpl.BackendConfig,
    batches: Sequence[Batch],
    *,
    is_qat: bool = False,
    is_trained: bool = True,
    custom: refimpl.PrepareCustomConfig | None = None,
) -> Both:
    """Take a float model through both flows on the same batches. Raises what they raise.

    ``is_qat``: the model runs in train mode, then its ranges are seen anew in eval mode. ``is_trained``: without it,
    only the latter.
    """
    quantizer = BackendConfigQuantizer(config, mapping, is_qat=is_qat)
    if not is_qat:
        program = export_float(model.eval(), batches[0])
        prepared = refimpl.prepare_fx(copy.deepcopy(model), mapping, None, custom, backend_config=config)
        other = prepare_pt2e(open_module(program), quantizer)
        for each in (prepared, other):
            _run(each, batches)
    else:
        training = [tuple(torch.cat(parts) for parts in zip(*batches, strict=True))] if _trains(model) else batches
        program = export_float(model.train(), training[0], is_open=_trains(model))
        trained = copy.deepcopy(model).train()
        prepared = refimpl.prepare_qat_fx(trained, mapping, None, custom, backend_config=config)
        other = prepare_qat_pt2e(open_module(program), quantizer)
        for each in (prepared, other):
            _run(each, training if is_trained else ())
            prepared.eval() if each is prepared else move_exported_model_to_eval(each)
            forget_ranges(each)
            _run(each, batches)
    reference = refimpl.convert_to_reference_decomposed_fx(prepared)
    return Both(reference, convert_pt2e(other), quantizer)


def export_float(model: nn.Module, inputs: Batch, *, is_open: bool = False) -> ExportedProgram:
    """Export a float model; ``is_open``: for batches of other sizes as well."""
    copied = Unnamed(copy.deepcopy(model)).train(model.training)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of recurrent weights that are no attributes
        return export(copied, inputs, dynamic_shapes=(tuple({0: Dim.AUTO} for _ in inputs),) if is_open else None)


def _trains(model: nn.Module) -> bool:
    """Tell whether training changes statistics, which need more than one value per channel."""
    return any(isinstance(module, _BatchNorm) for module in model.modules())


def _run(model: nn.Module, batches: Iterable[Batch]) -> None:
    with torch.no_grad():
        for inputs in batches:
            model(*(each.clone() for each in inputs))


# -- comparing ---------------------------------------------------------------------------------------------------------


def find_difference(both: Both, batches: Sequence[Batch]) -> str:
    """Say how the two differ; "" if the outputs, and the quantized ops with their qparams, are the same."""
    with torch.no_grad():
        for inputs in batches:
            pairs = [
                [each for each in tree_leaves(model(*(value.clone() for value in inputs))) if isinstance(each, Tensor)]
                for model in both[:2]
            ]
            if not all(_same(left, right) for left, right in zip(*pairs, strict=True)):
                return "the outputs differ"
    mine, theirs = list_quantized(hold_weights(both.reference)), list_quantized(both.converted)
    return "" if mine == theirs else f"only in FX: {mine - theirs}; only in PT2E: {theirs - mine}"


def _same(left: Tensor, right: Tensor) -> bool:
    return left.shape == right.shape and bool(((left == right) | (left.isnan() & right.isnan())).all())


def list_quantized(model: GraphModule) -> Counter[Any]:
    """Count a model's quantize ops by their qparams, and its integer weights by their integers and qparams."""
    found: Counter[Any] = Counter()
    for node in model.graph.nodes:
        if node.op == "call_module":
            called = model.get_submodule(str(node.target))
            found.update(weight for module in called.modules() for weight in _list_weights(module))
        name = str(node.target).partition("quantized_decomposed.")[2].partition(".")[0]
        operands = [_constant_of(model, argument) for argument in node.args]
        if name.startswith("quantize") and operands[0] is None:
            found[(name, *map(_spell, operands[1:]))] += 1
        elif name.startswith("dequantize") and operands[0] is not None:
            scale, zero_point = (torch.as_tensor(each).reshape(-1) for each in operands[1:3])
            axis = operands[3] if scale.numel() > 1 else None
            found[("weight", axis, *map(_spell, (operands[0], scale, zero_point)))] += 1
    return found


def _list_weights(module: Any) -> Iterator[Any]:
    """Yield what `list_quantized` counts of a reference module, whose weights are folded."""
    for name in [key.removesuffix("_qscheme") for key in vars(module) if key.endswith("_qscheme")]:
        if hasattr(module, f"{name}_integers"):
            numbers = [getattr(module, f"{name}_{part}") for part in ("integers", "scale", "zero_point")]
            axis = int(getattr(module, f"{name}_axis_int")) if numbers[1].numel() > 1 else None
            yield ("weight", axis, *map(_spell, numbers))


def _constant_of(model: GraphModule, argument: Any) -> Any:
    """Return an argument's value if it is known without running the model; None: it is computed."""
    if not isinstance(argument, Node):
        return argument
    if argument.op == "get_attr":
        return attribute_of(model, str(argument.target))
    if not str(argument.target).startswith("quantized_decomposed.quantize"):
        return None
    operands = [_constant_of(model, each) for each in argument.args]
    target: Any = argument.target
    return None if any(each is None for each in operands) else target(*operands)


def _spell(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return str(value)
    return tuple(value.detach().double().reshape(-1).tolist())
