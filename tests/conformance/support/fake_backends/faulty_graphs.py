"""Vendor backends that are right in every op alone, and wrong where one op follows another; FAKE_FIXED mends them."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import GraphModule, Interpreter, Node

from fx_quant_conformance.backends.base import Backend, Capabilities, Representation
from fx_quant_conformance.backends.torch_engines.tables import native_config
from fx_quant_conformance.refimpl import BackendConfig
from fx_quant_conformance.refimpl.config.patterns import pattern_name
from fx_quant_conformance.refimpl.graph.invariants import is_dequantize, is_quantize

PATTERNS = frozenset(
    {
        "nn.Linear",
        "nni.LinearReLU",
        "nn.Linear+nn.ReLU",
        "nn.Conv2d",
        "nni.ConvReLU2d",
        "nn.Conv2d+nn.ReLU",
        "operator.add",
        "operator.mul",
        "torch.cat",
        "nn.ReLU",
        "F.relu",
        "nn.MaxPool2d",
        "nn.AdaptiveAvgPool2d",
        "torch.flatten",
    }
)
RELUS = (nn.ReLU, F.relu)


class Honest(Backend):
    """Claims a few ops, and runs the reference model itself."""

    name = "honest"
    representation = Representation.DECOMPOSED

    def backend_config(self) -> BackendConfig:
        entries = [each for each in native_config("fbgemm").configs if pattern_name(each.normal_pattern) in PATTERNS]
        return BackendConfig(self.name).set_backend_pattern_configs(entries)

    def capabilities(self) -> Capabilities:
        return Capabilities(float_accumulation=True)

    def lower(self, reference_model: GraphModule, example_inputs: tuple[Any, ...]) -> Callable[..., Any]:
        return torch.no_grad()(_Run(self, reference_model))

    def wrong(self, node: Node, kinds: dict[Node, Any], right: Any, times: int) -> Any:
        """What a node gives in place of what is right, as often as it has been run on that input."""
        return right


class _Run(Interpreter):
    """Runs a model node by node, wrong where the backend says so."""

    def __init__(self, backend: Honest, model: GraphModule) -> None:
        super().__init__(model)
        self.backend = backend
        self.kinds = {node: self._kind(node) for node in model.graph.nodes}
        self.seen: list[Tensor] = []

    def _kind(self, node: Node) -> Any:
        return type(self.fetch_attr(str(node.target))) if node.op == "call_module" else node.target

    def __call__(self, *inputs: Tensor) -> Any:
        self.seen.append(torch.cat([value.flatten() for value in inputs]))
        return self.run(*inputs)

    def run_node(self, n: Node) -> Any:
        right = super().run_node(n)
        times = sum(torch.equal(each, self.seen[-1]) for each in self.seen)
        return right if "FAKE_FIXED" in os.environ else self.backend.wrong(n, self.kinds, right, times)


def follows(node: Node, kinds: dict[Node, Any], *wanted: Any) -> bool:
    """Whether what a node reads comes from an op of a kind, through quantize and dequantize."""
    for value in node.all_input_nodes:
        source = value
        while is_dequantize(source) or is_quantize(source):
            source = source.all_input_nodes[0]
        if kinds[source] in wanted:
            return True
    return False


class WrongCat(Honest):
    """Joins in another order where something comes from a relu."""

    def wrong(self, node: Node, kinds: dict[Node, Any], right: Any, times: int) -> Any:
        is_wrong = kinds[node] is torch.cat and follows(node, kinds, *RELUS)
        return right.flatten().roll(1).reshape(right.shape) if is_wrong else right


class WrongCatOfQuantized(WrongCat):
    """The same, on quantized tensors."""

    representation = Representation.QUANTIZED


class Aborts(Honest):
    """Dies in a product of a relu."""

    def wrong(self, node: Node, kinds: dict[Node, Any], right: Any, times: int) -> Any:
        if follows(node, kinds, *RELUS) and "mul" in node.name:
            os.abort()
        return right


class Repeats(Honest):
    """Gives something else for the flattened result when it is run once more."""

    def wrong(self, node: Node, kinds: dict[Node, Any], right: Any, times: int) -> Any:
        return right * 0.5 if kinds[node] is torch.flatten and times > 1 else right
