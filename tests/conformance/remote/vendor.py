"""Backends whose lowering ends in as many ways."""

from __future__ import annotations

import ctypes
import itertools
import os
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from backends.base import Execution, QuantizerRequest, UnsupportedPattern
from conformance.machine.memory import current_filling
from conformance.remote import wire
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
    """Gives the number of threads, the strides of its input, and what memory is filled with."""

    def lower(self, reference_model: GraphModule, example_inputs: tuple[Any, ...]) -> Callable[..., Any]:
        return lambda x: tuple(map(torch.tensor, (torch.get_num_threads(), *x.stride(), current_filling())))


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
            wire.MOST_BYTES = 4 * x.nbytes
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


class Cold(Good):
    def warm_up(self) -> None:
        raise ImportError("no driver")


def start_process() -> int:
    """Start a process in a session of its own; return its number."""
    return subprocess.Popen(["sleep", "600"], start_new_session=True).pid


class LeavesBehind(Good):
    """Gives the number of a process that it starts."""

    def lower(self, reference_model: GraphModule, example_inputs: tuple[Any, ...]) -> Callable[..., Any]:
        started = torch.tensor(start_process())
        return lambda x: (started, started)


class Endless(Good):
    """Hangs where it is warmed up, after it has started a process, and where it is asked for a Quantizer."""

    def warm_up(self) -> None:
        print("started", start_process(), flush=True)
        time.sleep(1000)

    def quantizer(self, request: QuantizerRequest) -> Any:
        time.sleep(1000)
