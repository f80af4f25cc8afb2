"""The accuracy check: refimpl's forms beside the better of torch's two, on the default mappings of an engine.

Inputs are drawn ten times; the models are calibrated, or trained without steps, on all of them. The float model is the
user's own, with norms whose statistics training does not change.
"""

from __future__ import annotations

import copy
import math
import statistics
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.ao.quantization.quantize_fx as torch_fx
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torch.nn.modules.batchnorm import _BatchNorm

from fx_quant_conformance import refimpl
from fx_quant_conformance.backends.torch_engines.engine import engine as engine_of
from tests.refimpl.support import both_flows as flows
from tests.refimpl.support.parity import torn
from tests.refimpl.support.ratios import CONFIGS, decibels

Build = Callable[[], tuple[nn.Module, tuple[Any, ...]]]
DRAWS, BATCHES, ROUNDS = 10, 6, 3
"""Draws of inputs; batches in each, so that no single tie decides; and how often training sees all of them."""
MEDIAN, MOST = 0.5, 3.0
"""Decibels that refimpl may lie below the better of torch's models: in the median of the draws, and in any."""
KNOWN_LOSS = 6.0
"""Decibels, one bit, from which on what an op with a number loses on a shared grid explains more (OBS-19)."""
SAME = 100.0
"""Decibels from which on a prepared model is the float model: folded norms round a weight, by 2⁻²⁴ of itself."""


@dataclass(frozen=True, kw_only=True)
class Accuracy:
    """What a model gives on each draw, in dB: refimpl's forms and torch's; and what convert said of grids that lose.

    ``prepared``: of the prepared model with its observers and fake quantizes off. ``warned``: the forms for which
    convert warned. ``lost``: what an op with a number loses by the log of each form, at most. ``own_form``: the forms
    that are held to torch's of the same kind only, see `measure`. ``torn``: the ops that share one observer by the
    config, and not in torch's prepared model (OBS-02).
    """

    prepared: float
    ours: Mapping[str, list[float]]
    torchs: Mapping[str, list[float]]
    warned: frozenset[str]
    lost: Mapping[str, float]
    own_form: frozenset[str] = frozenset()
    torn: tuple[str, ...] = ()

    def problems(self) -> list[str]:
        """List what is less accurate than torch without a word, and a prepared model that computes otherwise."""
        found = [] if self.prepared > SAME else [f"prepared: {self.prepared:.1f} dB from the float model"]
        for form in (form for form in self.ours if form not in self.warned and self.lost[form] < KNOWN_LOSS):
            best = self._best_of_torch(form)
            lost = [
                max(right - own, 0.0) if right > own else 0.0 for right, own in zip(best, self.ours[form], strict=True)
            ]
            if statistics.median(lost) > MEDIAN or max(lost) > MOST:
                found.append(f"{form}: median {statistics.median(lost):.1f}, at most {max(lost):.1f} dB below torch")
        return found

    def _best_of_torch(self, form: str) -> list[float]:
        """Return the ratios to hold a form to: of the better of torch's reference and lowered model, by draw."""
        names: tuple[str, ...] = ("reference", "lowered")
        if form in self.own_form and form in self.torchs:
            names = (form,)
        rows = [self.torchs[name] for name in names if name in self.torchs]
        return [max(column) for column in zip(*rows, strict=True)] if rows else [-math.inf] * len(self.ours[form])


def measure(build: Build, engine: str, *, is_qat: bool = False, draws: int = DRAWS) -> Accuracy:
    """Take a model through both flows and compare them. `build`: a new model in eval mode, and example inputs.

    The lowered model and the program are held to the better one unless they give what torch's of the same kind gives:
    then the kernels and the rounding of that form lose, not the flow, which the reference model shows. Two more kinds
    of forms are held to torch's of the same kind, and not to another that cannot lose in this way:

    - The exported program of an engine whose QConfigs reduce the range: what lies beyond 0..127 is clipped, as in
      torch's decomposed model. Quantized tensors have no narrow range, and clip nothing there. (CVT-07, CVT-09)
    - The reference and the program of a model with dropout, which round to the grid of its result. In training it has
      seen values that dropout scaled up. Torch's quantized dropout returns its input, and drops that grid. (LOW-03)
    """
    model, examples = build()
    for module in model.modules():
        if isinstance(module, _BatchNorm):
            module.momentum = 0.0
    batches = [draw_like(examples, draw) for draw in range(draws * BATCHES)]
    ours, warned, prepared, losses = _convert_ours(model, batches, engine, is_qat)
    torchs, apart = _convert_torchs(model, batches, engine, is_qat)
    off = copy.deepcopy(prepared).apply(switch_off)
    want = _run_all(copy.deepcopy(model), batches)
    same = min(map(decibels, want[::BATCHES], _run_all(off, batches[::BATCHES])))
    with engine_of(engine):
        found = {form: _measure_draws(converted, batches, want) for form, converted in ours.items()}
        theirs = {form: _try_draws(converted, batches, want) for form, converted in torchs.items()}
    own_form = {"exported"} if engine in ("x86", "fbgemm") else set()
    own_form |= {form for form in ("lowered", "exported") if found[form] == theirs.get(form)}
    drops = any(map(_is_dropout, prepared.modules())) or any(map(_calls_dropout, prepared.graph.nodes))
    if drops:
        own_form |= {"reference", "exported"}
    return Accuracy(
        prepared=same, ours=found, torchs=theirs, warned=warned, lost=losses, own_form=frozenset(own_form), torn=apart
    )


def _is_dropout(module: nn.Module) -> bool:
    return isinstance(module, nn.modules.dropout._DropoutNd)


