"""Faults of the reference backend in how it runs: memory, batches, threads, dynamic inputs, the graph's structure."""

from __future__ import annotations

import copy
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from fx_quant_conformance.backends.base import Execution
from fx_quant_conformance.refimpl.graph.invariants import is_dequantize, is_quantize
from tests.conformance.support.told import name_ops
from tests.mutants.reference_faults import (
    CHOOSES,
    DYNAMIC,
    NUMBERS,
    SUMS,
    Wrap,
    edited,
    modules,
    seed,
    stepped,
    wrapped,
)
from tests.mutants.reference_kernels import SmallReference, Steps, in_rows

# -- other models -----------------------------------------------------------------------------------------------------


class OneForAll(SmallReference):
    """Keeps one model of each structure, whatever its weights, scales and zero points: the first, or the latest."""

    def __init__(self, *, is_latest: bool) -> None:
        super().__init__()
        self._is_latest = is_latest
        self._kept: dict[str, Callable[..., Any]] = {}

    def lower(self, reference_model: GraphModule, example_inputs: tuple[Any, ...]) -> Callable[..., Any]:
        structure = "; ".join(map(_describe, reference_model.graph.nodes)) + str(dict(reference_model.named_children()))
        lowered = super().lower(reference_model, example_inputs)
        if self._is_latest:  # a kernel that holds the numbers of one model
            self._kept[structure] = lowered
            return lambda *inputs: self._kept[structure](*inputs)
        return self._kept.setdefault(structure, lowered)  # a compiler's cache


def _describe(node: Node) -> str:
    """Return a node as text, without the numbers of a grid."""
    return f"{node.name}: {node.target}({'' if is_quantize(node) or is_dequantize(node) else (node.args, node.kwargs)})"


seed("models", "compiled models cached by structure alone", lambda: OneForAll(is_latest=False), *NUMBERS, "NUM-07")
seed("models", "one slot for the numbers of all models", lambda: OneForAll(is_latest=True), "NUM-07")


# -- layout, batch, threads, memory -----------------------------------------------------------------------------------


def _as_if_contiguous(value: Tensor) -> Tensor:
    """What a kernel reads that takes memory to be contiguous."""
    dense = value.new_empty(value.shape).stride()
    span = 1 + sum((length - 1) * stride for length, stride in zip(value.shape, dense, strict=True))
    size = value.untyped_storage().nbytes() // value.element_size() - value.storage_offset()
    memory = torch.as_strided(value, (size,), (1,))
    memory = torch.cat([memory, memory.new_zeros(max(0, span - len(memory)))])
    return torch.as_strided(memory, value.shape, dense)


def _from_the_start(value: Tensor) -> Tensor:
    """What a kernel reads that begins where the memory begins."""
    return torch.as_strided(value, value.shape, value.stride(), 0)


def _reads(is_misread: Callable[[Tensor], bool], misread: Callable[[Tensor], Tensor] = _as_if_contiguous) -> Wrap:
    def wrap(lowered: Callable[..., Any], *_: Any) -> Callable[..., Any]:
        return lambda *inputs: lowered(*(misread(x) if is_misread(x) else x for x in inputs))

    return wrap


def _is_last(value: Tensor) -> bool:
    return value.dim() == 4 and not value.is_contiguous() and value.is_contiguous(memory_format=torch.channels_last)


def _is_gappy(value: Tensor) -> bool:
    return value.is_floating_point() and value.numel() > 0 and not value.is_contiguous() and not _is_last(value)


def _begins_later(value: Tensor) -> bool:
    return value.is_floating_point() and value.is_contiguous() and value.storage_offset() > 0


def _rows(change: Callable[[Tensor, Tensor], Tensor]) -> Wrap:
    """Change the output by what the first input is."""

    def wrap(lowered: Callable[..., Any], *_: Any) -> Callable[..., Any]:
        return lambda *inputs: in_rows(lowered(*inputs), lambda y: change(inputs[0], y))

    return wrap


def _has_rows(x: Tensor, y: Tensor) -> bool:
    return x.dim() > 1 and y.dim() > 1 and len(x) == len(y) > 1


def _first_row(x: Tensor, y: Tensor) -> Tensor:
    return y[:1].expand(y.shape).contiguous() if _has_rows(x, y) else y


