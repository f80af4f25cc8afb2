"""Samples of embeddings and of recurrent modules and cells, which are quantized in their weight alone or while running.

Some arguments are ones that quantized kernels commonly lack: they are varied with few others, so that a fall back to
float does not hide the pairs of the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from conformance.ops.op_model import Input, Role, Step
from conformance.ops.variants import Arguments, Fixed, OpSamples
from conformance.ops.weighted import drawn_weight

Inputs = Callable[[Arguments], tuple[Input, ...]]

_PLACE = Fixed(reason="the suite runs on the CPU, in float32")
_PLACES = {"device": _PLACE, "dtype": _PLACE}
_DRAWN = Fixed(reason="the table is drawn row by row")
_RENORMALIZES = Fixed(
    reason="it rewrites rows of the float table while the model runs: what is quantized would depend on which rows the "
    "calibration looked up"
)
_RENORMALIZED = {"max_norm": _RENORMALIZES, "norm_type": Fixed(reason="read only where max_norm is given")}

# -- embeddings -------------------------------------------------------------------------------------------------------


def drawn_table(rows: int, columns: int) -> Tensor:
    """Draw a table of float32, from torch's generator, whose rows differ in place and width of their range.

    In turn: around 0; positive alone, so that 0 is no value of the row's grid; one value repeated, so that the range is
    empty; around 0 and tiny; negative alone.
    """
    table = torch.empty(rows, columns).uniform_(-1, 1)
    table[1::5] = table[1::5] / 4 + 1.0
    table[2::5] = 0.75
    table[3::5] *= 2.0**-8
    table[4::5] = table[4::5] / 2 - 0.75
    return table


_GRADIENTS = {"scale_grad_by_freq": (False, True), "sparse": (False, True)}
_TABLE = {"num_embeddings": (10, 1, 300), "embedding_dim": (8, 7, 64, 66)}
_INDICES = ((5,), (2, 3), (0,), (2, 1, 3))


def _indices(arguments: Arguments) -> tuple[Input, ...]:
    rows, is_int32 = arguments["num_embeddings"], arguments["_int32"]
    return (Input(shape=arguments["shape"], role=Role.INDEX, high=rows, is_int32=is_int32),)


def _keywords(arguments: Arguments, *names: str) -> dict[str, Any]:
    return {name: arguments[name] for name in names}


def _embedding(op: Any, arguments: Arguments) -> Step:
    module = op(**{name: value for name, value in arguments.items() if name not in ("shape", "_int32")})
    with torch.no_grad():
        module.weight.copy_(drawn_table(*module.weight.shape))
    return Step(op=module)


def _embedding_function(op: Any, arguments: Arguments) -> Step:
    keywords = _keywords(arguments, "padding_idx", "scale_grad_by_freq", "sparse")
    table = drawn_table(arguments["num_embeddings"], arguments["embedding_dim"])
    return Step(op=op, parameters=(table,), keywords=tuple(keywords.items()))


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


_COUNT = 7  # of indices in all bags, or in each


def _bag_inputs(arguments: Arguments) -> tuple[Input, ...]:
    """Indices in one row, cut into bags by offsets; or a row of indices for each bag."""
    shape = (_COUNT,) if arguments["offsets"] else (arguments["_bags"], _COUNT)
    rows, is_int32 = arguments["num_embeddings"], arguments["_int32"]
    inputs = [Input(shape=shape, role=Role.INDEX, high=rows, is_int32=is_int32)]
    if arguments["offsets"] and not arguments["include_last_offset"]:
        inputs.append(Input(shape=(arguments["_bags"],), role=Role.OFFSETS, high=_COUNT, is_int32=is_int32))
    if arguments["per_sample_weights"]:
        inputs.append(Input(shape=shape, role=Role.STATE))
    return tuple(inputs)


def _bag(op: Any, arguments: Arguments) -> Step:
    names = [name for name in arguments if name not in ("offsets", "per_sample_weights", "_bags", "_int32")]
    module = op(**_keywords(arguments, *names))
    with torch.no_grad():
        module.weight.copy_(drawn_table(*module.weight.shape))
    if arguments["include_last_offset"]:  # the second of three bags is empty
        return Step(op=Bags(module, torch.tensor([0, 4, 4, _COUNT] if arguments["_bags"] == 3 else [0, _COUNT])))
    return Step(op=module if arguments["offsets"] else Bags(module, None))


def _is_bag(arguments: Arguments) -> bool:
    """Torch takes weights per sample in sums alone, a last offset beside others, no option on gradients of maxima."""
    if arguments["include_last_offset"] and (not arguments["offsets"] or arguments["_int32"]):  # they are int64
        return False
    if arguments["per_sample_weights"] and arguments["mode"] != "sum":
        return False
    if arguments["mode"] == "max" and (arguments["scale_grad_by_freq"] or arguments["sparse"]):
        return False
    beside = ("mode", "embedding_dim", "include_last_offset", "offsets")
    return _has_few_lacks(_BAG, {"padding_idx": 0, "mode": "max"}, beside, arguments)


def _has_few_lacks(
    varied: Mapping[str, tuple[Any, ...]], lacking: Mapping[str, Any], beside: tuple[str, ...], arguments: Arguments
) -> bool:
    """Whether at most one argument has a value that kernels lack, and then only those `beside` it are varied."""
    lacks = [name for name, value in lacking.items() if arguments[name] == value]
    away = {name for name, values in varied.items() if arguments[name] != values[0]}
    return not lacks or (len(lacks) == 1 and away <= {*lacks, *beside})


_BAG: Mapping[str, tuple[Any, ...]] = {
    **_TABLE, "mode": ("mean", "sum", "max"), "include_last_offset": (False, True), "padding_idx": (None, 0),
    **_GRADIENTS, "offsets": (True, False), "per_sample_weights": (False, True), "_bags": (1, 3),
    "_int32": (False, True),
}  # fmt: skip
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


def _recurrent(op: Any, arguments: Arguments) -> Step:
    """Build a module with drawn weights; a state given as an input is one of the model's."""
    module = op(**{name: value for name, value in arguments.items() if name not in _OURS})
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if name.startswith("weight"):
                parameter.copy_(drawn_weight(*parameter.shape))
            else:
                parameter.uniform_(-0.5, 0.5)
    return Step(op=WithStates(module) if op in _TWO_STATES and arguments["hx"] else module)


