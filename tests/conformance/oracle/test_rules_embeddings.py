"""The oracle of embeddings and bags of them."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fx_quant_conformance.backends.base import Capabilities
from fx_quant_conformance.backends.quantized_form import to_quantized_form
from fx_quant_conformance.backends.torch_engines.engine import engine
from fx_quant_conformance.conformance.bounds.error_bounds import NoOracleError, OpCall, U, Value
from fx_quant_conformance.conformance.ops.embeddings_and_recurrent import RECORDS, draw_table
from fx_quant_conformance.conformance.oracle.evaluate import Walk
from fx_quant_conformance.conformance.oracle.table import OP_RULES
from fx_quant_conformance.refimpl import lower
from fx_quant_conformance.refimpl.graph.tracing import NOT_LOWERED
from tests.conformance.support.dynamic_flows import (
    BYTES,
    IN_FLOAT,
    NATIVE,
    NIBBLES,
    SIGNED,
    excess,
    inputs_of,
    model_of,
    reference_of,
)

EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)


@pytest.mark.slow
@pytest.mark.rule("CVT-11")
@pytest.mark.parametrize("op", EMBEDDINGS)
@pytest.mark.parametrize(("qconfig", "config"), [(NIBBLES, "qnnpack"), (SIGNED, "onednn")])
def test_the_reference_model_is_within_the_slack(op: Any, qconfig: Any, config: str) -> None:
    for number, (_, arguments) in enumerate(RECORDS[op].variants()):
        torch.manual_seed(number)
        model, inputs = model_of(op, arguments), inputs_of(op, arguments)
        reference = reference_of(model, qconfig, config=config)
        exacts = Walk(reference, IN_FLOAT).exact(inputs)
        assert excess(exacts, reference(*inputs)) <= 0, arguments
        assert all(exact.slack.numel() == 0 or float(exact.slack.max()) < 0.5 for exact in exacts)


@pytest.mark.rule("CVT-11")
def test_rows_are_the_integers_times_their_scales_exactly() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(5, 4, _weight=draw_table(5, 4))).eval()
    reference = reference_of(model, BYTES)
    (exact,) = Walk(reference, IN_FLOAT).exact((torch.arange(5),))
    embedding: Any = reference.get_submodule("0")
    integers = embedding.get_quantized_weight().int_repr()
    for row in range(5):
        scale, zero = (Fraction(float(each[row])) for each in (embedding.weight_scale, embedding.weight_zero_point))
        wanted = [float(scale * (int(each) - zero)) for each in integers[row]]
        assert exact.real[row].tolist() == pytest.approx(wanted, rel=1e-14, abs=1e-18)
        assert float(exact.step[row, 0]) == float(scale)


@pytest.mark.slow
@pytest.mark.rule("CVT-11")
@pytest.mark.parametrize("qconfig", [BYTES, NIBBLES], ids=["8 bits", "4 bits"])
def test_native_kernels_are_within_the_slack(qconfig: Any) -> None:
    for op in EMBEDDINGS:
        for number, (_, arguments) in enumerate(RECORDS[op].variants()):
            is_odd = qconfig is NIBBLES and arguments["embedding_dim"] % 2  # the kernel's rows have a column too many
            if arguments["padding_idx"] is not None or is_odd or len(arguments.get("shape", ())) > 2:
                continue  # padding: the module sums it all the same
            torch.manual_seed(number)
            reference = reference_of(model_of(op, arguments), qconfig)
            inputs = inputs_of(op, arguments)
            with engine("qnnpack"):
                lowered = lower(to_quantized_form(reference))
            if not lowered.meta[NOT_LOWERED]:
                assert excess(Walk(reference, NATIVE).exact(inputs), lowered(*inputs)) <= 0, arguments


def test_rows_whose_scale_is_in_half_precision_are_right_only_where_that_is_declared() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(10, 8)).eval()
    reference, indices = reference_of(model, NIBBLES), torch.arange(10)
    with engine("qnnpack"):
        found = lower(to_quantized_form(reference))(indices)
    declared, silent = (
        Walk(reference, capabilities).exact((indices,))
        for capabilities in (NATIVE, replace(NATIVE, half_row_qparams=False))
    )
    assert excess(declared, found) <= 0
    assert excess(silent, found) > 0
    assert float(declared[0].slack.max()) < 0.1


def test_a_bag_that_counts_its_padding_is_refuted() -> None:
    torch.manual_seed(0)
    bag = nn.EmbeddingBag(10, 8, mode="sum", padding_idx=0)
    with torch.no_grad():
        bag.weight.copy_(draw_table(10, 8))
    indices = torch.tensor([[0, 1, 2], [3, 4, 5]])
    reference = reference_of(nn.Sequential(bag).eval(), BYTES)
    exacts = Walk(reference, IN_FLOAT).exact((indices,))
    assert excess(exacts, reference(indices)) <= 0
    assert excess(exacts, F.embedding_bag(indices, bag.weight, mode="sum")) > 1


def test_the_largest_of_a_bag_and_weights_per_sample_keep_their_bounds() -> None:
    torch.manual_seed(0)
    for mode, weights in (("max", None), ("sum", torch.randn(6))):
        bag = nn.Sequential(nn.EmbeddingBag(10, 8, mode=mode)).eval()
        reference = reference_of(bag, BYTES)
        inputs = (torch.randint(0, 10, (6,)), torch.tensor([0, 2]), weights)
        walk = Walk(reference, IN_FLOAT)
        node = next(iter(reference.graph.nodes))
        walk.values[node] = inputs[0]
        module = reference.get_submodule("0")
        given = None if weights is None else Value(real=weights.double())
        value = walk._evaluate_module(module, (*inputs[:2], given), {}, node)
        wanted = module(*inputs)
        assert bool(((value.real - wanted.double()).abs() <= value.error() + 2 * U * value.real.abs()).all())


def test_renormalized_rows_have_no_oracle() -> None:
    reference = reference_of(nn.Sequential(nn.Embedding(4, 3, max_norm=1.0)).eval(), BYTES)
    with pytest.raises(NoOracleError, match="max_norm"):
        Walk(reference, IN_FLOAT).exact((torch.arange(4),))


@pytest.mark.rule("CVT-11")
def test_an_embedding_by_a_function_moves_values_and_their_errors() -> None:
    table = Value(real=torch.randn(5, 3).double(), errors={"weights": torch.rand(5, 3).double()})
    indices = torch.tensor([[4, 0]])
    call = OpCall(function=F.embedding, args=(indices, table), kwargs={}, capabilities=Capabilities())
    assert torch.equal(OP_RULES[F.embedding].bound(call)["weights"], table.errors["weights"][indices])
