"""The judge's end: a backend whose models are lowered and run in processes of their own.

`RemoteBackend` is the backend to the rest of the suite: what it says of itself is data, and its ``lower`` returns a
model that is run elsewhere. If that process dies or hangs, `LostProcess` ends the piece of work.
"""

from __future__ import annotations

import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from backends.base import Backend, Capabilities, Execution, QuantizerRequest
from conformance.annotations.probe import BothPlaces, Probe
from conformance.annotations.programs import OtherGridError
from conformance.machine.fault import Fault
from conformance.machine.memory import current_filling
from conformance.machine.messages import Tally
from conformance.remote.description import Description
from conformance.remote.host import Host
from conformance.remote.model_bytes import dump_model, dump_object
from conformance.remote.wire import Frame, WireError, pack, unpack
from conformance.remote.worker import Dialogue, RemoteError, RemoteWorker, make_error
from refimpl import BackendConfig

MOST_TOGETHER = 1 << 20
"""Bytes of inputs that a process gets at a time."""


class OverwrittenError(Exception):
    """A later run wrote over the output of a run. ``later``: how many runs later it came; 0: that is not known."""

    def __init__(self, later: int) -> None:
        super().__init__("a later run wrote over the output: a result belongs to the caller")
        self.later = later


def spell_trace(error: Exception) -> str:
    """Return the last frames of an error's traceback, where the backend's code raised it."""
    if isinstance(error, RemoteError):
        return error.trace
    return "".join(traceback.format_exception(error, limit=-6))


class RemoteBackend(Backend):
    """A backend that is known by its description; its models are lowered and run in other processes, one at a time.

    ``share``: how many pieces of work one process does at most. ``limit``: seconds for one. ``text``: the description,
    as it came.
    """

    records: bool = False
    """Whether it writes down what it is asked for: then nothing is left out because of what it answers."""

    runs_elsewhere: bool = False
    """Whether no process here lowers its models: they are files for a device."""

    imports: str = ""
    """Where the vendor's code is found, in the words of ``--backend``; "": where the command line says."""

    def __init__(
        self, description: Description, host: Host | None = None, *, share: int = 1, limit: float = 60.0, text: str = ""
    ) -> None:
        self.name = description.name
        self.representation = description.representation
        self.engine = description.engine
        self.waivers = description.waivers
        self.description = description
        self.text = text
        self.host = host
        self._share = share
        self._limit = limit
        self.tally = Tally()
        """What was done for the present piece of work so far."""
        self._deadline = 0.0
        self._worker: RemoteWorker | None = None

    def unavailable_reason(self) -> str | None:
        """Return why the backend cannot run on this machine; None: it can."""
        return self.description.unavailable

    def backend_config(self) -> BackendConfig:
        """Return the config, with stand-ins for the vendor's own classes and functions."""
        return self.description.config

    def capabilities(self) -> Capabilities:
        """Return what the backend declares."""
        return self.description.capabilities

    def qconfigs(self) -> Sequence[Any] | None:
        """Return the vendor's QConfigs, where its code is imported; None: the suite's."""
        return self.description.preparation.qconfigs

    def prepare_custom_config(self) -> Any:
        """Return the custom config for prepare, where the vendor's code is imported."""
        return self.description.preparation.prepare

    def convert_custom_config(self) -> Any:
        """Return the custom config for convert, where the vendor's code is imported."""
        return self.description.preparation.convert

    def versions(self) -> dict[str, str]:
        """Return the versions that the backend names."""
        return dict(self.description.versions)

    def lower(self, reference_model: GraphModule, example_inputs: tuple[Any, ...]) -> Callable[..., Any]:
        """Have a reference model lowered; the other process exports it if the backend takes programs.

        Raises what the backend's code raises, or LostProcess.
        """
        return self._lower_from({"do": "lower"}, dump_model(reference_model, example_inputs))

    def execution(self, lowered: Callable[..., Any]) -> Execution | None:
        """Return what the backend reports of a lowered model. Raises as `lower` does."""
        assert isinstance(lowered, ElsewhereModel), "a model that another backend lowered"
        return lowered.execution()

    def annotate(self, request: QuantizerRequest, probes: Mapping[str, Probe]) -> dict[str, BothPlaces] | None:
        """Have models annotated by the vendor's Quantizer; None: there is none for them. Raises as `lower` does."""
        return self._find_worker().annotate(request, probes)

    def lower_annotated(
        self, request: QuantizerRequest, model: nn.Module, reference: GraphModule, inputs: tuple[Any, ...]
    ) -> Callable[..., Any]:
        """Have a float model lowered as the vendor's Quantizer has it quantized, on its reference model's grids.

        Raises OtherGridError where they cannot be, and as `lower` does.
        """
        given = {"do": "lower annotated", "request": asdict(request)}
        return self._lower_from(given, dump_object((model, reference, inputs)))

    def described_as(self, description: Description) -> RemoteBackend:
        """Return the same backend under another description."""
        return RemoteBackend(description, self.host, share=self._share, limit=self._limit)

    def begin(self, work: str = "") -> None:
        """Begin a piece of work by its ID: its time runs from now, in a new process if the last one did its share."""
        self.tally = Tally()
        self._deadline = time.monotonic() + self._limit
        if self._worker is not None and self._worker.served >= self._share:
            self.end()
        if self._worker is not None:
            self._worker.begin(self._deadline, self.tally)

    def conclude(self) -> None:
        """End a piece of work that came to its end."""

    def find_leftover(self) -> Fault | None:
        """Find a fault in what the backend handed in for this piece of work; one that runs here handed in nothing."""
        return None

    def end(self) -> None:
        """End the process that is left, if any."""
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.close()

    def _lower_from(self, given: dict[str, Any], data: bytes) -> Callable[..., Any]:
        """Have lowered what the bytes hold. ``given``: the request for that."""
        dialogue = Dialogue(self._find_worker())
        head = {**given, "seed": torch.default_generator.initial_seed()}
        answer = dialogue.ask(Frame(head=head, pieces=[data])).head
        if "other_grid" in answer:
            raise OtherGridError(str(answer["other_grid"]))
        if "not_callable" in answer:
            kind = type(str(answer["not_callable"]), (), {})
            return kind()  # type: ignore[no-any-return]  # the stage says what it is
        return RemoteModel(dialogue)

    def _find_worker(self) -> RemoteWorker:
        if self._worker is None:
            assert self.host is not None, "a backend that is only described runs nothing"
            self._worker = RemoteWorker(self.host, self._limit)
            self._worker.begin(self._deadline or time.monotonic() + self._limit, self.tally)
        return self._worker


