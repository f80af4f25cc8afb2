"""Both flows, one answer: a sample of claims, and drawn graphs. `python -m benchmarks.pt2e_flows` tries them all."""

# ruff: noqa: E402
from __future__ import annotations

from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.torchao import require_torchao

require_torchao()

from benchmarks import pt2e_flows, pt2e_graphs, pt2e_models, pt2e_reasons
from benchmarks.pt2e_both import Both, convert_both, find_difference
from benchmarks.pt2e_flows import Outcome, compare_claims, make_row
from benchmarks.pt2e_graphs import Source, search
from benchmarks.pt2e_reasons import find_reason
from fx_quant_conformance.conformance.claims.claim import enumerate_claims
from fx_quant_conformance.conformance.fuzz.graph import DrawnGraph
from fx_quant_conformance.conformance.whole_models.architectures import ARCHITECTURES
from fx_quant_conformance.refimpl import (
    BackendConfig,
    QConfigMapping,
    default_backend_config,
    get_default_qconfig_mapping,
)

SAMPLE = (
    "nn.Conv2d/*/ptq/*",
    "nn.Conv1d+nn.ReLU/*/ptq/per_channel_symmetric",
    "nn.Conv2d/*/qat/per_channel_symmetric",
    "nn.ConvTranspose2d/*/ptq/*",
    "F.linear+F.relu/*dynamic*",
    "nn.Linear/dynamic:in=float16*",
    "nn.LSTM/dynamic*per_channel_symmetric",
    "torch.cat/*/ptq/*",
    "nn.Sigmoid/*/ptq/*",
    "operator.add+nn.ReLU/*/ptq/*",
    "F.instance_norm/*/ptq/*",
    ".reshape/*/ptq/*",
    "nn.Embedding/*w=quint8*/ptq/*",
    "nnqat.Conv1d/*",
)


def _compare_some(*globs: str) -> list[Outcome]:
    """Return the outcomes of native's claims that one of the globs matches."""
    every = enumerate_claims
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(
            pt2e_flows,
            "enumerate_claims",
            lambda *given: [claim for claim in every(*given) if any(fnmatchcase(claim.id, glob) for glob in globs)],
        )
        return list(compare_claims("native"))


@pytest.fixture(scope="module")
def outcomes() -> list[Outcome]:
    """Of the sample of native's claims."""
    return _compare_some(*SAMPLE)


@pytest.mark.slow
def test_each_claim_of_the_sample_is_the_same_or_has_a_reason(outcomes: list[Outcome]) -> None:
    assert {glob for glob in SAMPLE if not any(fnmatchcase(each.claim.id, glob) for each in outcomes)} == set()
    assert {str(each.claim): each.difference for each in outcomes if each.difference and each.reason is None} == {}
    differing = {each.reason.key for each in outcomes if each.reason is not None}
    assert differing == {"real zero points", "qat module"}
    row = make_row("native", outcomes)
    assert row["unexplained"] == 0 and row["without an aten form"] == row["with a reason"] == 1
    assert row["carry over bit for bit"] == row["pairs"] - 2


def test_a_reason_that_its_experiment_does_not_show_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault beside the batch norm that FX keeps: the outputs differ for another reason too."""

    def convert_badly(*given: Any, **options: Any) -> Both:
        both = convert_both(*given, **options)
        _shift_biases(both)
        return both

    monkeypatch.setattr(pt2e_reasons, "convert_both", convert_badly)
    (outcome,) = _compare_some("nni.ConvBn2d/*/ptq/per_channel_symmetric")
    reason = find_reason(outcome.claim)
    assert reason is not None
    assert reason.key == "batch norm kept"
    assert outcome.difference == "the outputs differ"
    assert outcome.reason is None


def _shift_biases(both: Both) -> None:
    for name, parameter in both.converted.named_parameters():
        if name.endswith("bias"):
            parameter.data += 10.0


@pytest.mark.slow
def test_drawn_graphs_of_claimed_patterns_give_the_same_in_both_flows() -> None:
    found = search(Source("native"), count=20, seed=1)
    assert (found.smallest, found.difference) == (None, "")
    assert len(found.compared) == len({graph.to_json() for graph in found.compared}) == 20
    assert max(len(graph.calls) for graph in found.compared) > 1


@pytest.mark.slow
def test_a_graph_that_differs_is_shrunk(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: Source, graph: DrawnGraph) -> str:
        if len(graph.calls) > 2:
            raise ValueError("more than two")
        return ""

    monkeypatch.setattr(Source, "compare", fail)
    monkeypatch.setattr(pt2e_graphs, "is_broken_by_torchao", lambda _: False)
    found = search(Source("native"), count=60, seed=1)
    assert found.smallest is not None
    assert len(found.smallest.calls) == 3
    assert found.difference == "ValueError: more than two"


@pytest.mark.slow
def test_whole_models_are_the_same_or_have_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {"shared_linear", "cat_of_ranges", "dlrm"}
    monkeypatch.setattr(pt2e_models, "ARCHITECTURES", [each for each in ARCHITECTURES if each.name in names])
    monkeypatch.setattr(pt2e_models, "_make_digits", lambda: _fail("digits"))
    rows = {(row.model, row.setup[:3]): row for row in pt2e_models.compare_models("native")}
    digits = {("digits", "ptq"), ("digits", "qat")}
    assert {key for key, row in rows.items() if row.difference and not row.reason} == digits
    assert {key for key, row in rows.items() if row.reason} == {("dlrm", "ptq"), ("dlrm", "qat")}
    same = {(name, flow) for name in names - {"dlrm"} for flow in ("ptq", "qat")}
    assert {key for key, row in rows.items() if not row.difference} == same


def _fail(message: object) -> Any:
    raise RuntimeError(message)


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> Any:
        return self.layer(x)


@pytest.mark.parametrize("fault", ["weight", "output"])
def test_a_difference_in_a_weight_or_an_output_is_found(fault: str) -> None:
    """The comparison can fail: of the converted program one number is changed."""
    torch.manual_seed(0)
    batches = [(torch.randn(2, 6),)]
    convert = partial(convert_both, mapping=get_default_qconfig_mapping("x86"), config=default_backend_config())
    both = convert(_Model(), batches=batches)
    assert find_difference(both, batches) == ""
    if fault == "weight":
        integers = next(value for name, value in both.converted.named_buffers() if name.startswith("_frozen"))
        integers[0, 0] += 1
        inputs = [(torch.zeros(2, 6),)]  # which hide it from the outputs
        assert "only in PT2E" in find_difference(both, inputs)
    else:
        _shift_biases(both)
        assert find_difference(both, batches) == "the outputs differ"


def test_a_quantizer_of_another_config_differs() -> None:
    torch.manual_seed(0)
    batches = [(torch.randn(2, 6),)]
    mapping: QConfigMapping = get_default_qconfig_mapping("x86")
    both = convert_both(_Model(), mapping, default_backend_config(), batches)
    nothing = convert_both(_Model(), mapping, BackendConfig("nothing"), batches)
    assert find_difference(both._replace(converted=nothing.converted), batches) != ""
