"""The decision log: every match, where its QConfig came from, what was chosen or why not (OBS-15, DTY-09)."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import nn

from fx_quant_conformance import refimpl
from fx_quant_conformance.refimpl import ModelError
from tests.refimpl.support import both_core as core
from tests.refimpl.support import both_flows as flows
from tests.refimpl.support.zoo import build_named


@pytest.mark.rule("OBS-15")
def test_the_log_has_a_row_per_match_in_graph_order() -> None:
    model, batches = build_named("Residual")
    prepared = refimpl.prepare_fx(model, flows.global_mapping(), batches[0], backend_config=flows.our_config("fbgemm"))
    rows = refimpl.explain(prepared).rows()
    assert [row["pattern"] for row in rows] == ["nni.ConvReLU2d", "nn.Conv2d", "operator.add+F.relu"]
    assert [row["qconfig"] for row in rows] == ["global"] * 3
    assert rows[0]["dtype config"] == "in=quint8, w=qint8, out=quint8"
    assert "input x: observer 0 (OBS-01); output" in rows[0]["observers"]
    assert rows[0]["reason"] == ""


@pytest.mark.rule("OBS-15")
def test_converted_models_keep_the_log_and_others_have_none() -> None:
    model, batches = build_named("Mlp")
    flow = flows.our_flow(model, flows.global_mapping(), batches)
    assert refimpl.explain(flow.reference).rows() == refimpl.explain(flow.prepared).rows()
    assert refimpl.explain(refimpl.convert_fx(flow.prepared)).rows() == refimpl.explain(flow.prepared).rows()
    for other in (nn.Linear(2, 2), torch.fx.symbolic_trace(nn.Linear(2, 2))):
        with pytest.raises(ModelError, match="has no decision log: it was not made by refimpl's prepare_fx"):
            refimpl.explain(other)


@pytest.mark.rule("OBS-15")
@pytest.mark.rule("DTY-09")
def test_the_log_tells_modes_and_special_modules_apart_and_names_what_no_pattern_matches() -> None:
    def run(net: Any, x: Any) -> Any:
        return torch.exp(net.b(net.inner(net.loose(net.a(x)))))

    config = refimpl.PrepareCustomConfig().set_standalone_module_name("inner", None, (core.X,), None, None)
    model = core.Net(run, inner=nn.Sequential(nn.Linear(4, 4)), loose=nn.SELU()).eval()
    mapping = flows.global_mapping().set_module_name("a", core.NAMED.default_dynamic_qconfig)
    log = refimpl.explain(core.prepared(model, mapping, prepare_custom_config=config))
    assert {row["node"]: row["dtype config"] for row in log.rows()} == {
        "a": "in=quint8, w=qint8, out=float32, dynamic",
        "inner": "standalone module",
        "b": "in=quint8, w=qint8, out=quint8",
        "loose": "float",
        "exp": "float",
    }
    reasons = {row["node"]: row["reason"] for row in log.rows()}
    assert reasons["exp"] == reasons["loose"] == "no pattern matches"
    assert {row["node"]: row["qconfig"] for row in log.rows()}["a"] == "module_name 'a'"


def is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(isinstance(key, str) and is_plain(part) for key, part in value.items())
    return all(map(is_plain, value)) if isinstance(value, list) else value is None or type(value) in (str, int, bool)


@pytest.mark.rule("OBS-15")
@pytest.mark.rule("DTY-09")
def test_the_dict_form_is_plain_builtins_and_says_all_of_it() -> None:
    model = core.Net(lambda net, x: torch.sigmoid(torch.cat([net.relu(net.a(x)), x]))).eval()
    log = refimpl.explain(core.prepared(model))
    found = log.to_dict()
    assert is_plain(found) and json.loads(json.dumps(found)) == found
    assert [entry["node"] for entry in found["decisions"]] == [decision.node for decision in log.plan.decisions]
    assert [(entry["value"], entry["role"], entry["rule"]) for entry in found["observers"]] == [
        (slot.value, slot.role, slot.rule) for slot in log.plan.slots
    ]
    assert found["fusions"] == ["nn.Linear+nn.ReLU at a"]
    refused = next(entry for entry in found["decisions"] if entry["node"] == "sigmoid")
    assert refused["refusals"][0]["rule"] == "DTY-05"
    row = next(row for row in log.rows() if row["node"] == "sigmoid")
    assert row["dtype config"] == "float" and "sigmoid" in str(log) and "DTY-05" in str(log)
    assert row["reason"].startswith("dtype config 0: DTY-05: input fixed (scale, zero point) is None")


class Inner(nn.Module):
    def forward(self, x: Any) -> Any:
        return torch.relu(x)  # the inner line


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()

    def forward(self, x: Any) -> Any:
        return self.inner(x) + x  # the outer line


def test_a_node_says_which_lines_of_forward_it_comes_from() -> None:
    """The last line is where the op is called, as in a traceback; fx's own nodes say so in as many words."""
    fused = refimpl.fuse_fx(Outer().eval())
    traces = {node.name: node.stack_trace or "" for node in fused.graph.nodes}
    outer, inner = "return self.inner(x) + x  # the outer line", "return torch.relu(x)  # the inner line"
    assert outer in traces["relu"] and traces["relu"].endswith(inner)
    assert traces["add"].endswith(outer) and inner not in traces["add"]
    assert __file__ in traces["relu"] and "in forward" in traces["relu"]
