"""Embeddings, and recurrent modules and cells, which are quantized only in their weight or while running.

Arguments that quantized kernels commonly lack are varied with few others, so that a fallback to float does not hide
the pairs of the others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fx_quant_conformance.conformance.bounds.error_bounds import FUNCTION, Errors, OpCall, OpRule, gamma
from fx_quant_conformance.conformance.ops.calls import MOVED, PLACES
from fx_quant_conformance.conformance.ops.op_model import Input, Role, Step
from fx_quant_conformance.conformance.ops.variants import Arguments, Fixed, OpRecord
from fx_quant_conformance.conformance.ops.weighted import draw_weight

_DRAWN = Fixed(reason="the table is drawn row by row")
_RENORMALIZES = Fixed(
    reason="it rewrites rows of the float table while the model runs: what is quantized would depend on which rows the "
    "calibration looked up"
)
_RENORMALIZED = {"max_norm": _RENORMALIZES, "norm_type": Fixed(reason="read only where max_norm is given")}

# -- embeddings -------------------------------------------------------------------------------------------------------


def draw_table(rows: int, columns: int) -> Tensor:
    """Draw a table of float32, from torch's generator, whose rows differ in place and width of their range.

    In turn: around 0; only positive, so that 0 is no value of the row's grid; one value repeated, so that the range is
    empty; around 0 and tiny; only negative.
    """
    table = torch.empty(rows, columns).uniform_(-1, 1)
    table[1::5] = table[1::5] / 4 + 1.0
    table[2::5] = 0.75
    table[3::5] *= 2.0**-8
    table[4::5] = table[4::5] / 2 - 0.75
    return table


_GRADIENTS = {"scale_grad_by_freq": (False, True), "sparse": (False, True)}
_TABLE = {"num_embeddings": (10, 1, 300), "embedding_dim": (8, 7, 64, 66)}
_EMBEDDING: Mapping[str, tuple[Any, ...]] = {
    **_TABLE,
    "shape": ((5,), (2, 3), (0,), (2, 1, 3)),
    "_int32": (False, True),
    "padding_idx": (None, 0),
    **_GRADIENTS,
}


def _make_indices(shape: tuple[int, ...], arguments: Arguments) -> Input:
    return Input(shape=shape, role=Role.INDEX, high=arguments["num_embeddings"], is_int32=arguments["_int32"])


def _construct(op: Any, arguments: Arguments, *skipped: str) -> Any:
    """Construct an embedding, its table drawn, with all arguments but the skipped ones."""
    module = op(**{name: value for name, value in arguments.items() if name not in ("_int32", *skipped)})
    with torch.no_grad():
        module.weight.copy_(draw_table(*module.weight.shape))
    return module


def _call_embedding(op: Any, arguments: Arguments) -> Step:
    keywords = tuple((name, arguments[name]) for name in ("padding_idx", "scale_grad_by_freq", "sparse"))
    table = draw_table(arguments["num_embeddings"], arguments["embedding_dim"])
    return Step(op=op, parameters=(table,), keywords=keywords)


def bound_float_bags(call: OpCall) -> Errors:
    """A float module sums at most n rows in float32, n indices in all: γₙ₊₂·n·max|w|. Rows themselves are exact."""
    n = max(1, call.args[0].numel())
    largest = call.function.weight.detach().abs().max()  # type: ignore[attr-defined]
    return {"accumulation": (gamma(n + 2) * n * largest).expand_as(call.result)}


_LEFT_IN_FLOAT = OpRule(arithmetic=FUNCTION, bound=bound_float_bags, source="torch.nn.EmbeddingBag, left in float")


class Bags(nn.Module):
    """A bag of embeddings whose offsets are the model's own: none, or ones that end with the number of indices."""

    offsets: Tensor | None

    def __init__(self, bag: nn.EmbeddingBag, offsets: Tensor | None) -> None:
        super().__init__()
        self.bag = bag
        self.register_buffer("offsets", offsets)

    def forward(self, indices: Any, weights: Any = None) -> Any:
        """Put the offsets between the inputs."""
        return self.bag(indices, self.offsets, weights)