def _calls_dropout(node: Node) -> bool:
    return "dropout" in str(getattr(node.target, "__name__", node.target))


def draw_like(examples: tuple[Any, ...], draw: int) -> tuple[Any, ...]:
    """Draw inputs: uniform floats of an example's mean and deviation, so that no draw has a range of its own."""
    generator = torch.Generator().manual_seed(draw)

    def like(value: Any) -> Any:
        is_float = isinstance(value, Tensor) and value.is_floating_point() and bool(value.isfinite().all())
        if not is_float or value.numel() < 2:
            return value
        if bool((value == value.round()).all()):  # pixels, and masks of 0 and 1
            return value[torch.randperm(len(value), generator=generator)]
        return (torch.rand(value.shape, generator=generator) - 0.5) * math.sqrt(12) * value.std() + value.mean()

    return tuple(torch.utils._pytree.tree_map(like, examples))


def switch_off(module: nn.Module) -> None:
    """Let an observer or fake quantize pass values through."""
    for switch in ("disable_observer", "disable_fake_quant"):
        getattr(module, switch, lambda: None)()


def _convert_ours(
    model: nn.Module, batches: Sequence[tuple[Any, ...]], engine: str, is_qat: bool
) -> tuple[dict[str, nn.Module], frozenset[str], GraphModule, dict[str, float]]:
    prepare: Any = refimpl.prepare_qat_fx if is_qat else refimpl.prepare_fx
    mapping = getattr(refimpl, f"get_default_{'qat_' if is_qat else ''}qconfig_mapping")(engine)
    config = flows.our_config(CONFIGS[engine])
    with engine_of(engine), torch.no_grad():
        torch.default_generator.manual_seed(1)
        floating = copy.deepcopy(model).train(is_qat)
        prepared = prepare(floating, mapping, copy.deepcopy(batches[0]), backend_config=config)
        flows.calibrate(prepared, list(copy.deepcopy(batches)) * (ROUNDS if is_qat else 1))
        prepared.eval()
        converts: dict[str, Callable[..., Any]] = {
            "reference": refimpl.convert_to_reference_fx,
            "decomposed": refimpl.convert_to_reference_decomposed_fx,
            "lowered": refimpl.convert_fx,
        }
        forms, warned = {}, set()
        for form, convert in converts.items():
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                forms[form] = convert(prepared, backend_config=config)
            warned |= {form} if any(" loses " in str(each.message) for each in caught) else set()
        losses = {form: _find_loss(converted, form) for form, converted in forms.items()}
        losses["exported"] = losses.pop("decomposed")
        forms["exported"] = refimpl.export_reference(forms.pop("decomposed"), copy.deepcopy(batches[0])).module()
    renamed = frozenset("exported" if form == "decomposed" else form for form in warned)
    return forms, renamed, prepared, losses


def _find_loss(converted: nn.Module, form: str) -> float:
    losses = refimpl.explain(converted).grid_losses
    return max((loss.of_input if form == "lowered" else loss.decibels for loss in losses), default=0.0)


def _convert_torchs(
    model: nn.Module, batches: Sequence[tuple[Any, ...]], engine: str, is_qat: bool
) -> tuple[dict[str, nn.Module], tuple[str, ...]]:
    """Return torch's forms, as far as torch can make them, and the ops that it tears apart (OBS-02).

    What torch cannot make is no number to be held to.
    """
    prepare: Any = torch_fx.prepare_qat_fx if is_qat else torch_fx.prepare_fx
    mapping = getattr(flows.torch_mappings, f"get_default_{'qat_' if is_qat else ''}qconfig_mapping")(engine)
    config = flows.torch_config(CONFIGS[engine])
    converts: dict[str, Callable[..., Any]] = {
        "reference": torch_fx.convert_to_reference_fx,
        "lowered": torch_fx.convert_fx,
        "exported": torch_fx._convert_to_reference_decomposed_fx,
    }
    made: dict[str, nn.Module] = {}
    with engine_of(engine), torch.no_grad():
        try:
            torch.default_generator.manual_seed(1)
            floating = copy.deepcopy(model).train(is_qat)
            prepared = prepare(floating, mapping, copy.deepcopy(batches[0]), backend_config=config)
            flows.calibrate(prepared, list(copy.deepcopy(batches)) * (ROUNDS if is_qat else 1))
        except Exception:
            return made, ()
        for form, convert in converts.items():
            try:
                made[form] = convert(copy.deepcopy(prepared.eval()), backend_config=config)
            except Exception:
                continue
    return made, torn(prepared, CONFIGS[engine])


def _run_all(model: nn.Module, batches: Sequence[tuple[Any, ...]]) -> list[Any]:
    with torch.no_grad():
        return [model(*copy.deepcopy(inputs)) for inputs in batches]


def _measure_draws(model: nn.Module, batches: Sequence[tuple[Any, ...]], want: Sequence[Any]) -> list[float]:
    """Return the ratio of each draw, over its batches; -inf for NaN."""
    ratios = []
    for start in range(0, len(batches), BATCHES):
        part = slice(start, start + BATCHES)
        ratio = decibels(list(want[part]), _run_all(model, batches[part]))
        ratios.append(-math.inf if math.isnan(ratio) else ratio)
    return ratios


def _try_draws(model: nn.Module, batches: Sequence[tuple[Any, ...]], want: Sequence[Any]) -> list[float]:
    """Return the same of a model of torch's, which may fail where it runs."""
    try:
        return _measure_draws(model, batches, want)
    except Exception:
        return [-math.inf] * (len(batches) // BATCHES)
