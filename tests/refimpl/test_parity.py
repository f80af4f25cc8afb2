"""Torch's flow is the oracle: same reference graph, same qparams, same bits, on many models (QCM to CVT)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import both_flows as flows
import pytest
import torch
import torch.nn.functional as F
from flow_zoo import ZOO, build
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import refimpl
from refimpl.decide import SHARE, Plan
from refimpl.invariants import is_dequantize, is_quantize

RULES = ("PAT-07", "FUS-03", "OBS-01", "OBS-02", "OBS-04", "OBS-06", "OBS-07", "OBS-08", "CVT-01", "CVT-02", "CVT-06")


def held_to(*rules: str) -> Callable[[Any], Any]:
    """Mark a test with several rules."""

    def mark(test: Any) -> Any:
        for rule in rules:
            test = pytest.mark.rule(rule)(test)
        return test

    return mark


def assert_parity(model: nn.Module, batches: Any, qconfig: Any, engine: str) -> None:
    mapping = flows.global_mapping(qconfig)
    torchs, ours = (flow(model, mapping, batches, engine) for flow in (flows.torch_flow, flows.our_flow))
    flows.assert_same_flow(torchs, ours, batches)


@held_to(*RULES)
@pytest.mark.parametrize("engine", flows.ENGINES)
@pytest.mark.parametrize("name", ZOO)
def test_the_reference_model_is_torchs(name: str, engine: str) -> None:
    model, batches = build(name)
    assert_parity(model, batches, flows.QCONFIG if engine in ("qnnpack", "x86") else flows.PER_CHANNEL, engine)


@held_to(*RULES)
def test_the_zoo_is_large_enough() -> None:
    assert len(ZOO) >= 25


# ---- drawn chains -----------------------------------------------------------------------------------------


class Chain(nn.Module):
    """Steps drawn by name, on rows of 8; a step may look back at an earlier value."""

    def __init__(self, steps: list[tuple[str, int]]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.steps = steps
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in steps])
        self.norms = nn.ModuleList([nn.BatchNorm1d(8) for _ in steps])
        self.relu, self.shared = nn.ReLU(), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Any:
        seen = [x]
        for index, (step, back) in enumerate(self.steps):
            seen.append(self.step(step, index, seen[-1], seen[back % len(seen)]))
        return seen[-1]

    def step(self, step: str, index: int, x: Tensor, earlier: Tensor) -> Any:
        simple: dict[str, Callable[[], Any]] = {
            "linear": lambda: self.layers[index](x),
            "linear relu": lambda: self.relu(self.layers[index](x)),
            "linear F.relu": lambda: F.relu(self.layers[index](x)),
            "linear bn": lambda: self.norms[index](self.layers[index](x)),
            "shared": lambda: self.shared(x),
            "relu": lambda: x.relu(),
            "add": lambda: x + earlier,
            "add relu": lambda: F.relu(torch.add(x, earlier)),
            "mul": lambda: torch.mul(x, earlier),
            "scalar": lambda: x * 0.5,
            "cat": lambda: torch.cat([x, earlier], 0)[: x.size(0)],
            "reshape": lambda: x.reshape(-1, 4, 2).transpose(1, 2).contiguous().view(-1, 8),
            "pool": lambda: F.max_pool1d(x.unsqueeze(1), 3, 1, 1).squeeze(1),
            "exp": lambda: torch.exp(-x.abs()),
        }
        return simple[step]()


STEPS = [
    "linear", "linear relu", "linear F.relu", "linear bn", "shared", "relu", "add", "add relu", "mul", "scalar", "cat",
    "reshape", "pool", "exp",
]  # fmt: skip


@held_to(*RULES, "OBS-09", "OBS-10")
@settings(max_examples=50, derandomize=True, deadline=None)
@given(steps=st.lists(st.tuples(st.sampled_from(STEPS), st.integers(0, 5)), min_size=1, max_size=7))
def test_drawn_chains_are_torchs(steps: list[tuple[str, int]]) -> None:
    model = Chain(steps).eval()
    torch.manual_seed(1)
    batches = [(torch.randn(4, 8),) for _ in range(2)]
    torchs, ours = (flow(model, flows.global_mapping(), batches) for flow in (flows.torch_flow, flows.our_flow))
    assert flows.kinds(ours.reference) == flows.kinds(torchs.reference)
    plan = refimpl.explain(ours.prepared).plan
    assert not torn(ours.reference, plan)
    if not torn(torchs.reference, plan):  # else: the deviation OBS-02 below
        flows.assert_same_flow(torchs, ours, batches)


def torn(reference: Any, plan: Plan) -> list[str]:
    """Name the ops that share an observer between input and output (OBS-02) and whose qparams differ all the same."""
    shares = {decision.node for decision in plan.decisions if decision.dtype_config and decision.observation is SHARE}
    found = []
    for node in reference.graph.nodes:
        quantizes = [value.args[0] for value in node.all_input_nodes if is_dequantize(value)]
        quantizes += [user for user in node.users if is_quantize(user)]
        if node.name in shares and len({flows.numbers_of(reference, quantize) for quantize in quantizes}) > 1:
            found.append(node.name)
    return found


# ---- deviations: what both do, by rule --------------------------------------------------------------------


class Net(nn.Module):
    def __init__(self, run: Callable[..., Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.other, self.bn = nn.Conv2d(2, 2, 1), nn.Conv2d(2, 2, 1), nn.BatchNorm2d(2)
        self.bn.running_mean = torch.tensor([1.0, -1.0])
        self.norm, self.relu, self.run = nn.LayerNorm(4), nn.ReLU(), run

    def forward(self, x: Tensor) -> Any:
        return self.run(self, x)


@dataclass(frozen=True, kw_only=True)
class Deviation:
    """What differs on a model: the count of a kind of node in both reference graphs, or the largest error."""

    rule: str
    run: Callable[..., Any]
    kind: str = "call_function quantize_per_tensor"
    counts: tuple[int, int] | None = None  # torch's and ours
    error: float | None = None  # ours is within it, torch's is not
    engine: str = "qnnpack"


@pytest.mark.rule("OBS-02")
def test_torch_tears_sharing_apart_that_a_later_op_extends() -> None:
    """x feeds relu and cat, both sharing: torch gives x the observer of cat, and relu's output keeps the old one."""
    model = Chain([("relu", 0), ("linear", 0), ("cat", 0)]).eval()
    batches = [(torch.randn(4, 8, generator=torch.Generator().manual_seed(1)),)]
    torchs, ours = (flow(model, flows.global_mapping(), batches) for flow in (flows.torch_flow, flows.our_flow))
    plan = refimpl.explain(ours.prepared).plan
    assert (torn(torchs.reference, plan), torn(ours.reference, plan)) == (["relu"], [])


