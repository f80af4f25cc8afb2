"""A backend whose every text would steer a terminal, and be a command to the service that runs a CI job."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.fx import GraphModule

from fx_quant_conformance.backends.base import Capabilities, Execution, UnsupportedPattern
from fx_quant_conformance.refimpl import BackendConfig, BackendPatternConfig
from tests.conformance.support.fake_backends.fakes import INT8, Good

EVIL = "\n::error file=a.py::owned\n  ##[error]owned\r\n\x1b]0;owned\x07\x1b[2J\x9b31m \u202e \u2028::warning::owned\n"
"""What sets title and colours of a terminal and the order of reading, and commands of two spellings."""
PLACE = os.environ.get("HOSTILE_PLACE", "lower")

if PLACE == "import":
    raise RuntimeError(EVIL)


class Shouting(nn.ReLU):
    """A class of the vendor's own, with a name that is none."""


Shouting.__qualname__ = Shouting.__name__ = f"Shouting{EVIL}"


class Shouts(Good):
    """Says EVIL wherever it may say something; how it fails is HOSTILE_PLACE."""

    name = f"npu{EVIL}"
    engine = ""

    def unavailable_reason(self) -> str | None:
        return EVIL if PLACE == "unavailable" else None

    def versions(self) -> dict[str, str]:
        return {EVIL: EVIL}

    def capabilities(self) -> Capabilities:
        if PLACE == "capabilities":
            return Capabilities(weight_schemes=(EVIL,))
        return super().capabilities()

    def backend_config(self) -> BackendConfig:
        config = super().backend_config()
        config.name = f"config{EVIL}"
        own = BackendPatternConfig(Shouting).add_dtype_config(INT8)
        return config.set_backend_pattern_config(own)

    def lower(self, reference_model: GraphModule, example_inputs: tuple[Any, ...]) -> Callable[..., Any]:
        print(EVIL, flush=True)
        print(EVIL, file=sys.stderr, flush=True)
        if PLACE == "crash":
            os._exit(9)
        if PLACE == "declines":
            raise UnsupportedPattern(EVIL)
        if PLACE == "lower":
            raise type(f"Error{EVIL}", (Exception,), {})(EVIL)
        return reference_model

    def execution(self, lowered: Callable[..., Any]) -> Execution | None:
        return Execution(quantized_ops=(EVIL,), float_fallbacks=(EVIL,), kernels=(EVIL,))
