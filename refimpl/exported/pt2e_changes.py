"""find_changes: what torchao's PT2E flow changes in what a program computes, found before the program is prepared.

``prepare_pt2e`` folds each batch norm into the convolution or linear layer that it reads, before it asks the Quantizer.
``convert_pt2e`` folds those that ``prepare_qat_pt2e`` has made trainable. Neither asks who else reads the layer's
result, its weight or its bias. ``eval()`` and ``train()`` write batch norms and dropouts again, with torch's default
constants. The folds are listed as torchao makes them, and each is held to the program. torchao is not needed.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule, Node

from fx_quant_conformance.refimpl.errors import warn_user
from fx_quant_conformance.refimpl.exported.calls import arguments_of, callers_of, refuse_other_programs
from fx_quant_conformance.refimpl.exported.pt2e_folds import (
    LINEAR,
    TRANSPOSED,
    NormFold,
    Readers,
    group_folds,
    list_folds,
    list_trained_folds,
    name_op,
)


class ChangeKind(Enum):
    """What is changed, and why."""

    RESULT_READ = "result read"
    """Something else reads the layer's result, and gets it with the batch norm."""
    NORM_DROPPED = "norm dropped"
    """Another batch norm has been folded into the same weight, and this one is left out."""
    TENSOR_READ = "tensor read"
    """Something else reads the weight or bias into which the batch norm is folded."""
    BIAS_LOST = "bias lost"
    """The layer is called again before the same batch norm, and does not get the bias that the first call gets."""
    NAME_TAKEN = "name taken"
    """The bias that the fold makes takes the place of a tensor that something reads."""
    BATCH_STATISTICS = "batch statistics"
    """The batch norm takes mean and variance of its batch; the fold takes the running ones."""
    WITHOUT_BATCH = "without batch"
    """The layer's input has no batch, so that the batch norm's channels are not those of the layer."""
    RAISES = "raises"
    """torchao cannot fold the batch norm, and raises an error that does not say where."""
    TRAINED_WITH_DEFAULTS = "trained with defaults"
    """``prepare_qat_pt2e`` writes a batch norm behind a convolution again, with torch's default constants."""
    SWITCHED_TO_DEFAULTS = "switched to defaults"
    """``eval()`` and ``train()`` write a batch norm or dropout again, with torch's default constants."""
    LEFT_IN_TRAINING = "left in training"
    """``eval()`` does not reach an op that drops or draws values."""


_APART = "write norm(layer(x).clone()), as a batch norm that reads a copy is not folded"
_BY_HAND = "set the modes without torchao, as docs/pt2e.md shows"
_REMEDIES = {
    ChangeKind.BATCH_STATISTICS: f"call model.eval() before torch.export.export; if the batch's are meant, {_APART}",
    ChangeKind.BIAS_LOST: f"give the layer a bias, if it has none; or {_APART}",
    ChangeKind.LEFT_IN_TRAINING: _BY_HAND,
    ChangeKind.NAME_TAKEN: "give the layer a bias, or the tensor another name",
    ChangeKind.SWITCHED_TO_DEFAULTS: _BY_HAND,
    ChangeKind.TRAINED_WITH_DEFAULTS: f"build the model with the defaults; or {_APART}",
    ChangeKind.WITHOUT_BATCH: f"give the layer a batch, layer(x[None]); or {_APART}",
}
"""What to write instead; for every other kind ``_APART``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramChange:
    """What torchao changes at one node of an exported program. ``str()`` is a line to print."""

    kind: ChangeKind
    node: str
    """The node of the batch norm, or of the op that drops values."""
    layer: str
    """The node of the convolution or linear layer into which the batch norm is folded; "" if none is."""
    reason: str
    """What is changed, with the modules that are called there."""
    line: str
    """The user's line that calls it, as ``file:number: code``; "" if the program does not note it."""

    @property
    def remedy(self) -> str:
        """What to write instead."""
        return _REMEDIES.get(self.kind, _APART)

    def __str__(self) -> str:
        return f"{self.reason}. Instead: {self.remedy}" + (f" ({self.line})" if self.line else "")


def find_changes(program: GraphModule, *, is_qat: bool = False) -> tuple[ProgramChange, ...]:
    """Return what torchao changes in what an exported program's module computes, beside quantizing it.

    ``program``: what ``prepare_pt2e`` is going to get, ``torch.export.export(model, inputs).module()``; it is not
    changed. ``is_qat``: it is for ``prepare_qat_pt2e``; then what ``convert_pt2e`` folds is meant, where the Quantizer
    annotates layer and batch norm as one, and what torchao's ``eval()`` and ``train()`` do. In PTQ it is the same for
    every Quantizer. An empty result says that the prepared program, while nothing is quantized, computes what the
    program does, up to the rounding of floats.

    Raises ModelError for what is no exported program, or is prepared already.
    """
    refuse_other_programs(program)
    readers = Readers(program)
    folds = list_trained_folds(readers) if is_qat else list_folds(readers)
    groups = group_folds(folds, is_qat)
    found = [change for fold in folds for change in _judge_fold(readers, fold, groups[fold], is_qat)]
    if is_qat:
        trained = {fold.norm for fold in folds}
        found += [change for node in readers.nodes for change in _judge_constants(node, node in trained)]
    order = {node.name: index for index, node in enumerate(readers.nodes)}
    return tuple(sorted(found, key=lambda change: order[change.node]))


