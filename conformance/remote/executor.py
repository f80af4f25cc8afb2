"""Executors: how the suite has a backend lower models and run them: here, in another process, or by files."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, TypeVar

from torch.fx import GraphModule

from fx_quant_conformance.backends.base import Backend, Execution, Lowered
from fx_quant_conformance.backends.lowering import as_lowered, lower_reference
from fx_quant_conformance.conformance.machine.fault import Fault
from fx_quant_conformance.conformance.machine.memory import current_filling, fill_memory
from fx_quant_conformance.conformance.remote.wire import HeldOutputs, pack, unpack

Given = TypeVar("Given")
Read = TypeVar("Read")
Beside = Callable[[Backend, Given], Any]
"""A function of the suite, which has a name in its module: it may run in the process of the backend's code."""


class OverwrittenError(Exception):
    """A later run wrote over the output of a run. ``later``: how many runs later it came; 0: that is not known."""

    def __init__(self, later: int) -> None:
        super().__init__("a later run wrote over the output: a result belongs to the caller")
        self.later = later


class HeldModel(Lowered):
    """A lowered model whose inputs are copied, and whose outputs are held to their bytes."""

    @abstractmethod
    def run_all(self, batches: Sequence[tuple[Any, ...]], fillings: Sequence[int] = ()) -> Iterator[Any]:
        """Run it on several inputs, in their layout, one after the other; yield the outputs. Raises where it raised.

        Raises OverwrittenError in the place of an output that a later run wrote over. ``fillings``: the byte that
        memory is filled with, for each run; default: that of `fill_memory` now.
        """


class Executor(ABC):
    """Has models lowered by a backend. What is lowered is a `HeldModel`, or cannot be called."""

    gives_quantizer: bool = False
    """Whether the backend gives a torchao Quantizer, which can be asked, for some of its claims."""

    records: bool = False
    """Whether it writes down what it is asked for: then nothing is left out because of what it answers."""

    runs_elsewhere: bool = False
    """Whether no process here lowers its models: they are files for a device."""

    vendor_claims: frozenset[str] = frozenset()
    """The IDs of claims that need the vendor's own classes or functions, which are in a process of its own."""

    sources: tuple[str, ...] | None = None
    """The files and folders that the backend's code comes from; None: they cannot be told."""

    registrations: Mapping[str, str] = {}
    """What the backend's code registers, in words, by the pattern's name."""

    @abstractmethod
    def lower_copy(self, reference: GraphModule, example_inputs: tuple[Any, ...]) -> Any:
        """Have a copy of a reference model lowered. Raises what the backend's code raises, NoAnswer, or LostProcess."""

    @abstractmethod
    def lower_by(self, function: Beside[Given], given: Given, *, step: str) -> Any:
        """Have a model lowered by a function, which gets the backend and what is given.

        ``step``: what a message calls that. Raises as `lower_copy` does; what the function raises has its type's name.
        """

    @abstractmethod
    def ask_by(self, function: Beside[Given], given: Given, read: Callable[[Any], Read], *, step: str) -> Read:
        """Have a function run, and read the data that it returns, such as JSON holds.

        ``read`` raises WireError for other data. Raises as `lower_by` does.
        """

    def allow(self, seconds: float) -> None:
        """Give what is asked from now on so many seconds, as far as the backend's process is watched."""
        return

    def find_leftover(self) -> Fault | None:
        """Find a fault in what a device handed in for this piece of work and nobody asked for."""
        return None


def executor_of(backend: Backend) -> Executor:
    """Return how a backend is reached: by itself if it is an executor, else in this process."""
    return backend if isinstance(backend, Executor) else LocalExecutor(backend)


class LocalExecutor(Executor):
    """Has models lowered and run in this process."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self.gives_quantizer = type(backend).quantizer is not Backend.quantizer

    def lower_copy(self, reference: GraphModule, example_inputs: tuple[Any, ...]) -> Any:
        """Lower a copy of a reference model."""
        return self._hold(lower_reference(self._backend, copy.deepcopy(reference), example_inputs))

    def lower_by(self, function: Beside[Given], given: Given, *, step: str) -> Any:
        """Lower a model by a function."""
        return self._hold(function(self._backend, given))

    def ask_by(self, function: Beside[Given], given: Given, read: Callable[[Any], Read], *, step: str) -> Read:
        """Run a function, and read what it returns."""
        return read(function(self._backend, given))

    def _hold(self, made: Any) -> Any:
        return LocalModel(as_lowered(self._backend, made)) if callable(made) else made


class LocalModel(HeldModel):
    """A lowered model in this process."""

    def __init__(self, lowered: Lowered) -> None:
        self._lowered = lowered

    def __call__(self, *inputs: Any) -> Any:
        """Run it on these inputs, which it may write to."""
        return self._lowered(*inputs)

    def run_all(self, batches: Sequence[tuple[Any, ...]], fillings: Sequence[int] = ()) -> Iterator[Any]:
        """Run it on copies of the inputs; yield copies of its outputs."""
        outputs, packed, pieces, raised = HeldOutputs(), list[Any](), list[bytes](), None
        for inputs, fill in zip(batches, fillings or [current_filling()] * len(batches), strict=True):
            given: list[bytes] = []
            copies = unpack(pack(tuple(inputs), given), given)
            try:
                with fill_memory(fill) if fill else nullcontext():
                    packed.append(outputs.pack(self._lowered(*copies), pieces))
            except Exception as error:  # whatever the backend's code raises
                raised = error
                break
        overwritten = dict(outputs.find_overwritten())
        for number, data in enumerate(packed):
            if number in overwritten:
                raise OverwrittenError(overwritten[number])
            yield unpack(data, pieces)
        if raised is not None:
            raise raised

    def execution(self) -> Execution | None:
        """Return what the backend reports of it."""
        return self._lowered.execution()

    def graph(self) -> str:
        """Return its graph as text."""
        return self._lowered.graph()
