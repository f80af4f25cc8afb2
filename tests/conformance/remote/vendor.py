"""Backends that show what a worker does, and backends that end theirs in as many ways."""

from __future__ import annotations

import ctypes
import itertools
import os
import signal
import socket
import stat
import subprocess
import sys
import time
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from fx_quant_conformance.backends.base import Execution, Lowered, QuantizerRequest, UnsupportedPattern
from fx_quant_conformance.conformance.machine import frames
from fx_quant_conformance.conformance.machine.frames import Frame, send_frame
from fx_quant_conformance.conformance.machine.memory import current_filling
from fx_quant_conformance.refimpl import BackendConfig
from tests.conformance.support.fake_backends.fakes import Good


class Plain(Good):
    """Runs the model, and says in which process."""

    def lower(self, reference_model: GraphModule, example_inputs: tuple[Any, ...]) -> Callable[..., Any]:
        class Lowered:
            graph_module = reference_model

            def __call__(self, *inputs: Tensor) -> Any:
                return reference_model(*inputs), torch.tensor(os.getpid())

        return Lowered()

    def execution(self, lowered: Callable[..., Any]) -> Execution:
        return Execution(quantized_ops=("linear",), float_fallbacks=(), kernels=("k",))


class SaysItself(Lowered):
    """Says itself what it runs, and what its graph is."""

    def __call__(self, *inputs: Any) -> Any:
        return inputs[0] + 1

    def execution(self) -> Execution:
        return Execution(quantized_ops=("own",), float_fallbacks=())

    def graph(self) -> str:
        return "a graph of its own"


class Says(Good):
    """Lowers to what says itself what it runs."""

    def lower(self, reference_model: GraphModule, example_inputs: tuple[Any, ...]) -> Lowered:
        return SaysItself()

    def execution(self, lowered: Callable[..., Any]) -> Execution:
        raise AssertionError("asked of what says it itself")


class Invents(Good):
    """Says what it runs by something that is no Execution."""

    def execution(self, lowered: Callable[..., Any]) -> Any:
        return {"quantized_ops": ["all"]}


class Reuses(Good):
    """Gives the same memory for each output."""

    def lower(self, reference_model: GraphModule, example_inputs: tuple[Any, ...]) -> Callable[..., Any]:
        return torch.zeros(2, 3).copy_


class Holds(Good):
    """Gives how many of its models are still there."""

    def __init__(self) -> None:
        self._held = weakref.WeakSet[SaysItself]()

    def lower(self, reference_model: GraphModule, example_inputs: tuple[Any, ...]) -> Lowered:
        held = self._held

        class Counting(SaysItself):
            def __call__(self, *inputs: Any) -> Any:
                return torch.tensor(len(held))

        held.add(model := Counting())
        return model


class DeviceError(Exception):
    """A vendor's own error."""


class Raises(Good):
    def lower(self, reference_model: GraphModule, example_inputs: tuple[Any, ...]) -> Callable[..., Any]:
        if len(example_inputs) > 1:
            raise UnsupportedPattern("two inputs")
        raise DeviceError("no such kernel")


class Writes(Good):
    def lower(self, reference_model: GraphModule, example_inputs: tuple[Any, ...]) -> Callable[..., Any]:
        return lambda x: x.mul_(2)


class Tells(Good):
    """Gives the number of threads, the strides and the offset of its input, and what memory is filled with."""

    def lower(self, reference_model: GraphModule, example_inputs: tuple[Any, ...]) -> Callable[..., Any]:
        return lambda x: tuple(
            map(torch.tensor, (torch.get_num_threads(), *x.stride(), x.storage_offset(), current_filling()))
        )


class Counts(Good):
    """Gives the number of the run, and what memory is filled with; writes to its input, and cannot do with zeros."""

    def lower(self, reference_model: GraphModule, example_inputs: tuple[Any, ...]) -> Callable[..., Any]:
        numbers = itertools.count(1)

        def run(x: Tensor) -> tuple[Tensor, Tensor]:
            number = next(numbers)
            if not bool(x.any()):
                raise DeviceError(f"run {number}: division by zero")
            x.add_(1)
            return torch.tensor(number), torch.tensor(current_filling())

        return run


