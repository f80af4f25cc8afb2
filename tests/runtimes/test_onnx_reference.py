"""Reference models under the ONNX package's own evaluator: what is computed, and what is said of it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from fx_quant_conformance.backends.discovery import find_backend
from fx_quant_conformance.backends.lowering import lower_reference
from fx_quant_conformance.conformance.claims.claim import enumerate_claims
from tests.runtimes.references import Flat, image, reference_of

pytest.importorskip("onnx")
pytest.importorskip("onnxscript")
NAME = "onnx-reference"


class Three(nn.Module):
    """Outputs of three dtypes or ranks, one of them a number."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"flat": x.flatten(1), "pooled": nn.functional.max_pool2d(x, 2), "mean": x.mean()}


def test_it_claims_what_onnxruntime_claims() -> None:
    names = []
    for backend in map(find_backend, (NAME, "onnxruntime")):
        names.append([claim.id for claim in enumerate_claims(backend.backend_config(), backend.capabilities())])
    assert names[0] == names[1]
    assert find_backend(NAME).backend_config().name == NAME


@pytest.mark.slow
def test_integers_are_those_of_the_reference_model_for_batches_of_any_size() -> None:
    layers = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(64, 5))
    reference = reference_of(layers, image(1, 3, 4, 4))
    lowered = lower_reference(find_backend(NAME), reference, (image(1, 3, 4, 4),))
    for rows in (1, 5, 0):
        x = image(rows, 3, 4, 4)
        assert torch.allclose(lowered(x), reference(x), atol=1e-6) and len(lowered(x)) == rows


@pytest.mark.slow
def test_outputs_have_structure_shapes_and_dtypes_of_the_model() -> None:
    x = image(2, 3, 4, 4)
    reference = reference_of(Three(), x)
    found, right = lower_reference(find_backend(NAME), reference, (x,))(x), reference(x)
    assert list(found) == list(right) == ["flat", "pooled", "mean"]
    for name, value in right.items():
        assert (found[name].shape, found[name].dtype) == (value.shape, value.dtype)
        assert torch.allclose(found[name], value, atol=1e-6)


@pytest.mark.slow
def test_outputs_can_be_written_to() -> None:
    """NumPy hands out views of what it holds, and constants."""
    x = image(4, 9)
    lowered = lower_reference(find_backend(NAME), reference_of(Flat(), x), (x,))
    before = lowered(x).clone()
    lowered(x).zero_()
    assert torch.equal(lowered(x), before)


@pytest.mark.rule("LOW-04")
def test_nothing_is_said_of_what_runs_in_float() -> None:
    backend, x = find_backend(NAME), image(2, 6)
    lowered = lower_reference(backend, reference_of(nn.Sequential(nn.Linear(6, 5)), x), (x,))
    assert backend.execution(lowered) is None
    assert backend.execution(lambda x: x) is None, "another backend's model"
