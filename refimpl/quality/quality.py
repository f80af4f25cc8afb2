"""explain with sample inputs: how far each layer is from float, and which one adds the error (rule OBS-15)."""

from __future__ import annotations

import copy
import math
from dataclasses import asdict, dataclass, field
from typing import Any, overload

import torch
from tabulate import tabulate
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.fx.node import map_aggregate

from fx_quant_conformance.refimpl.config.forms import check_model
from fx_quant_conformance.refimpl.convert.convert import convert_to_reference_fx
from fx_quant_conformance.refimpl.errors import ModelError, RefimplError
from fx_quant_conformance.refimpl.graph.tracing import CONVERTED, NOT_LOWERED, notes_of
from fx_quant_conformance.refimpl.observers.fake_quantize import disable_fake_quant
from fx_quant_conformance.refimpl.prepare.equalize import EQUALIZATION
from fx_quant_conformance.refimpl.prepare.explain import DecisionLog, dtypes_of, read_decision_log
from fx_quant_conformance.refimpl.quality.walk import (
    LayerEdge,
    OutputGrid,
    QualityWalk,
    Reading,
    as_float,
    copy_tensors,
    flatten,
    record,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerQuality:
    """One quantized pattern, or one value that is quantized for its users, against the float model. (OBS-15)

    SQNRs are 20 · log10(‖float‖ / ‖float - quantized‖), in dB, over all values of all batches. ``inf``: no error;
    ``-inf``: an error, though all float values are zero.
    """

    node: str
    """The pattern's last node, or the value."""
    module: str
    """Full name of the module that is called, or that calls the function; "" for the model itself."""
    pattern: str
    """The pattern's name, or ``input of …`` with the nodes that take the value."""
    dtype_config: str
    """The dtypes of the pattern's dtype config; "" for a value."""
    sqnr_alone: float
    """SQNR of this layer's own error: for the float model's values, rounded as its inputs are, against float."""
    sqnr_accumulated: float
    """SQNR of the quantized model's values here, with all errors of earlier layers."""
    signal: float
    """Root mean square of the float model's values."""
    error_alone: float
    """Root mean square of the error in ``sqnr_alone``."""
    error_accumulated: float
    """Root mean square of the error in ``sqnr_accumulated``."""
    scale: float | None
    """The step of the output's grid; None where it is not one number, as for a float output."""
    low: float | None
    """The smallest real number of that grid."""
    high: float | None
    """The largest real number of that grid."""
    clipped: float | None
    """Share (0 to 1) of the float model's values that lie more than half a step outside of ``low`` and ``high``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QualityReport:
    """The layers of a quantized model against the float model, the worst first. ``str()`` gives a table. (OBS-15)"""

    layers: tuple[LayerQuality, ...]
    """The layers, ordered by ``sqnr_alone``, then by ``sqnr_accumulated``: look at the first one."""
    outputs: tuple[float, ...]
    """The SQNR in dB of each float tensor that the model returns, in order."""
    unmeasured: tuple[tuple[str, str], ...]
    """The nodes that could not be compared, with the reason."""
    log: DecisionLog
    """All decisions, as ``explain`` returns them without inputs."""

    def rows(self) -> list[dict[str, str]]:
        """Return a row of text for each layer, the worst first."""
        return [
            {
                "node": layer.node,
                "module": layer.module,
                "pattern": layer.pattern,
                "dtype config": layer.dtype_config,
                "alone (dB)": _format_decibels(layer.sqnr_alone),
                "accumulated (dB)": _format_decibels(layer.sqnr_accumulated),
                "clipped": "" if layer.clipped is None else f"{layer.clipped:.2%}",
                "range": "" if layer.low is None else f"{layer.low:.4g} to {layer.high:.4g}",
                "scale": "" if layer.scale is None else f"{layer.scale:.4g}",
            }
            for layer in self.layers
        ]

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain builtins that JSON can hold.

        The keys: ``layers``, ``outputs``, ``unmeasured``; a list for each. An SQNR that is no finite number is None:
        its error or its signal is then 0.
        """
        return {
            "layers": [{key: _as_plain(value) for key, value in asdict(layer).items()} for layer in self.layers],
            "outputs": [_as_plain(value) for value in self.outputs],
            "unmeasured": [{"node": node, "reason": reason} for node, reason in self.unmeasured],
        }

    def __str__(self) -> str:
        table = tabulate(self.rows(), headers="keys", tablefmt="simple", maxcolwidths=40, disable_numparse=True)
        last = f"outputs (dB): {', '.join(map(_format_decibels, self.outputs))}"
        return "\n".join([table, "", last, *(f"not measured: {node}: {reason}" for node, reason in self.unmeasured)])


@overload
def explain(model: nn.Module) -> DecisionLog: ...
@overload
def explain(
    model: nn.Module, sample_inputs: Any, *, against: nn.Module | None = None, float_model: nn.Module | None = None
) -> QualityReport: ...
def explain(
    model: nn.Module,
    sample_inputs: Any = None,
    *,
    against: nn.Module | None = None,
    float_model: nn.Module | None = None,
) -> DecisionLog | QualityReport:
    """Return the decision log of a model from prepare or convert, or of its copy, loaded ones too. (OBS-15)

    With `sample_inputs`, return how far each layer is from the float model instead: a tuple of the model's positional
    inputs, or the only one; or a list of such, over which all is summed. Copies of the models run, in eval mode: the
    given ones are not changed, and observe nothing.

    `against`: the prepared or reference model that `model` was converted to, for the float side. A prepared model needs
    none; a reference model holds its float weights, except in custom modules and a vendor's own reference classes. A
    lowered model has only packed integers, and needs it: the accumulated errors are then its own, and the errors that
    single layers add are the reference model's.

    `float_model`: the user's model, with which the outputs are compared; without it that is the prepared model with its
    observers off, or the float side of the reference model. What prepare changed shows only against the user's model.

    Raises ModelError for any other model, for a lowered one without `against`, and, with the node, for inputs that do
    not run.
    """
    log = read_decision_log(model)
    if sample_inputs is None:
        return log
    batches = sample_inputs if isinstance(sample_inputs, list) else [sample_inputs]
    if not batches:
        raise ModelError("explain: sample_inputs is an empty list; give a tuple of inputs, or a list of such")
    reference, origin, lowered = _resolve(model, against)
    if float_model is not None:
        check_model("explain: float_model", float_model)
        float_model = copy.deepcopy(float_model).eval()
    tally = _Tally()
    walk = QualityWalk(reference, origin, "", tally.measure)
    with torch.no_grad():
        for batch in batches:
            inputs = batch if isinstance(batch, tuple) else (batch,)
            if lowered is not None:
                tally.lowered = {}
                result = record(lowered, copy_tensors(inputs), "", tally.lowered)
            floating, quantized = walk.run(copy_tensors(inputs), copy_tensors(inputs))
            whole = origin if float_model is None else float_model
            if whole is not None:  # its outputs are compared, not those of the walk
                floating = whole(*map_aggregate(copy_tensors(inputs), as_float))
            tally.add_output(floating, quantized if lowered is None else result)
    return tally.report(read_decision_log(reference))


def _resolve(model: nn.Module, against: nn.Module | None) -> tuple[GraphModule, GraphModule | None, GraphModule | None]:
    """Return copies, in eval mode, of the reference model, and of the prepared and the lowered one or None."""
    if not isinstance(against, nn.Module | None):
        raise ModelError(f"explain: against= takes a prepared or reference model, found {type(against).__name__}")
    copied = copy.deepcopy(model).eval()
    origin: Any = copied if against is None else copy.deepcopy(against).eval()
    read_decision_log(origin)
    if NOT_LOWERED in notes_of(origin):
        raise ModelError(
            f"explain: {type(origin).__name__} is lowered, and its float weights are gone: give the prepared or the "
            "reference model that it was made of as against="
        )
    lowered: Any = copied if NOT_LOWERED in notes_of(copied) else None
    reference: Any = copied if lowered is None else origin
    if CONVERTED not in notes_of(reference):
        try:
            reference = convert_to_reference_fx(reference)
        except RefimplError as error:  # convert's arguments are not known
            advice = "convert it, and give explain the reference model, with the prepared one as against="
            raise ModelError(f"explain: {error}; {advice}") from error
    notes = notes_of(origin)
    is_float_side = CONVERTED not in notes and not notes.get(EQUALIZATION)  # else weights are not yet scaled
    return reference, origin.apply(disable_fake_quant) if is_float_side else None, lowered


@dataclass(slots=True)
class _Sums:
    """Sums over all values of all batches: of squares, and of clipped values."""

    count: int = 0
    signal: float = 0.0
    own_signal: float = 0.0
    own_noise: float = 0.0
    noise: float = 0.0
    clipped: int = 0
    grid: OutputGrid | None = None


@dataclass(slots=True)
class _Tally:
    """Adds up the walk's readings."""

    sums: dict[LayerEdge, _Sums] = field(default_factory=dict)
    outputs: list[list[float]] = field(default_factory=list)
    reasons: dict[str, str] = field(default_factory=dict)
    lowered: dict[str, Any] | None = None
    """The values of the lowered model's nodes in this batch, if any."""

    def measure(self, layer: LayerEdge, reading: Reading) -> None:
        """Add one batch's values of a layer, or the reason why it has none."""
        reason = reading.reason
        actual = reading.actual if self.lowered is None else _find_lowered_value(layer, self.lowered)
        if not reason and actual is None:
            reason = "the lowered model has no value for it"
        if not reason:
            pairs = _pair_tensors(reading.own_float, reading.own_actual), _pair_tensors(reading.floating, actual)
            reason = "it gives no float values" if not all(pairs) else ""
        if reason:
            self.reasons[layer.name] = reason
            return
        own, through = map(_sum_squares, pairs)
        sums = self.sums.setdefault(layer, _Sums(grid=reading.grid))
        sums.own_signal, sums.own_noise = sums.own_signal + own[0], sums.own_noise + own[1]
        sums.signal, sums.noise = sums.signal + through[0], sums.noise + through[1]
        sums.count += sum(value.numel() for value, _ in pairs[1])
        if reading.grid is not None:
            sums.clipped += sum(_count_outside(value, reading.grid) for value, _ in pairs[1])

    def add_output(self, floating: Any, quantized: Any) -> None:
        """Add the models' results for one batch."""
        squares = [_sum_squares([pair]) for pair in _pair_tensors(floating, quantized)]
        self.outputs = self.outputs or [[0.0, 0.0] for _ in squares]
        for total, (signal, noise) in zip(self.outputs, squares, strict=True):
            total[:] = total[0] + signal, total[1] + noise

    def report(self, log: DecisionLog) -> QualityReport:
        """Return the layers, worst first; those whose numbers are not finite are not measured."""
        for layer, sums in list(self.sums.items()):
            if not math.isfinite(sums.signal + sums.noise + sums.own_signal + sums.own_noise):
                self.reasons[layer.name] = "its values are not finite, or too large"
                del self.sums[layer]
        layers = [_summarize(layer, sums) for layer, sums in self.sums.items()]
        return QualityReport(
            layers=tuple(sorted(layers, key=lambda layer: (layer.sqnr_alone, layer.sqnr_accumulated))),
            outputs=tuple(_sqnr_of(*total) for total in self.outputs),
            unmeasured=tuple(self.reasons.items()),
            log=log,
        )


def _summarize(layer: LayerEdge, sums: _Sums) -> LayerQuality:
    decision, grid = layer.decision, sums.grid
    users = ", ".join(user.name for user in layer.at.users)
    return LayerQuality(
        node=layer.name,
        module=layer.prefix + decision.places[-1].name if decision else "",
        pattern=decision.pattern if decision else f"input of {users}",
        dtype_config=dtypes_of(decision) if decision else "",
        sqnr_alone=_sqnr_of(sums.own_signal, sums.own_noise),
        sqnr_accumulated=_sqnr_of(sums.signal, sums.noise),
        signal=math.sqrt(sums.signal / sums.count),
        error_alone=math.sqrt(sums.own_noise / sums.count),
        error_accumulated=math.sqrt(sums.noise / sums.count),
        scale=None if grid is None else grid.scale,
        low=None if grid is None else grid.low,
        high=None if grid is None else grid.high,
        clipped=None if grid is None else sums.clipped / sums.count,
    )


def _find_lowered_value(layer: LayerEdge, values: dict[str, Any]) -> Any:
    """Return the lowered model's value of a layer: the quantizing node's, if it is left, else the op's in its place."""
    ops = layer.decision.nodes[::-1] if layer.decision else ()
    names = (*(node.name for node in (layer.at, layer.quantize) if node is not None), *ops)
    return next((values[layer.prefix + name] for name in names if layer.prefix + name in values), None)


def _pair_tensors(floating: Any, quantized: Any) -> list[tuple[Tensor, Tensor]]:
    """List the float tensors of a structure, not empty, each with the quantized model's."""
    pairs = zip(flatten(floating), flatten(quantized), strict=True)
    return [pair for pair in pairs if isinstance(pair[0], Tensor) and pair[0].is_floating_point() and pair[0].numel()]


def _sum_squares(pairs: list[tuple[Tensor, Tensor]]) -> tuple[float, float]:
    """Return ‖float‖² and ‖float - quantized‖², summed in float64."""
    doubles = [(exact.double(), value.double()) for exact, value in pairs]
    return sum(float(a.square().sum()) for a, _ in doubles), sum(float((a - b).square().sum()) for a, b in doubles)


def _count_outside(values: Tensor, grid: OutputGrid) -> int:
    half = grid.scale / 2
    return int(((values < grid.low - half) | (values > grid.high + half)).sum())


def _sqnr_of(signal: float, noise: float) -> float:
    if noise == 0:
        return math.inf
    return 10 * math.log10(signal / noise) if signal else -math.inf


def _format_decibels(value: float) -> str:
    return "exact" if value == math.inf else "no signal" if value == -math.inf else f"{value:.1f}"


def _as_plain(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
