"""Recording: a backend that writes down what it is asked to lower and to run, and answers with what is right.

A device gets these models and inputs as files (export.py). The judge takes the same way again with the device's outputs
(replay.py): what it asks for depends on answers only where something is wrong, so a right answer shows all of it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.utils._pytree import tree_map_only

from fx_quant_conformance.backends.base import Capabilities, Representation
from fx_quant_conformance.conformance.bounds.error_bounds import NoOracleError
from fx_quant_conformance.conformance.claims.inputs import Batch
from fx_quant_conformance.conformance.oracle.evaluate import Walk
from fx_quant_conformance.conformance.oracle.grids import placeholder_grids
from fx_quant_conformance.conformance.remote.client import RemoteBackend
from fx_quant_conformance.conformance.remote.executor import HeldModel
from fx_quant_conformance.conformance.vectors.formats import Extent, extents_of
from fx_quant_conformance.conformance.vectors.graph_data import GraphData, describe_model
from fx_quant_conformance.conformance.vectors.interval import Interval, interval_of
from fx_quant_conformance.conformance.vectors.runs import RunsData, key_of
from fx_quant_conformance.refimpl.graph.invariants import is_dequantize


@dataclass(kw_only=True)
class RecordedCase:
    """A model that was lowered in a piece of work, and its runs."""

    name: str
    work: str
    data: GraphData
    model: GraphModule
    form: Representation
    """The form in which ``lower`` takes the model."""
    dynamic_batch: bool
    """Whether a program of it takes any number of rows."""
    fold_weights: bool
    """Whether a program of it holds weights as integers."""
    examples: dict[tuple[Extent, ...], tuple[Any, ...]] = field(default_factory=dict)
    """Inputs with which it was lowered, by the shapes that a program exported with them takes."""
    runs: RunsData
    expected: list[list[Interval] | None] = field(default_factory=list)
    """For each run and output what is right; None: the oracle does not know."""


class Sink(Protocol):
    """Takes the cases of a piece of work when it has ended."""

    def take(self, work: str, cases: Sequence[RecordedCase]) -> None:
        """Take them."""


class RecordingBackend(RemoteBackend):
    """A backend as it describes itself, which runs nothing. ``imports``: where the vendor's own code is found."""

    records = runs_elsewhere = True

    def __init__(self, *described: Any, sink: Sink, imports: str, **more: Any) -> None:
        super().__init__(*described, **more)
        self.imports = imports
        self._sink = sink
        self._work = ""
        self._cases: dict[str, RecordedCase] = {}

    def lower(self, reference_model: GraphModule, example_inputs: tuple[Any, ...]) -> RecordedModel:
        """Note the model; equal models of a piece of work are one case."""
        data = describe_model(reference_model)
        name = name_case(self._work, data)
        case = self._cases.get(name)
        if case is None:
            case = self._cases[name] = RecordedCase(
                name=name,
                work=self._work,
                data=data,
                model=reference_model,
                form=self.representation,
                dynamic_batch=self.capabilities().dynamic_batch,
                fold_weights=self.capabilities().fold_weights,
                runs=RunsData(grids=placeholder_grids(reference_model)),
            )
        extents = extents_of(example_inputs, dynamic_batch=case.dynamic_batch)
        case.examples.setdefault(extents, example_inputs)
        return RecordedModel(case, list(case.examples).index(extents), self.capabilities())

    def own_arguments(self) -> dict[str, Any]:
        """Return the sink, and where the vendor's own code is found."""
        return {"sink": self._sink, "imports": self.imports}

    def begin(self, work: str = "") -> None:
        """Begin a piece of work."""
        self._work = work
        self._cases.clear()

    def conclude(self) -> None:
        """Hand on what was recorded."""
        self._sink.take(self._work, list(self._cases.values()))
        self._cases.clear()


def name_case(work: str, data: GraphData) -> str:
    """Return the name of a case: 16 hexadecimal digits of the piece of work and of the model's data."""
    digest = hashlib.sha256(f"{work}\0{data.text}\0".encode())
    for key in sorted(data.arrays):
        array = data.arrays[key]
        digest.update(f"{key}{array.dtype}{array.shape}".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()[:16]


class RecordedModel(HeldModel):
    """A model whose runs are noted; its outputs are the nearest of what is right."""

    def __init__(self, case: RecordedCase, program: int, capabilities: Capabilities) -> None:
        self._case, self._program = case, program
        model = case.model
        self._walk = Walk(model, capabilities)
        self._gives_tensor = is_dequantize(model.graph.output_node().args[0])
        self._answers: dict[str, tuple[Any, list[Interval] | None]] = {}

    def __call__(self, *inputs: Tensor) -> Any:
        """Note a run on inputs."""
        return next(self.run_all([inputs]))

    def run_all(self, batches: Sequence[Batch], fillings: Sequence[int] = ()) -> Iterator[Any]:
        """Note runs; yield the outputs. Raises what the reference model raises, where the oracle does not know."""
        for inputs in batches:
            threads = torch.get_num_threads()
            output, expected = self._answer(inputs)
            self._case.runs.add(inputs, output, threads=threads, program=self._program)
            self._case.expected.append(expected)
            yield output

    def _answer(self, inputs: Batch) -> tuple[Any, list[Interval] | None]:
        key = key_of([value.clone(memory_format=torch.contiguous_format) for value in inputs], 1)
        if key not in self._answers:
            self._answers[key] = self._compute(inputs)
        output, expected = self._answers[key]
        return tree_map_only(Tensor, torch.clone, output), expected

    def _compute(self, inputs: Batch) -> tuple[Any, list[Interval] | None]:
        try:
            exacts = list(self._walk.exact(tuple(inputs))) if all(value.numel() for value in inputs) else []
        except NoOracleError:
            exacts = []
        intervals = list(map(interval_of, exacts))
        if len(intervals) == 1 and self._gives_tensor:
            return intervals[0].nearest(), intervals
        with torch.no_grad():
            output = self._case.model(*(value.clone() for value in inputs))
        if not intervals:
            return output, None
        left = iter(intervals)
        return tree_map_only(Tensor, lambda _: next(left).nearest(), output), intervals
