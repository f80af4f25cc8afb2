"""Has a backend lower reference models: the one place where a model is brought to the form EXPORTED."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.fx import GraphModule

from backends.base import Backend, Representation, UnsupportedPattern
from refimpl import ModelError, export_reference


def lower_reference(
    backend: Backend, reference_model: GraphModule, example_inputs: tuple[Any, ...]
) -> Callable[..., Any]:
    """Return what the backend's ``lower`` makes of a reference model of the form ``representation.of_models``.

    A backend of the form EXPORTED gets the model's program, its batch dynamic if its Capabilities say so. Raises
    UnsupportedPattern for a model that has no program, and what ``lower`` raises.
    """
    if backend.representation is not Representation.EXPORTED:
        return backend.lower(reference_model, example_inputs)
    is_dynamic = backend.capabilities().dynamic_batch
    try:
        program = export_reference(reference_model, example_inputs, dynamic_batch=is_dynamic)
    except ModelError as error:
        raise UnsupportedPattern(f"it takes exported programs, and {error}") from error
    return backend.lower(program, example_inputs)