def _beyond_tile(x: Tensor, y: Tensor) -> Tensor:
    """Rows after the last whole tile of four are those of the tile before."""
    rows = len(y) // 4 * 4 if _has_rows(x, y) else 0
    return torch.cat([y[:rows], y[: len(y) - rows]]) if rows and rows < len(y) and len(y) > 8 else y


def _compiled_size(lowered: Callable[..., Any], _: GraphModule, example: tuple[Any, ...]) -> Callable[..., Any]:
    """Wrong for batches of another size than that of the example inputs."""

    def run(*inputs: Any) -> Any:
        other = [x.dim() > 1 and len(x) != len(given) for x, given in zip(inputs, example, strict=True)]
        return in_rows(lowered(*inputs), lambda y: y.roll(1, 0) if any(other) and y.dim() else y)

    return run


def _by_threads(lowered: Callable[..., Any], *_: Any) -> Callable[..., Any]:
    def run(*inputs: Any) -> Any:
        found = lowered(*inputs)
        return in_rows(found, lambda y: y.roll(1, -1)) if torch.get_num_threads() > 1 else found

    return run


def _second_differs(lowered: Callable[..., Any], *_: Any) -> Callable[..., Any]:
    """A buffer that is cleared once only."""
    calls: list[int] = []

    def run(*inputs: Any) -> Any:
        calls.append(1)
        return in_rows(lowered(*inputs), lambda y: y * 2 if len(calls) == 2 else y)

    return run


def _stale(lowered: Callable[..., Any], *_: Any) -> Callable[..., Any]:
    """The result of other inputs of these shapes is given once more."""
    kept: list[tuple[list[Any], Any]] = []

    def run(*inputs: Any) -> Any:
        shapes = [x.shape for x in inputs]
        if len(kept) == 2 and kept[0][0] == shapes:
            return copy.deepcopy(kept.pop()[1])
        kept.append((shapes, lowered(*inputs)))
        return kept[-1][1]

    return run


def _unwritten(lowered: Callable[..., Any], *_: Any) -> Callable[..., Any]:
    """The last element is never written: it is whatever memory holds."""

    def tail(y: Tensor) -> Tensor:
        if not y.is_floating_point() or y.numel() < 2:
            return y
        memory = torch.empty(y.numel())
        memory[:-1] = y.flatten()[:-1]
        return memory.reshape(y.shape)

    return lambda *inputs: in_rows(lowered(*inputs), tail)


def _overwrites(lowered: Callable[..., Any], *_: Any) -> Callable[..., Any]:
    """The first input is used as memory for something else."""

    def run(*inputs: Any) -> Any:
        found = in_rows(lowered(*inputs), Tensor.clone)
        if inputs[0].is_floating_point():
            inputs[0].zero_()
        return found

    return run


def keep_in_turn(lowered: Callable[..., Any], buffers: int) -> Callable[..., Any]:
    """Results of one shape are in so many buffers in turn: each is right until a later run writes over it."""
    kept = defaultdict[torch.Size, deque[Tensor]](lambda: deque(maxlen=buffers))

    def run(*inputs: Any) -> Any:
        y = lowered(*inputs)
        if isinstance(y, Tensor):
            own = kept[y.shape]
            own.append(own[0].copy_(y) if len(own) == buffers else y.clone())
        return own[-1] if isinstance(y, Tensor) else y

    return run


def _no_rows(lowered: Callable[..., Any], *_: Any) -> Callable[..., Any]:
    """No rows in, nothing out."""
    empty = lambda y: y if y.numel() else torch.zeros(0)  # noqa: E731
    return lambda *inputs: in_rows(lowered(*inputs), empty) if inputs[0].is_floating_point() else lowered(*inputs)


def _is_expanded(value: Tensor) -> bool:
    lengths = zip(value.stride(), value.shape, strict=True)
    return value.is_floating_point() and any(not stride and length > 1 for stride, length in lengths)


def _twice_in_a_row(lowered: Callable[..., Any], *_: Any) -> Callable[..., Any]:
    """The result is added to what is in the buffer, which other inputs clear."""
    before: list[Any] = []

    def run(*inputs: Any) -> Any:
        same = bool(before) and all(map(torch.equal, before, inputs))
        before[:] = [x.clone() for x in inputs]
        return in_rows(lowered(*inputs), lambda y: y * 2 if same else y)

    return run


