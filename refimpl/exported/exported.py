"""A decomposed reference model as a `torch.export.ExportedProgram`, in the form that PT2E gives.

A reference model computes the integers of its weights each time that it runs. Here they are computed once, with torch's
semantics (NUM-01), so that the program holds what a compiler reads: integers and a dequantize.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from textwrap import shorten
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram, export
from torch.fx import GraphModule, Node
from torch.fx.experimental import _config as symbolic

from fx_quant_conformance.refimpl.errors import ModelError
from fx_quant_conformance.refimpl.graph.graph_modules import free_name
from fx_quant_conformance.refimpl.graph.invariants import is_dequantize, is_quantize
from fx_quant_conformance.refimpl.graph.tracing import attribute_of, is_effect
from fx_quant_conformance.refimpl.legacy import is_torchs
from fx_quant_conformance.refimpl.legacy.dtypes import PLAIN_DTYPE
from fx_quant_conformance.refimpl.legacy.quantized_tensors import MAKERS
from fx_quant_conformance.refimpl.legacy.weights import read_integers
from fx_quant_conformance.refimpl.observers.decomposed import OPS
from fx_quant_conformance.refimpl.observers.qparams import dtype_range
from fx_quant_conformance.refimpl.releases import has

OF_MODEL, CALLED = "model.", "called_"
"""How the path of each module of a reference model begins in a program, and that of a function or method after it."""
_MOST_TEXT = 120
"""Characters of a model's ops in a message; what torch says may have four times as many."""


def export_reference(
    reference_model: GraphModule,
    example_inputs: tuple[Any, ...],
    *,
    dynamic_batch: bool = True,
    fold_weights: bool = True,
) -> ExportedProgram:
    """Export what `convert_to_reference_decomposed_fx` returns, in the form that PT2E gives. (CVT-02, CVT-07)

    The program computes in aten ops. Activations are quantized and dequantized by
    ``quantized_decomposed.quantize_per_tensor.default`` and ``dequantize_per_tensor.default``, with scale, zero point
    and bounds as numbers; those of dynamic quantization come from ``choose_qparams.tensor``, and are arguments of the
    overload ``tensor``. Weights are constants of int8 or uint8 that are dequantized: by
    ``dequantize_per_tensor.default`` with numbers, or by ``dequantize_per_channel.default`` with a tensor of scales and
    one of zero points, as is a weight that has one channel. One dequantize serves all readers of a tensor, where PT2E
    may give each its own. A reference module whose class reads its weight by a method of its own keeps the calls that
    this makes. Without ``fold_weights`` the weights are floats that the program quantizes, by
    ``quantize_per_tensor.default`` or ``quantize_per_channel.default``, and dequantizes, as PT2E's
    ``convert_pt2e(…, fold_quantize=False)`` leaves them.

    Axis 0 of each input that has the most rows is dynamic, with ``dynamic_batch``; others are broadcast. Without it,
    all shapes are those of the examples. Inputs are exported contiguous, whatever the layout of the examples. In the
    program, the reference model is the module ``model``: its parameters begin with that name, and ``nn_module_stack``
    of a node's meta has the path of the module that the node is of. Each function or method of the reference model is
    such a module, ``called_`` before the name of its node, so that the ops that torch makes of it, or decomposes it to,
    are known as its parts. The reference model is not changed.

    Raises ModelError for a model that is no decomposed reference model, and for one that torch.export does not take.
    """
    _check_form(reference_model)
    try:
        model = _make_modules(hold_weights(reference_model, as_integers=fold_weights)).eval()
        return export_open(model, example_inputs, dynamic_batch=dynamic_batch)
    except Exception as error:
        said = shorten(str(error).strip().partition("\n")[0], _MOST_TEXT * 4)
        raise ModelError(
            f"the reference model ({_name_ops(reference_model)}) has no exported program: torch says "
            f"{type(error).__name__}: {said}"
        ) from error


