"""The base of the backends on runtimes that read ONNX."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.fx import GraphModule

from backends._export import Compiled, ExportingBackend


class OnnxBackend(ExportingBackend):
    """A backend whose runtime reads ONNX; ``load`` builds a model from bytes, reference model and example inputs."""

    load: Callable[[bytes, GraphModule, tuple[Any, ...]], Compiled]

    def warm_up(self) -> None:
        """Import the exporter; not the runtime: a forked process would wait for its threads."""
        from backends._onnx import warm_up

        warm_up()

    def lower(self, reference_model: GraphModule, example_inputs: tuple[Any, ...]) -> Callable[..., Any]:
        """Export to ONNX and load."""
        from backends._onnx import onnx_bytes

        return type(self).load(onnx_bytes(reference_model, example_inputs), reference_model, example_inputs)
