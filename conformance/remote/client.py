"""The judge's end: a backend whose models are lowered and run in a process of its own, a worker.

`RemoteBackend` is the backend to the rest of the suite: what it says of itself is data, and what it lowers is run
elsewhere. If the worker dies or hangs, `LostProcess` ends the piece of work.
"""

from __future__ import annotations

import json
import time
import traceback
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias

import torch
from torch import Tensor
from torch.fx import GraphModule
from typing_extensions import Self

from fx_quant_conformance.backends.base import Backend, Capabilities, Execution, UnsupportedPattern
from fx_quant_conformance.conformance.machine.child import Ending
from fx_quant_conformance.conformance.machine.frames import Frame, NoAnswer, WireError
from fx_quant_conformance.conformance.machine.memory import current_filling
from fx_quant_conformance.conformance.machine.messages import Tally
from fx_quant_conformance.conformance.machine.workplace import BEGINS, LOST, LostProcess
from fx_quant_conformance.conformance.remote.description import Description, read_description
from fx_quant_conformance.conformance.remote.executor import Beside, Executor, Given, HeldModel, OverwrittenError, Read
from fx_quant_conformance.conformance.remote.model_bytes import dump_model, dump_object
from fx_quant_conformance.conformance.remote.wire import pack, unpack
from fx_quant_conformance.refimpl import BackendConfig

if TYPE_CHECKING:
    from typing import Self  # Python 3.11

Ask: TypeAlias = Callable[[Frame, float], Frame]
"""Returns the worker's answer to a request, to be had within so many seconds, or says how it was lost."""
Remake: TypeAlias = Callable[[Ask, float], "RemoteBackend"]
"""Makes a backend anew in another process, of what asks a worker there and of a work's limit in seconds."""
MOST_TOGETHER = 1 << 20
"""Bytes of inputs that a process gets at a time."""


LOWERS = frozenset({"lower", "lower by"})
"""The requests that have a model lowered."""


class RemoteError(Exception):
    """What the backend's code raised, in its own process; ``trace`` is the traceback there."""

    trace = ""


def format_trace(error: Exception) -> str:
    """Return the last frames of an error's traceback, where the backend's code raised it."""
    if isinstance(error, RemoteError):
        return error.trace
    return "".join(traceback.format_exception(error, limit=-6))


class RemoteBackend(Backend, Executor):
    """A backend that is known by its description; its models are lowered and run in another process.

    ``ask``: asks that; None: a backend that is only described. ``limit``: seconds for one piece of work. ``text``: the
    description, as it came.
    """

    imports: str = ""
    """Where the vendor's code is found, in the words of ``--backend``; "": where the command line says."""

    def __init__(
        self, description: Description, ask: Ask | None = None, *, limit: float = 60.0, text: str = ""
    ) -> None:
        self.name = description.name
        self.representation = description.representation
        self.engine = description.engine
        self.waivers = description.waivers
        self.description = description
        self.text = text
        self.vendor_claims = description.vendor_claims
        self.sources = description.sources
        self.registrations = description.registrations
        self.gives_quantizer = description.has_quantizer and not self.runs_elsewhere
        self.tally = Tally()
        """What was done for the present piece of work so far."""
        self._ask_worker = ask
        self._limit = limit
        self._allowed = limit
        self._deadline = time.monotonic() + limit
        self._begins = True
        self._numbered = 0
        self._dropped: list[int] = []

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

    def lower(self, reference_model: GraphModule, example_inputs: tuple[Any, ...]) -> Any:
        """Have a reference model lowered; the other process exports it if the backend takes programs.

        Raises what the backend's code raises, NoAnswer, or LostProcess.
        """
        return self._lower_from({"do": "lower"}, dump_model(reference_model, example_inputs))

    def lower_copy(self, reference: GraphModule, example_inputs: tuple[Any, ...]) -> Any:
        """Have a reference model lowered: the other process has a copy."""
        return self.lower(reference, example_inputs)

    def lower_by(self, function: Beside[Given], given: Given, *, step: str) -> Any:
        """Have a model lowered by a function in the other process. Raises as `lower` does."""
        return self._lower_from({"do": "lower by", "step": step}, dump_object((function, given)))

    def ask_by(self, function: Beside[Given], given: Given, read: Callable[[Any], Read], *, step: str) -> Read:
        """Have a function run in the other process, which is lost if what it sends cannot be read."""
        answer = self.ask(Frame(head={"do": "ask by", "step": step}, pieces=[dump_object((function, given))]))
        try:
            return read(answer.head.get("made"))
        except WireError as error:
            self.lose(str(error))

    @property
    def remake(self) -> Remake:
        """Makes the same backend in another process; it can be pickled."""
        return partial(remake, type(self), self.text, self.own_arguments())

    def described_as(self, description: Description) -> Self:
        """Return the same backend under another description."""
        given = self.own_arguments()
        return type(self)(description, self._ask_worker, limit=self._limit, text=self.text, **given)

    def own_arguments(self) -> dict[str, Any]:
        """Return the arguments that only a backend of its class is made with, by name."""
        return {}

    def begin(self, work: str = "") -> None:
        """Begin a piece of work by its ID: its time runs from now."""
        self.tally = Tally()
        self.allow(self._limit)

    def allow(self, seconds: float) -> None:
        """Give what is asked from now on so many seconds."""
        self._allowed, self._begins = seconds, True
        self._deadline = time.monotonic() + seconds

    def conclude(self) -> None:
        """End a piece of work that came to its end."""

    def ask(self, request: Frame) -> Frame:
        """Return the answer to a request. Raises what the backend's code raised, NoAnswer, or LostProcess."""
        assert self._ask_worker is not None, "a backend that is only described runs nothing"
        request.head["drop"], self._dropped[:] = list(self._dropped), []
        request.head[BEGINS], self._begins = self._begins, False
        self.tally.lowerings += request.head["do"] in LOWERS
        answer = self._ask_worker(request, max(0.0, self._deadline - time.monotonic()))
        if LOST in answer.head:
            raise self._make_loss(request, answer.head)
        self.tally.runs += count_runs(request, answer)
        if "unread" in answer.head:
            raise NoAnswer(str(answer.head["unread"]))
        if "raised" in answer.head:
            raise make_error(answer.head["raised"])
        return answer

    def lose(self, message: str) -> NoReturn:
        """Give up a worker that does not answer as it should. Raises LostProcess."""
        raise LostProcess(Ending.DIED, f"the process sent {message}")

    def _make_loss(self, request: Frame, lost: Mapping[str, Any]) -> LostProcess:
        ending, message = Ending(lost[LOST]), str(lost["message"])
        if ending is Ending.TIMEOUT:
            option = " (--claim-timeout)" if self._allowed == self._limit else ""
            step = request.head.get("step", request.head["do"])
            message = f"{step} did not end within {self._allowed:g} s{option}"
        ending = Ending.TIMEOUT if ending is Ending.TIMEOUT else Ending.DIED
        return LostProcess(ending, message, text=str(lost["text"]), is_alone=bool(lost["is_alone"]))

    def _lower_from(self, given: dict[str, Any], data: bytes) -> Any:
        """Have lowered what the bytes hold. ``given``: the request for that."""
        self._numbered += 1
        model = RemoteModel(self, self._numbered)
        weakref.finalize(model, self._dropped.append, self._numbered)
        head = {**given, "seed": torch.default_generator.initial_seed(), "model": self._numbered}
        answer = self.ask(Frame(head=head, pieces=[data])).head
        if "not_callable" in answer:
            return type(str(answer["not_callable"]), (), {})()  # the stage says what it is
        return model


