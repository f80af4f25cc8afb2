"""Faults of integer kernels that show in a model and in no claim: what stands beside an op, how large it is, how often.

What each gets wrong, the model that is named has, and no claim does in profile ``quick``.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.ao.nn.quantized.reference as nnqr
from torch import Tensor, nn
from torch.fx import Node

from fx_quant_conformance.refimpl.graph.invariants import is_dequantize, is_quantize
from tests.mutants.integer_kernels import IntegerBackend, Integers, Kernels, Sum, varied
from tests.mutation.mutant import Mutant

MUTANTS: list[Mutant] = []


def wrong(group: str, name: str, model: str) -> Callable[[type[Kernels]], type[Kernels]]:
    """Enter kernels that are wrong in a model."""

    def enter(kernels: type[Kernels]) -> type[Kernels]:
        make, claims = partial(IntegerBackend, kernels), (f"model/{model}/ptq/quint8/*",)
        MUTANTS.append(Mutant(group=group, name=name, make=make, rules=("NUM-03", "NUM-05"), claims=claims))
        return kernels

    return enter


def _step(group: str, name: str, model: str, method: str, body: Callable[..., Any]) -> None:
    """Enter kernels of which one step is wrong in a model."""
    wrong(group, name, model)(varied(method, body))


def _source(node: Node) -> Node:
    """The node that a value comes from, before quantize and dequantize."""
    return _source(node.all_input_nodes[0]) if is_quantize(node) or is_dequantize(node) else node


def _readers(node: Node) -> Iterator[Node]:
    """The nodes that read a value, behind quantize and dequantize."""
    for reader in node.users:
        if is_quantize(reader) or is_dequantize(reader):
            yield from _readers(reader)
        else:
            yield reader


class Linked(Kernels):
    """Kernels that know the graph."""

    def nodes(self) -> list[Node]:
        """Return the nodes, in their order."""
        graph: Any = self.module.graph
        return list(graph.nodes)

    def called(self, node: Node) -> Any:
        """Return the module or function that a node calls."""
        return self.fetch_attr(str(node.target)) if node.op == "call_module" else node.target

    def calls(self, nodes: Iterator[Node], kind: type[nn.Module]) -> bool:
        """Return whether one of the nodes calls a module of a class, or that and an op that is fused to it."""
        called = [self.called(node) for node in nodes]
        return any(isinstance(each[0] if isinstance(each, nn.Sequential) else each, kind) for each in called)


# -- what stands beside an op -----------------------------------------------------------------------------------------


@wrong("structure", "a relu fused into a layer that others read", "read_inside")
class FusesForAll(Linked):
    def run_node(self, n: Node) -> Any:
        result = super().run_node(n)
        return (
            replace(result, rectified=True) if isinstance(result, Sum) and self.calls(_readers(n), nn.ReLU) else result
        )


@wrong("state", "the last op that reads a value writes over what is returned", "read_inside")
class WritesOver(Linked):
    def run_node(self, n: Node) -> Any:
        result = super().run_node(n)
        if self.called(n) is not operator.add:
            return result
        place = self.nodes().index
        for node in n.all_input_nodes:
            value = self.env[node]
            readers = [reader for reader in _readers(_source(node)) if reader.op != "output"]
            if n is max(readers, key=place) and value.q.shape == result.total.shape:
                value.q.copy_((result.total / result.scale).round())
        return result


@wrong("structure", "inputs bound in the order in which they are read", "two_inputs")
class BindsAsRead(Linked):
    def run(self, *args: Any, **keywords: Any) -> Any:
        nodes = [node for node in self.nodes() if not is_quantize(node) and not is_dequantize(node)]
        inputs = [node for node in nodes if node.op == "placeholder"]
        read = dict.fromkeys(_source(each) for node in nodes for each in node.all_input_nodes)
        order = [node for node in read if node.op == "placeholder"]
        return super().run(*(args[order.index(node)] for node in inputs), **keywords)


@wrong("zero point", "a convolution's weights packed with its first input's zero point", "shared_conv")
class PacksOnce(Kernels):
    def reference_module(self, module: Any, x: Integers) -> Sum:
        if not isinstance(module, nnqr.Conv2d):
            return super().reference_module(module, x)
        zero_point = self.__dict__.setdefault("packed", {}).setdefault(module, x.zero_point)
        return super().reference_module(module, replace(x, zero_point=zero_point))


@wrong("state", "weights kept by their values, with the zero point of the first input", "shared_conv")
class KeepsByValue(Kernels):
    def reference_module(self, module: Any, x: Integers) -> Sum:
        key = module.get_quantized_weight().numpy().tobytes()
        first, zero_point = self.__dict__.setdefault("packed", {}).setdefault(key, (module, x.zero_point))
        return super().reference_module(module, x if module is first else replace(x, zero_point=zero_point))


@wrong("layout", "an image flattened as channels last for a linear layer", "lenet")
class FlattensForLinear(Linked):
    def run_node(self, n: Node) -> Any:
        result = super().run_node(n)
        if n.target is not torch.flatten or not self.calls(_readers(n), nnqr.Linear):
            return result
        image = self.fetch_args_kwargs_from_env(n)[0][0].q
        return replace(result, q=image.movedim(1, -1).reshape(result.q.shape))


@wrong("activation", "the host's quantize wraps", "residual")
class WrapsInputs(Kernels):
    def quantize(self, value: Any, numbers: tuple[Any, ...], target: Any) -> Integers:
        grid = super().quantize(value, numbers, target)
        if not isinstance(value, Tensor):
            return grid
        q = (value.double() / grid.scale).round() + grid.zero_point
        return replace(grid, q=(q - grid.low).remainder(grid.high - grid.low + 1) + grid.low)


# -- how many, how large ----------------------------------------------------------------------------------------------


def _linear_blocks(honest: Any, x: Integers, weight: Integers) -> Tensor:
    """In blocks of 256 outputs and 512 products: that behind both ends is left out."""
    total: Tensor = honest(x, weight)
    if weight.q.shape[0] > 256 and weight.q.shape[1] > 512:
        total[..., 256:] = honest(replace(x, q=x.q[..., :512]), replace(weight, q=weight.q[256:, :512]))
    return total


def _sixteen_rows(honest: Any, x: Integers, weight: Integers) -> Tensor:
    total: Tensor = honest(x, weight)
    return total[torch.arange(len(total)) % 16] if total.dim() == 2 and len(total) > 16 else total


def _near_pixels(honest: Any, x: Integers, weight: Integers, geometry: Any) -> Tensor:
    """A row index of 6 bits."""
    total: Tensor = honest(x, weight, geometry)
    return total[..., torch.arange(total.shape[-2]) % 64, :]


def _one_channel(honest: Any, x: Integers, weight: Integers, geometry: Any) -> Tensor:
    """As many groups as channels: a depthwise kernel, whose weights are stored the other way round."""
    if geometry[3] == 1 == x.q.shape[1]:
        weight = replace(weight, q=weight.q.transpose(-1, -2))
    total: Tensor = honest(x, weight, geometry)
    return total


def _reciprocal(honest: Any, pool: Any, x: Integers) -> Tensor:
    """The reciprocal of a window's size in 12 bits."""
    total: Tensor = honest(pool, x)
    if not isinstance(pool, nn.AvgPool2d):
        return total
    size = math.prod(pool.kernel_size) if isinstance(pool.kernel_size, (tuple, list)) else pool.kernel_size**2
    return total * size * (round(2**12 / size) / 2**12) if size > 32 else total


def _near_scales(honest: Any, x: Integers, y: Integers) -> Sum:
    """The operand of the smaller scale shifted by 4 bits at most."""
    least = torch.maximum(x.scale, y.scale) / 16
    total: Sum = honest(replace(x, scale=x.scale.clamp(min=least)), replace(y, scale=y.scale.clamp(min=least)))
    return total


def _four(honest: Any, values: list[Integers], dim: int) -> Integers:
    """A table of four addresses; the fifth is the first."""
    joined: Integers = honest([values[place % 4] for place in range(len(values))], dim)
    return joined


_step("accumulation", "products lose what is beyond 512 by 256", "many_rows", "linear", _linear_blocks)
_step("layout", "rows beyond 16 are the first again", "many_rows", "linear", _sixteen_rows)
_step("geometry", "rows of an image beyond 64 are the first again", "large", "convolution", _near_pixels)
_step("layout", "a layer of one channel taken for a depthwise one", "lenet", "convolution", _one_channel)
_step("scale", "the size of a wide window in 12 bits", "large", "average", _reciprocal)
_step("scale", "scales of a sum more than 16 times apart", "two_inputs", "add", _near_scales)
_step("sharing", "of five values that are joined one is another's", "cat_of_ranges", "cat", _four)
