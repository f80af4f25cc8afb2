"""Writes in place: prepared, reference and lowered models compute what the float model does (TRC-01)."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.ao.quantization.quantize_fx as torch_fx
from torch import Tensor, nn

from fx_quant_conformance import refimpl
from fx_quant_conformance.backends.torch_engines.engine import engine
from fx_quant_conformance.refimpl.graph.in_place import trace_values, write_part
from fx_quant_conformance.refimpl.graph.tracing import is_effect
from tests.refimpl.support import both_flows as flows
from tests.refimpl.support.ratios import decibels, make, run
from tests.refimpl.support.writes import OUTSIDE, STATEMENTS, Net, Run, counter
from tests.support.torch_release import need

X = torch.randn(4, 3, 6, 6, generator=torch.Generator().manual_seed(0))


@pytest.mark.rule("TRC-01")
@pytest.mark.parametrize("name", STATEMENTS)
@torch.no_grad()
def test_what_is_written_in_place_is_read_later(name: str) -> None:
    made = make(Net(STATEMENTS[name]).eval(), X)
    assert decibels(made.want, run(made.prepared, (X,))) == float("inf"), "bit for bit"
    assert made.worst > 25, made.ratios()


@pytest.mark.rule("TRC-01")
@pytest.mark.parametrize("name", ["method", "masked_item"])
@torch.no_grad()
def test_torchs_flow_drops_such_a_write_or_cannot_trace_it(name: str) -> None:
    """The other side of the row of deviations.md."""
    net = Net(STATEMENTS[name]).eval()
    want, config = run(net, (X,)), flows.torch_config("fbgemm")
    try:
        mapping = flows.torch_mappings.get_default_qconfig_mapping("x86")
        prepared = torch_fx.prepare_fx(copy.deepcopy(net), mapping, (X,), backend_config=config)
    except TypeError as error:
        assert "does not support item assignment" in str(error)
        return
    prepared(X)
    assert decibels(want, run(torch_fx.convert_to_reference_fx(prepared, backend_config=config), (X,))) < 20


@pytest.mark.rule("TRC-01")
@pytest.mark.parametrize("name", OUTSIDE)
@torch.no_grad()
def test_writes_to_inputs_and_buffers_reach_them_in_every_form(name: str) -> None:
    if name in ("augmented_counter", "assigned_counter"):
        need("traces_buffers")
    net = Net(OUTSIDE[name]).eval()
    before = {key: buffer.clone() for key, buffer in net.named_buffers()}
    made = make(net, X)
    assert all(torch.equal(buffer, before[key]) for key, buffer in net.named_buffers()), "tracing leaves no trace"
    expected, given = copy.deepcopy(net), X.clone()
    expected(given)
    written = {key: value for key, value in expected.named_buffers() if not torch.equal(value, before[key])}
    for form, model in {"prepared": made.prepared, **made.forms}.items():
        copied, own = copy.deepcopy(model), X.clone()
        for key in written:
            copied.get_buffer(key).copy_(before[key])  # calibration wrote to it as well
        with engine("x86"):
            result = copied(own)
        assert decibels(made.want, result) > 25, form
        assert decibels(given, own) > 25 and torch.equal(given, X) == torch.equal(own, X), form
        assert all(decibels(value, copied.get_buffer(key)) > 25 for key, value in written.items()), form


@pytest.mark.rule("TRC-01")
@torch.no_grad()
def test_an_exported_program_keeps_what_is_written() -> None:
    made = make(Net(counter).eval(), X)
    program: Any = refimpl.export_reference(made.forms["decomposed"], (X,)).module()
    before = float(program.model.count)
    program(X)
    assert float(program.model.count) == before + 1


def may_be_a_view(net: Any, x: Tensor) -> Any:
    y = net.conv(x)
    z = y.flatten(1)
    z.mul_(2)
    return y + 1


def in_place_dropout(net: Any, x: Tensor) -> Any:
    y = net.conv(x)
    z = net.drop(y)
    z.sub_(1)
    return y + z


def whole_pair(net: Any, x: Tensor) -> Any:
    pair = net.conv(x).topk(2, 1)
    pair[0].mul_(2)
    return pair


def resized(net: Any, x: Tensor) -> Any:
    y = net.conv(x)
    y.resize_(2, 3)
    return y + 1


@pytest.mark.rule("TRC-01")
@pytest.mark.parametrize(
    ("body", "message"),
    [
        (may_be_a_view, "mul_ writes in place into flatten.*conv is read later.*by the layout of flatten"),
        (in_place_dropout, "sub_ writes in place into drop.*conv is read later.*by the layout of drop"),
        (resized, "resize_ resizes conv, which is read later"),
        (whole_pair, "mul_ writes in place into a part of topk.*, which is read as a whole later"),
    ],
)
def test_where_nobody_can_say_what_a_write_reaches_it_is_an_error_before_anything_runs(body: Run, message: str) -> None:
    with pytest.raises(refimpl.ModelError, match=message):
        make(Net(body).eval(), X)


class Statement(nn.Module):
    def forward(self, x: Tensor) -> Any:
        y = x + 1
        z = y.contiguous()
        z.mul_(2)
        return y


@pytest.mark.rule("TRC-01")
def test_the_error_says_the_users_line() -> None:
    with pytest.raises(refimpl.ModelError, match=r"test_in_place.py:\d+: z.mul_\(2\)"):
        refimpl.fuse_fx(Statement().eval())


class Constant(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.zeros(2))

    def forward(self, x: Tensor) -> Any:
        self.mask = torch.ones(2)
        return x * self.mask


@pytest.mark.rule("TRC-01")
def test_a_buffer_that_gets_a_new_constant_is_an_error_and_stays_as_it_was() -> None:
    model = Constant().eval()
    with pytest.raises(refimpl.ModelError, match="forward gives buffer 'mask' a new constant"):
        refimpl.fuse_fx(model)
    assert torch.equal(model.get_buffer("mask"), torch.zeros(2))


@pytest.mark.rule("TRC-01")
@pytest.mark.parametrize("name", ["views_beside_each_other", "counter"])
def test_the_traced_graph_has_no_write_but_those_that_are_to_be_kept(name: str) -> None:
    nodes = trace_values(Net((STATEMENTS | OUTSIDE)[name]).eval()).graph.nodes
    assert all(node.users or is_effect(node) for node in nodes if node.op.startswith("call_"))
    assert any(map(is_effect, nodes)) == (name in OUTSIDE)


@pytest.mark.rule("TRC-01")
def test_write_part_writes_to_a_copy_through_any_views() -> None:
    whole = torch.arange(24.0).reshape(2, 3, 4)
    expected = whole.clone()
    expected.transpose(1, 2)[:, 1].copy_(torch.tensor([7.0, 8.0, 9.0]))
    steps: Any = (("transpose", (1, 2), {}), ("getitem", ((slice(None), 1),), {}))
    assert torch.equal(write_part(whole, torch.tensor([7.0, 8.0, 9.0]), *steps), expected)
    parts = write_part(whole, 5, ("chunk", (2,), {"dim": 0}), ("getitem", (1,), {}), ("getattr", ("T",), {}))
    assert torch.equal(parts[1], torch.full((3, 4), 5.0)) and torch.equal(parts[0], whole[0])
    assert torch.equal(write_part(whole, -1.0, ("getitem", (whole > 20,), {})), whole.masked_fill(whole > 20, -1.0))
    assert torch.equal(whole, torch.arange(24.0).reshape(2, 3, 4))
