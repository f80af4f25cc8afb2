"""Backends that end the process, harm the one that started it, or leave it no way out, wherever they are asked."""

from __future__ import annotations

import atexit
import ctypes
import os
import signal
import time
from collections.abc import Callable
from typing import Any

from torch.fx import GraphModule

from fx_quant_conformance.backends.base import Capabilities
from fx_quant_conformance.refimpl import BackendConfig
from tests.conformance.support.fake_backends.fakes import Good

WAYS: dict[str, Callable[[], object]] = {
    "exit 0": lambda: os._exit(0),
    "segfault": lambda: ctypes.string_at(0),
    "odd": lambda: _raise(KeyboardInterrupt("odd")),
    "hang": lambda: time.sleep(1000),
    "stop the parent": lambda: _stop(os.getppid()),
    "kill the parent": lambda: os.kill(os.getppid(), signal.SIGKILL),
}


def _stop(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)
    time.sleep(1000)


def _raise(error: BaseException) -> None:
    raise error


def misbehave(place: str) -> None:
    """Do what HOSTILE_WAY says if this is HOSTILE_PLACE."""
    if os.environ.get("HOSTILE_PLACE") == place:
        WAYS[os.environ["HOSTILE_WAY"]]()


class Ends(Good):
    """Misbehaves at one place."""

    name = "ends"

    def __init__(self) -> None:
        misbehave("constructor")

    def unavailable_reason(self) -> str | None:
        misbehave("unavailable_reason")
        return None

    def backend_config(self) -> BackendConfig:
        misbehave("backend_config")
        return super().backend_config()

    def capabilities(self) -> Capabilities:
        misbehave("capabilities")
        return super().capabilities()

    def versions(self) -> dict[str, str]:
        misbehave("versions")
        return super().versions()

    def warm_up(self) -> None:
        misbehave("warm_up")

    def lower(self, reference_model: GraphModule, example_inputs: tuple[Any, ...]) -> Callable[..., Any]:
        misbehave("lower")
        return super().lower(reference_model, example_inputs)


class LeavesWithZero(Good):
    """Is wrong, and has Python exit with status 0 all the same."""

    def __init__(self) -> None:
        atexit.register(os._exit, 0)

    def lower(self, reference_model: GraphModule, example_inputs: tuple[Any, ...]) -> Callable[..., Any]:
        return lambda *inputs: reference_model(*inputs) * 0
