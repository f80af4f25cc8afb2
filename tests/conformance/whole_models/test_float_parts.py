"""What stands between the quantized layers: wiring faults in every family are found, and other right ways are not."""

from __future__ import annotations

import operator
import random
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from fx_quant_conformance.backends.base import Backend
from fx_quant_conformance.backends.discovery import find_backend
from fx_quant_conformance.backends.reference import ReferenceBackend
from fx_quant_conformance.conformance.claims.claim import enumerate_claims
from fx_quant_conformance.conformance.own_models.given import GivenModel, settle
from fx_quant_conformance.conformance.own_models.jobs import _make_unit
from fx_quant_conformance.conformance.stages.bench import Bench
from fx_quant_conformance.conformance.whole_models.judging import draw_reference, verify_model
from fx_quant_conformance.conformance.whole_models.setups import ModelSetup
from fx_quant_conformance.conformance.whole_models.subgraphs import cut_subgraphs
from fx_quant_conformance.reports.schema import Check
from fx_quant_conformance.reports.verdicts import Verdict
from tests.support.families import FAMILIES, make
from tests.support.honest_floats import VARIANTS, HonestFloats
from tests.support.rewiring import Rewired, changes, list_faults

FAULTS = 3
"""Wiring faults of a family that are tried."""
SHOWS = 0.02
"""How far a fault moves an output, as a part of its largest value."""


@lru_cache(maxsize=32)
def quantized(family: str, seed: int = 0) -> tuple[GraphModule, Sequence[tuple[Tensor, ...]]]:
    """The reference model of a family, and the inputs on which it is judged."""
    return quantize(ReferenceBackend(), *make(FAMILIES[family], seed), seed)


def quantize(
    backend: Backend, model: nn.Module, inputs: tuple[Any, ...], seed: int = 0, calibration: Sequence[Any] = ()
) -> tuple[GraphModule, Sequence[tuple[Tensor, ...]]]:
    bench = Bench(backend, seed=seed, profile="quick")
    unit = _make_unit(
        bench,
        f"model/own/{type(model).__name__}/{seed}",
        enumerate_claims(backend.backend_config(), backend.capabilities()),
        ModelSetup(flow="ptq", activation=torch.quint8, scheme="per_channel_symmetric"),
        settle(GivenModel(model=model, example_inputs=inputs, calibration=calibration)),
    )
    return draw_reference(bench, unit)


def test_a_batch_that_is_the_example_again_is_not_judged_twice() -> None:
    model, (x, *_) = nn.Sequential(nn.Linear(4, 4)).eval(), torch.randn(3, 2, 4).unbind()
    _, judged = quantize(ReferenceBackend(), model, (x,), calibration=[(x.clone(),), (x + 1,)])
    assert [len(judged), bool(torch.equal(judged[0][0], judged[1][0]))] == [2, False]
    _, judged = quantize(ReferenceBackend(), model, (x,), calibration=[(x.clone(),)])
    assert len(judged) == 1


def judge(backend: Backend, family: str, seed: int = 0) -> Check:
    reference, batches = quantized(family, seed)
    return verify_model(Bench(backend, seed=seed, profile="quick"), family, reference, batches, takes_apart=True)


def evidence_of(check: Check) -> dict[str, Any]:
    return dict(check.evidence)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_right_lowering_of_every_family_is_judged(family: str) -> None:
    """The reference backend shows no execution; but for that it is verified, and nothing is left open."""
    check = judge(Rewired(), family)
    assert check.verdict is Verdict.UNSHOWN and evidence_of(check)["otherwise"] == "VERIFIED", check
    told = evidence_of(check)
    assert max(told["decided"], told["decided_alone"], told.get("decided_within", 0.0)) > 0.9


@pytest.mark.parametrize("family", FAMILIES)
def test_wiring_faults_are_found(family: str) -> None:
    reference, batches = quantized(family)
    leaves = enumerate(torch.utils._pytree.tree_leaves(reference(*batches[0])))
    expected = {number: each for number, each in leaves if isinstance(each, Tensor)}
    faults = [f for f in list_faults(reference, batches[0]) if changes(reference, f, batches[0], expected) > SHOWS]
    assert faults
    random.Random(family).shuffle(faults)
    for fault in faults[:FAULTS]:
        check = judge(Rewired(fault), family)
        assert check.verdict in (Verdict.REFUTED, Verdict.FALLBACK), (str(fault), check.message)


@pytest.mark.parametrize("variant", VARIANTS)
def test_other_right_ways_are_not_refuted(variant: str) -> None:
    backend, tried = HonestFloats(VARIANTS[variant]), 0
    for family in FAMILIES:
        reference, batches = quantized(family)
        used = backend.mode.used
        backend.lower(reference, batches[0])(*batches[0])
        if backend.mode.used == used:  # it has nothing that the variant computes
            continue
        check, tried = judge(backend, family), tried + 1
        assert check.verdict is Verdict.UNSHOWN, (family, check.message)
    assert tried >= 2, "hardly a family has what the variant computes"


class Reticent(ReferenceBackend):
    """Lowers no model with more than one result."""

    def lower(self, reference_model: GraphModule, example_inputs: tuple[Any, ...]) -> Any:
        """Raise for several results."""
        if isinstance(reference_model.graph.output_node().args[0], tuple):
            raise RuntimeError("one result at a time")
        return super().lower(reference_model, example_inputs)


def test_that_inner_values_are_not_returned_is_said() -> None:
    check = judge(Reticent(), "Vision")
    assert check.verdict is Verdict.UNSHOWN and "decided_within" not in evidence_of(check)
    assert "patterns hold; within it nothing was seen: lower raised RuntimeError: one result at a time" in check.message


class Recurring(nn.Module):
    """Layers around a recurrent one, which a machine quantizes when it runs: it rightly gives other states."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.gru, self.last = nn.Linear(8, 8), nn.GRU(8, 8, batch_first=True), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Return the last layer's result."""
        result: Tensor = self.last(self.gru(self.first(x))[0])
        return result


def test_an_item_of_several_results_is_judged_on_the_item_that_the_model_gives() -> None:
    backend = find_backend("qnnpack")
    if reason := backend.unavailable_reason():
        pytest.skip(reason)
    torch.manual_seed(0)
    reference, batches = quantize(backend, Recurring().eval(), (torch.randn(2, 6, 8),))
    reads = [part.reads for part in cut_subgraphs(reference, batches, with_regions=True)]
    (item,) = (
        node.name for node in reference.graph.nodes if node.target is operator.getitem and "gru" in str(node.args)
    )
    assert (item,) in reads
    check = verify_model(Bench(backend, seed=0, profile="quick"), "recurring", reference, batches, takes_apart=True)
    assert check.verdict is Verdict.VERIFIED, check.message
