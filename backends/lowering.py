"""Has a backend lower reference models: the one place where a decomposed model is brought to another form.

What ``lower`` returns is made a `Lowered` here, if it is another callable.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.fx import GraphModule

from fx_quant_conformance.backends.base import Backend, Execution, Lowered, Representation, UnsupportedPattern
from fx_quant_conformance.backends.graph_text import format_graph
from fx_quant_conformance.backends.quantized_form import to_quantized_form
from fx_quant_conformance.refimpl import ModelError, export_reference


def lower_reference(
    backend: Backend, reference_model: GraphModule, example_inputs: tuple[Any, ...]
) -> Callable[..., Any]:
    """Return what the backend's ``lower`` makes of a decomposed reference model, brought to the backend's form.

    A backend of the form EXPORTED gets the model's program, its batch and its weights as its Capabilities say. Raises
    UnsupportedPattern for a model that has no program, as `in_form` does, and what ``lower`` raises.
    """
    if backend.representation is not Representation.EXPORTED:
        return backend.lower(in_form(backend.representation, reference_model), example_inputs)
    declared = backend.capabilities()
    try:
        program = export_reference(
            reference_model,
            example_inputs,
            dynamic_batch=declared.dynamic_batch,
            fold_weights=declared.fold_weights,
        )
    except ModelError as error:
        raise UnsupportedPattern(f"it takes exported programs, and {error}") from error
    return backend.lower(program, example_inputs)


def in_form(representation: Representation, reference_model: GraphModule) -> GraphModule:
    """Return a decomposed reference model in a backend's form, or in that from which its program is made.

    Raises QConfigError for a value that quantized tensors cannot have. (CVT-10)
    """
    return to_quantized_form(reference_model) if representation is Representation.QUANTIZED else reference_model


def as_lowered(backend: Backend, made: Callable[..., Any]) -> Lowered:
    """Return what a backend's ``lower`` returned, wrapped if it is no `Lowered`."""
    return made if isinstance(made, Lowered) else _Wrapped(backend, made)


class _Wrapped(Lowered):
    """A callable that a backend's ``lower`` returned."""

    def __init__(self, backend: Backend, made: Callable[..., Any]) -> None:
        self._backend = backend
        self._made = made

    def __call__(self, *inputs: Any) -> Any:
        return self._made(*inputs)

    def execution(self) -> Execution | None:
        """Return what the backend reports."""
        return self._backend.execution(self._made)

    def graph(self) -> str:
        """Return the graph of a GraphModule, or of what has one."""
        return format_graph(getattr(self._made, "graph_module", self._made))