def remake(
    kind: type[RemoteBackend], text: str, given: Mapping[str, Any], ask: Ask | None = None, limit: float = 60.0
) -> RemoteBackend:
    """Return the backend of a description, with the arguments that its class is given. Raises DescriptionError."""
    return kind(read_description(json.loads(text)), ask, limit=limit, text=text, **given)


class RemoteModel(HeldModel):
    """A lowered model in the worker, there known by its number."""

    def __init__(self, backend: RemoteBackend, number: int) -> None:
        self._backend = backend
        self._number = number

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
                self._backend.lose(f"no output that can be read: {unreadable}")
            if error is not None:
                raise error
            yield output

    def execution(self) -> Execution | None:
        """Return what the backend reports of it."""
        names = self._ask("execution").head.get("execution")
        if names is None:
            return None
        return Execution(**{name: tuple(names[name]) for name in Execution.__dataclass_fields__})

    def graph(self) -> str:
        """Return its graph as text; "" if it has none."""
        return str(self._ask("graph").head["graph"])

    def _ask(self, action: str, pieces: list[bytes] | None = None, **head: Any) -> Frame:
        request = Frame(head={"do": action, **head, "model": self._number}, pieces=pieces or [])
        return self._backend.ask(request)


def _read_run(answer: Frame, number: int, inputs: Sequence[Tensor]) -> tuple[Any, Exception | None]:
    """Return the output of one run, or what it raised; write to the inputs what the model has written to them."""
    done = answer.head["done"]
    if number == len(done) and "failed" in answer.head:
        return None, make_error(answer.head["failed"])
    for place, value in done[number]["written"].items():
        inputs[int(place)].copy_(unpack(value, answer.pieces))
    overwritten = OverwrittenError(int(done[number]["overwritten"])) if "overwritten" in done[number] else None
    return unpack(done[number]["output"], answer.pieces), overwritten


def count_runs(request: Frame, answer: Frame) -> int:
    """Return how many runs an answer is of, with one that raised; at most as many as were asked for."""
    done = answer.head.get("done")
    made = len(done) + ("failed" in answer.head) if isinstance(done, list) else 0
    return min(made, len(request.head.get("runs", ())))


def make_error(raised: dict[str, Any]) -> Exception:
    """Return an error of the type's name and with the text of what was raised there."""
    text = str(raised.get("text", ""))
    if raised.get("declined"):
        return UnsupportedPattern(text)
    error: RemoteError = type(str(raised.get("type", "Exception")), (RemoteError,), {})(text)
    error.trace = str(raised.get("trace", ""))
    return error