_BAG: Mapping[str, tuple[Any, ...]] = {
    **_TABLE,
    "mode": ("mean", "sum", "max"),
    "include_last_offset": (False, True),
    "padding_idx": (None, 0),
    **_GRADIENTS,
    "offsets": (True, False),
    "per_sample_weights": (False, True),
    "_bags": (1, 3),
    "_int32": (False, True),
}
_COUNT = 7  # of indices in all bags, or in each


def _make_bag_inputs(arguments: Arguments) -> tuple[Input, ...]:
    """Indices in one row, cut into bags by offsets; or a row of indices for each bag."""
    shape = (_COUNT,) if arguments["offsets"] else (arguments["_bags"], _COUNT)
    inputs = [_make_indices(shape, arguments)]
    if arguments["offsets"] and not arguments["include_last_offset"]:
        offsets = (arguments["_bags"],)
        inputs.append(Input(shape=offsets, role=Role.OFFSETS, high=_COUNT, is_int32=arguments["_int32"]))
    if arguments["per_sample_weights"]:
        inputs.append(Input(shape=shape, role=Role.STATE))
    return tuple(inputs)


def _build_bag(op: Any, arguments: Arguments) -> Step:
    module = _construct(op, arguments, "offsets", "per_sample_weights", "_bags")
    if arguments["include_last_offset"]:  # the second of three bags is empty
        return Step(op=Bags(module, torch.tensor([0, 4, 4, _COUNT] if arguments["_bags"] == 3 else [0, _COUNT])))
    return Step(op=module if arguments["offsets"] else Bags(module, None))


def _is_bag(arguments: Arguments) -> bool:
    """Torch takes weights per sample only in sums, a last offset after others, no option on gradients of maxima."""
    if arguments["include_last_offset"] and (not arguments["offsets"] or arguments["_int32"]):  # they are int64
        return False
    if arguments["per_sample_weights"] and arguments["mode"] != "sum":
        return False
    if arguments["mode"] == "max" and (arguments["scale_grad_by_freq"] or arguments["sparse"]):
        return False
    companions = ("mode", "embedding_dim", "include_last_offset", "offsets")
    return _has_few_lacks(_BAG, {"padding_idx": 0, "mode": "max"}, companions, arguments)


def _has_few_lacks(
    varied: Mapping[str, tuple[Any, ...]], lacking: Mapping[str, Any], companions: tuple[str, ...], arguments: Arguments
) -> bool:
    """Whether at most one argument has a value that kernels lack, and then only its companions are varied with it."""
    lacks = [name for name, value in lacking.items() if arguments[name] == value]
    away = {name for name, values in varied.items() if arguments[name] != values[0]}
    return not lacks or (len(lacks) == 1 and away <= {*lacks, *companions})


# Sums of several bags, of which some are empty, in widths for which there are kernels and in others.
_SUMS: tuple[Arguments, ...] = tuple(
    {"mode": "sum", "_bags": bags, "embedding_dim": width, "_int32": is_int32}
    for bags, width, is_int32 in ((3, 64, False), (9, 64, True), (9, 66, False), (3, 8, True))
)

# -- recurrent modules ------------------------------------------------------------------------------------------------


class WithStates(nn.Module):
    """A recurrent module or cell of two states, which takes them as a tuple."""

    def __init__(self, recurrent: nn.Module) -> None:
        super().__init__()
        self.recurrent = recurrent

    def forward(self, x: Any, h: Any, c: Any) -> Any:
        """Join the states."""
        return self.recurrent(x, (h, c))


_TWO_STATES = (nn.LSTM, nn.LSTMCell)
_OURS = ("hx", "_batch", "_steps", "_unbatched")
_WIDTHS = {"input_size": (8, 1, 65), "hidden_size": (8, 1, 9)}
_CALLS = {"hx": (False, True), "_batch": (1, 3), "_unbatched": (False, True)}
_LACKING = {"_unbatched": True}


def _build_recurrent(op: Any, arguments: Arguments) -> Step:
    """Build a module with drawn weights; a state given as an input is one of the model's."""
    module = op(**{name: value for name, value in arguments.items() if name not in _OURS})
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if name.startswith("weight"):
                parameter.copy_(draw_weight(*parameter.shape))
            else:
                parameter.uniform_(-0.5, 0.5)
    return Step(op=WithStates(module) if op in _TWO_STATES and arguments["hx"] else module)


