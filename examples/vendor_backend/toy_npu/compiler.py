"""The compiler: a reference model in, a model whose quantized parts are kernels of the machine out.

In a reference model (decomposed form) every quantized op stands between a dequantize and a quantize. Each such group
for which there is a kernel becomes one call of it, from int8 to int8; all else is left as it is, and runs in float on
the host.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from fx_quant_conformance.backends.base import Execution, UnsupportedPattern
from fx_quant_conformance.refimpl import nni, nnqr, qint8
from toy_npu import machine as npu
from toy_npu.machine import Grid, Machine, Unit
from toy_npu.modules import LinearSquash, Squash

QUANTIZE, DEQUANTIZE = "quantize_per_tensor", "dequantize_per_tensor"
UNITS: dict[type[nn.Module], Unit] = {nn.ReLU: npu.relu, nn.ELU: npu.elu, Squash: npu.squash}
FUSED = (nni.LinearReLU, LinearSquash)
MOVES = (torch.flatten,)
"""Only the shape changes, so that integers do as well as floats."""


class Kernel(nn.Module):
    """A call of the machine: tensors of int8 in and out."""

    def __init__(self, run: Any, name: str) -> None:
        super().__init__()
        self.run, self.name = run, name

    def forward(self, x: Tensor) -> Tensor:
        """Run the kernel on the integers of its input."""
        return torch.from_numpy(np.ascontiguousarray(self.run(x.detach().contiguous().numpy())))


def compile_model(model: GraphModule, machine: Machine) -> GraphModule:
    """Replace each dequantize → op → quantize that the machine has a kernel for. Raises UnsupportedPattern."""
    lowered = copy.deepcopy(model)
    for quantize in [node for node in lowered.graph.nodes if _is(node, QUANTIZE)]:
        op = quantize.args[0]
        if op.op == "placeholder" or not op.args or not _is(op.args[0], DEQUANTIZE):
            continue
        integers, x_grid, grid = op.args[0].args[0], _grid(lowered, op.args[0]), _grid(lowered, quantize)
        with lowered.graph.inserting_before(quantize):
            if op.target in MOVES and x_grid == grid:
                arguments = (integers, *op.args[1:])
                call = lowered.graph.create_node("call_function", op.target, arguments, op.kwargs, f"npu_{op.name}")
            elif (kernel := _kernel(_called(lowered, op), machine, x_grid, grid)) is not None:
                lowered.add_submodule(f"npu_{op.name}", kernel)
                call = lowered.graph.call_module(f"npu_{op.name}", (integers,))
            else:
                continue
        quantize.replace_all_uses_with(call)
    lowered.graph.eliminate_dead_code()
    lowered.delete_all_unused_submodules()
    lowered.recompile()
    return lowered


def executed(lowered: GraphModule) -> Execution:
    """Tell kernels of the machine, and moves of integers, from what the host computes in float."""
    quantized, host = [], []
    for node in lowered.graph.nodes:
        module, name = _called(lowered, node), node.name.removeprefix("npu_")  # the reference model's
        if isinstance(module, Kernel):
            quantized.append(f"{name} ({module.name})")
        elif node.target in MOVES and not _is(node.args[0], DEQUANTIZE):
            quantized.append(f"{name} (move)")
        elif node.op.startswith("call") and not (_is(node, QUANTIZE) or _is(node, DEQUANTIZE)):
            host.append(node.name)
    return Execution(quantized_ops=tuple(quantized), float_fallbacks=tuple(host))


def _kernel(module: nn.Module | None, machine: Machine, x_grid: Grid, grid: Grid) -> Kernel | None:
    if isinstance(module, nnqr.Linear):
        return _linear(module, npu.identity, machine, x_grid, grid)
    if isinstance(module, FUSED):
        return _linear(module[0], UNITS[type(module[1])], machine, x_grid, grid)
    if module is None or type(module) not in UNITS:
        return None
    unit = UNITS[type(module)]
    return Kernel(partial(machine.lookup, x_grid=x_grid, unit=unit, grid=grid), unit.__name__)


def _linear(layer: Any, unit: Unit, machine: Machine, x_grid: Grid, grid: Grid) -> Kernel:
    """The kernel of a reference layer: its weight as integers, its bias in steps of the sum."""
    if layer.weight_dtype not in (qint8, torch.int8):
        raise UnsupportedPattern(f"a weight of {layer.weight_dtype}; the machine has int8")
    weight = layer.get_quantized_weight().numpy()
    scales = layer.weight_scale.reshape(-1).expand(len(weight)).numpy().astype(np.float32)
    bias = np.zeros(len(weight)) if layer.bias is None else layer.bias.detach().double().numpy()
    steps = np.clip(np.rint(bias / (x_grid.scale * scales.astype(np.float64))), -(2**31), 2**31 - 1).astype(np.int32)
    run = partial(machine.linear, weight=weight, bias=steps, x_grid=x_grid, scales=scales, unit=unit, grid=grid)
    return Kernel(run, f"linear_{unit.__name__}")


# -- the graph --------------------------------------------------------------------------------------------------------


def _is(node: Any, name: str) -> bool:
    """Whether a node is a quantize or a dequantize, with qparams as numbers or as tensors."""
    return isinstance(node, Node) and getattr(node.target, "_opname", "") == name


def _called(model: GraphModule, node: Node) -> nn.Module | None:
    return model.get_submodule(str(node.target)) if node.op == "call_module" else None


def _grid(model: GraphModule, node: Node) -> Grid:
    scale, zero_point = _numbers(model, node.args[1:3])
    return Grid(scale=float(scale), zero_point=int(zero_point))


def _numbers(model: GraphModule, values: Any) -> Iterator[Any]:
    for value in values:
        yield getattr(model, str(value.target)).item() if isinstance(value, Node) else value
