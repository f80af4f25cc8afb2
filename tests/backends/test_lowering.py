"""A backend that takes programs is given one, its batch dynamic and its weights folded if it says so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fx_quant_conformance.backends.base import Backend, Capabilities, Representation
from fx_quant_conformance.backends.lowering import lower_reference
from fx_quant_conformance.refimpl import BackendConfig
from tests.runtimes.references import image, reference_of


class Takes(Backend):
    """Keeps the program that it is given to lower, and runs it."""

    name = "takes"
    representation = Representation.EXPORTED

    def __init__(self, **declared: bool) -> None:
        self.given: Any = None
        self._declared = declared

    def backend_config(self) -> BackendConfig:
        return BackendConfig("takes")

    def capabilities(self) -> Capabilities:
        return Capabilities(**self._declared)  # type: ignore[arg-type]

    def lower(self, reference_model: Any, example_inputs: tuple[Any, ...]) -> Callable[..., Any]:
        self.given = reference_model
        program: nn.Module = reference_model.module()
        return torch.no_grad()(program)


@pytest.mark.slow
@pytest.mark.rule("LOW-01")
@pytest.mark.parametrize("is_dynamic", [True, False], ids=["dynamic", "static"])
def test_the_batch_is_dynamic_where_the_backend_takes_one(is_dynamic: bool) -> None:
    x, backend = image(2, 3, 4, 4), Takes(dynamic_batch=is_dynamic)
    reference = reference_of(nn.Conv2d(3, 4, 2), x)
    assert torch.equal(lower_reference(backend, reference, (x,))(x), reference(x))
    values = [node.meta["val"] for node in backend.given.graph.nodes if isinstance(node.meta.get("val"), Tensor)]
    symbolic = [size for value in values for size in value.shape if isinstance(size, torch.SymInt)]
    assert values and bool(symbolic) is is_dynamic


@pytest.mark.slow
@pytest.mark.parametrize("is_folded", [True, False], ids=["integers", "floats"])
def test_weights_are_held_as_the_backend_takes_them(is_folded: bool) -> None:
    x, backend = image(2, 3, 4, 4), Takes(fold_weights=is_folded)
    reference = reference_of(nn.Conv2d(3, 4, 2), x)
    assert torch.equal(lower_reference(backend, reference, (x,))(x), reference(x))
    dtypes = {value.dtype for value in backend.given.state_dict.values() if value.dim() == 4}
    assert (torch.int8 in dtypes) is is_folded
