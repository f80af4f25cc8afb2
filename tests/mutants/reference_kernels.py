"""The reference backend under a small config that has every kind of op and dtype config, and ways to get it wrong.

``Edited`` changes the reference model before it runs, ``Stepped`` runs it node by node with steps replaced, ``Wrapped``
changes what is called; each says how in one function.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache
from typing import Any

import torch
import torch.ao.nn.quantized.reference as nnqr
from torch import Tensor, nn
from torch.fx import GraphModule, Interpreter, Node

from fx_quant_conformance.backends.base import Capabilities
from fx_quant_conformance.backends.reference import ReferenceBackend
from fx_quant_conformance.backends.torch_engines.tables import native_config
from fx_quant_conformance.refimpl import BackendConfig, BackendPatternConfig, DTypeConfig
from fx_quant_conformance.refimpl.config.patterns import pattern_name
from fx_quant_conformance.refimpl.graph.invariants import is_dequantize, is_quantize

U8, S8, DYNAMIC, HALF, WEIGHT = "u8", "s8", "dynamic", "half", "weight"
CLAIMED: dict[str, tuple[str, ...]] = {
    "nn.Linear": (U8, DYNAMIC, HALF),
    "nnqat.Linear": (U8, DYNAMIC, HALF),
    "nn.Linear+nn.ReLU": (U8,),
    "nni.LinearReLU": (U8,),
    "F.linear": (U8, DYNAMIC),
    "nn.Conv1d": (U8, S8),
    "nn.Conv2d": (U8,),
    "torch.conv2d": (U8,),
    "nn.Conv2d+nn.BatchNorm2d": (U8,),
    "nn.Conv2d+nn.BatchNorm2d+nn.ReLU": (U8,),
    "nni.ConvReLU2d": (U8,),
    "nni.ConvBnReLU2d": (U8,),
    "nniqat.ConvBnReLU2d": (U8,),
    "nn.ConvTranspose2d": (U8,),
    "operator.add": (U8,),
    "operator.add+nn.ReLU": (U8,),
    "operator.mul": (U8,),
    "torch.cat": (U8,),
    "nn.ReLU": (U8,),
    "nn.ReLU6": (U8,),
    "torch.clamp": (U8,),
    "nn.Hardswish": (U8,),
    "nn.Sigmoid": (U8,),
    "nn.Softmax": (U8, S8),
    "F.layer_norm": (U8,),
    "nn.MaxPool2d": (U8,),
    "nn.AvgPool2d": (U8,),
    "nn.AdaptiveAvgPool2d": (U8,),
    "F.interpolate": (U8,),
    "torch.mean": (U8,),
    "torch.flatten": (U8,),
    "torch.transpose": (U8,),
    "nn.Identity": (U8,),
    "nn.LSTMCell": (DYNAMIC,),
    "nn.GRUCell": (DYNAMIC, HALF),
    "nn.Embedding": (WEIGHT,),
    "nn.EmbeddingBag": (WEIGHT,),
    ".reshape": (U8,),
    ".size": (U8,),
}
"""Which dtype configs of which patterns; dynamic ones are of quint8."""
QAT = ("nn.Linear", "nni.ConvBnReLU2d")
"""Entries that keep their class for training."""
SAMPLE = (
    "nn.Linear/static:*",
    "nn.Linear/dynamic:in=quint8*/ptq/*",
    "nn.Conv1d/static:in=qint8*",
    "nn.Conv2d/*",
    "nn.Conv2d+nn.BatchNorm2d+nn.ReLU/*",
    "nn.ConvTranspose2d/*",
    "operator.[am]*[dl]/*/ptq/*",
    "torch.cat/*/ptq/*",
    "torch.flatten/*/ptq/*",
    "nn.ReLU/*",
    "nn.Hardswish/*/ptq/*",
    "nn.Softmax/*quint8*/ptq/*",
    "F.layer_norm/*/ptq/*",
    "nn.[AM]??Pool2d/*/ptq/*",
    "nn.LSTMCell/*",
    "nn.GRUCell/dynamic:in=float16*",
    "nn.Embedding/*quint8*",
    "nn.EmbeddingBag/*quint4x2*",
    *(f"model/{name}/ptq/*" for name in ("residual", "reused*", "branches", "cat*", "shared*", "float*")),
)
"""What the gate runs of them in full: every kind of op and of dtype config once, training with and without a
weight, some models of a few ops."""
SCHEMES = ("per_channel_symmetric",)


def _kind(dtypes: DTypeConfig) -> str:
    if dtypes.is_dynamic:
        return HALF if dtypes.input_dtype is torch.float16 else DYNAMIC
    return {torch.quint8: U8, torch.qint8: S8}.get(dtypes.input_dtype, WEIGHT)  # type: ignore[arg-type]


@cache
def whole_config() -> BackendConfig:
    """Return the claims; made once, for patterns are compared by identity in places."""
    return BackendConfig("small").set_backend_pattern_configs(list(entries()))


def entries() -> Iterable[BackendPatternConfig]:
    """Yield the entries anew: qnnpack's, and what only the native config has."""
    taken = set[str]()
    for entry in (*native_config("qnnpack").configs, *native_config("native").configs):
        name = pattern_name(entry.normal_pattern)
        if name in CLAIMED and name not in taken:
            taken.add(name)
            entry.set_dtype_configs([each for each in entry.dtype_configs if _kind(each) in CLAIMED[name]])
            if name not in QAT:
                entry.set_qat_module(None)  # type: ignore[arg-type]
            yield entry


