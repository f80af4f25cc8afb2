"""Probing: a Quantizer annotates float models of single patterns, as torchao's prepare has it do.

Several patterns are probed at once, as separate parts of one graph: some Quantizers need seconds for each graph. Where
that raises, halves of them are probed, until the one at fault is alone.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fx_quant_conformance.backends.names import format_error
from fx_quant_conformance.conformance.claims.build import build_model
from fx_quant_conformance.conformance.claims.case import Case
from fx_quant_conformance.conformance.claims.inputs import Batch, draw_calibration_inputs
from fx_quant_conformance.conformance.ops.op_model import Role
from fx_quant_conformance.conformance.pt2e.reading import PatternReading, read_probes
from fx_quant_conformance.conformance.pt2e.remembered import remember_patterns
from fx_quant_conformance.refimpl.exported.exported import open_module

RAISED = "the Quantizer raised"
"""How the reason begins of what a Quantizer fails on."""
REFUSED = ("torchao refused it", "torch.export refused it")
"""How it begins of what no Quantizer was asked of."""
AT_ONCE = 48
"""How many patterns are probed in one graph."""
_CONVS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_NEIGHBOURS: tuple[type[nn.Module], ...] = (nn.Linear, *_CONVS)
"""The ops that may stand before and after a pattern, in order of preference."""
_LONGEST = 160


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """A float model of a pattern, in eval mode, and inputs for it."""

    pattern: nn.Module
    inputs: Batch
    activations: tuple[int, ...]
    """Which of the inputs may be quantized."""

    @classmethod
    def of(cls, case: Case) -> Probe:
        """Build a case's model, the same one each time."""
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(0)
            activations = (number for number, each in enumerate(case.inputs) if each.role is Role.ACTIVATION)
            return cls(
                pattern=build_model(case), inputs=draw_calibration_inputs(case)[0], activations=tuple(activations)
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Probed:
    """What came of a probe: a reading, or in words why there is none."""

    reading: PatternReading | None = None
    failure: str = ""
    is_refused: bool = False
    """Whether torch.export or torchao refused it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BothPlaces:
    """What came of a probe alone, and between ops that are quantized."""

    alone: Probed
    between: Probed | None = None
    """None: it left nothing open, or none of these ops fits. A pattern leaves something open where an input or an
    output of it is not observed."""
    has_neighbours: bool = False
    """Whether the Quantizer quantizes some op that may stand next to patterns."""


class Alone(nn.Module):
    """A pattern that takes the model's inputs and gives its output."""

    def __init__(self, pattern: nn.Module) -> None:
        super().__init__()
        self.pattern = pattern

    def forward(self, *inputs: Any) -> Any:
        """Return what the pattern gives."""
        return self.pattern(*inputs)


class BetweenOthers(nn.Module):
    """A pattern each of whose activations comes from an op, and whose output goes to another.

    What comes before is given out as well, so that it is not fused with the pattern.
    """

    def __init__(self, pattern: nn.Module, before: Mapping[int, nn.Module], after: nn.Module) -> None:
        super().__init__()
        self.pattern, self.after = pattern, after
        self.before = nn.ModuleDict({str(position): module for position, module in before.items()})

    def forward(self, *inputs: Any) -> Any:
        """Return what the op after the pattern gives, and what the pattern gets."""
        given = [self.before[str(n)](x) if str(n) in self.before else x for n, x in enumerate(inputs)]
        return self.after(self.pattern(*given)), given


class _Parts(nn.Module):
    """Models side by side: each takes its share of the inputs."""

    def __init__(self, models: Mapping[str, nn.Module], counts: Mapping[str, int]) -> None:
        super().__init__()
        self._counts = dict(counts)
        for name, model in models.items():
            self.add_module(name, model)

    def forward(self, *inputs: Any) -> Any:
        """Return the results of all models."""
        results, first = list[Any](), 0
        for name, count in self._counts.items():
            results.append(getattr(self, name)(*inputs[first : first + count]))
            first += count
        return results


class Prober:
    """Probes one Quantizer. ``is_qat``: by prepare_qat_pt2e, in train mode; else by prepare_pt2e, in eval mode."""

    def __init__(self, quantizer: Any, *, is_qat: bool) -> None:
        self._quantizer = quantizer
        self._is_qat = is_qat
        self._neighbours: list[type[nn.Module]] | None = None

    def probe(self, probes: Mapping[str, Probe]) -> dict[str, BothPlaces]:
        """Probe each pattern alone; those that leave something open also between ops that are quantized."""
        alone = self._run(probes, lambda probe: Alone(probe.pattern))
        opened = {name: probe for name, probe in probes.items() if _leaves_open(alone[name])}
        has_neighbours = bool(opened and self.neighbours)
        between = self._run(opened, self._put_between) if has_neighbours else {}
        return {
            name: BothPlaces(alone=each, between=between.get(name), has_neighbours=has_neighbours)
            for name, each in alone.items()
        }

    @property
    def neighbours(self) -> list[type[nn.Module]]:
        """The ops whose inputs the Quantizer quantizes statically, where they stand alone."""
        if self._neighbours is None:
            probes = {kind.__name__: _make_neighbour_probe(kind) for kind in _NEIGHBOURS}
            probed = self._run(probes, lambda probe: Alone(probe.pattern))
            self._neighbours = [kind for kind in _NEIGHBOURS if _takes_static(probed[kind.__name__])]
        return self._neighbours

    def _put_between(self, probe: Probe) -> nn.Module | None:
        """Put a pattern between two neighbours; None: none of them takes its tensors."""
        with torch.no_grad():
            output = probe.pattern(*(value.clone() for value in probe.inputs))
        before = {place: self._make_neighbour(probe.inputs[place]) for place in probe.activations}
        after = self._make_neighbour(output)
        given = {place: module for place, module in before.items() if module is not None}
        return None if after is None or len(given) < len(before) else BetweenOthers(probe.pattern, given, after)

    def _make_neighbour(self, value: object) -> nn.Module | None:
        """Make an op that takes a tensor, and gives one of its shape."""
        if not isinstance(value, Tensor) or not value.is_floating_point():
            return None
        for kind in self.neighbours:
            if kind is nn.Linear and value.dim() > 0:
                return nn.Linear(value.shape[-1], value.shape[-1])
            if kind in _CONVS and value.dim() == 3 + _CONVS.index(kind):
                return kind(value.shape[1], value.shape[1], 1)
        return None

    def _run(self, probes: Mapping[str, Probe], place: Callable[[Probe], nn.Module | None]) -> dict[str, Probed]:
        """Have the Quantizer annotate each probe in its place, and read what it did.

        A probe that cannot be exported costs itself only; one that has no place is left out.
        """
        found, names = dict[str, Probed](), {f"p{number}": name for number, name in enumerate(probes)}
        for first in range(0, len(names), AT_ONCE):
            some = list(names)[first : first + AT_ONCE]
            placed = {key: place(probes[names[key]]) for key in some}
            models = {key: model.train(self._is_qat) for key, model in placed.items() if model is not None}
            found |= self._annotate(models, {key: probes[names[key]].inputs for key in models})
        return {names[key]: each for key, each in found.items()}

    def _annotate(self, models: Mapping[str, nn.Module], inputs: Mapping[str, Batch]) -> dict[str, Probed]:
        try:
            program = _export(models, inputs)
        except Exception as error:  # whatever torch.export raises
            if len(models) == 1:
                return dict.fromkeys(models, _refuse(error))
            return self._annotate_exportable(models, inputs)
        try:
            readings = read_probes(prepare(program, self._quantizer, is_qat=self._is_qat), list(models))
        except Exception as error:  # whatever a vendor's Quantizer raises, or torchao on its own account
            if len(models) > 1:
                return self._halve(models, inputs)
            is_refused = _fails_without(models, inputs, is_qat=self._is_qat)
            who = REFUSED[0] if is_refused else RAISED
            return dict.fromkeys(models, Probed(failure=f"{who}: {_shorten(error)}", is_refused=is_refused))
        return {name: Probed(reading=reading) for name, reading in readings.items()}

    def _annotate_exportable(self, models: Mapping[str, nn.Module], inputs: Mapping[str, Batch]) -> dict[str, Probed]:
        """Annotate the models that can be exported; the others cost themselves only."""
        tried = {name: _find_refusal({name: model}, inputs) for name, model in models.items()}
        found = {name: refusal for name, refusal in tried.items() if refusal is not None}
        rest = {name: model for name, model in models.items() if name not in found}
        if rest:
            found |= self._annotate(rest, inputs) if found else self._halve(rest, inputs)
        return found

    def _halve(self, models: Mapping[str, nn.Module], inputs: Mapping[str, Batch]) -> dict[str, Probed]:
        """Annotate each half of several models, one of which is at fault."""
        names = list(models)
        halves: tuple[Sequence[str], ...] = (names[: len(names) // 2], names[len(names) // 2 :])
        first, second = (self._annotate({name: models[name] for name in half}, inputs) for half in halves)
        return first | second


def _export(models: Mapping[str, nn.Module], inputs: Mapping[str, Batch]) -> Any:
    counts = {name: len(inputs[name]) for name in models}
    values = tuple(value.clone() for name in models for value in inputs[name])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return open_module(torch.export.export(_Parts(models, counts), values))


def prepare(program: Any, quantizer: Any, *, is_qat: bool) -> Any:
    """Return an exported program's module as torchao prepares it by a Quantizer. Raises what either raises."""
    from torchao.quantization.pt2e.quantize_pt2e import prepare_pt2e, prepare_qat_pt2e

    with warnings.catch_warnings(), remember_patterns():
        warnings.simplefilter("ignore")
        return (prepare_qat_pt2e if is_qat else prepare_pt2e)(program, quantizer)


def _fails_without(models: Mapping[str, nn.Module], inputs: Mapping[str, Batch], *, is_qat: bool) -> bool:
    """Tell whether torchao cannot prepare models even if nothing is annotated."""
    from torchao.quantization.pt2e.quantizer import ComposableQuantizer

    try:
        prepare(_export(models, inputs), ComposableQuantizer([]), is_qat=is_qat)
    except Exception:  # whatever torchao raises
        return True
    return False


def _find_refusal(models: Mapping[str, nn.Module], inputs: Mapping[str, Batch]) -> Probed | None:
    """Say that torch.export refuses models; None: it takes them."""
    try:
        _export(models, inputs)
    except Exception as error:  # whatever torch.export raises
        return _refuse(error)
    return None


def _refuse(error: Exception) -> Probed:
    return Probed(failure=f"{REFUSED[1]}: {_shorten(error)}", is_refused=True)


def _leaves_open(probed: Probed) -> bool:
    reading = probed.reading
    return reading is not None and None in (*reading.inputs, *reading.outputs)


def _make_neighbour_probe(kind: Any) -> Probe:
    rank = 0 if kind is nn.Linear else 1 + _CONVS.index(kind)
    pattern = nn.Linear(4, 4) if kind is nn.Linear else kind(4, 4, 1)
    return Probe(pattern=pattern, inputs=(torch.ones(2, 4, *[3] * rank),), activations=(0,))


def _takes_static(probed: Probed) -> bool:
    inputs = () if probed.reading is None else probed.reading.inputs
    return bool(inputs) and all(each is not None and not each.facts.is_dynamic for each in inputs)


def _shorten(error: Exception) -> str:
    """Return an error's class and text on one line that fits a table."""
    text = format_error(error)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"
