"""The samples of ops without weights: every argument is varied, every variant runs, and no variation is idle."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from backends.native_tables import native_config
from conformance.ops.op_model import MODEL_OF
from conformance.ops.variants import Arguments, Fixed, OpSamples
from refimpl import ObservationType
from refimpl.patterns import leaf_name, leaves
from tests.conformance.support.ops_without_weights import OP_SAMPLES
from tests.conformance.support.samples_budget import MOST_VARIANTS

each_op = pytest.mark.parametrize("op", OP_SAMPLES, ids=leaf_name)
OPERANDS = {"self", "input", "tensors", "mat1", "mat2", "a"}
# The names under which torch knows ops that Python wraps, and an argument that the wrapper adds.
WRAPPED = {
    F.max_pool1d: "max_pool1d_with_indices",
    F.max_pool2d: "max_pool2d_with_indices",
    F.max_pool3d: "max_pool3d_with_indices",
}


def schema_arguments(name: str) -> Iterator[str]:
    """Arguments of all forms of an op that take a tensor, or a list of them, and give a new one."""
    schemas = torch._C._jit_get_schemas_for_operator(f"aten::{name}")
    assert schemas, name
    for schema in schemas:
        names = [argument.name for argument in schema.arguments]
        first = str(schema.arguments[0].type)
        if first in ("Tensor", "List[Tensor]") and "out" not in names:
            yield from names


def signature(op: Any) -> set[str]:
    """The names of an op's arguments beside its operands."""
    if op == "shape":
        return set()
    if op in WRAPPED:
        names: Any = [*schema_arguments(WRAPPED[op]), "return_indices"]
    elif isinstance(op, str):
        names = schema_arguments(op)
    elif isinstance(op, type) or inspect.isfunction(op) or op.__module__ == "_operator":
        names = inspect.signature(op).parameters
    else:
        names = schema_arguments(op.__name__)
    operands = OPERANDS | ({"other"} if op is torch.matmul else set())
    return {"other" if name == "b" else name for name in names if name not in operands}


@each_op
def test_every_argument_of_the_signature_is_varied_or_fixed_for_a_reason(op: Any) -> None:
    table = OP_SAMPLES[op].arguments
    assert signature(op) - set(table) == set()
    for name, values in table.items():
        if isinstance(values, Fixed):
            assert values.reason
        else:
            assert len(values) > 1, name
            assert name.startswith("_") or name == "shape" or name in signature(op), name


@each_op
def test_every_value_is_met_and_their_number_is_bounded(op: Any) -> None:
    samples = OP_SAMPLES[op]
    variants = [arguments for _, arguments in samples.variants()]
    assert len(variants) <= MOST_VARIANTS
    for name, values in samples.arguments.items():
        if not isinstance(values, Fixed):
            assert all(any(variant[name] == value for variant in variants) for value in values), name
    if op not in ("contiguous", torch.permute, torch.permute_copy):  # what they do depends on the rank
        assert samples.is_valid(samples.base())


def run(op: Any, samples: OpSamples, arguments: Arguments) -> Tensor:
    """Build, trace and run a variant; the same inputs and parameters for the same shapes."""
    torch.manual_seed(0)
    inputs = samples.inputs(arguments)
    drawn = [torch.randn(each.shape) for each in inputs]
    model = MODEL_OF[len(inputs)]([samples.step(op, arguments)]).eval()
    traced = torch.fx.symbolic_trace(model)
    with torch.no_grad():
        found, again = (each(*(x.clone() for x in drawn)) for each in (model, traced))
    assert torch.equal(found, again)
    assert found.numel() and bool(found.isfinite().all())
    result: Tensor = found
    return result


@pytest.mark.slow
@each_op
def test_every_variant_builds_traces_and_runs(op: Any) -> None:
    samples = OP_SAMPLES[op]
    for _, arguments in samples.variants():
        run(op, samples, arguments)


# What does not show in the numbers: where they are stored, and what is only checked.
SILENT = {"inplace", "memory_format", "output_size", "p", "training", "recompute_scale_factor"}


