"""Helpers: take one float model through torch's flow and through refimpl, and put the results side by side.

The parity harness, which compares stage by stage, is in `parity.py`; here are the configs, QConfigs and shortcuts.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any

import torch
import torch.ao.quantization.quantize_fx as torch_fx  # torch's configs need it loaded before them
from torch import Tensor, nn
from torch.ao.quantization import fake_quantize, observer, qconfig, qconfig_mapping
from torch.fx import GraphModule

from fx_quant_conformance import refimpl
from fx_quant_conformance.backends.torch_engines.tables import native_config
from fx_quant_conformance.refimpl.config.backend_config import BackendConfig, as_backend_config
from fx_quant_conformance.refimpl.graph.invariants import is_dequantize, is_quantize

torchs: Any = observer  # typed as Any: torch's constructors are not annotated
torch_fakes: Any = fake_quantize
torch_qconfigs: Any = qconfig
torch_mappings: Any = qconfig_mapping

SIGNED_WEIGHT = {"dtype": torch.qint8, "qscheme": torch.per_tensor_symmetric}
QCONFIG = torch_qconfigs.QConfig(
    activation=torchs.MinMaxObserver.with_args(dtype=torch.quint8),
    weight=torchs.MinMaxObserver.with_args(**SIGNED_WEIGHT),
)
PER_CHANNEL = torch_qconfigs.QConfig(
    activation=QCONFIG.activation,
    weight=torchs.PerChannelMinMaxObserver.with_args(dtype=torch.qint8, qscheme=torch.per_channel_symmetric),
)
ENGINES = ("qnnpack", "fbgemm", "x86", "onednn")


@cache
def torch_config(name: str) -> Any:
    """Return torch's own BackendConfig of an engine."""
    return getattr(import_module(f"torch.ao.quantization.backend_config.{name}"), f"get_{name}_backend_config")()


@cache
def our_config(name: str) -> BackendConfig:
    """Return torch's BackendConfig of an engine as refimpl reads it. (CFG-14)"""
    return as_backend_config(torch_config(name))


@dataclass(frozen=True, kw_only=True)
class Flow:
    """One model after prepare (calibrated) and after convert to the reference model."""

    prepared: GraphModule
    reference: GraphModule

    def __call__(self, *inputs: Tensor) -> Any:
        with torch.no_grad():
            return self.reference(*inputs)


def global_mapping(qconfig: Any = QCONFIG) -> Any:
    """Return torch's QConfigMapping with one global QConfig."""
    return torch_mappings.QConfigMapping().set_global(qconfig)


def calibrate(prepared: nn.Module, batches: Sequence[tuple[Tensor, ...]]) -> None:
    """Run a prepared model on every batch."""
    with torch.no_grad():
        for batch in batches:
            prepared(*batch)


def torch_flow(model: nn.Module, mapping: Any, batches: Sequence[tuple[Tensor, ...]], engine: str = "qnnpack") -> Flow:
    """Prepare, calibrate and convert with torch.ao.quantization."""
    config = torch_config(engine)
    prepared = torch_fx.prepare_fx(copy.deepcopy(model), copy.deepcopy(mapping), batches[0], backend_config=config)
    calibrate(prepared, batches)
    reference = torch_fx.convert_to_reference_fx(copy.deepcopy(prepared), backend_config=config)
    return Flow(prepared=prepared, reference=reference)


def our_flow(model: nn.Module, mapping: Any, batches: Sequence[tuple[Tensor, ...]], engine: str = "qnnpack") -> Flow:
    """Prepare, calibrate and convert with refimpl, from the same arguments."""
    prepared = refimpl.prepare_fx(model, mapping, batches[0], backend_config=our_config(engine))
    calibrate(prepared, batches)
    return Flow(prepared=prepared, reference=refimpl.convert_to_reference_fx(prepared))


def settle(model: nn.Module) -> None:
    """Take two faults out of the reference modules that torch made; what shows them is in test_reference.

    Float16 weights are not rounded (CVT-04), and decomposed ones truncate zero points that are reals (CVT-07).
    """
    for module in model.modules():
        if getattr(module, "weight_qscheme", None) == torch.per_channel_affine_float_qparams:
            module.is_decomposed = False  # type: ignore[assignment]
        for name, weight in module.named_parameters(recurse=False):
            if getattr(module, f"{name}_dtype", None) == torch.float16:
                weight.data = weight.data.half().float()


def kinds(model: GraphModule) -> Counter[str]:
    """Count a graph's nodes by what they call: names of nodes, modules and buffers left out."""
    return Counter(_kind(model, node) for node in model.graph.nodes)


def _kind(model: GraphModule, node: torch.fx.Node) -> str:
    if node.op == "call_module":
        module = model.get_submodule(str(node.target))
        return f"module {type(module).__name__}({', '.join(type(part).__name__ for part in module.children())})"
    if node.op == "get_attr":
        return "get_attr"
    return f"{node.op} {node.target if isinstance(node.target, str) else getattr(node.target, '__name__', '?')}"


def qparams(model: GraphModule) -> list[tuple[Any, ...]]:
    """List (op, scale, zero point, dtype or axis) of every quantize, in graph order."""
    return [(node.target.__name__, *_numbers(model, node)) for node in model.graph.nodes if is_quantize(node)]


def numbers_of(model: GraphModule, quantize: torch.fx.Node) -> str:
    """Show the qparams of one quantize node, to compare them."""
    return str(_numbers(model, quantize))


def _numbers(model: GraphModule, quantize: torch.fx.Node) -> list[Any]:
    numbers: list[Any] = []
    for argument in quantize.args[1:]:
        if isinstance(argument, torch.fx.Node):
            owner, _, name = str(argument.target).rpartition(".")
            argument = getattr(model.get_submodule(owner), name).reshape(-1).tolist()
        numbers.append(argument)
    return numbers


def same(left: Any, right: Any) -> bool:
    """Tell whether two results, tensors or structures of tensors, are equal bit for bit."""
    if isinstance(left, Tensor):
        return isinstance(right, Tensor) and left.dtype == right.dtype and torch.equal(left, right)
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(same(a, b) for a, b in zip(left, right, strict=True))
    return bool(left == right)


def assert_same_flow(torchs: Flow, ours: Flow, batches: Sequence[tuple[Tensor, ...]]) -> None:
    """Same graph up to names, same qparams in order, same bits out."""
    assert kinds(ours.reference) == kinds(torchs.reference), (
        f"graphs differ: ours adds {kinds(ours.reference) - kinds(torchs.reference)}, "
        f"lacks {kinds(torchs.reference) - kinds(ours.reference)}"
    )
    assert qparams(ours.reference) == qparams(torchs.reference), "qparams differ"
    for batch in batches:
        assert same(ours(*batch), torchs(*batch)), "outputs differ though graph and qparams agree"


def quantized_ops(model: GraphModule) -> list[str]:
    """Name the nodes of a graph that read a dequantize directly."""
    return [node.name for node in model.graph.nodes if any(is_dequantize(value) for value in node.all_input_nodes)]


def graph_counts(model: GraphModule, *tests: Callable[[Any], bool]) -> list[int]:
    """Count the nodes that satisfy each test."""
    return [sum(map(test, model.graph.nodes)) for test in tests]


def native(name: str) -> BackendConfig:
    """Return the project's own config of an engine: its fuser methods are refimpl's, not torch's."""
    return native_config(name)  # type: ignore[arg-type]
