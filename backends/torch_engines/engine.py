"""The four engines of torch.backends.quantized: lowering by refimpl's table, and evidence of what ran."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch.fx import GraphModule, Node

from fx_quant_conformance.backends.base import Backend, Capabilities, Execution, Representation, Taken
from fx_quant_conformance.backends.torch_engines.tables import native_config
from fx_quant_conformance.refimpl import BackendConfig, lower
from fx_quant_conformance.refimpl.config.patterns import leaf_name
from fx_quant_conformance.refimpl.graph.tracing import NOT_LOWERED
from fx_quant_conformance.refimpl.legacy.quantized_tensors import LACK
from fx_quant_conformance.refimpl.lower.calls import REQUANTIZE


@contextmanager
def engine(name: str) -> Iterator[None]:
    """Run a block with ``torch.backends.quantized.engine`` set, then restore the former engine."""
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
        """Run the graph on inputs like the examples, without gradients, under the engine."""
        with engine(self.engine_name), torch.no_grad():
            return self.graph_module(*inputs)


# What the modules around the kernels do not support, so that refimpl's lowering leaves it in float. (LOW-03)
_NO_BATCH: dict[str, Taken] = {"_unbatched": (False,)}
_EVEN = _NO_BATCH | {"_uneven": (False,)}
LIMITS: dict[str, dict[str, Taken]] = {
    "nn.Conv1d": _EVEN | {"padding_mode": ("zeros", "reflect")},
    "nn.Conv2d": _EVEN | {"padding_mode": ("zeros", "reflect")},
    "nn.Conv3d": _EVEN | {"padding_mode": ("zeros",)},
    **dict.fromkeys(("torch.conv1d", "torch.conv2d", "torch.conv3d"), _EVEN),
    **dict.fromkeys((f"nn.ConvTranspose{n}d" for n in (1, 2, 3)), _NO_BATCH | {"output_size": (None,)}),
    **dict.fromkeys((f"torch.conv_transpose{n}d" for n in (1, 2, 3)), _NO_BATCH),
    "nn.Linear": _NO_BATCH,
    "F.linear": _NO_BATCH,
    "torch.add": {"alpha": (1,)},
    **dict.fromkeys(("nn.LSTM", "nn.GRU"), _NO_BATCH | {"bias": (True,)}),
    **dict.fromkeys(("nn.LSTMCell", "nn.GRUCell", "nn.RNNCell"), _NO_BATCH),
    "nn.Embedding": {"shape": ((5,), (2, 3), (0,))},
    "nn.EmbeddingBag": {"mode": ("sum",)},
}


def batched_pools(rank: int, *kinds: str) -> dict[str, dict[str, Taken]]:
    """Return limits by which pools of a rank take only batches of images; ``kinds``: such as ``"max_pool"``."""
    names = [f"nn.{kind.title().replace('_', '')}{rank}d" for kind in kinds]
    names += [leaf_name(getattr(F, f"{kind}{rank}d")) for kind in kinds]

    def in_batches(shape: tuple[int, ...]) -> bool:
        """Images in batches."""
        return len(shape) == rank + 2

    return {name: {"shape": in_batches} for name in names}


LIMITS |= batched_pools(3, "max_pool", "avg_pool")


class TorchEngineBackend(Backend):
    """A native engine of torch: the config of its name, refimpl's lowering, and graph inspection as evidence."""

    representation = Representation.QUANTIZED

    def backend_config(self) -> BackendConfig:
        """Return the engine's claims, the same as torch's own config for it."""
        return native_config(self.name)  # type: ignore[arg-type]

    def unavailable_reason(self) -> str | None:
        """Report an engine that this build of torch lacks, or that torch has no more."""
        if LACK:
            return f"{LACK}, which its engines compute with"
        supported = torch.backends.quantized.supported_engines
        reason = f"this build of torch has no quantized engine {self.engine!r}; it has {', '.join(supported)}"
        return None if self.engine in supported else reason

    def capabilities(self) -> Capabilities:
        """The weight schemes of the engines' kernels, and what torch's quantized modules have in common."""
        return Capabilities(
            weight_schemes=("per_tensor_symmetric", "per_channel_symmetric"),
            dynamic_states=True,
            dynamic_scale_floor=float(torch.tensor(6.1e-5)),  # choose_qparams of torch's kernels
            half_row_qparams=True,
            tie_steps=1,
            limits=LIMITS,
        )

    def versions(self) -> dict[str, str]:
        """Return the version of torch, of which the engines are part."""
        return {"torch": torch.__version__}

    def lower(self, reference_model: GraphModule, example_inputs: tuple[Any, ...]) -> Callable[..., Any]:
        """Replace reference patterns by quantized ops and pack the weights for this engine. (LOW-01)"""
        with engine(self.engine), warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            return LoweredModel(lower(reference_model, keep_dropout=True), self.engine)

    def execution(self, lowered: Callable[..., Any]) -> Execution | None:
        """Read off the lowered graph which ops run quantized and which are left in float."""
        return read_execution(lowered.graph_module) if isinstance(lowered, LoweredModel) else None


def read_execution(model: GraphModule) -> Execution:
    """Separate quantized ops from float fallbacks, which lowering has listed.

    An op is quantized if it reads a quantized value, quantizes its input itself, or holds a quantized weight. Lowering
    gives it the name of the reference model's node.
    """
    quantized: list[str] = []
    floating = [str(refused) for refused in model.meta.get(NOT_LOWERED, ()) if refused.op != REQUANTIZE]
    is_quantized: set[Node] = set()
    for node in model.graph.nodes:
        if node.target in (torch.quantize_per_tensor, torch.quantize_per_channel):
            is_quantized.add(node)
        elif node.target == "dequantize" or node.op in ("placeholder", "get_attr", "output"):
            continue
        elif not is_quantized.isdisjoint(node.all_input_nodes):
            is_quantized.add(node)
            quantized.append(_name_op(model, node))
        elif _is_quantized_op(model, node):
            quantized.append(_name_op(model, node))
    return Execution(quantized_ops=tuple(quantized), float_fallbacks=tuple(floating))


def _is_quantized_op(model: GraphModule, node: Node) -> bool:
    """Tell whether a node calls one of torch's quantized modules (or a class of one) or ops, not a reference module."""
    if node.op != "call_module":
        return str(node.target).startswith("quantized.")
    homes = (base.__module__ for base in type(model.get_submodule(str(node.target))).__mro__)
    return any(".quantized" in home and ".reference" not in home for home in homes)


def _name_op(model: GraphModule, node: Node) -> str:
    """Return an op's name with its kernel: ``op0 (ao.nn.quantized.modules.linear.Linear)``, ``add (quantized.add)``."""
    if node.op == "call_module":
        kind = type(model.get_submodule(str(node.target)))
        return f"{node.name} ({kind.__module__}.{kind.__qualname__})".replace("torch.ao.nn.", "ao.nn.")
    name = str(node.target)
    return f"{node.name} ({name if name.startswith('quantized.') else getattr(node.target, '__name__', name)})"
