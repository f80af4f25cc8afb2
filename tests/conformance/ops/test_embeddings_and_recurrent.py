"""The samples of embeddings and recurrent ops: complete, buildable, and directed at what they say."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.fx import Tracer

from fx_quant_conformance.conformance.ops.embeddings_and_recurrent import RECORDS, Bags, draw_table
from tests.conformance.support.dynamic_flows import model_of

ops = pytest.mark.parametrize("op", RECORDS, ids=lambda op: op.__name__)


@ops
def test_a_model_holds_its_op_once_and_nothing_else(op: Any) -> None:
    for _, arguments in RECORDS[op].variants():
        model = model_of(op, arguments)
        nodes = [node for node in Tracer().trace(model).nodes if node.op.startswith("call_")]
        assert len(nodes) == 1
        found = model.get_submodule(str(nodes[0].target)) if nodes[0].op == "call_module" else nodes[0].target
        assert found is op or type(found) is op


@ops
def test_arguments_that_kernels_lack_are_varied_with_few_others(op: Any) -> None:
    lacking = {"bias": False, "_unbatched": True, "mode": "max", "padding_idx": 0}
    if op in (nn.Embedding, F.embedding) or "Cell" in op.__name__:
        lacking = {"_unbatched": True}
    for varied, arguments in RECORDS[op].variants():
        lacks = [name for name, value in lacking.items() if arguments.get(name) == value]
        assert len(lacks) <= 1
        assert not lacks or not {"input_size", "num_embeddings", "_batch", "per_sample_weights"} & set(varied)


def test_pairs_of_layers_directions_and_steps_meet_given_states() -> None:
    for op in (nn.LSTM, nn.GRU):
        met = {
            (arguments["num_layers"], arguments["bidirectional"], arguments["hx"], arguments["_steps"])
            for _, arguments in RECORDS[op].variants()
            if arguments["bias"] and not arguments["_unbatched"]
        }
        assert {(2, True, True, 1), (2, True, True, 3)} <= met


def test_rows_of_a_table_differ_in_the_place_and_width_of_their_range() -> None:
    torch.manual_seed(0)
    table = draw_table(10, 8)
    low, high = table.amin(1), table.amax(1)
    assert bool((low[1::5] > 0).all())
    assert bool((low[2::5] == high[2::5]).all())
    assert bool((high[4::5] < 0).all())
    assert float((high - low)[3::5].max()) < 2.0**-6
    assert bool((table[0] < 0).any() and (table[0] > 0).any())


def test_bags_with_a_last_offset_hold_an_empty_one_and_end_where_the_indices_end() -> None:
    for _, arguments in RECORDS[nn.EmbeddingBag].variants():
        if not arguments["include_last_offset"]:
            continue
        model = model_of(nn.EmbeddingBag, arguments)
        (bags,) = (module for module in model.modules() if isinstance(module, Bags))
        assert bags.offsets is not None
        assert int(bags.offsets[-1]) == RECORDS[nn.EmbeddingBag].inputs(arguments)[0].shape[0]
        if arguments["_bags"] == 3:
            assert bool((bags.offsets.diff() == 0).any())
