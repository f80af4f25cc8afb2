"""Backends that are wrong, and meddle with whatever would say so in their own process."""

from __future__ import annotations

import gc
import inspect
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

import fx_quant_conformance.conformance.stages.comparison as comparison
import fx_quant_conformance.conformance.stages.numerics as numerics
import fx_quant_conformance.reports.writer as writer
from fx_quant_conformance.backends.base import Capabilities
from fx_quant_conformance.reports.schema import ClaimResult
from fx_quant_conformance.reports.verdicts import Verdict
from tests.conformance.support.fake_backends.fakes import Good


class Wrong(Good):
    """Gives zeros."""

    def lower(self, reference_model: GraphModule, example_inputs: tuple[Any, ...]) -> Callable[..., Any]:
        return lambda *inputs: reference_model(*inputs) * 0


class TakesPlaces(Wrong):
    """Puts a folder where the run is going to write its page, and a file in the place of the folder of scripts."""

    def lower(self, reference_model: GraphModule, example_inputs: tuple[Any, ...]) -> Callable[..., Any]:
        report = Path(os.environ["HOSTILE_REPORT"])
        (report / "report.html" / "taken").mkdir(parents=True, exist_ok=True)
        (report / "scripts").touch()
        return super().lower(reference_model, example_inputs)


class DeclaresOddly(Good):
    """Declares a tensor where a number is to be."""

    def capabilities(self) -> Capabilities:
        odd: Any = torch.ones(2, 2)
        return Capabilities(tie_steps=odd)


class PatchesJudge(Wrong):
    """Has every comparison find nothing, and every claim verified."""

    def __init__(self) -> None:
        for module in (comparison, numerics):
            setattr(module, "compare_all", lambda where, *_: iter([comparison.Comparison(where=where)]))  # noqa: B010
        comparison.compare = lambda where, *_: comparison.Comparison(where=where)
        Verdict.worst = classmethod(lambda cls, verdicts: Verdict.VERIFIED)  # type: ignore[method-assign,assignment]


class PatchesWriter(Wrong):
    """Has the results file say that each claim is verified."""

    def __init__(self) -> None:
        write = writer.ResultsWriter.write_line

        def forge(self: writer.ResultsWriter, line: str) -> Any:
            return write(self, line.replace('"REFUTED"', '"VERIFIED"'))

        writer.ResultsWriter.write_line = forge  # type: ignore[method-assign]
        ClaimResult.__post_init__ = lambda self: object.__setattr__(self, "verdict", Verdict.VERIFIED)  # type: ignore[attr-defined]


class WalksStack(Good):
    """Looks for the exact result in the callers' variables, and gives that, rounded; zeros if it finds none."""

    def lower(self, reference_model: GraphModule, example_inputs: tuple[Any, ...]) -> Callable[..., Any]:
        def run(*inputs: Tensor) -> Tensor:
            shape = reference_model(*inputs).shape
            return next((each for each in _find_exact(shape)), torch.zeros(shape))

        return run


def _find_exact(shape: torch.Size) -> Any:
    """Yield what looks like the exact result: in a caller's variables, or anywhere in memory."""
    frame = sys._getframe()
    while frame is not None:
        yield from _read(frame.f_locals.get("exacts"), shape)
        frame = frame.f_back  # type: ignore[assignment]
    for each in gc.get_objects():
        if type(each).__name__ == "Exact" and not inspect.isclass(each):
            yield from _read((each,), shape)


def _read(exacts: Any, shape: torch.Size) -> Any:
    for exact in exacts or ():
        if exact.real.shape == shape and exact.grid is not None:
            integers = exact.integers.round()
            yield ((integers - exact.grid.zero_point) * exact.grid.scale).float()
