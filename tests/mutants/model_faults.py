"""Faults of the flow that change a model: the backend agrees with the reference model, and both with nobody's model.

Each takes what the honest flow made and changes it, so that none depends on how the flow is written.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.fx import GraphModule, Node

from fx_quant_conformance.refimpl.graph.invariants import is_dequantize
from fx_quant_conformance.refimpl.graph.tracing import layer_of
from tests.mutants.flow_faults import patched

Change = Callable[[Any], object]
OWN = ("model/own/*/quint8/*",)
PREPARE = "fx_quant_conformance.conformance.whole_models.units.prepare_fx"
CONVERT = "fx_quant_conformance.conformance.stages.bench.convert_to_reference_decomposed_fx"


def _changed(change: Change) -> Callable[..., GraphModule]:
    """What a pass returns is changed, in place."""

    def body(honest: Any, *arguments: Any, **keywords: Any) -> GraphModule:
        made: GraphModule = honest(*arguments, **keywords)
        change(made)
        made.graph.lint()
        made.recompile()
        return made

    return body


def prepare(name: str, model: str, change: Change, *rules: str) -> None:
    """Enter a fault of prepare, by what it changes of the prepared model."""
    patched("flow", name, PREPARE, _changed(change), *rules, claims=OWN, models=(f"tests.mutants.flow_models:{model}",))


def convert(name: str, model: str, change: Change, *rules: str) -> None:
    """Enter a fault of convert, by what it changes of the reference model."""
    patched("flow", name, CONVERT, _changed(change), *rules, claims=OWN, models=(f"tests.mutants.flow_models:{model}",))


def _find(model: GraphModule, name: str) -> Node:
    node: Node = next(node for node in model.graph.nodes if node.name == name)
    return node


def _bypass(node: Node) -> None:
    node.replace_all_uses_with(node.all_input_nodes[0])
    node.graph.erase_node(node)


# -- prepare ----------------------------------------------------------------------------------------------------------


def _read_folded(model: Any) -> None:
    """Whatever reads a tensor of the shape of the convolution's weight reads the folded one."""
    folded = layer_of(model.conv).weight
    for node in model.graph.find_nodes(op="get_attr"):
        value = model
        for part in str(node.target).split("."):
            value = getattr(value, part)
        if value.shape == folded.shape:
            node.target = "conv.weight"


def _swap_norms(honest: Any, model: Any, *arguments: Any, **keywords: Any) -> GraphModule:
    """Each convolution is fused with the other one's norm."""
    swapped: Any = copy.copy(model)
    swapped._modules = {**model._modules, "left_norm": model.right_norm, "right_norm": model.left_norm}
    made: GraphModule = honest(swapped, *arguments, **keywords)
    return made


def _drop_for_good(model: Any) -> None:
    for node in (each for each in model.graph.nodes if each.target is F.dropout):
        node.args, node.kwargs = (node.args[0],), {"p": 0.5, "training": True}


def _change_number(model: Any) -> None:
    node = _find(model, "add")
    node.args = (node.args[0], 0.25)


def _replace_submodule(model: Any) -> None:
    model.add_module("second", copy.deepcopy(model.activation_post_process_0))


prepare("a reader gets the folded weight", "reader", _read_folded, "OBS-15")
patched(
    "flow",
    "fuse swaps the norms of two branches",
    PREPARE,
    _swap_norms,
    "FUS-06",
    "OBS-15",
    claims=OWN,
    models=("tests.mutants.flow_models:branches",),
)
prepare("prepare lets dropout drop values for good", "scaled", _drop_for_good, "OBS-15")
prepare("prepare changes a number", "scaled", _change_number, "OBS-15")
prepare("an observer takes the place of a submodule", "scaled", _replace_submodule, "OBS-15")


def _enlarge_biases(model: Any) -> None:
    """By less than what the rounding of weights explains."""
    for layer in (each for each in model.modules() if isinstance(each, nn.Linear | nn.Conv2d)):
        if layer.bias is not None:
            layer.bias = nn.Parameter(layer.bias.detach() * (1 + 2.0**-16))


patched(
    "flow",
    "prepare enlarges biases by 2^-16",
    "fx_quant_conformance.conformance.stages.calibration.prepare_fx",
    _changed(_enlarge_biases),
    "OBS-15",
    claims=("nn.Linear/static:*/ptq/*", "nn.Conv2d/*/ptq/*"),
)

# -- convert ----------------------------------------------------------------------------------------------------------


def _drop_products(model: Any) -> None:
    for node in [each for each in model.graph.nodes if each.name.startswith("mul")]:
        _bypass(node)


def _overwrite_buffer(model: Any) -> None:
    node = next(each for each in model.graph.find_nodes(op="get_attr") if "gain" in str(each.target))
    setattr(model, str(node.target), torch.tensor(0.0123))


def _take_other_weight(model: Any) -> None:
    """One layer gets the other's float weight, with its qparams."""
    layer_of(model.right).weight = nn.Parameter(layer_of(model.left).weight.detach().clone())


def _read_integers(model: Any) -> None:
    """The last reader of the first value that is quantized takes its integers as numbers."""
    node = next(each for each in model.graph.nodes if is_dequantize(each))
    list(node.users)[-1].replace_input_with(node, node.args[0])


def _dequantize_otherwise(model: Any) -> None:
    node = next(each for each in model.graph.nodes if is_dequantize(each))
    node.args = (node.args[0], node.args[1] * 1.25, *node.args[2:])


def _shift_bias(model: Any) -> None:
    for module in (each for each in model.modules() if hasattr(each, "get_weight") and each.bias is not None):
        module.bias = nn.Parameter(module.bias.detach() + 0.125)


convert("convert drops a product", "scaled", _drop_products, "CVT-01")
convert("convert drops a statement in place", "statement", _drop_products, "CVT-01")
convert("qparams overwrite a buffer", "scaled", _overwrite_buffer, "CVT-01")
convert("convert takes the weight of another layer", "branches", _take_other_weight, "CVT-02")
convert("a reader takes integers for numbers", "scaled", _read_integers, "CVT-06")
convert("dequantized by another scale", "scaled", _dequantize_otherwise, "CVT-01")
patched(
    "flow",
    "convert shifts what training has learned",
    CONVERT,
    _changed(_shift_bias),
    "CVT-01",
    claims=("model/residual/ptq/*",),
    in_full=("model/residual/qat/*",),
)
