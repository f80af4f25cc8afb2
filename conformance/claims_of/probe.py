"""Probing: a Quantizer annotates float models of single patterns, as torchao's prepare has it do.

Several patterns are probed at once, as separate parts of one graph: some Quantizers need seconds for each graph. Where
that raises, halves of them are probed, until the one at fault is alone.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from backends.discovery import describe_error
from conformance.claims.case import Case
from conformance.claims.inputs import Batch
from conformance.claims_of.annotation import PatternReading, read_probes
from conformance.claims_of.candidates import build_case
from conformance.ops.op_model import Role

AT_ONCE = 48
"""How many patterns are probed in one graph."""
_CONVS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
NEIGHBOURS: tuple[type[nn.Module], ...] = (nn.Linear, *_CONVS)
"""The ops that may stand before and after a pattern, in order of preference."""
_LONGEST = 160


@dataclass(frozen=True, slots=True, kw_only=True)
class Probed:
    """What came of a probe: a reading, or in words why there is none."""

    reading: PatternReading | None = None
    failure: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """A model that holds a pattern once, in eval mode, and its inputs."""

    model: nn.Module
    inputs: Batch


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
    """Probes side by side: each takes its share of the inputs."""

    def __init__(self, probes: Mapping[str, Probe]) -> None:
        super().__init__()
        self._counts = {name: len(probe.inputs) for name, probe in probes.items()}
        for name, probe in probes.items():
            self.add_module(name, probe.model)

    def forward(self, *inputs: Any) -> Any:
        """Return the results of all probes."""
        results, first = list[Any](), 0
        for name, count in self._counts.items():
            results.append(getattr(self, name)(*inputs[first : first + count]))
            first += count
        return results


def make_alone(case: Case) -> Probe:
    """Build a probe of a case's pattern alone."""
    model, inputs = build_case(case)
    return Probe(model=Alone(model), inputs=inputs)


def make_between(case: Case, kinds: Sequence[type[nn.Module]]) -> Probe | None:
    """Build a probe of a case's pattern between two ops of these kinds; None: none of them takes its tensors."""
    model, inputs = build_case(case)
    with torch.no_grad():
        output = model(*inputs)
    activations = {n: inputs[n] for n, each in enumerate(case.inputs) if each.role is Role.ACTIVATION}
    before = {position: _make_neighbour(kinds, value) for position, value in activations.items()}
    after = _make_neighbour(kinds, output)
    given = {position: module for position, module in before.items() if module is not None}
    if after is None or len(given) < len(before):
        return None
    return Probe(model=BetweenOthers(model, given, after).eval(), inputs=inputs)


def _make_neighbour(kinds: Sequence[type[nn.Module]], value: object) -> nn.Module | None:
    """Make an op that takes a tensor, and gives one of its shape."""
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return None
    for kind in kinds:
        if kind is nn.Linear and value.dim() > 0:
            return nn.Linear(value.shape[-1], value.shape[-1])
        if kind in _CONVS and value.dim() == 3 + _CONVS.index(kind):
            return kind(value.shape[1], value.shape[1], 1)
    return None


def run_probes(quantizer: Any, probes: Mapping[str, Probe], *, is_qat: bool) -> dict[str, Probed]:
    """Have a Quantizer annotate each probe, and read what it did; a probe that cannot be exported costs itself only."""
    found, exportable = dict[str, Probed](), dict[str, Probe]()
    for name, probe in probes.items():
        probe.model.train(is_qat)
        try:
            _export({name: probe})
            exportable[name] = probe
        except Exception as error:  # whatever torch.export raises
            found[name] = Probed(failure=f"torch.export refused it: {_shorten(error)}")
    names = list(exportable)
    for first in range(0, len(names), AT_ONCE):
        some = {name: exportable[name] for name in names[first : first + AT_ONCE]}
        found |= _annotate(quantizer, some, is_qat)
    return found


def _annotate(quantizer: Any, probes: Mapping[str, Probe], is_qat: bool) -> dict[str, Probed]:
    try:
        readings = _prepare(quantizer, probes, is_qat)
    except Exception as error:  # whatever a vendor's Quantizer raises
        if len(probes) == 1:
            return {name: Probed(failure=f"the Quantizer raised {_shorten(error)}") for name in probes}
        names = list(probes)
        halves = (names[: len(names) // 2], names[len(names) // 2 :])
        first, second = ({name: probes[name] for name in half} for half in halves)
        return _annotate(quantizer, first, is_qat) | _annotate(quantizer, second, is_qat)
    return {name: Probed(reading=reading) for name, reading in readings.items()}


def _export(probes: Mapping[str, Probe]) -> Any:
    inputs = tuple(value for probe in probes.values() for value in probe.inputs)
    return torch.export.export(_Parts(probes), inputs).module()


def _prepare(quantizer: Any, probes: Mapping[str, Probe], is_qat: bool) -> dict[str, PatternReading]:
    from torchao.quantization.pt2e.quantize_pt2e import prepare_pt2e, prepare_qat_pt2e

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        prepare = prepare_qat_pt2e if is_qat else prepare_pt2e
        return read_probes(prepare(_export(probes), quantizer), list(probes))


def _shorten(error: Exception) -> str:
    """Return an error's class and text on one line that fits a table."""
    text = describe_error(error)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"