@each_op
def test_every_argument_makes_a_difference_in_some_variant(op: Any) -> None:
    samples = OP_SAMPLES[op]
    base = samples.base()
    idle = {name for name in base if name != "shape" and not name.startswith("_") and name not in SILENT}
    for varied, arguments in samples.variants():
        for name in idle.intersection(varied):
            other = {**arguments, name: base[name]}
            if samples.is_valid(other) and not torch.equal(run(op, samples, arguments), run(op, samples, other)):
                idle.remove(name)
    assert not idle


@pytest.mark.rule("OBS-02")
def test_every_op_of_the_native_configs_that_shares_its_observer_has_samples() -> None:
    for entry in native_config("qnnpack").configs:
        if entry.observation_type is ObservationType.OUTPUT_SHARE_OBSERVER_WITH_INPUT:
            assert all(leaf in OP_SAMPLES for leaf in leaves(entry.normal_pattern)), entry


def called(op: Any, **away: Any) -> list[Any]:
    """The nodes of a variant: the base with some arguments away from it."""
    samples = OP_SAMPLES[op]
    arguments = {**samples.base(), **away}
    assert samples.is_valid(arguments)
    model = MODEL_OF[len(samples.inputs(arguments))]([samples.step(op, arguments)])
    return [node for node in torch.fx.symbolic_trace(model).graph.nodes if node.op.startswith("call")]


@pytest.mark.parametrize("op", (operator.add, torch.sub, torch.mul), ids=leaf_name)
def test_a_number_is_the_second_operand_or_the_first(op: Callable[..., Any]) -> None:
    (second,), (first,) = called(op, other=0.3), called(op, other=0.3, _number_first=True)
    assert (second.target, first.target) == (op, op)
    assert second.args[1] == 0.3 and first.args[0] == 0.3
    (twice,) = called(op, other="itself")
    assert twice.args[0] is twice.args[1]


def test_addmm_takes_its_bias_first_and_its_weight_last() -> None:
    (node,) = called(torch.addmm, beta=0.5)
    bias, x, weight = node.args
    assert (bias.op, x.op, weight.op, dict(node.kwargs)) == ("get_attr", "placeholder", "get_attr", {"beta": 0.5})


def test_a_shape_is_read_once_and_used_on_the_tensor() -> None:
    for away in ({}, {"dim": None}):
        size, reshape = called("size", **away)
        assert (size.target, reshape.target) == ("size", "reshape")
        assert size in reshape.args
    attribute, item, reshape = called("shape")
    assert attribute.args[1] == "shape" and item in reshape.args


@pytest.mark.slow
@pytest.mark.parametrize("rank", (1, 2, 3))
def test_windows_end_outside_of_the_input_where_ceil_mode_is_varied(rank: int) -> None:
    for kind in (
        (nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d)[rank - 1],
        (F.avg_pool1d, F.avg_pool2d, F.avg_pool3d)[rank - 1],
    ):
        samples = OP_SAMPLES[kind]
        shape_of = partial(run, kind, samples)
        rounded_up = [arguments for _, arguments in samples.variants() if arguments["ceil_mode"]]
        assert any(shape_of(each).shape != shape_of({**each, "ceil_mode": False}).shape for each in rounded_up)


def test_operands_are_broadcast_on_either_side_and_across_ranks() -> None:
    pairs = OP_SAMPLES[torch.add].arguments["shape"]
    assert isinstance(pairs, tuple)
    results = [(torch.zeros(left) + torch.zeros(right)).shape for left, right in pairs]
    zipped = list(zip(pairs, results, strict=True))
    assert any(left == result != right for (left, right), result in zipped)
    assert any(right == result != left for (left, right), result in zipped)
    assert any(left != result != right for (left, right), result in zipped)
    assert any(len(left) < len(right) for left, right in pairs) and any(len(left) > len(right) for left, right in pairs)
    assert {len(result) for result in results} >= {1, 3, 4, 5}
