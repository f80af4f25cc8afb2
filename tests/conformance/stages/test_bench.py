"""The judge's models have the decomposed form; what a backend on quantized tensors is given has the same integers."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Interpreter, Node

from fx_quant_conformance.backends.base import Backend, Representation
from fx_quant_conformance.backends.discovery import find_backend
from fx_quant_conformance.backends.lowering import in_form
from fx_quant_conformance.conformance.claims.claim import Claim, enumerate_claims
from fx_quant_conformance.conformance.claims.kinds import Kind
from fx_quant_conformance.conformance.machine.fault import FaultFound
from fx_quant_conformance.conformance.pipeline.claim_run import take_through
from fx_quant_conformance.conformance.stages.bench import Bench
from fx_quant_conformance.conformance.stages.config import plan_claim
from fx_quant_conformance.conformance.stages.state import CaseState, ClaimState
from fx_quant_conformance.refimpl import MinMaxObserver, QConfig, QConfigMapping, convert_to_reference_fx, prepare_fx
from fx_quant_conformance.refimpl.graph.invariants import is_quantize
from tests.mutants.fixed_grids import SEVEN, FixedGridBackend

BACKENDS: dict[str, Callable[[], Backend]] = {
    "qnnpack": lambda: find_backend("qnnpack"),
    "seven bits": lambda: FixedGridBackend(SEVEN, representation=Representation.QUANTIZED),
}
X = torch.linspace(-2.0, 3.0, 20).reshape(5, 4)


def convert_first_cases(bench: Bench) -> Iterator[tuple[Claim, CaseState]]:
    """The first case of each pattern and dtype config, converted."""
    of = {(claim.pattern, str(claim.dtypes)): claim for claim in enumerate_claims(bench.config, bench.capabilities)}
    for claim in (replace(each, preparation=bench.preparation) for each in of.values()):
        run = ClaimState(bench=bench, claim=claim)
        try:
            yield claim, take_through(run, plan_claim(bench, claim)[0], ("fuse", "prepare", "convert"))
        except FaultFound:
            continue  # a claim that ends before


def list_integers(model: GraphModule, inputs: tuple[Tensor, ...]) -> list[tuple[Node, Tensor, Tensor]]:
    """Each quantize node of a graph, the value before it, and the integers behind it."""
    seen = list[tuple[Node, Tensor, Tensor]]()

    class Spy(Interpreter):
        def run_node(self, n: Node) -> Any:
            value = super().run_node(n)
            if is_quantize(n) and value.dtype is not torch.float16:
                before: Any = self.env[n.all_input_nodes[0]]
                seen.append((n, before, value.int_repr() if value.is_quantized else value))
            return value

    with torch.no_grad():
        Spy(model, garbage_collect_values=False).run(*copy.deepcopy(inputs))
    return seen


def are_ties(quantize: Node, value: Tensor) -> Tensor:
    """Tell where a value lies halfway between two integers, but for what float32 rounds.

    x / s is two roundings of at most 255 steps, 2·2⁻²⁴·255, and to add a zero point first one of at most 510: 2⁻¹⁴.
    """
    scale: Any = quantize.args[1]
    if isinstance(scale, Node):
        return torch.tensor(False)  # per channel: a weight
    steps = value.double() / float(scale)
    return ((steps - steps.floor()) - 0.5).abs() <= 2.0**-14


def list_weights(model: GraphModule) -> list[Tensor]:
    """The integers of the reference modules' weights."""
    parts: list[Any] = [part for part in model.modules() if hasattr(part, "get_quantized_weight")]
    weights = [part.get_quantized_weight() for part in parts if part.weight_dtype is not torch.float16]
    return [weight.int_repr() if weight.is_quantized else weight for weight in weights]


def targets_of(model: GraphModule) -> list[str]:
    """What a graph calls, but for the clamp of a narrower range."""
    clamps = {node for node in model.graph.nodes if node.target is torch.clamp and all(map(is_quantize, node.users))}
    called = (node for node in model.graph.nodes if node not in clamps and node.op not in ("get_attr", "placeholder"))
    return [f"{node.name} {node.target}" for node in called if node.op != "output"]


@pytest.mark.slow
@pytest.mark.rule("CVT-07", "CVT-09")
@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.filterwarnings("ignore:convert. .* loses")
def test_both_forms_of_every_claim_have_the_same_integers(name: str) -> None:
    """Exact ties aside, which each form rounds its own way; of a dynamic value torch's kernel chooses the qparams."""
    bench, kinds = Bench(BACKENDS[name](), seed=0, profile="quick"), Counter[Kind]()
    for claim, state in convert_first_cases(bench):
        reference, inputs = state.reference, state.inputs[0].tensors
        given = in_form(Representation.QUANTIZED, reference)
        assert targets_of(given) == targets_of(convert_to_reference_fx(state.prepared)), claim.id
        weights = zip(list_weights(given), list_weights(reference), strict=True)
        assert all(torch.equal(found, right) for found, right in weights), claim.id
        if claim.kind is not Kind.DYNAMIC:
            pairs = zip(list_integers(given, inputs), list_integers(reference, inputs), strict=True)
            for (_, _, found), (node, value, right) in pairs:
                assert found.dtype is right.dtype and found.shape == right.shape, claim.id
                assert bool(((found == right) | are_ties(node, value)).all()), (claim.id, node)
        kinds[claim.kind] += 1
    assert kinds[Kind.STATIC] > 2 and (name == "seven bits" or len(kinds) > 3), kinds


# -- ranges -----------------------------------------------------------------------------------------------------------


@pytest.mark.rule("CVT-09")
def test_a_users_model_has_the_ranges_that_users_get() -> None:
    """A narrow range is kept to judge a claim of it; a user's model on quantized tensors has the headroom."""
    bench = Bench(find_backend("qnnpack"), seed=0, profile="quick")
    narrow = MinMaxObserver.with_args(dtype=torch.qint8, qscheme=torch.per_tensor_symmetric, quant_min=-8, quant_max=7)
    layer = nn.Linear(4, 4)
    with torch.no_grad():
        layer.weight.copy_(15 * torch.eye(4))  # 7.5 steps of 2, which go to the even integer
    activation = MinMaxObserver.with_args(dtype=torch.quint8, quant_min=0, quant_max=127)
    mapping = QConfigMapping().set_global(QConfig(activation, narrow))
    model = prepare_fx(nn.Sequential(layer).eval(), mapping, (X,))
    model(X)
    far, ends = (100 * X,), {True: (127, 7), False: (255, 8)}
    for is_bounded, (highest, of_weight) in ends.items():
        reference = bench.convert(model, is_bounded=is_bounded)
        for form in (reference, in_form(Representation.QUANTIZED, reference)):
            assert max(int(integers.max()) for _, _, integers in list_integers(form, far)) == highest
            assert int(list_weights(form)[0].max()) == of_weight
    assert torch.equal(form(*far), convert_to_reference_fx(model)(*far))