def export_open(model: nn.Module, example_inputs: tuple[Any, ...], *, dynamic_batch: bool) -> ExportedProgram:
    """Export a model in eval mode, as the module ``model`` of a program whose inputs have no names.

    ``dynamic_batch``: whether axis 0 of the inputs with the most rows is dynamic. Raises what torch.export raises.
    """
    inputs = tuple(value.contiguous() if isinstance(value, Tensor) else value for value in example_inputs)
    is_batch = find_batch_axes(inputs) if dynamic_batch else [False] * len(inputs)
    setting = symbolic.patch(backed_size_oblivious=True) if has("dynamic_row") else nullcontext()  # type: ignore[attr-defined]
    if not has("dynamic_row"):
        batches = zip(inputs, is_batch, strict=True)
        inputs = tuple(torch.cat([value] * 2) if own and len(value) == 1 else value for value, own in batches)
    shapes = tuple({0: Dim.AUTO} if own else None for own in is_batch)
    wrapped = Unnamed(model)
    wrapped.training = False  # alone: a program's module refuses eval()
    with torch.no_grad(), setting:
        return export(wrapped, inputs, dynamic_shapes=(shapes,), strict=False)


def open_module(program: ExportedProgram) -> GraphModule:
    """Return a program's module without the checks of its inputs that torch adds to it, as ExecuTorch does.

    They are calls of a module, which Quantizers refuse, or do not look past. Releases of torch that add none have no
    argument for it.
    """
    adds_checks = "check_guards" in inspect.signature(program.module).parameters
    module: Any = program.module(check_guards=False) if adds_checks else program.module()
    return module  # type: ignore[no-any-return]


def find_batch_axes(inputs: Sequence[Any]) -> list[bool]:
    """Tell for each input of a model whether axis 0 is a batch: of the tensors, those with the most rows have one."""
    sizes = [len(value) if isinstance(value, Tensor) and value.dim() else 0 for value in inputs]
    return [size > 0 and size == max(sizes) for size in sizes]


def hold_weights(reference_model: GraphModule, *, as_integers: bool = True) -> GraphModule:
    """Return a copy of a decomposed reference model that holds its weights as integers, or as floats. (CVT-02, CVT-07)

    They are dequantized when it runs, to the same float32 as before, and as floats quantized before that.
    """
    model = copy.deepcopy(reference_model)
    for module in model.modules():
        _read_by_numbers(module, as_integers)
    for node in model.graph.nodes:
        if as_integers and is_quantize(node) and all(operand.op == "get_attr" for operand in node.all_input_nodes):
            _hold_result(model, node)
    model.graph.eliminate_dead_code(lambda node: node.is_impure() or is_effect(node))
    model.recompile()
    return model


class Called(nn.Module):
    """A function or a method as a module."""

    def __init__(self, target: Callable[..., Any] | str) -> None:
        super().__init__()
        self.target = target

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call it."""
        if callable(self.target):
            return self.target(*args, **kwargs)
        return getattr(args[0], self.target)(*args[1:], **kwargs)


def _make_modules(model: GraphModule) -> GraphModule:
    """Make modules of a model's functions and methods, but for those that quantize and dequantize; return the model."""
    for node in model.graph.nodes:
        name = f"{CALLED}{node.name}"
        is_edge = is_quantize(node) or is_dequantize(node)
        if node.op in ("call_function", "call_method") and not is_edge and not hasattr(model, name):
            model.add_submodule(name, Called(node.target))
            node.op, node.target = "call_module", name
    model.recompile()
    return model


