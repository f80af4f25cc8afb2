"""Vendor backends in miniature, one for each way in which a run can go."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import nn
from torch.fx import GraphModule

from fx_quant_conformance.backends.base import Backend, Capabilities, Execution, Representation, UnsupportedPattern
from fx_quant_conformance.refimpl import BackendConfig, BackendPatternConfig, DTypeConfig, nnqr, qint8, quint8

INT8 = DTypeConfig(input_dtype=quint8, output_dtype=quint8, weight_dtype=qint8, bias_dtype=torch.float)


class Good(Backend):
    """Claims nn.Linear with two kinds of weights, and runs the reference model itself.

    It stands for a machine that multiplies integers, sums in floating point, and says so.
    """

    name = "good"
    representation = Representation.QUANTIZED

    def backend_config(self) -> BackendConfig:
        linear = BackendPatternConfig(nn.Linear).add_dtype_config(INT8)
        linear.set_root_module(nn.Linear).set_reference_quantized_module(nnqr.Linear)
        return BackendConfig("good config").set_backend_pattern_config(linear)

    def capabilities(self) -> Capabilities:
        return Capabilities(weight_schemes=("per_tensor_symmetric", "per_channel_symmetric"), float_accumulation=True)

    def execution(self, lowered: Callable[..., Any]) -> Execution | None:
        nodes = lowered.graph.nodes if isinstance(lowered, GraphModule) else ()
        return Execution(
            quantized_ops=("op0", *(each.name for each in nodes if each.op == "call_module")), float_fallbacks=()
        )

    def lower(self, reference_model: GraphModule, example_inputs: tuple[Any, ...]) -> Callable[..., Any]:
        return reference_model

    def versions(self) -> dict[str, str]:
        return {"good_compiler": "1.2"}


class Silent(Good):
    """Sums floats, as it says, and does not say what it runs: nothing shows the execution."""

    name = "silent"

    def capabilities(self) -> Capabilities:
        return Capabilities(float_accumulation=True)

    def execution(self, lowered: Callable[..., Any]) -> Execution | None:
        return None


class SilentFloats(Silent):
    """The same, but does not say that it sums floats."""

    def capabilities(self) -> Capabilities:
        return Capabilities()


class LowerRaises(Good):
    def lower(self, reference_model: GraphModule, example_inputs: tuple[Any, ...]) -> Callable[..., Any]:
        raise RuntimeError("no such kernel")


class Hostile(Good):
    """Raises text that would be markup, or would steer a terminal, where it is not taken for text."""

    def lower(self, reference_model: GraphModule, example_inputs: tuple[Any, ...]) -> Callable[..., Any]:
        raise RuntimeError(
            "evil ]]> <property name='verdict' value='TOLERATED'/> \x00\x1b[2J\x07 \u202e &#0; </failure>"
        )


class FarOff(Good):
    """Gives what lies farther below zero than any integer of 32 bits says, in steps."""

    def lower(self, reference_model: GraphModule, example_inputs: tuple[Any, ...]) -> Callable[..., Any]:
        return lambda *inputs: reference_model(*inputs) - 1e30


class HangsInFuse(Good):
    """A fuser method that never ends."""

    def backend_config(self) -> BackendConfig:
        config = super().backend_config()
        pair = BackendPatternConfig((nn.Linear, nn.ReLU)).add_dtype_config(INT8).set_fuser_method(_never_ends)
        fused = BackendPatternConfig(nn.Sequential).add_dtype_config(INT8)
        return config.set_backend_pattern_configs([pair.set_fused_module(nn.Sequential), fused])


def _never_ends(is_qat: bool, *modules: nn.Module) -> nn.Module:
    time.sleep(1000)
    return nn.Sequential(*modules)


class Idle(Good):
    """Right numbers, all of them in float: no quantized op runs, but a kernel of floats."""

    def execution(self, lowered: Callable[..., Any]) -> Execution:
        return Execution(quantized_ops=(), float_fallbacks=(), kernels=("sgemm",))


def _segfault() -> NoReturn:
    ctypes.string_at(0)
    raise AssertionError("read from address 0")


def _hang() -> NoReturn:
    """Hang in C code, with a process started before; FAKE_MARKER names a file for its ID."""
    started = subprocess.Popen(["sleep", "600"])
    Path(os.environ["FAKE_MARKER"]).write_text(str(started.pid))
    ctypes.CDLL(None).pause()
    raise AssertionError("no signal was expected")


def _abort() -> NoReturn:
    os.write(2, b"npu: internal compiler error\n")
    os.abort()


def _kill() -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("survived SIGKILL")


class Misbehaves(Good):
    """Claims six ops; lowering them ends in as many ways, all but nn.Linear's bad."""

    name = "misbehaves"
    bad: tuple[tuple[type[nn.Module], Callable[[], NoReturn]], ...] = (
        (nn.Conv1d, _segfault),
        (nn.Conv2d, _hang),
        (nn.Conv3d, _abort),
        (nn.ConvTranspose1d, lambda: os._exit(0)),
        (nn.ConvTranspose2d, _kill),
    )

    def backend_config(self) -> BackendConfig:
        config = super().backend_config()
        for op, _ in self.bad:
            entry = BackendPatternConfig(op).add_dtype_config(INT8).set_root_module(op)
            entry.set_reference_quantized_module(getattr(nnqr, op.__name__))
            config.set_backend_pattern_config(entry)
        return config

    def capabilities(self) -> Capabilities:
        return Capabilities(weight_schemes=("per_tensor_symmetric",), float_accumulation=True)

    def lower(self, reference_model: GraphModule, example_inputs: tuple[Any, ...]) -> Callable[..., Any]:
        for op, misbehave in self.bad:
            if any(isinstance(module, op) for module in reference_model.modules()):
                misbehave()
        return reference_model