wrapped("layout", "channels_last read as contiguous", _reads(_is_last), "NUM-07")
wrapped("layout", "slices and transposed inputs read as contiguous", _reads(_is_gappy), "NUM-07")
wrapped("layout", "inputs read from where their memory begins", _reads(_begins_later, _from_the_start), "NUM-07")
wrapped("layout", "every row of a batch is the first", _rows(_first_row), *NUMBERS, "NUM-07")
wrapped("layout", "rows beyond a tile of four are others", _rows(_beyond_tile), *NUMBERS, "NUM-07")
wrapped("layout", "wrong for batches of another size than compiled", _compiled_size, "NUM-07")
wrapped("layout", "a batch without rows has no shape", _no_rows, "NUM-07")
wrapped("layout", "expanded inputs read as if they were dense", _reads(_is_expanded), "NUM-07")
wrapped(
    "state",
    "the same input twice in a row differs",
    _twice_in_a_row,
    "NUM-07",
    claims=("nn.Linear/static:*", "nn.ReLU/*", *SUMS),
)
wrapped("state", "depends on the number of threads", _by_threads, "NUM-07")
wrapped("state", "second call differs, any op", _second_differs, "NUM-07", *NUMBERS)
wrapped("state", "third call gives an earlier result", _stale, "NUM-07", *NUMBERS)
wrapped("state", "last element not written, any op", _unwritten, "NUM-07", *NUMBERS)
wrapped("state", "writes to its input", _overwrites, "NUM-07")
for number in (1, 2):
    wrapped("state", f"results in {number} of its own buffers", lambda f, *_, n=number: keep_in_turn(f, n), "NUM-07")

# -- dynamic and weight-only ------------------------------------------------------------------------------------------


def _chooses(change: Callable[..., Any]) -> Callable[..., Any]:
    """Replace the choice of a dynamic input's qparams: change(x, low, high, eps, dtype) → (scale, zero point)."""

    def body(honest: Any, target: Any, *arguments: Any, **keywords: Any) -> Any:
        return change(honest, *arguments) if target == CHOOSES else honest(target, *arguments, **keywords)

    return body