class Overflows(Good):
    """Gives more than a message holds."""

    def lower(self, reference_model: GraphModule, example_inputs: tuple[Any, ...]) -> Callable[..., Any]:
        def run(x: Tensor) -> Tensor:
            frames.MOST_BYTES = 4 * x.nbytes
            return x.repeat(4, 1)

        return run


class Dies(Good):
    def lower(self, reference_model: GraphModule, example_inputs: tuple[Any, ...]) -> Callable[..., Any]:
        ctypes.string_at(0)
        raise AssertionError("read from address 0")


class Leaves(Good):
    def lower(self, reference_model: GraphModule, example_inputs: tuple[Any, ...]) -> Callable[..., Any]:
        sys.exit(3)


class Hangs(Good):
    def lower(self, reference_model: GraphModule, example_inputs: tuple[Any, ...]) -> Callable[..., Any]:
        time.sleep(1000)
        return reference_model


class Babbles(Good):
    """Writes to every open descriptor that takes it."""

    def lower(self, reference_model: GraphModule, example_inputs: tuple[Any, ...]) -> Callable[..., Any]:
        for descriptor in range(3, 64):
            try:
                os.write(descriptor, b"\xff" * 64)
            except OSError:
                continue
        return reference_model


def forge_answer(**head: Any) -> None:
    """Send an answer in the worker's place."""
    (number,) = filter(is_socket, range(3, 256))
    with socket.socket(fileno=os.dup(number)) as channel:
        send_frame(channel, Frame(head=head))


def is_socket(descriptor: int) -> bool:
    """Tell whether a number is that of an open socket."""
    try:
        return stat.S_ISSOCK(os.fstat(descriptor).st_mode)
    except OSError:
        return False


class Forges(Good):
    def lower(self, reference_model: GraphModule, example_inputs: tuple[Any, ...]) -> Callable[..., Any]:
        forge_answer(peak_mib="much")
        return reference_model


class Mumbles(Good):
    def backend_config(self) -> BackendConfig:
        forge_answer(said="I am a backend")
        return super().backend_config()


class KillsParent(Good):
    def lower(self, reference_model: GraphModule, example_inputs: tuple[Any, ...]) -> Callable[..., Any]:
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(1000)
        return reference_model


class StopsParent(Plain):
    def lower(self, reference_model: GraphModule, example_inputs: tuple[Any, ...]) -> Callable[..., Any]:
        os.kill(os.getppid(), signal.SIGSTOP)
        return super().lower(reference_model, example_inputs)


def start_process() -> int:
    """Start a process in a session of its own; return its number."""
    return subprocess.Popen(["sleep", "600"], start_new_session=True).pid


class LeavesBehind(Good):
    """Gives the number of a process that it starts; leaves for an input that begins with 7."""

    def lower(self, reference_model: GraphModule, example_inputs: tuple[Any, ...]) -> Callable[..., Any]:
        started = torch.tensor(start_process())
        return lambda x: (started, started) if int(x.flatten()[0]) != 7 else sys.exit(7)


class Warm(Good):
    """Says how often it was warmed up."""

    def __init__(self) -> None:
        self.warmed = 0

    def warm_up(self) -> None:
        self.warmed += 1

    def versions(self) -> dict[str, str]:
        return {"warmed": str(self.warmed)}


class Cold(Warm):
    def warm_up(self) -> None:
        super().warm_up()
        raise ImportError("no driver")


class DiesCold(Warm):
    def warm_up(self) -> None:
        sys.exit("no device")


class Endless(Warm):
    """Hangs where it is warmed up, after it has started a process, and where it is asked for a Quantizer of QAT."""

    def warm_up(self) -> None:
        print("started", start_process(), flush=True)
        time.sleep(1000)

    def quantizer(self, request: QuantizerRequest) -> Any:
        if request.is_qat:
            time.sleep(1000)


class Mute(Good):
    def backend_config(self) -> BackendConfig:
        time.sleep(1000)
        raise AssertionError("it hangs")


class Babel(Good):
    def backend_config(self) -> BackendConfig:
        raise DeviceError("no config")


class Quits(Good):
    def backend_config(self) -> BackendConfig:
        os._exit(5)