def _sequence_inputs(states: int) -> Inputs:
    def inputs(arguments: Arguments) -> tuple[Input, ...]:
        batch = () if arguments["_unbatched"] else (arguments["_batch"],)
        leading = (*batch, arguments["_steps"]) if arguments["batch_first"] else (arguments["_steps"], *batch)
        layers = arguments["num_layers"] * (2 if arguments["bidirectional"] else 1)
        state = Input(shape=(layers, *batch, arguments["hidden_size"]), role=Role.STATE)
        return (Input(shape=(*leading, arguments["input_size"])), *[state] * (states * arguments["hx"]))

    return inputs


def _cell_inputs(states: int) -> Inputs:
    def inputs(arguments: Arguments) -> tuple[Input, ...]:
        batch = () if arguments["_unbatched"] else (arguments["_batch"],)
        state = Input(shape=(*batch, arguments["hidden_size"]), role=Role.STATE)
        return (Input(shape=(*batch, arguments["input_size"])), *[state] * (states * arguments["hx"]))

    return inputs


_LACKING = {"_unbatched": True}


def _sequence(states: int) -> OpSamples:
    """An LSTM or a GRU. One step from given states shows every state by itself; several, how they follow each other."""
    varied: dict[str, tuple[Any, ...]] = {
        **_WIDTHS, "num_layers": (1, 2), "bias": (True, False), "batch_first": (False, True), "dropout": (0.0, 0.5),
        "bidirectional": (False, True), **_CALLS, "_steps": (2, 1, 3),
    }  # fmt: skip

    def is_valid(arguments: Arguments) -> bool:
        if arguments["dropout"] and arguments["num_layers"] == 1:
            return False  # torch warns: there is no layer to drop the outputs of
        beside = ("num_layers", "bidirectional", "batch_first", "hx", "_steps")
        return _has_few_lacks(varied, _LACKING | {"bias": False}, beside, arguments)

    fixed = dict(_PLACES)
    if states == 2:
        fixed["proj_size"] = Fixed(
            reason="torch.ao.nn.quantized.reference.LSTM has none: its from_float drops the projection, its forward "
            "then refuses the projected states"
        )
    return OpSamples(arguments={**varied, **fixed}, inputs=_sequence_inputs(states), step=_recurrent, is_valid=is_valid)


def _cell(states: int, **more: tuple[Any, ...]) -> OpSamples:
    """A cell: one step of a recurrent module."""
    varied: dict[str, tuple[Any, ...]] = {**_WIDTHS, "bias": (True, False), **more, **_CALLS}

    def is_valid(arguments: Arguments) -> bool:
        return _has_few_lacks(varied, _LACKING, ("hx", "bias"), arguments)

    return OpSamples(arguments={**varied, **_PLACES}, inputs=_cell_inputs(states), step=_recurrent, is_valid=is_valid)


OP_SAMPLES: dict[Any, OpSamples] = {
    nn.Embedding: OpSamples(
        arguments={
            **_TABLE, "shape": _INDICES, "_int32": (False, True), "padding_idx": (None, 0), **_GRADIENTS,
            "_freeze": (False, True),
            "_weight": _DRAWN, **_RENORMALIZED, **_PLACES,
        },
        inputs=_indices,
        step=_embedding,
    ),
    F.embedding: OpSamples(
        arguments={
            **_TABLE, "shape": _INDICES, "_int32": (False, True), "padding_idx": (None, 0), **_GRADIENTS,
            "weight": _DRAWN,
            "input": Fixed(reason="indices: their shape is varied under shape"), **_RENORMALIZED,
        },
        inputs=_indices,
        step=_embedding_function,
    ),
    nn.EmbeddingBag: OpSamples(
        arguments={**_BAG, "_weight": _DRAWN, **_RENORMALIZED, **_PLACES},
        inputs=_bag_inputs,
        step=_bag,
        is_valid=_is_bag,
        known=_SUMS,
    ),
    nn.LSTM: _sequence(2),
    nn.GRU: _sequence(1),
    nn.LSTMCell: _cell(2),
    nn.GRUCell: _cell(1),
    nn.RNNCell: _cell(1, nonlinearity=("tanh", "relu")),
}  # fmt: skip