def _reduced(honest: Any, x: Tensor, low: int, high: int, *rest: Any) -> Any:
    return honest(CHOOSES, x, low, high // 2, *rest)


def _symmetric(honest: Any, x: Tensor, low: int, high: int, *rest: Any) -> Any:
    del honest, rest
    scale = (x.abs().max().double() / ((high - low) / 2)).clamp(min=2.0**-20)
    return scale, torch.tensor((low + high + 1) // 2)


def _without_zero(honest: Any, x: Tensor, low: int, high: int, *rest: Any) -> Any:
    """The range is from the smallest to the largest value, zero or no zero."""
    del honest, rest
    scale = ((x.max() - x.min()).double() / (high - low)).clamp(min=2.0**-20)
    return scale, (low - (x.min() / scale).round()).clamp(low, high).long()


def _floored(honest: Any, x: Tensor, low: int, high: int, *rest: Any) -> Any:
    scale, zero = honest(CHOOSES, x, low, high, *rest)
    return scale.clamp(min=2.0**-10), zero


class Previous(Steps):
    """Takes the qparams that the input before this one had."""

    def function(self, target: Any, *arguments: Any, **keywords: Any) -> Any:
        found = super().function(target, *arguments, **keywords)
        if target != CHOOSES:
            return found
        before = self.__dict__.get("before", found)
        self.__dict__["before"] = found
        return before


class PreviousQparams(SmallReference):
    def lower(self, reference_model: GraphModule, example_inputs: tuple[Any, ...]) -> Callable[..., Any]:
        run: Callable[..., Any] = torch.no_grad()(Previous(reference_model).run)
        return run


stepped("dynamic", "dynamic inputs in 7 bits", "function", _chooses(_reduced), claims=DYNAMIC)
stepped("dynamic", "dynamic inputs symmetric", "function", _chooses(_symmetric), claims=DYNAMIC)
stepped("dynamic", "range of a dynamic input without zero", "function", _chooses(_without_zero), claims=DYNAMIC)
stepped("dynamic", "smallest dynamic scale 2^-10", "function", _chooses(_floored), claims=DYNAMIC)
seed("dynamic", "qparams of the previous input", PreviousQparams, *NUMBERS, "NUM-07", claims=DYNAMIC)


def _embedding(change: Callable[..., Any]) -> Callable[..., Any]:
    kinds = (nn.Embedding, nn.EmbeddingBag)
    return lambda honest, module, *arguments, **keywords: (
        change(honest, module, *arguments) if isinstance(module, kinds) else honest(module, *arguments, **keywords)
    )


def _one_before(honest: Any, module: Any, indices: Tensor, *rest: Any) -> Any:
    """The last row of the table is read as the one before."""
    return honest(module, indices.clamp(max=max(0, module.num_embeddings - 2)), *rest)


def _means_as_sums(module: Any) -> None:
    module.mode = "sum"


stepped(
    "geometry",
    "last row of an embedding is the one before",
    "called",
    _embedding(_one_before),
    claims=("nn.Embedding*",),
)
edited("geometry", "mean of a bag as sum", modules(nn.EmbeddingBag, _means_as_sums), claims=("nn.EmbeddingBag/*",))


def _state_dropped(honest: Any, module: nn.Module, *arguments: Any, **keywords: Any) -> Any:
    is_cell = isinstance(module, nn.RNNCellBase)
    return honest(module, *arguments[:1]) if is_cell else honest(module, *arguments, **keywords)


stepped("state", "hidden state of a cell dropped", "called", _state_dropped, claims=("nn.*Cell/*",))

# -- structure of the graph -------------------------------------------------------------------------------------------


def _skips(model: GraphModule, is_skipped: Callable[[Node], bool]) -> None:
    """Let each dequantize for which it is said so take what was to be quantized."""
    for node in model.graph.nodes:
        quantize: Any = node.args[0] if is_dequantize(node) else None
        if is_quantize(quantize) and is_skipped(node):
            node.replace_all_uses_with(quantize.args[0])


def _source(dequantize: Node) -> str:
    """What kind of node it is whose value is quantized and dequantized here."""
    quantize: Any = dequantize.args[0]
    return str(quantize.args[0].op)


def _is_result(node: Node) -> bool:
    return _source(node) not in ("placeholder", "get_attr")


def _unquantized(model: GraphModule) -> None:
    _skips(model, _is_result)


def _between(model: GraphModule) -> None:
    """Of a chain of ops, only the last result is quantized: kernels fused that may not be."""
    ends = model.graph.output_node().all_input_nodes
    _skips(model, lambda node: _is_result(node) and node not in ends)


def _inputs_unquantized(model: GraphModule) -> None:
    _skips(model, lambda node: _source(node) == "placeholder")


edited("structure", "results never quantized", _unquantized, "NUM-03", "LOW-04")
edited("structure", "quantize dropped between ops", _between, "NUM-03")
edited("structure", "inputs never quantized", _inputs_unquantized, *NUMBERS)
wrapped("structure", "results in float64", lambda f, *_: lambda *x: in_rows(f(*x), Tensor.double))
wrapped("structure", "results as a list", lambda f, *_: lambda *x: [f(*x)])
wrapped("structure", "no result", lambda f, *_: lambda *x: None)


class ShowsFloat(SmallReference):
    """Says of itself that it adds in float."""

    floats: tuple[str, ...] = ("add",)

    def execution(self, lowered: Callable[..., Any]) -> Any:
        targets = [getattr(node.target, "__name__", "") for node in lowered.graph.nodes]  # type: ignore[attr-defined]
        floats = tuple(each for each in self.floats if each in targets)
        return Execution(quantized_ops=name_ops(lowered), float_fallbacks=floats)

    def lower(self, reference_model: GraphModule, example_inputs: tuple[Any, ...]) -> Callable[..., Any]:
        return reference_model.eval().requires_grad_(False)


class ShowsNothing(ShowsFloat):
    """Cannot show that anything ran on integers."""

    def execution(self, lowered: Callable[..., Any]) -> Any:
        found = super().execution(lowered)
        return Execution(quantized_ops=() if found.float_fallbacks else found.quantized_ops, float_fallbacks=())


seed("structure", "adds in float, and says so", ShowsFloat, "LOW-04", claims=SUMS)
seed("structure", "shows no quantized op for a sum", ShowsNothing, "LOW-04", claims=SUMS)