def config_with(pattern: str, change: Callable[[BackendPatternConfig], object]) -> BackendConfig:
    """Return the claims with one entry changed."""
    found = list(entries())
    change(next(entry for entry in found if pattern_name(entry.normal_pattern) == pattern))
    return BackendConfig("small").set_backend_pattern_configs(found)


class SmallReference(ReferenceBackend):
    """The reference backend with those claims."""

    name = "reference-small"

    def __init__(self, config: BackendConfig | None = None) -> None:
        self._config = config or whole_config()

    def backend_config(self) -> BackendConfig:
        return self._config

    def capabilities(self) -> Capabilities:
        return replace(super().capabilities(), weight_schemes=SCHEMES)


class Edited(SmallReference):
    """Changes each reference model, in place, before it runs."""

    def __init__(self, edit: Callable[[GraphModule], object], config: BackendConfig | None = None) -> None:
        super().__init__(config)
        self._edit = edit

    def lower(self, reference_model: GraphModule, example_inputs: tuple[Any, ...]) -> Callable[..., Any]:
        self._edit(reference_model)
        reference_model.recompile()
        return super().lower(reference_model, example_inputs)


class Wrapped(SmallReference):
    """Makes something else of what is called: ``wrap(lowered, reference_model, example_inputs)``."""

    def __init__(self, wrap: Callable[..., Callable[..., Any]], config: BackendConfig | None = None) -> None:
        super().__init__(config)
        self._wrap = wrap

    def lower(self, reference_model: GraphModule, example_inputs: tuple[Any, ...]) -> Callable[..., Any]:
        return self._wrap(super().lower(reference_model, example_inputs), reference_model, example_inputs)


class Steps(Interpreter):
    """Runs the reference model node by node; each step is a method, for a fault to replace."""

    def run_node(self, n: Node) -> Any:
        arguments, keywords = self.fetch_args_kwargs_from_env(n)
        if is_quantize(n):
            is_parameter = n.all_input_nodes[0].op == "get_attr"
            return n.target(*arguments) if is_parameter else self.quantize(n, *arguments)  # type: ignore[operator]
        if is_dequantize(n):
            return self.dequantize(n, *arguments)
        if n.op == "call_module":
            return self.called(self.fetch_attr(str(n.target)), *arguments, **keywords)
        if n.op == "call_function":
            return self.function(n.target, *arguments, **keywords)
        return super().run_node(n)

    def quantize(self, node: Node, value: Any, *numbers: Any) -> Any:
        """Quantize an activation: numbers are scale, zero point, both ends and dtype."""
        target: Any = node.target
        return target(value, *numbers)

    def dequantize(self, node: Node, *arguments: Any) -> Any:
        target: Any = node.target
        return target(*arguments)

    def called(self, module: nn.Module, *arguments: Any, **keywords: Any) -> Any:
        return module(*arguments, **keywords)

    def function(self, target: Any, *arguments: Any, **keywords: Any) -> Any:
        return target(*arguments, **keywords)


class Stepped(SmallReference):
    """Runs the reference model with one step replaced: the body gets the honest step, then what the step is given."""

    steps: type[Steps] = Steps

    def __init__(self, step: str, body: Callable[..., Any], config: BackendConfig | None = None) -> None:
        super().__init__(config)

        def replaced(self: Steps, *arguments: Any, **keywords: Any) -> Any:
            return body(getattr(super(kind, self), step), *arguments, **keywords)

        kind = type(f"Stepped_{step}", (self.steps,), {step: replaced})
        self._kind: Any = kind

    def lower(self, reference_model: GraphModule, example_inputs: tuple[Any, ...]) -> Callable[..., Any]:
        run: Callable[..., Any] = torch.no_grad()(self._kind(reference_model).run)
        return run


def weighted(model: nn.Module) -> list[Any]:
    """List the reference modules that hold one quantized weight."""
    return [
        each
        for each in model.modules()
        if isinstance(each, (nnqr.Linear, nnqr.Conv1d, nnqr.Conv2d, nnqr.Conv3d, nnqr.ConvTranspose2d))
    ]


def in_rows(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Change the tensors of an output, or of several."""
    if isinstance(value, (tuple, list)):
        return type(value)(in_rows(each, change) for each in value)
    return change(value) if isinstance(value, Tensor) else value
