"""Jobs: what is run beside the claims of a config, under IDs of the same kind.

A job named ``model/…`` judges a model of several patterns; one named ``fact/<topic>/<subject>`` measures. Both yield
rows of the results file (reports/schema.py: kinds "model" and "fact") and run isolated, as claims do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from reports.codec import PlainRow

if TYPE_CHECKING:
    from conformance.pipeline.workbench import Workbench


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One piece of work: ``run`` yields its rows, plain builtins, as soon as it has them."""

    id: str
    run: Callable[[Workbench], Iterator[PlainRow]]

    def __str__(self) -> str:
        return self.id