def warn_of_changes(program: GraphModule, fused: Collection[Collection[Node]]) -> None:
    """Warn of what torchao changes in a program in QAT. ``fused``: the nodes of each pattern that is annotated as one.

    Only what is fused is folded: elsewhere an observer stands between a layer and its batch norm.
    """
    names = [{node.name for node in nodes} for nodes in fused]
    found = [
        change
        for change in find_changes(program, is_qat=True)
        if change.kind is not ChangeKind.TENSOR_READ or any({change.node, change.layer} <= own for own in names)
    ]
    if found:
        more = "; find_changes(program, is_qat=True) lists all" if len(found) > 1 else ""
        warn_user(f"torchao changes what the program computes at {len(found)} of its nodes{more}: {found[0]}")


# -- what is said --------------------------------------------------------------------------------------------------


def _describe(node: Node) -> str:
    """Return the name of a node, with the module that is called there."""
    callers = callers_of(node)
    return f"{node.name} ({callers[-1].name})" if callers else node.name


def _format_all(nodes: Sequence[Node]) -> str:
    names = list(dict.fromkeys(_describe(node) for node in nodes))
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


_FRAME = re.compile(r'File "(.+)", line (\d+), in .*(?:\n\s*(?!File ")(.*))?')  # torch may know no line of code
_TORCH = Path(torch.__file__).parent


def _find_line(node: Node) -> str:
    """Return the innermost line outside of torch that led to a node, as ``file:number: code``; "" if none is noted."""
    frames = _FRAME.findall(node.meta.get("stack_trace") or "")
    own = [frame for frame in frames if _TORCH not in Path(frame[0]).parents]
    return "{}:{}: {}".format(*own[-1]).removesuffix(": ") if own else ""


# -- what a fold changes -------------------------------------------------------------------------------------------

_STATISTICS = ("running_mean", "running_var")
_TENSORS = ("weight", "bias", *_STATISTICS)


def _judge_fold(readers: Readers, fold: NormFold, group: Sequence[NormFold], is_qat: bool) -> Iterator[ProgramChange]:
    """Yield what a fold changes. ``group``: the folds of the same weight, in order."""
    obstacle = _find_obstacle(readers, fold, is_qat)
    faults = [(ChangeKind.RAISES, obstacle)] if obstacle else _find_faults(readers, fold, group, is_qat)
    for kind, text in faults:
        reason = f"{_describe(fold.norm)}, folded into {_describe(fold.layer)}: {text}"
        yield ProgramChange(
            kind=kind, node=fold.norm.name, layer=fold.layer.name, reason=reason, line=_find_line(fold.norm)
        )


def _find_obstacle(readers: Readers, fold: NormFold, is_qat: bool) -> str:
    """Say why torchao cannot fold a norm, and raises; "" if it can."""
    layer, norm = arguments_of(fold.layer), arguments_of(fold.norm)
    tensors = {"its weight": layer["weight"], "its bias": layer.get("bias")}
    tensors |= {f"the norm's {name}": norm.get(name) for name in _TENSORS}
    for name, node in tensors.items():
        if node is not None and node.op != "get_attr":
            return f"{name} is {'an input' if node.op == 'placeholder' else 'computed'}, where torchao expects a tensor"
    if missing := [name for name in (_TENSORS if is_qat else _STATISTICS) if norm.get(name) is None]:
        return f"the norm has no {' and no '.join(missing)}"
    targets = [str(node.target) for node in (layer["weight"], layer.get("bias")) if node is not None]
    targets += [_name_bias(fold)] if len(targets) == 1 else []
    for target in targets:
        if not isinstance(readers.find_tensor(target), (nn.Parameter, type(None))):
            return f"{target} is no parameter, and torchao writes one in its place"
    if str(fold.layer.target) in TRANSPOSED and layer.get("groups", 1) != 1:
        return "it is transposed and has several groups"
    return ""


