"""What is measured of a model that was handed in, in its row: shown, never judged."""

from __future__ import annotations

from dataclasses import dataclass, field

from fx_quant_conformance.reports.numbers import Number
from fx_quant_conformance.reports.verdicts import Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelPart:
    """A pattern of a model that was handed in, or an op of it that runs in float."""

    node: str
    """Name of its last node."""
    pattern: str
    """Readable name of the pattern or op."""
    dtypes: str = ""
    """The dtypes in which it is quantized; "" if it runs in float."""
    reason: str = ""
    """Why it runs in float."""
    multiplications: int = 0
    """Number of multiply-accumulates, for the example inputs."""
    alone_db: Number | None = None
    """Ratio of the float values to the error that quantizing this pattern alone adds, in dB."""
    accumulated_db: Number | None = None
    """The same with the errors of all earlier patterns."""
    verdict: Verdict | None = None
    """Verdict of the backend on it, alone on the values of the reference model; None in float."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """A metric of a model that was handed in, by its own function of evaluation."""

    name: str
    """Name of the metric, such as ``top-1``."""
    floating: Number | None = None
    """Value of the float model."""
    reference: Number | None = None
    """Value of the reference model: the difference to the float model is quantization's."""
    backend: Number | None = None
    """Value of the backend: the difference to the reference model is the backend's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """What a model that was handed in comes to on the backend: shown, never judged."""

    qconfigs: str = ""
    """By which QConfigs it is quantized: the model's own, or those that fit the claims of a dtype and a scheme."""
    parts: list[ModelPart] = field(default_factory=list)
    """Its patterns and float ops in the order of the graph; what computes no values, such as a size, is left out."""
    output_db: list[Number] = field(default_factory=list)
    """Ratio of each float output to the reference model's error, in dB."""
    metrics: list[Metric] = field(default_factory=list)
    """Its metrics."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Median time of a run on the example inputs, in seconds, of ``float``, ``reference`` and ``backend``."""
    notes: list[str] = field(default_factory=list)
    """What could not be measured, and why."""

    @property
    def multiplications(self) -> int:
        """Number of multiply-accumulates of the whole model."""
        return sum(part.multiplications for part in self.parts)

    @property
    def quantized(self) -> list[ModelPart]:
        """The parts that are quantized."""
        return [part for part in self.parts if part.dtypes]