DEVIATIONS = (
    Deviation(
        rule="PAT-08",  # keyword arguments are arguments
        run=lambda net, x: torch.cat(tensors=[net.conv(x), net.other(x)]),
        counts=(3, 4),
    ),
    Deviation(
        rule="PAT-08",
        run=lambda net, x: net.relu(input=net.conv(x)),
        kind="module ConvReLU2d(Conv2d, ReLU)",
        counts=(0, 1),
    ),
    Deviation(rule="FUS-07", run=lambda net, x: net.bn(net.conv(x)) + net.conv(x), error=0.1),
    Deviation(
        rule="LOW-03",  # a fused add has no alpha
        run=lambda net, x: torch.add(net.conv(x), x, alpha=2),
        error=0.1,
        engine="onednn",
    ),
    Deviation(
        rule="DTY-01",  # the config asks for a float weight, the QConfig for an integer one
        run=lambda net, x: net.norm(net.conv(x)),
        counts=(3, 2),
        engine="onednn",
    ),
)


@pytest.mark.parametrize(
    "deviation", [pytest.param(d, marks=pytest.mark.rule(d.rule), id=f"{d.rule}-{i}") for i, d in enumerate(DEVIATIONS)]
)
def test_deviations_are_known_on_both_sides(deviation: Deviation) -> None:
    model, batches = Net(deviation.run).eval(), [(torch.randn(2, 2, 4, 4, generator=torch.Generator().manual_seed(0)),)]
    both = [
        flow(model, flows.global_mapping(), batches, deviation.engine) for flow in (flows.torch_flow, flows.our_flow)
    ]
    if deviation.counts is not None:
        assert tuple(flows.kinds(flow.reference)[deviation.kind] for flow in both) == deviation.counts
    if deviation.error is not None:
        with torch.no_grad():
            errors = [float((flow(*batches[0]) - model(*batches[0])).abs().max()) for flow in both]
        assert errors[1] < deviation.error < errors[0], f"errors of torch and ours against the float model: {errors}"
