"""Unclaimed support: which dtype configs are tried on a pattern, and what is said of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.ao.nn.quantized.reference as nnqr
from torch import nn
from torch.fx import GraphModule

from backends.base import Capabilities, Execution, UnsupportedPattern
from backends.reference import ReferenceBackend
from conformance.facts.unclaimed import jobs
from conformance.stages.bench import Bench
from refimpl import BackendConfig, BackendPatternConfig, DTypeConfig, DTypeWithConstraints
from reports.schema import Measurement, ModelResult

U8 = DTypeConfig(torch.quint8, torch.quint8, torch.qint8, torch.float)
S8 = DTypeConfig(torch.qint8, torch.qint8, torch.qint8, torch.float)
NARROW = DTypeWithConstraints(dtype=torch.qint8, quant_min_lower_bound=-127, quant_max_upper_bound=127)
S8_NARROW = DTypeConfig(NARROW, NARROW, NARROW, torch.float)
PLAIN_U8, PLAIN_S8 = DTypeConfig(torch.quint8, torch.quint8), DTypeConfig(torch.qint8, torch.qint8)
PRESCRIBED = DTypeWithConstraints(dtype=torch.qint8, scale_exact_match=1 / 256, zero_point_exact_match=-128)
FIXED = DTypeConfig(PRESCRIBED, PRESCRIBED)
LOOKUP = DTypeConfig(torch.float, torch.float, torch.quint8)
S8_CLAIM = "static:in=qint8,w=qint8,b=float32,out=qint8"


def entry(pattern: Any, *dtypes: DTypeConfig) -> BackendPatternConfig:
    return BackendPatternConfig(pattern).set_dtype_configs(list(dtypes))


def weighted(kind: type[nn.Module], *dtypes: DTypeConfig) -> BackendPatternConfig:
    reference = getattr(nnqr, kind.__name__)
    return entry(kind, *dtypes).set_root_module(kind).set_reference_quantized_module(reference)


QUANTIZED = Execution(quantized_ops=("conv2d",), float_fallbacks=())
IN_FLOAT = Execution(quantized_ops=(), float_fallbacks=("all of it",))


class Vendor(ReferenceBackend):
    """The reference model, changed where it quantizes an activation to qint8."""

    def __init__(
        self, config: BackendConfig, lower: Callable[[GraphModule], Any], executed: Execution | None = QUANTIZED
    ) -> None:
        self.claims, self.signed, self.executed = config, lower, executed

    def backend_config(self) -> BackendConfig:
        return self.claims

    def lower(self, reference_model: GraphModule, example_inputs: tuple[Any, ...]) -> Callable[..., Any]:
        output = next(node for node in reference_model.graph.nodes if node.op == "output").args[0]
        lowered = torch.no_grad()(reference_model)
        return self.signed(reference_model) if torch.int8 in output.args else lowered

    def execution(self, lowered: Callable[..., Any]) -> Execution | None:
        return self.executed


LINEARS = BackendConfig("v").set_backend_pattern_configs([weighted(nn.Linear, U8, S8), weighted(nn.Conv2d, U8)])


def declining(model: GraphModule) -> Any:
    raise UnsupportedPattern("no signed kernels")


def run(backend: Vendor) -> list[Measurement | ModelResult]:
    bench = Bench(backend, seed=0, profile="full")
    return [each for job in jobs(bench.config, bench.capabilities, "full") for each in job.run(bench)]


def right(model: GraphModule) -> Any:
    return torch.no_grad()(model)


def test_what_would_work_is_reported_with_the_number_of_cases() -> None:
    (found,) = run(Vendor(LINEARS, right))
    assert isinstance(found, Measurement)
    assert (found.kind, found.topic, found.subject) == ("measurement", "unclaimed", "nn.Conv2d")
    assert found.values == {S8_CLAIM: "executes quantized and correctly in 8 cases"}


class FailsLater:
    """Takes the first case of every claim, and none with groups."""

    def __call__(self, model: GraphModule) -> Any:
        if any(getattr(module, "groups", 1) > 1 for module in model.modules()):
            raise UnsupportedPattern("groups")
        return torch.no_grad()(model)


@pytest.mark.parametrize(
    ("lower", "executed"),
    (
        (lambda model: lambda *inputs: model(*inputs).detach() * 0, QUANTIZED),
        (declining, QUANTIZED),
        (lambda model: lambda *inputs: model.nothing(*inputs), QUANTIZED),
        (FailsLater(), QUANTIZED),
        (right, IN_FLOAT),
        (right, None),
    ),
    ids=("wrong", "declined", "raises", "fails in a further case", "in float", "not shown"),
)
def test_what_is_not_worth_claiming_is_not_reported(lower: Callable[[GraphModule], Any], executed: Any) -> None:
    """Before, each was a row of the report: 40 of qnnpack's, all of them refused or in float."""
    assert run(Vendor(LINEARS, lower, executed)) == []