def _find_faults(
    readers: Readers, fold: NormFold, group: Sequence[NormFold], is_qat: bool
) -> Iterator[tuple[ChangeKind, str]]:
    """Yield what a fold that torchao makes changes, with the kind of each."""
    first, (layer, norm, _) = group[0], fold
    norms = [each.norm for each in group if each.layer is layer]
    others = [user for user in readers.list_readers(layer) if user not in norms]
    if norm is norms[0] and others:
        yield ChangeKind.RESULT_READ, f"its result is read by {_format_all(others)} as well"
    if fold is first:
        yield from _find_tensor_readers(readers, fold, group)
    elif fold.is_chained or _identify_norm(norm) != _identify_norm(first.norm):
        yield ChangeKind.NORM_DROPPED, f"left out, as {_describe(first.norm)} is folded into the same weight first"
    elif layer is not first.layer and (_bias_of(layer) is None or _bias_of(layer) is not _bias_of(first.layer)):
        yield ChangeKind.BIAS_LOST, f"the norm's part of the bias is lost: {_describe(first.layer)} has the same weight"
    if not is_qat and arguments_of(norm).get("training"):
        yield ChangeKind.BATCH_STATISTICS, "the norm takes the statistics of its batch, the fold the running ones"
    ranks = [node.meta["val"].dim() for node in (layer, arguments_of(layer)["weight"]) if "val" in node.meta]
    if str(layer.target) != LINEAR and len(set(ranks)) > 1:
        yield ChangeKind.WITHOUT_BATCH, "its input has no batch, and the norm takes another axis for its channels"


def _find_tensor_readers(
    readers: Readers, fold: NormFold, group: Sequence[NormFold]
) -> Iterator[tuple[ChangeKind, str]]:
    """Yield who else reads the tensors that a fold writes: other than the layers of its group, and their norms."""
    own = {node for each in group for node in (each.layer, each.norm)}
    weight, bias, new_bias = arguments_of(fold.layer)["weight"], _bias_of(fold.layer), _name_bias(fold)
    targets = str(weight.target), new_bias if bias is None else str(bias.target)
    others = {target: [user for user in readers.list_tensor_readers(target) if user not in own] for target in targets}
    misled = others.pop(new_bias) if bias is None else []
    if any(others.values()):
        names = " and ".join(target for target, users in others.items() if users)
        users = _format_all([user for users in others.values() for user in users])
        yield ChangeKind.TENSOR_READ, f"it writes {names}, read by {users} as well"
    if misled:
        yield ChangeKind.NAME_TAKEN, f"its bias is written as {new_bias}, read by {_format_all(misled)}"


def _bias_of(layer: Node) -> Any:
    return arguments_of(layer).get("bias")


def _name_bias(fold: NormFold) -> str:
    """Return the name that torchao gives to the bias of a layer that has none."""
    return f"{arguments_of(fold.layer)['weight'].target}_bias"


def _identify_norm(norm: Node) -> tuple[Any, ...]:
    """Return what two calls of one norm have in common."""
    arguments = arguments_of(norm)
    return *(arguments.get(name) for name in _TENSORS), arguments.get("eps")


# -- what eval() and train() change --------------------------------------------------------------------------------

_SWITCHED = {
    "batch_norm": ("training", {"momentum": 0.1, "eps": 1e-5}),
    "dropout": ("train", {"p": 0.5}),
    "dropout_": ("train", {"p": 0.5}),
}
"""The ops that torchao's eval() and train() write again: the argument of the mode, and the constants then written."""

_NOT_SWITCHED = {
    "alpha_dropout": ("train", "p"),
    "alpha_dropout_": ("train", "p"),
    "feature_alpha_dropout": ("train", "p"),
    "feature_alpha_dropout_": ("train", "p"),
    "feature_dropout": ("train", "p"),
    "feature_dropout_": ("train", "p"),
    "gru": ("train", "dropout"),
    "lstm": ("train", "dropout"),
    "rnn_relu": ("train", "dropout"),
    "rnn_tanh": ("train", "dropout"),
    "rrelu": ("training", "upper"),
    "rrelu_": ("training", "upper"),
    "scaled_dot_product_attention": ("dropout_p", "dropout_p"),
}
"""Ops that drop or draw values, which these leave as they are: the arguments that both are true if this one does."""


def _judge_constants(node: Node, is_trained: bool) -> Iterator[ProgramChange]:
    """Yield what happens to a node's constants and its mode. ``is_trained``: prepare_qat_pt2e writes it again too."""
    arguments, name = arguments_of(node), name_op(node)
    kind, text = ChangeKind.LEFT_IN_TRAINING, "eval() does not reach it"
    if name in _SWITCHED:
        mode, defaults = _SWITCHED[name]
        lost = [f"{key} {arguments[key]:g} to {value:g}" for key, value in defaults.items() if arguments[key] != value]
        lost += [] if arguments[mode] else [f"{mode} False to True"]
        if name == "batch_norm" and arguments["running_mean"] is None and not is_trained:
            lost.append("training True to False, without running statistics")
        if not lost:
            return
        kind = ChangeKind.TRAINED_WITH_DEFAULTS if is_trained else ChangeKind.SWITCHED_TO_DEFAULTS
        text = f"{'prepare_qat_pt2e changes' if is_trained else 'eval() and train() change'} {', '.join(lost)}"
    elif name not in _NOT_SWITCHED or not all(arguments.get(key) for key in _NOT_SWITCHED[name]):
        return
    yield ProgramChange(kind=kind, node=node.name, layer="", reason=f"{_describe(node)}: {text}", line=_find_line(node))