class Unnamed(nn.Module):
    """A model whose inputs have no names."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *inputs: Any) -> Any:
        """Return what the model returns."""
        return self.model(*inputs)


def _check_form(model: Any) -> None:
    """Raise ModelError for what is no decomposed reference model."""
    if not isinstance(model, GraphModule):
        raise ModelError(
            f"export_reference: found a {type(model).__name__}; give the GraphModule that "
            "convert_to_reference_decomposed_fx returns"
        )
    for node in model.graph.nodes:
        if node.op == "call_function" and node.target in MAKERS:
            raise ModelError(
                f"export_reference: {node.name} makes a quantized tensor, which torch.export does not take; give the "
                "model that convert_to_reference_decomposed_fx returns"
            )


def _name_ops(model: GraphModule) -> str:
    """Name what a model calls between dequantize and quantize."""
    calls = [node for node in model.graph.nodes if node.op.startswith("call_")]
    inner = [node for node in calls if not is_quantize(node) and not is_dequantize(node)]
    modules = {node: type(model.get_submodule(node.target)) for node in inner if node.op == "call_module"}
    names = [f"{node.name}: {modules[node].__name__}" if node in modules else node.name for node in inner]
    return shorten(", ".join(names) or "no op", _MOST_TEXT)


# -- weights ----------------------------------------------------------------------------------------------------------


def _read_by_numbers(module: Any, as_integers: bool) -> None:
    """Have a module read the weights, which it reads as torch's reference modules do, with their qparams as numbers."""
    names = [key.removesuffix("_qscheme") for key in vars(module) if key.endswith("_qscheme")]
    readers = {name: _make_reader(module, name, as_integers) for name in names if _is_foldable(module, name)}
    vars(module).update({f"get_{name}": read for name, read in readers.items()})
    if readers and hasattr(module, "get_flat_weights"):
        module.get_flat_weights = partial(_read_all, module, readers)


def _is_foldable(module: Any, name: str) -> bool:
    """Tell whether a weight is of integers, and read by a method of torch's: a recurrent layer has one for all."""
    read = getattr(module, f"get_{name}", getattr(module, "get_flat_weights", None))
    return getattr(module, f"{name}_dtype") in PLAIN_DTYPE and is_torchs(read)


def _make_reader(module: Any, name: str, as_integers: bool) -> Callable[[], Tensor]:
    """Return what reads one weight of a module: by its integers, or by its floats where these give the same ones."""
    integers = read_integers(module, name)
    dtype, scale = getattr(module, f"{name}_dtype"), getattr(module, f"{name}_scale")
    bounds = (getattr(module, f"{name}_quant_min", None), getattr(module, f"{name}_quant_max", None))
    rest = (*(dtype_range(dtype) if None in bounds else bounds), PLAIN_DTYPE[dtype])
    axis, zero_point = getattr(module, f"{name}_axis_int"), getattr(module, f"{name}_zero_point")
    quantize, dequantize = OPS.quantize_per_tensor, OPS.dequantize_per_tensor
    qparams: tuple[Any, ...] = (scale.item(), int(zero_point.item()), *rest) if scale.numel() == 1 else ()
    if scale.dim() and len(scale) == integers.shape[axis]:
        quantize, dequantize = OPS.quantize_per_channel, OPS.dequantize_per_channel
        qparams = (scale, zero_point, axis, *rest)
    if as_integers or not torch.equal(quantize(getattr(module, name), *qparams), integers):
        delattr(module, name)
        module.register_buffer(f"{name}_integers", integers)
    return partial(_read, module, name, quantize, dequantize, qparams)


def _read_all(module: Any, readers: Mapping[str, Callable[[], Tensor]]) -> list[Tensor | None]:
    return [readers[each]() if each in readers else getattr(module, each, None) for each in module._flat_weights_names]


def _read(module: Any, name: str, quantize: Any, dequantize: Any, qparams: tuple[Any, ...]) -> Tensor:
    integers = getattr(module, f"{name}_integers", None)
    if integers is None:
        integers = quantize(getattr(module, name), *qparams)
    return dequantize(integers, *qparams)  # type: ignore[no-any-return]


def _hold_result(model: GraphModule, node: Node) -> None:
    """Replace the node that quantizes a function's weight by the integers."""
    target: Any = node.target
    operands = [attribute_of(model, str(arg.target)) if isinstance(arg, Node) else arg for arg in node.args]
    name = free_name(model, f"{node.name}_integers")
    model.register_buffer(name, target(*operands))
    with model.graph.inserting_before(node):
        node.replace_all_uses_with(model.graph.get_attr(name))
