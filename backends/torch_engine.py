"""What the four engines of torch.backends.quantized share: lowering by refimpl's table, and evidence of what ran."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch.fx import GraphModule, Node

from backends.base import Backend, Capabilities, Execution, Representation
from backends.native_tables import native_config
from refimpl import BackendConfig, lower
from refimpl.lower import NOT_LOWERED


@contextmanager
def engine(name: str) -> Iterator[None]:
    """Run a block with ``torch.backends.quantized.engine`` set, and put the former engine back."""
    former = torch.backends.quantized.engine
    torch.backends.quantized.engine = name
    try:
        yield
    finally:
        torch.backends.quantized.engine = former


class LoweredModel:
    """A lowered graph that always runs under the engine that its weights were packed for."""

    def __init__(self, graph_module: GraphModule, engine_name: str) -> None:
        self.graph_module = graph_module
        self.engine_name = engine_name

    def __call__(self, *inputs: Any) -> Any:
        with engine(self.engine_name), torch.no_grad():
            return self.graph_module(*inputs)


class TorchEngineBackend(Backend):
    """A native engine of torch: its config by name, refimpl's lowering, and graph inspection as evidence."""

    representation = Representation.QUANTIZED
    schemes: ClassVar[tuple[str, ...]] = ("per_tensor_symmetric", "per_channel_symmetric")

    def backend_config(self) -> BackendConfig:
        """Return the engine's claims, the same as torch's own config for it."""
        return native_config(self.name)  # type: ignore[arg-type]

    def unavailable_reason(self) -> str | None:
        """Say so when this build of torch has no such engine."""
        supported = torch.backends.quantized.supported_engines
        if self.engine in supported:
            return None
        return f"this build of torch has no quantized engine {self.engine!r}; it has {', '.join(supported)}"

    def capabilities(self) -> Capabilities:
        """The weight schemes that the engine's kernels take."""
        return Capabilities(weight_schemes=self.schemes)

    def versions(self) -> dict[str, str]:
        """The engines are part of torch."""
        return {"torch": torch.__version__}

    def lower(self, reference_model: GraphModule, example_inputs: tuple[Any, ...]) -> Callable[..., Any]:
        """Replace reference patterns by quantized ops and pack the weights for this engine. (LOW-01)"""
        with engine(self.engine), warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            return LoweredModel(lower(reference_model), self.engine)

    def execution(self, lowered: Callable[..., Any]) -> Execution | None:
        """Read off the lowered graph which ops run quantized and which are left in float."""
        if not isinstance(lowered, LoweredModel):
            return None
        return read_execution(lowered.graph_module)


def read_execution(model: GraphModule) -> Execution:
    """Tell quantized ops from float fallbacks: an op that reads a dequantized value runs in float."""
    quantized: list[str] = []
    floating = [str(refused) for refused in model.meta.get(NOT_LOWERED, ())]
    is_quantized: set[Node] = set()
    for node in model.graph.nodes:
        if node.target in (torch.quantize_per_tensor, torch.quantize_per_channel):
            is_quantized.add(node)
        elif node.target == "dequantize" or node.op in ("placeholder", "get_attr", "output"):
            continue
        elif any(value in is_quantized for value in node.all_input_nodes):
            is_quantized.add(node)
            quantized.append(_op_name(model, node))
    return Execution(quantized_ops=tuple(quantized), float_fallbacks=tuple(floating))


def _op_name(model: GraphModule, node: Node) -> str:
    if node.op == "call_module":
        module = model.get_submodule(str(node.target))
        return f"{type(module).__module__}.{type(module).__qualname__}".replace("torch.ao.nn.", "ao.nn.")
    return f".{node.target}" if isinstance(node.target, str) else str(node.target)
