"""Jobs: work of a run in addition to the claims of a config, under IDs of the same kind.

A job judges a model of several patterns, or measures something. It runs isolated, as a claim does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from fx_quant_conformance.conformance.machine.messages import Begin
from fx_quant_conformance.conformance.stages.bench import Bench
from fx_quant_conformance.reports.schema import Measurement, ModelResult
from fx_quant_conformance.reports.selection import OWN


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One piece of work."""

    id: str
    run: Callable[[Bench], Iterator[Begin | ModelResult | Measurement]]
    """Yields its rows as soon as it has them, and a Begin before a step with a user's code."""
    topic: str = ""
    """The topic of the measurement; "" for a job that judges a model."""
    subject: str = ""
    """The subject of the measurement; "" for a job that judges a model."""

    @property
    def is_model(self) -> bool:
        """Whether the job judges a model."""
        return not self.topic

    @property
    def is_adaptive(self) -> bool:
        """Whether what it asks for next depends on the last answer: then no file can hold its questions."""
        return not self.is_model or self.id.startswith("model/fuzz/")

    @property
    def is_users(self) -> bool:
        """Whether it judges a model that is handed in, so that code of the user's runs."""
        return self.id.startswith(OWN)

    def __str__(self) -> str:
        return self.id


def measuring_job(topic: str, subject: str, run: Callable[[Bench], Iterator[Measurement]]) -> Job:
    """Return a job that measures, ``fact/<topic>/<subject>``."""
    return Job(id=f"fact/{topic}/{subject}", run=run, topic=topic, subject=subject)
