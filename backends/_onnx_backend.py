"""The base of the backends on runtimes that read ONNX."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.export import ExportedProgram

from fx_quant_conformance.backends.exporting import Compiled, ExportingBackend


class OnnxBackend(ExportingBackend):
    """A backend whose runtime reads ONNX."""

    load: Callable[[bytes, ExportedProgram], Compiled]
    """Builds a model from the bytes and the program that they are of."""

    def warm_up(self) -> None:
        """Import the exporter; not the runtime: a forked process would wait for its threads."""
        from fx_quant_conformance.backends._onnx import warm_up

        warm_up()

    def lower(self, program: ExportedProgram, example_inputs: tuple[Any, ...]) -> Callable[..., Any]:
        """Write as ONNX and load."""
        from fx_quant_conformance.backends._onnx import onnx_bytes

        return type(self).load(onnx_bytes(program), program)
