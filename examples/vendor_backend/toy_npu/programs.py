"""The door of a compiler that takes exported programs; the compiler here is torch itself, in float."""

from __future__ import annotations

from typing import Any

import torch
from torch.export import ExportedProgram

from backends.base import Backend, Representation
from refimpl import BackendConfig
from toy_npu.backend import toy_npu_config


class OnPrograms(Backend):
    """The claims of the toy NPU, lowered from exported programs; it does not say what it runs."""

    name = "toy_npu_on_programs"
    representation = Representation.EXPORTED

    def backend_config(self) -> BackendConfig:
        return toy_npu_config()

    def lower(self, program: ExportedProgram, example_inputs: tuple[Any, ...]) -> Any:
        return torch.no_grad()(program.module())  # your compiler's call
