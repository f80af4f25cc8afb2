"""The samples of every op: each argument is varied, or fixed for a reason; each variant runs, and none is idle."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fx_quant_conformance.conformance.ops.table import RECORDS
from fx_quant_conformance.conformance.ops.variants import Fixed
from fx_quant_conformance.refimpl.config.patterns import leaf_name
from tests.conformance.support.dynamic_flows import flat, inputs_of, model_of
from tests.conformance.support.samples_budget import MOST_VARIANTS

each_op = pytest.mark.parametrize("op", RECORDS, ids=leaf_name)
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
    names: Any
    if op == "shape":
        return set()
    if op in (nn.LSTM, nn.GRU):  # which take what their base takes, but for its mode; a GRU has no projections
        names = {*inspect.signature(nn.RNNBase).parameters, "hx"} - {"mode"}
        names -= {"proj_size"} if op is nn.GRU else set()
    elif op in WRAPPED:
        names = [*schema_arguments(WRAPPED[op]), "return_indices"]
    elif isinstance(op, str):
        names = schema_arguments(op)
    elif isinstance(op, type):
        names = [*inspect.signature(op).parameters, *inspect.signature(vars(op).get("forward", op)).parameters]
    elif inspect.isfunction(op) or op.__module__ == "_operator":
        names = inspect.signature(op).parameters
    else:
        names = schema_arguments(op.__name__)
    operands = OPERANDS | ({"other"} if op is torch.matmul else set())
    return {"other" if name == "b" else name for name in names if name not in operands}


@each_op
def test_every_argument_of_the_signature_is_varied_or_fixed_for_a_reason(op: Any) -> None:
    samples = RECORDS[op]
    missing = signature(op) - set(samples.arguments)
    assert not missing, f"{leaf_name(op)}: vary {missing} or say why not"
    variants = [arguments for _, arguments in samples.variants()]
    assert len(variants) <= MOST_VARIANTS
    for name, values in samples.arguments.items():
        if isinstance(values, Fixed):
            assert values.reason
        else:
            assert len(values) > 1, name
            met = {str(arguments[name]) for arguments in variants}
            assert {str(value) for value in values} <= met, name


def run(op: Any, arguments: dict[str, Any]) -> list[Tensor]:
    """Build, trace and run a variant; the same inputs and parameters for the same shapes."""
    torch.manual_seed(0)
    model = model_of(op, arguments)
    torch.manual_seed(1)
    drawn = [4 * x if x.is_floating_point() else x for x in inputs_of(op, arguments)]
    with torch.no_grad():
        found, again = (flat(each(*(x.clone() for x in drawn))) for each in (model, torch.fx.symbolic_trace(model)))
    for one, other in zip(found, again, strict=True):
        assert torch.equal(one, other)
        assert bool(one.isfinite().all())
    is_nothing = 0 in arguments.get("shape", ()) or arguments.get("other") == "itself"  # x - x is one
    assert is_nothing or any(bool(each.any()) for each in found), arguments
    return found


# What does not show in the numbers: where they are stored, what is only checked, and what counts in training.
SILENT = {
    "inplace",
    "memory_format",
    "output_size",
    "p",
    "training",
    "recompute_scale_factor",
    "dropout",
    "padding_idx",
    "scale_grad_by_freq",
    "sparse",
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Implicit dimension choice for softmax")
@each_op
def test_every_variant_runs_and_every_argument_makes_a_difference_in_some(op: Any) -> None:
    samples = RECORDS[op]
    base = samples.base()
    idle = {name for name in base if name != "shape" and not name.startswith("_") and name not in SILENT}
    for varied, arguments in samples.variants():
        found = run(op, arguments)
        for name in idle.intersection(varied):
            other = {**arguments, name: base[name]}
            if samples.is_valid(other) and not all_equal(found, run(op, other)):
                idle.remove(name)
    assert not idle


def all_equal(found: list[Tensor], others: list[Tensor]) -> bool:
    return len(found) == len(others) and all(map(torch.equal, found, others))


POOLS = tuple(op for op in RECORDS if "Pool" in leaf_name(op) or "_pool" in leaf_name(op))


@pytest.mark.parametrize("op", POOLS, ids=leaf_name)
def test_a_pools_ceil_mode_is_idle_where_torchs_result_has_the_same_shape(op: Any) -> None:
    samples, seen = RECORDS[op], set[bool]()
    for _, arguments in samples.variants():
        if "ceil_mode" not in arguments:
            continue
        shapes = [
            flat(model_of(op, {**arguments, "ceil_mode": mode})(*inputs_of(op, arguments)))[0].shape
            for mode in (False, True)
        ]
        is_idle = "ceil_mode" in samples.idle(arguments)
        assert is_idle is (shapes[0] == shapes[1]), arguments
        seen.add(is_idle)
    assert seen in (set(), {True, False})