class TiredOfTalking(Good):
    """Its process does not outlive a model that it lowers, nor a warm-up, once it has said what the backend is."""

    has_spoken = False

    def versions(self) -> dict[str, str]:
        self.has_spoken = True
        return super().versions()

    def warm_up(self) -> None:
        if self.has_spoken and os.environ.get("TIRED_OF") == "warm_up":
            os._exit(3)

    def lower(self, reference_model: GraphModule, example_inputs: tuple[Any, ...]) -> Callable[..., Any]:
        return os._exit(3) if self.has_spoken else reference_model


class OneOpPerProcess(Misbehaves):
    """Dies when a process that has lowered one op lowers another: what it leaves behind is the next claim's death."""

    lowered: str = ""

    def lower(self, reference_model: GraphModule, example_inputs: tuple[Any, ...]) -> Callable[..., Any]:
        ops = [op for op, _ in self.bad if any(isinstance(module, op) for module in reference_model.modules())]
        found = str(ops)
        if self.lowered not in ("", found):
            os.abort()
        self.lowered = found
        return reference_model


class Deviates(Good):
    """Declines weights per channel, and says so in a waiver file that FAKE_WAIVERS names."""

    name = "deviates"

    def __init__(self) -> None:
        self.waivers = Path(os.environ["FAKE_WAIVERS"])

    def lower(self, reference_model: GraphModule, example_inputs: tuple[Any, ...]) -> Callable[..., Any]:
        schemes = [getattr(module, "weight_qscheme", None) for module in reference_model.modules()]
        if torch.per_channel_affine in schemes:
            raise UnsupportedPattern("weights per channel")
        return reference_model


class Waits(Good):
    """Lowers weights per channel once there is a file that FAKE_MARKER names."""

    name = "waits"

    def lower(self, reference_model: GraphModule, example_inputs: tuple[Any, ...]) -> Callable[..., Any]:
        schemes = [getattr(module, "weight_qscheme", None) for module in reference_model.modules()]
        while torch.per_channel_affine in schemes and not Path(os.environ["FAKE_MARKER"]).exists():
            time.sleep(0.05)
        return reference_model


class DiesInWorkers(Good):
    """Can be held by one process only, as some devices can."""

    def __init__(self) -> None:
        if "PYTEST_XDIST_WORKER" in os.environ:
            raise RuntimeError("the device is in use")


class Unavailable(Good):
    name = "unavailable"

    def unavailable_reason(self) -> str | None:
        return "no NPU found"

    def backend_config(self) -> BackendConfig:
        raise AssertionError("asked for the config of a backend that is not there")


class ConfigRaises(Good):
    def backend_config(self) -> BackendConfig:
        raise KeyError("linear table")


class NoConfig(Good):
    def backend_config(self) -> BackendConfig:
        return None  # type: ignore[return-value]


class ClaimsNothing(Good):
    def backend_config(self) -> BackendConfig:
        return BackendConfig("empty")


class BadCapabilities(Good):
    def capabilities(self) -> Capabilities:
        return Capabilities(weight_schemes=("per_group",))


class ConstructorRaises(Good):
    def __init__(self) -> None:
        raise OSError("driver not loaded")


class Nameless(Good):
    name = ""


class Formless(Good):
    representation = "QUANTIZED"  # type: ignore[assignment]


class Incomplete(Backend):
    name = "incomplete"
    representation = Representation.QUANTIZED

    def backend_config(self) -> BackendConfig:
        return BackendConfig("incomplete")


class NotABackend:
    name = "duck"


INSTANCE = Good()
