"""The models that the suite brings along: built the same from one seed, small, and quantized where they should be."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node

from fx_quant_conformance.backends.base import Flow
from fx_quant_conformance.backends.torch_engines.qnnpack import QnnpackBackend
from fx_quant_conformance.backends.torch_engines.tables import NativeName, native_config
from fx_quant_conformance.conformance.claims.claim import enumerate_claims
from fx_quant_conformance.conformance.stages.bench import Bench
from fx_quant_conformance.conformance.stages.meaning import tensors_of
from fx_quant_conformance.conformance.whole_models.architectures import ARCHITECTURES, Architecture
from fx_quant_conformance.conformance.whole_models.jobs import unit_of
from fx_quant_conformance.conformance.whole_models.setups import ModelSetup, activation_dtypes_of, make_mapping
from fx_quant_conformance.conformance.whole_models.subgraphs import cut_subgraphs
from fx_quant_conformance.conformance.whole_models.units import quantize_model
from fx_quant_conformance.refimpl import explain

BY_NAME = {architecture.name: architecture for architecture in ARCHITECTURES}
every_architecture = pytest.mark.parametrize("architecture", ARCHITECTURES, ids=lambda each: each.name)
every_flow = pytest.mark.parametrize("flow", ("ptq", "qat"))
# What qnnpack's config, the widest of the native ones, has no pattern for.
IN_FLOAT: dict[str, tuple[str, ...]] = {
    "float_between": ("nn.GELU", "operator.sub"),
    "chunked": ("operator.getitem", "torch.chunk", "torch.split"),
    "transformer": ("nn.GELU", "nn.LayerNorm"),
    "lstm_tagger": ("operator.getitem",),
}


@cache
def bench() -> Bench:
    return Bench(QnnpackBackend(), seed=0, profile="full")


@cache
def converted(name: str, flow: Flow) -> tuple[Any, GraphModule, tuple[Tensor, ...]]:
    """The float model, its reference model, and an input."""
    case = BY_NAME[name].case()
    torch.manual_seed(0)
    model = case.build()
    claims = enumerate_claims(bench().config, bench().capabilities)
    setup = ModelSetup(flow=flow, activation=torch.quint8, scheme="per_channel_symmetric")
    unit = unit_of(name, model, case, claims, setup)
    reference = quantize_model(bench(), unit).reference  # QAT trains the float model's own parameters
    return model.eval(), reference, unit.calibration[0]


@pytest.mark.slow
@every_architecture
@every_flow
def test_all_of_a_model_is_quantized_but_for_what_no_pattern_names(architecture: Architecture, flow: Flow) -> None:
    plan = explain(converted(architecture.name, flow)[1]).plan
    refused = [decision.node for decision in plan.decisions if not decision.is_quantized]
    assert not refused
    assert sorted({kind for _, kind, _ in plan.unmatched}) == list(IN_FLOAT.get(architecture.name, ()))


@pytest.mark.rule("QAT-02")
def test_training_changes_the_weights() -> None:
    flows: tuple[Flow, ...] = ("ptq", "qat")
    before, after = (dict(converted("residual", flow)[1].named_parameters()) for flow in flows)
    assert before.keys() == after.keys()
    assert all(not torch.equal(before[name], after[name]) for name in before)


@pytest.mark.rule("QCM-02")
@pytest.mark.parametrize(
    ("name", "dtypes"),
    [
        ("qnnpack", (torch.qint8, torch.quint8)),
        ("fbgemm", (torch.quint8,)),
        ("onednn", (torch.quint8,)),
    ],
)
def test_the_dtypes_of_activations_are_the_configs(name: NativeName, dtypes: tuple[torch.dtype, ...]) -> None:
    claims = enumerate_claims(native_config(name), bench().capabilities)
    assert activation_dtypes_of(claims) == dtypes
    for dtype in dtypes:
        model = torch.nn.ModuleList([torch.nn.Linear(1, 1), torch.nn.LSTM(1, 1)])
        mapping = make_mapping(claims, ModelSetup(flow="ptq", activation=dtype, scheme="per_tensor_symmetric"), model)
        linear, lstm = (mapping.object_type_qconfigs[kind].activation() for kind in (torch.nn.Linear, torch.nn.LSTM))
        assert (linear.dtype, linear.is_dynamic) == (dtype, False)
        assert (lstm.dtype, lstm.is_dynamic) == (torch.quint8, True)
        assert torch.nn.Conv2d not in mapping.object_type_qconfigs


class Recorder(Interpreter):
    """Keeps what every node gave, by name."""

    def __init__(self, model: GraphModule) -> None:
        super().__init__(model)
        self.recorded: dict[str, Any] = {}

    def run_node(self, n: Node) -> Any:
        found = super().run_node(n)
        self.recorded[n.name] = found.clone() if isinstance(found, Tensor) else found
        return found


@every_architecture
@every_flow
def test_every_quantized_pattern_is_cut_out_and_computes_what_it_does_in_the_whole(
    architecture: Architecture, flow: Flow
) -> None:
    _, reference, inputs = converted(architecture.name, flow)
    recorder = Recorder(reference)
    with torch.no_grad():
        recorder.run(*(value.clone() for value in inputs))
    nodes = {node.name: node for node in reference.graph.nodes}
    parts = list(cut_subgraphs(reference, [inputs], with_regions=True))
    found = [subgraph for subgraph in parts if not subgraph.is_region]
    order = [list(nodes).index(subgraph.node) for subgraph in found]
    assert order == sorted(order)
    assert {subgraph.node for subgraph in found} == {decision.node for decision in explain(reference).plan.decisions}
    for subgraph in parts:
        subgraph.model.graph.lint()
        with torch.no_grad():
            alone = tensors_of(subgraph.model(*subgraph.batches[0]))
        assert len(alone) == len(subgraph.gives)
        for value, name in zip(alone, subgraph.gives, strict=True):
            assert torch.equal(value, recorder.recorded[name]), subgraph.node