class ElsewhereModel(ABC):
    """A lowered model that does not run in this process. It is called as the model there would be."""

    @abstractmethod
    def __call__(self, *inputs: Tensor) -> Any:
        """Run it on inputs, in their layout, with this thread's number of threads; it may write to the inputs."""

    @abstractmethod
    def run_all(self, batches: Sequence[tuple[Tensor, ...]], fillings: Sequence[int] = ()) -> Iterator[Any]:
        """Run it on several inputs, one after the other; yield the outputs. Raises where it raised.

        Raises OverwrittenError in the place of an output that a later run wrote over. ``fillings``: the byte that
        memory is filled with, for each run; default: that of `fill_memory` now.
        """

    @abstractmethod
    def execution(self) -> Execution | None:
        """Return what the backend reports of it."""

    @abstractmethod
    def spell_graph(self) -> str:
        """Return its graph as text; "" if it has none."""


class RemoteModel(ElsewhereModel):
    """A lowered model in the backend's process."""

    def __init__(self, dialogue: Dialogue) -> None:
        self._dialogue = dialogue

    def __call__(self, *inputs: Tensor) -> Any:
        """Run it on inputs, in their layout, with this thread's number of threads; it may write to the inputs."""
        return next(self.run_all([inputs], is_watched=True))

    def run_all(
        self, batches: Sequence[tuple[Tensor, ...]], fillings: Sequence[int] = (), *, is_watched: bool = False
    ) -> Iterator[Any]:
        """Run it on several inputs, one after the other; yield the outputs. Raises where it raised.

        They go together, in requests that are no larger than `MOST_TOGETHER` but for one input. ``fillings``: the byte
        that memory is filled with, for each run; default: that of `fill_memory` now. What the model writes to its
        inputs is written to these only if they are watched.
        """
        fills = fillings or [current_filling()] * len(batches)
        waiting, size = list[tuple[tuple[Tensor, ...], int]](), 0
        for inputs, fill in zip(batches, fills, strict=True):
            own = sum(value.nbytes for value in inputs)
            if waiting and size + own > MOST_TOGETHER:
                yield from self._run_together(waiting, is_watched)
                waiting, size = [], 0
            waiting.append((inputs, fill))
            size += own
        if waiting:
            yield from self._run_together(waiting, is_watched)

    def _run_together(self, runs: Sequence[tuple[tuple[Tensor, ...], int]], is_watched: bool) -> Iterator[Any]:
        """Run it on inputs, with the byte that memory is filled with, in one request."""
        pieces: list[bytes] = []
        spelled = [{"inputs": pack(tuple(inputs), pieces), "fill": fill} for inputs, fill in runs]
        answer = self._ask("run", pieces, runs=spelled, watched=is_watched, threads=torch.get_num_threads())
        for number, (inputs, _) in enumerate(runs):
            try:
                output, error = _read_run(answer, number, inputs)
            except (KeyError, IndexError, ValueError, TypeError, AttributeError, RuntimeError, WireError) as unreadable:
                self._dialogue.lose(f"the process sent no output that can be read: {unreadable}")
            if error is not None:
                raise error
            yield output

    def execution(self) -> Execution | None:
        """Return what the backend reports of it."""
        names = self._ask("execution").head.get("execution")
        if names is None:
            return None
        return Execution(**{name: tuple(names[name]) for name in Execution.__dataclass_fields__})

    def spell_graph(self) -> str:
        """Return its graph as text; "" if it has none."""
        return str(self._ask("graph").head["graph"])

    def _ask(self, action: str, pieces: list[bytes] | None = None, **head: Any) -> Frame:
        return self._dialogue.ask(Frame(head={"do": action, **head}, pieces=pieces or []))


def _read_run(answer: Frame, number: int, inputs: Sequence[Tensor]) -> tuple[Any, Exception | None]:
    """Return the output of one run, or what it raised; write to the inputs what the model has written to them."""
    done = answer.head["done"]
    if number == len(done) and "failed" in answer.head:
        return None, make_error(answer.head["failed"])
    for place, value in done[number]["written"].items():
        inputs[int(place)].copy_(unpack(value, answer.pieces))
    overwritten = OverwrittenError(int(done[number]["overwritten"])) if "overwritten" in done[number] else None
    return unpack(done[number]["output"], answer.pieces), overwritten