def tried(*entries: BackendPatternConfig) -> dict[str, list[str]]:
    """The claims that would be tried, by job."""
    config = BackendConfig("c").set_backend_pattern_configs(list(entries))
    found = jobs(config, Capabilities(), "stress")
    return {job.id: [str(each.input_dtype) for each in job.run.args[1]] for job in found}  # type: ignore[attr-defined]


def test_a_pattern_is_tried_with_the_dtypes_of_others_of_its_family() -> None:
    assert tried(weighted(nn.Linear, U8), weighted(nn.Conv2d, S8), entry(nn.ReLU, PLAIN_S8)) == {
        "fact/unclaimed/nn.Linear": ["torch.qint8"], "fact/unclaimed/nn.Conv2d": ["torch.quint8"],
    }  # fmt: skip
    assert tried(weighted(nn.Linear, U8), weighted(nn.Embedding, LOOKUP), weighted(nn.LSTM, S8)) == {}
    assert tried(entry(nn.ReLU, PLAIN_U8), entry(nn.Tanh, PLAIN_S8, PLAIN_U8)) == {
        "fact/unclaimed/nn.ReLU": ["torch.qint8"]
    }


def test_a_pattern_is_tried_with_what_the_op_at_its_root_has() -> None:
    relu = entry((nn.Conv2d, nn.ReLU), U8).set_root_module(nn.Conv2d)
    assert tried(weighted(nn.Linear, S8), weighted(nn.Conv2d, U8), relu) == {
        "fact/unclaimed/nn.Linear": ["torch.quint8"], "fact/unclaimed/nn.Conv2d": ["torch.qint8"],
    }, "what the op does not have, the pattern is not tried with"  # fmt: skip
    assert tried(weighted(nn.Conv2d, U8, S8), relu) == {"fact/unclaimed/nn.Conv2d+nn.ReLU": ["torch.qint8"]}
    assert tried(weighted(nn.Linear, S8), relu) == {
        "fact/unclaimed/nn.Linear": ["torch.quint8"], "fact/unclaimed/nn.Conv2d+nn.ReLU": ["torch.qint8"],
    }, "without an entry for its root"  # fmt: skip


def test_bounds_alone_and_fixed_qparams_are_not_tried() -> None:
    assert tried(weighted(nn.Linear, S8), weighted(nn.Conv2d, S8_NARROW)) == {}
    assert tried(entry(nn.ReLU, PLAIN_U8), entry(nn.Sigmoid, FIXED, PLAIN_U8)) == {}
    assert tried(entry(nn.ReLU, PLAIN_S8), entry(nn.Tanh, S8)) == {}, "without a weight its dtype does not matter"
    both = tried(weighted(nn.Linear, U8), weighted(nn.Conv2d, U8, S8_NARROW, S8))
    assert both == {"fact/unclaimed/nn.Linear": ["torch.qint8"]}, "one of each choice of dtypes"


def test_the_quick_profile_tries_none() -> None:
    assert jobs(LINEARS, Capabilities(), "quick") == ()
    assert [job.id for job in jobs(LINEARS, Capabilities(), "full")] == ["fact/unclaimed/nn.Conv2d"]
