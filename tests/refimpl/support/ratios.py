"""How far the forms of a quantized model are from the float model, in dB, through refimpl or torch's own flow."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.ao.quantization.quantize_fx as torch_fx
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.utils._pytree import tree_leaves

from fx_quant_conformance import refimpl
from fx_quant_conformance.backends.torch_engines.engine import engine as engine_of
from tests.refimpl.support import both_flows as flows

CONFIGS = {"x86": "fbgemm", "fbgemm": "fbgemm", "qnnpack": "qnnpack", "onednn": "onednn"}
_ours: Any = refimpl


@dataclass(frozen=True, kw_only=True)
class Made:
    """A calibrated or trained model, and what it was converted to. ``want``: what the float model gives."""

    prepared: GraphModule
    forms: Mapping[str, GraphModule]
    want: Any
    inputs: tuple[Any, ...]
    engine: str

    def ratios(self) -> dict[str, float]:
        """Return how far each form is from the float model, in dB."""
        with engine_of(self.engine):
            return {name: decibels(self.want, run(model, self.inputs)) for name, model in self.forms.items()}

    @property
    def worst(self) -> float:
        """The ratio of the form that is farthest from the float model."""
        return min(self.ratios().values())


def make(
    model: nn.Module, *inputs: Any, engine: str = "x86", is_qat: bool = False, mapping: Any = None, train: Any = None
) -> Made:
    """Take a model through refimpl with the engine's default mapping, or another one, on the inputs themselves.

    `train`: what is done with the prepared model in QAT, in train mode, besides one run.
    """
    torch.default_generator.manual_seed(0)
    name = f"get_default_{'qat_' if is_qat else ''}qconfig_mapping"
    mapping = getattr(refimpl, name)(engine) if mapping is None else mapping
    want = run(copy.deepcopy(model).eval(), inputs)
    prepare: Any = refimpl.prepare_qat_fx if is_qat else refimpl.prepare_fx
    with engine_of(engine):
        config = flows.our_config(CONFIGS[engine])
        prepared = prepare(copy.deepcopy(model).train(is_qat), mapping, copy.deepcopy(inputs), backend_config=config)
        with torch.no_grad():
            prepared(*copy.deepcopy(inputs))
        if train is not None:
            train(prepared)
        prepared.eval()
        converts: dict[str, Callable[..., GraphModule]] = {
            "reference": refimpl.convert_to_reference_fx,
            "decomposed": refimpl.convert_to_reference_decomposed_fx,
            "lowered": refimpl.convert_fx,
        }
        forms = {form: convert(prepared, backend_config=config) for form, convert in converts.items()}
    return Made(prepared=prepared, forms=forms, want=want, inputs=inputs, engine=engine)


def run(model: nn.Module, inputs: tuple[Any, ...]) -> Any:
    """Run a model on copies of its inputs, and on a copy of itself: it may write to both."""
    with torch.no_grad():
        return copy.deepcopy(model)(*copy.deepcopy(inputs))


def decibels(want: Any, found: Any) -> float:
    """Return the ratio of the float model's results to the error, over all tensors of floats, in dB."""
    pairs = list(zip(_floats(want), _floats(found), strict=True))
    signal, noise = (
        sum(float(each.double().square().sum()) for each in part)
        for part in ([left for left, _ in pairs], [left - right for left, right in pairs])
    )
    return math.inf if noise == 0 else -math.inf if signal == 0 else 10 * math.log10(signal / noise)


def _floats(value: Any) -> Iterator[Tensor]:
    for leaf in tree_leaves(value):
        if isinstance(leaf, Tensor) and (leaf.is_floating_point() or leaf.is_quantized):
            yield leaf.dequantize() if leaf.is_quantized else leaf


def torch_ratios(model: nn.Module, *inputs: Any, engine: str = "x86", is_qat: bool = False) -> dict[str, float]:
    """Return what `make(…).ratios()` does, of torch's own flow; the forms that it can make and run."""
    torch.default_generator.manual_seed(0)
    name = f"get_default_{'qat_' if is_qat else ''}qconfig_mapping"
    want, config = run(copy.deepcopy(model).eval(), inputs), flows.torch_config(CONFIGS[engine])
    found: dict[str, float] = {}
    with engine_of(engine), torch.no_grad():
        prepare: Any = torch_fx.prepare_qat_fx if is_qat else torch_fx.prepare_fx
        mapping = getattr(flows.torch_mappings, name)(engine)
        try:
            prepared = prepare(
                copy.deepcopy(model).train(is_qat), mapping, copy.deepcopy(inputs), backend_config=config
            )
            prepared(*copy.deepcopy(inputs))
        except Exception:  # what torch cannot do is no number to be held to
            return found
        prepared.eval()
        for form, convert in (("reference", torch_fx.convert_to_reference_fx), ("lowered", torch_fx.convert_fx)):
            try:
                converted = convert(copy.deepcopy(prepared), backend_config=config)
                found[form] = decibels(want, run(converted, inputs))
            except Exception:
                continue
    return found
