"""Vendor backends in miniature, one for each way in which a run can go."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule

from backends.base import Backend, Capabilities, Representation
from refimpl import BackendConfig, BackendPatternConfig, DTypeConfig

INT8 = DTypeConfig(
    input_dtype=torch.quint8, output_dtype=torch.quint8, weight_dtype=torch.qint8, bias_dtype=torch.float
)


class Good(Backend):
    """Claims nn.Linear with two kinds of weights, and runs the reference model itself."""

    name = "good"
    representation = Representation.QUANTIZED

    def backend_config(self) -> BackendConfig:
        import torch.ao.nn.quantized.reference as reference

        linear = BackendPatternConfig(nn.Linear).add_dtype_config(INT8)
        linear.set_root_module(nn.Linear).set_reference_quantized_module(reference.Linear)
        return BackendConfig("good config").set_backend_pattern_config(linear)

    def capabilities(self) -> Capabilities:
        return Capabilities(weight_schemes=("per_tensor_symmetric", "per_channel_symmetric"))

    def lower(self, reference_model: GraphModule, example_inputs: tuple[Any, ...]) -> Callable[..., Any]:
        return reference_model

    def versions(self) -> dict[str, str]:
        return {"good_compiler": "1.2"}


class LowerRaises(Good):
    def lower(self, reference_model: GraphModule, example_inputs: tuple[Any, ...]) -> Callable[..., Any]:
        raise RuntimeError("no such kernel")


class AbortsOnce(Good):
    """Takes its process down at the first lowering of all, in whichever process; FAKE_MARKER names a file."""

    def lower(self, reference_model: GraphModule, example_inputs: tuple[Any, ...]) -> Callable[..., Any]:
        try:
            Path(os.environ["FAKE_MARKER"]).touch(exist_ok=False)
        except FileExistsError:
            return reference_model
        os.abort()


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
