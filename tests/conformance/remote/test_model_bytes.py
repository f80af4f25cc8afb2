"""Reference models as bytes: the same nodes, the same numbers, the same notes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.fx import GraphModule

from fx_quant_conformance.backends.discovery import find_backend
from fx_quant_conformance.conformance.claims.claim import Claim, enumerate_claims
from fx_quant_conformance.conformance.pipeline.claim_run import rebuild
from fx_quant_conformance.conformance.remote.model_bytes import dump_model, load_model
from fx_quant_conformance.conformance.stages.bench import Bench
from fx_quant_conformance.conformance.stages.meaning import tensors_of
from fx_quant_conformance.refimpl.graph.tracer import trace
from fx_quant_conformance.refimpl.lower.lower import lower
from fx_quant_conformance.reports.schema import Where

_BENCHES = {name: Bench(find_backend(name), seed=0, profile="quick") for name in ("qnnpack", "reference")}
_PATTERNS = (
    "nn.Linear",
    "nni.ConvReLU2d",
    "torch.cat",
    "nn.LSTM",
    "nn.EmbeddingBag",
    "nn.AvgPool2d",
    "F.max_pool2d",
    "nn.Conv2d+nn.BatchNorm2d+nn.ReLU",
    "torch.conv2d",
)


def _claims(backend: str) -> list[Claim]:
    bench = _BENCHES[backend]
    first: dict[tuple[str, str], Claim] = {}
    for claim in enumerate_claims(bench.config, bench.capabilities):
        if claim.pattern in _PATTERNS:
            first.setdefault((claim.pattern, claim.flow), claim)
    return list(first.values())


@pytest.mark.slow
@pytest.mark.parametrize("backend", _BENCHES)
def test_a_model_comes_back_as_it_was(backend: str) -> None:
    claims = _claims(backend)
    assert len({claim.pattern for claim in claims}) >= 7
    for claim in claims:
        state = rebuild(_BENCHES[backend], claim, Where())
        reference, inputs = state.reference, state.inputs[0].tensors
        model, examples = load_model(dump_model(reference, inputs))
        assert str(model.graph) == str(reference.graph)
        assert list(model.state_dict()) == list(reference.state_dict())
        assert all(map(torch.equal, examples, inputs))
        with torch.no_grad():
            outputs = [tensors_of(each(*inputs)) for each in (model, reference)]
        assert all(torch.equal(left, right) for left, right in zip(*outputs, strict=True))


def test_lowering_finds_the_decisions_of_prepare_in_it() -> None:
    """What refimpl's lowering leaves out depends on them, and what it says of it names the user's modules."""
    (claim,) = [claim for claim in _claims("qnnpack") if (claim.pattern, claim.flow) == ("nn.Linear", "ptq")]
    state = rebuild(_BENCHES["qnnpack"], claim, Where())
    model, _ = load_model(dump_model(state.reference, state.inputs[0].tensors))
    assert str(lower(model).graph) == str(lower(state.reference).graph)


class _Block(nn.Module):
    """A container whose class the backend's process need not have."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(x)


def test_of_a_users_container_only_the_path_goes_along() -> None:
    traced = trace(nn.Sequential(_Block(), nn.ReLU()))
    model, _ = load_model(dump_model(GraphModule(traced, traced.graph), ()))
    stacks = {node.name: list(node.meta.get("nn_module_stack", {}).values()) for node in model.graph.nodes}
    assert stacks["relu"] == [("0", nn.Module)] and stacks["_1"] == [("1", nn.ReLU)]