def _make_states(states: int, arguments: Arguments) -> tuple[Input, ...]:
    """The input of a cell or a sequence, and its states if it is given some."""
    batch = () if arguments["_unbatched"] else (arguments["_batch"],)
    leading, state = batch, (*batch, arguments["hidden_size"])
    if "_steps" in arguments:
        leading = (*batch, arguments["_steps"]) if arguments["batch_first"] else (arguments["_steps"], *batch)
        state = (arguments["num_layers"] * (2 if arguments["bidirectional"] else 1), *state)
    given_states = [Input(shape=state, role=Role.STATE)] * (states * arguments["hx"])
    return (Input(shape=(*leading, arguments["input_size"])), *given_states)


def _sample_sequence(states: int) -> OpRecord:
    """An LSTM or a GRU. One step from given states shows each state separately; several, how they follow each other."""
    varied: dict[str, tuple[Any, ...]] = {
        **_WIDTHS,
        "num_layers": (1, 2),
        "bias": (True, False),
        "batch_first": (False, True),
        "dropout": (0.0, 0.5),
        "bidirectional": (False, True),
        **_CALLS,
        "_steps": (2, 1, 3),
    }

    def is_valid(arguments: Arguments) -> bool:
        if arguments["dropout"] and arguments["num_layers"] == 1:
            return False  # torch warns: there is no layer to drop the outputs of
        companions = ("num_layers", "bidirectional", "batch_first", "hx", "_steps")
        return _has_few_lacks(varied, _LACKING | {"bias": False}, companions, arguments)

    fixed = dict(PLACES)
    if states == 2:
        fixed["proj_size"] = Fixed(
            reason="nnqr.LSTM has none: its from_float drops the projection, its forward "
            "then refuses the projected states"
        )
    return OpRecord(
        arguments={**varied, **fixed},
        inputs=partial(_make_states, states),
        step=_build_recurrent,
        is_valid=is_valid,
    )


def _sample_cell(states: int, **options: tuple[Any, ...]) -> OpRecord:
    """A cell: one step of a recurrent module."""
    varied: dict[str, tuple[Any, ...]] = {**_WIDTHS, "bias": (True, False), **options, **_CALLS}
    return OpRecord(
        arguments={**varied, **PLACES},
        inputs=partial(_make_states, states),
        step=_build_recurrent,
        is_valid=partial(_has_few_lacks, varied, _LACKING, ("hx", "bias")),
    )


RECORDS: dict[Any, OpRecord] = {
    nn.Embedding: OpRecord(
        arguments={**_EMBEDDING, "_freeze": (False, True), "_weight": _DRAWN, **_RENORMALIZED, **PLACES},
        inputs=lambda arguments: (_make_indices(arguments["shape"], arguments),),
        step=lambda op, arguments: Step(op=_construct(op, arguments, "shape")),
        rule=replace(_LEFT_IN_FLOAT, source="torch.nn.Embedding, left in float"),
    ),
    F.embedding: OpRecord(
        arguments={
            **_EMBEDDING,
            "weight": _DRAWN,
            "input": Fixed(reason="indices: their shape is varied under shape"),
            **_RENORMALIZED,
        },
        inputs=lambda arguments: (_make_indices(arguments["shape"], arguments),),
        step=_call_embedding,
        rule=replace(MOVED, source="torch.nn.functional.embedding; CVT-11"),
    ),
    nn.EmbeddingBag: OpRecord(
        arguments={**_BAG, "_weight": _DRAWN, **_RENORMALIZED, **PLACES},
        inputs=_make_bag_inputs,
        step=_build_bag,
        is_valid=_is_bag,
        known=_SUMS,
        rule=_LEFT_IN_FLOAT,
    ),
    nn.LSTM: _sample_sequence(2),
    nn.GRU: _sample_sequence(1),
    nn.LSTMCell: _sample_cell(2),
    nn.GRUCell: _sample_cell(1),
    nn.RNNCell: _sample_cell(1, nonlinearity=("tanh", "relu")),
}
