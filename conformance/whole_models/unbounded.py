"""Which op leaves a part of a model undecided: the first without a bound of its result, where its operands have one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.fx import GraphModule, Node

from fx_quant_conformance.conformance.bounds.error_bounds import NoOracleError, Value, flatten
from fx_quant_conformance.conformance.claims.inputs import Batch
from fx_quant_conformance.conformance.oracle.evaluate import Walk
from fx_quant_conformance.conformance.stages.float_ops import name_op


def name_unbounded(model: GraphModule, batch: Batch) -> str:
    """Name the first op without a bound, and its node; "" if all ops have one."""
    walk = Walk(model, keeps_values=True)
    try:
        walk.exact(batch)
    except NoOracleError as error:
        return str(error)
    found = next(_list_unbounded(walk), None)
    if found is None:
        return ""
    is_nan = any(bool(each.real.isnan().any()) for each in _list_values(walk.values[found]))
    return f"{found.name} ({name_op(model, found)}){', which is no number (NaN)' if is_nan else ''}"


def _list_unbounded(walk: Walk) -> Iterator[Node]:
    for node, value in walk.values.items():
        if _is_unbounded(value) and not any(_is_unbounded(walk.values[each]) for each in node.all_input_nodes):
            yield node


def _is_unbounded(value: Any) -> bool:
    return any(bool(each.error().isinf().any()) for each in _list_values(value))


def _list_values(value: Any) -> Iterator[Value]:
    """List what is computed in floats: an undecided choice is not without a bound, and what it picks is told itself."""
    return (each for each in flatten(value) if isinstance(each, Value) and each.dtype.is_floating_point)
