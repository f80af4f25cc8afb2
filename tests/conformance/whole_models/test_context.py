"""The inner values of a model that a backend returns beside its results, and what is judged of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import GraphModule

from fx_quant_conformance.backends.reference import ReferenceBackend
from fx_quant_conformance.conformance.stages.bench import Bench
from fx_quant_conformance.conformance.whole_models.context import UntoldError, judge_in_context
from fx_quant_conformance.conformance.whole_models.subgraphs import cut_subgraphs
from fx_quant_conformance.refimpl import (
    convert_to_reference_decomposed_fx,
    default_backend_config,
    get_default_qconfig_mapping,
    prepare_fx,
)
from fx_quant_conformance.reports.verdicts import Verdict


class Dropping(nn.Module):
    """A layer, a dropout as a module or as a function, and what reads it."""

    def __init__(self, *, is_function: bool) -> None:
        super().__init__()
        self.layer, self.drop, self.is_function = nn.Linear(4, 4), nn.Dropout(), is_function

    def forward(self, x: Tensor) -> Any:
        y = self.layer(x)
        return x + (F.dropout(y, 0.5, False) if self.is_function else self.drop(y))


class Halving(ReferenceBackend):
    """A backend whose dropouts halve."""

    def lower(self, model: GraphModule, example_inputs: tuple[Any, ...]) -> Callable[..., Any]:
        for node in list(model.graph.nodes):
            if "drop" in str(node.target):
                with model.graph.inserting_after(node):
                    halved = model.graph.call_function(torch.mul, (node, 0.5))
                node.replace_all_uses_with(halved, delete_user_cb=lambda user, halved=halved: user is not halved)
        model.recompile()
        return super().lower(model, example_inputs)


class Refusing(ReferenceBackend):
    """A backend that takes idle dropouts out, and refuses to return their only value twice."""

    most = 3

    def lower(self, model: GraphModule, example_inputs: tuple[Any, ...]) -> Callable[..., Any]:
        outputs = model.graph.output_node().args[0]
        if isinstance(outputs, tuple) and len(outputs) > self.most:
            raise RuntimeError("an output is already there")
        return super().lower(model, example_inputs)


class RefusingAll(Refusing):
    """A backend that returns one value alone."""

    most = 1


def judge(backend: ReferenceBackend, *, is_function: bool) -> dict[str, Verdict]:
    """The verdicts on the parts of a model, in context."""
    torch.manual_seed(0)
    model, x = Dropping(is_function=is_function).eval(), torch.randn(3, 4)
    mapping = get_default_qconfig_mapping("qnnpack")
    prepared = prepare_fx(model, mapping, (x,), backend_config=default_backend_config())
    prepared(x)
    reference, batches = convert_to_reference_decomposed_fx(prepared), [(x,)]
    parts = list(cut_subgraphs(reference, batches))
    judged = judge_in_context(Bench(backend, seed=0, profile="quick"), "model", reference, batches, parts)
    return {part.node: check.verdict for part, check, _ in judged}


HOLDS = (Verdict.VERIFIED, Verdict.UNSHOWN)


@pytest.mark.rule("NUM-03")
@pytest.mark.parametrize("is_function", [False, True])
def test_a_value_on_both_sides_of_a_dropout_is_told_once_where_twice_is_refused(is_function: bool) -> None:
    """As ExecuTorch's delegate does. The dropout, which would be held to itself, is then not judged."""
    honest, refusing = (judge(backend(), is_function=is_function) for backend in (ReferenceBackend, Refusing))
    assert len(honest) == 3 and {*honest.values()} <= {*HOLDS}
    assert refusing.items() < honest.items() and [name for name in honest if "drop" in name] == [
        *honest.keys() - refusing
    ]


@pytest.mark.rule("NUM-03")
def test_a_dropout_that_computes_is_refuted_in_context() -> None:
    found = judge(Halving(), is_function=False)
    assert [name for name, verdict in found.items() if verdict is Verdict.REFUTED] == ["drop"]


def test_what_is_refused_all_the_same_is_said() -> None:
    with pytest.raises(UntoldError, match="an output is already there"):
        judge(RefusingAll(), is_function=False)
