"""Helpers: one float model prepared, equalized and converted by torch and by refimpl."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.ao.quantization.quantize_fx as torch_fx
from torch import Tensor, nn
from torch.ao.quantization import fake_quantize, observer, qconfig, qconfig_mapping
from torch.ao.quantization.fx import _equalize
from torch.fx import GraphModule

from fx_quant_conformance import refimpl
from fx_quant_conformance.refimpl.config.qconfig import QConfigMapping
from fx_quant_conformance.refimpl.graph.tracing import draft_of
from fx_quant_conformance.refimpl.prepare.equalize import (
    EQUALIZATION,
    Equalization,
    convert_equalization,
    default_equalization_qconfig,
)

torchs: Any = observer  # typed as Any: torch's constructors are not annotated
torch_fakes: Any = fake_quantize
torch_equalize: Any = _equalize
TorchMapping: Any = qconfig_mapping.QConfigMapping
STATIC: Any = qconfig.default_qconfig._replace(activation=torchs.MinMaxObserver)  # with the whole range
DYNAMIC: Any = qconfig.default_dynamic_qconfig
TORCH_EQUALIZED: Any = torch_equalize.default_equalization_qconfig
ONLY_LINEAR = TorchMapping().set_object_type(nn.Linear, STATIC)
WHOLE = TorchMapping().set_global(STATIC)
EVERYWHERE = TorchMapping().set_global(TORCH_EQUALIZED)
OURS = QConfigMapping().set_global(default_equalization_qconfig)


class Net(nn.Module):
    """Runs a function of its parts; parts that are tensors are buffers, or parameters if they are made so."""

    def __init__(self, run: Callable[[Any, Tensor], Any], **parts: Any) -> None:
        super().__init__()
        for name, part in parts.items():
            if type(part) is Tensor:
                self.register_buffer(name, part)
            else:
                setattr(self, name, part)
        self.run = run

    def forward(self, x: Tensor) -> Any:
        return self.run(self, x)


def spread(layer: Any) -> Any:
    """Give a layer's rows and columns ranges that differ by a factor of 100, so that equalization has work to do."""
    with torch.no_grad():
        weight = layer.weight
        rows, columns = weight.shape[:2]
        weight *= torch.logspace(-1, 1, rows).reshape(-1, *[1] * (weight.dim() - 1))
        weight *= torch.logspace(1, -1, columns).reshape(1, -1, *[1] * (weight.dim() - 2))
    return layer


def selected(**keys: Any) -> tuple[Any, Any]:
    """A mapping of the default EqualizationQConfig with these setters and keys, of torch's and of refimpl's."""
    made: tuple[Any, Any] = TorchMapping(), QConfigMapping()
    for mapping, default in zip(made, (TORCH_EQUALIZED, default_equalization_qconfig), strict=True):
        for setter, arguments in keys.items():
            on = arguments[-1] if arguments and arguments[-1] is None else default
            getattr(mapping, f"set_{setter}")(*(part for part in arguments if part is not None), on)
    return made


def linear(rows: int = 6, columns: int = 6, **arguments: Any) -> Any:
    return spread(nn.Linear(columns, rows, **arguments))


def conv(rows: int = 6, columns: int = 6, dims: int = 2, **arguments: Any) -> Any:
    return spread({1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}[dims](columns, rows, 2, **arguments))


def weight(layer: nn.Module) -> Tensor:
    found: Tensor = layer.get_parameter("weight").detach().clone()
    return found


class Both(NamedTuple):
    """Prepared and reference models of torch and of refimpl, on the same calibration input ``x``."""

    model: nn.Module
    x: Tensor
    torchs: GraphModule
    ours: GraphModule
    found: tuple[Equalization, ...]

    def float_errors(self) -> tuple[float, float]:
        """The largest change that equalization by itself, without quantizing, makes to the output; torch's first."""
        exact = self.model(self.x)
        made = (torch_equalize._convert_equalization_ref(copy.deepcopy(self.torchs)), equalized(self.ours))
        first, second = (float((part(self.x) - exact).abs().max() / exact.abs().max()) for part in made)
        return first, second

    def references(self) -> tuple[GraphModule, GraphModule]:
        return torch_reference(self.torchs), refimpl.convert_to_reference_fx(self.ours)

    def errors(self) -> tuple[float, float]:
        """The largest error of both reference models, torch's first; like the other, relative to the largest output."""
        exact = self.model(self.x)
        found = [float((made(self.x) - exact).abs().max() / exact.abs().max()) for made in self.references()]
        return found[0], found[1]


def prepare_with_torch(model: nn.Module, x: Tensor, mapping: Any, equalization: Any = None) -> GraphModule:
    made: GraphModule = torch_fx.prepare_fx(copy.deepcopy(model), mapping, (x,), _equalization_config=equalization)
    return made


def sample(shape: tuple[int, ...]) -> Tensor:
    return torch.randn(shape) * torch.logspace(-1, 1, shape[1]).reshape(-1, *[1] * (len(shape) - 2))


def both(
    model: nn.Module, shape: tuple[int, ...] = (16, 6), mapping: Any = WHOLE, torchs: Any = EVERYWHERE, ours: Any = OURS
) -> Both:
    model, x = model.eval(), sample(shape)
    prepared = refimpl.prepare_fx(model, mapping, (x,), _equalization_config=ours)
    found = prepared.meta[EQUALIZATION]
    made = Both(model, x, prepare_with_torch(model, x, mapping, torchs), prepared, found)
    made.torchs(x)
    made.ours(x)
    return made


def equalized(prepared: GraphModule) -> GraphModule:
    """Do what refimpl's convert does before it replaces observers, and keep what torch's convert needs."""
    draft = draft_of(prepared)
    convert_equalization(draft)
    made = GraphModule(draft, draft.graph)
    made.meta = dict(prepared.meta)
    return made


def torch_reference(prepared: GraphModule) -> GraphModule:
    made: GraphModule = torch_fx.convert_to_reference_fx(copy.deepcopy(prepared))
    return made
