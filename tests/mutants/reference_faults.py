"""Faults in the reference backend's kernels: its model edited, its steps replaced, what is called wrapped."""

from __future__ import annotations

import copy
import math
import operator
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.ao.nn.quantized.reference as nnqr
import torch.nn.functional as F
from reference_kernels import IN_FULL, Edited, SmallReference, Stepped, Steps, Wrapped, in_rows, weighted
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from backends.base import Capabilities, Execution
from conformance.mutation.mutant import Mutant
from refimpl.decomposed import OPS
from refimpl.invariants import is_dequantize, is_quantize

MUTANTS: list[Mutant] = []
NUMBERS = ("NUM-03", "NUM-05")
CHOOSES: Any = OPS.choose_qparams.tensor

WEIGHTED = ("nn.Linear/static:*/ptq/*", "nn.Conv*", "*.conv2d/*", "F.linear/static:*")
DYNAMIC = ("*/dynamic:in=quint8*/ptq/*",)
SUMS = ("operator.*/ptq/*", "torch.flatten/*/ptq/*")

Wrap = Callable[[Callable[..., Any], GraphModule, tuple[Any, ...]], Callable[..., Any]]


def seed(group: str, name: str, make: Callable[[], SmallReference], *rules: str, **more: Any) -> None:
    """Enter a fault into the table. ``claims``: the only ones that it touches."""
    more = {"in_full": more.get("claims", IN_FULL), **more}
    MUTANTS.append(Mutant(group=group, name=name, make=make, rules=rules or NUMBERS, **more))


def edited(group: str, name: str, edit: Callable[[GraphModule], object], *rules: str, **more: Any) -> None:
    seed(group, name, lambda: Edited(edit), *rules, **more)


def stepped(group: str, name: str, step: str, body: Callable[..., Any], *rules: str, **more: Any) -> None:
    seed(group, name, lambda: Stepped(step, body), *rules, **more)


def wrapped(group: str, name: str, wrap: Wrap, *rules: str) -> None:
    seed(group, name, lambda: Wrapped(wrap), *rules)


# -- rounding, zero points, scales of every op: what quantizes a result -----------------------------------------------


def to_integers(round_: Callable[[Tensor], Tensor]) -> Callable[..., Any]:
    """Quantize with another rounding."""

    def body(honest: Any, node: Node, value: Any, scale: Any, zero: Any, low: int, high: int, dtype: Any) -> Any:
        if not isinstance(scale, float):
            return honest(node, value, scale, zero, low, high, dtype)
        return (round_(value / scale) + zero).clamp(low, high).to(dtype)

    return body


def _other_numbers(change: Callable[..., tuple[Any, ...]]) -> Callable[..., Any]:
    """Quantize with other qparams."""
    return lambda honest, node, value, *numbers: honest(node, value, *change(*numbers))


def _is_static(scale: Any) -> bool:
    return isinstance(scale, float)


def _scaled(factor: float) -> Callable[..., tuple[Any, ...]]:
    return lambda scale, *rest: (scale * factor if _is_static(scale) else scale, *rest)


stepped("rounding", "results truncated", "quantize", to_integers(torch.trunc))
stepped("rounding", "results rounded down", "quantize", to_integers(torch.floor))
stepped("rounding", "results rounded by adding a half and truncating", "quantize", to_integers(
    lambda v: (v + 0.5).trunc()))  # fmt: skip
stepped("zero point", "zero point off by one when quantizing", "quantize", _other_numbers(
    lambda scale, zero, *rest: (scale, zero + 1 if _is_static(scale) else zero, *rest)))  # fmt: skip
stepped("zero point", "zero point dropped when quantizing", "quantize", _other_numbers(
    lambda scale, zero, *rest: (scale, 0 if _is_static(scale) else zero, *rest)))  # fmt: skip
for bits in (8, 12, 16):
    stepped("scale", f"results in steps larger by 2^-{bits}", "quantize", _other_numbers(_scaled(1 + 2.0**-bits)),
            size=2.0**-bits)  # fmt: skip
stepped("activation", "range ends one early, any op", "quantize", _other_numbers(
    lambda scale, zero, low, high, dtype: (scale, zero, low, high - 1, dtype)))  # fmt: skip
stepped("structure", "results in 7 bits", "quantize", _other_numbers(
    lambda scale, zero, low, high, dtype: (scale, zero, low, low + 127, dtype)))  # fmt: skip


# -- weights and biases -----------------------------------------------------------------------------------------------


def _weights(change: Callable[[Any], object]) -> Callable[[GraphModule], None]:
    def edit(model: GraphModule) -> None:
        with torch.no_grad():
            for module in weighted(model):
                change(module)

    return edit


def _in_float(module: Any) -> None:
    """The weight is not quantized: as a kernel that keeps the float one."""
    module.get_weight = lambda: module.weight


def _no_zero_point(module: Any) -> None:
    module.weight_zero_point.zero_()


def _without_lowest(module: Any) -> None:
    """A kernel whose weights are symmetric: the integer -128 becomes -127, though the config does not say so."""
    get = module.get_quantized_weight

    def clamped() -> Tensor:
        integers: Tensor = get()
        return integers.clamp(min=-127)

    module.get_quantized_weight = clamped
    module.get_weight = lambda: _dequantized(module, clamped())


def _dequantized(module: Any, integers: Tensor) -> Tensor:
    shape = [1] * integers.dim()
    if module.weight_scale.numel() > 1:
        shape[int(module.weight_axis)] = -1
    scale, zero = module.weight_scale.reshape(shape), module.weight_zero_point.reshape(shape)
    weight: Tensor = (integers - zero) * scale
    return weight.float()


class AffineWeights(Edited):
    """Takes weights with a zero point."""

    def capabilities(self) -> Capabilities:
        return replace(super().capabilities(), weight_schemes=("per_tensor_affine",))


def _square_transposed(module: Any) -> None:
    """The layout of the weight is (in, out): where both are equal, nothing complains."""
    if module.weight.dim() > 1 and module.weight.shape[0] == module.weight.shape[1]:
        module.weight.copy_(module.weight.transpose(0, 1).clone())


def _groups_mixed(module: Any) -> None:
    """Weights of a transposed convolution in the order (in, group, out / group)."""
    if isinstance(module, nnqr.ConvTranspose2d) and module.groups > 1:
        module.weight.copy_(module.weight.roll(1, 0).clone())


edited("weights", "weight left in float", _weights(_in_float))
seed("zero point", "weight zero point dropped", lambda: AffineWeights(_weights(_no_zero_point)))
edited("claims", "takes no weight of -128, unsaid", _weights(_without_lowest))
edited("geometry", "square weights transposed", _weights(_square_transposed), claims=WEIGHTED)
edited(
    "geometry",
    "transposed convolution: groups in another order",
    _weights(_groups_mixed),
    claims=("nn.ConvTranspose2d/*",),
)
edited("bias", "bias dropped, any op", _weights(lambda module: setattr(module, "bias", None)))


# -- geometry ---------------------------------------------------------------------------------------------------------


def _modules(kind: Any, change: Callable[[Any], object]) -> Callable[[GraphModule], None]:
    def edit(model: GraphModule) -> None:
        for module in model.modules():
            if isinstance(module, kind):
                change(module)

    return edit


def _relu6(module: Any) -> None:
    module.max_val = math.inf


edited("activation", "relu6 as relu", _modules(nn.ReLU6, _relu6), claims=("nn.ReLU6/*",))
edited("activation", "relu missing after a fused op", _modules(
    nn.Sequential, lambda m: isinstance(m[-1], nn.ReLU) and m.register_module(str(len(m) - 1), nn.Identity())
))  # fmt: skip
edited("geometry", "transposed convolution: output padding ignored", _modules(
    nnqr.ConvTranspose2d, lambda m: setattr(m, "output_padding", (0, 0))))  # fmt: skip
edited("geometry", "max_pool: dilation ignored, any shape", _modules(
    nn.MaxPool2d, lambda m: setattr(m, "dilation", 1)), *NUMBERS)  # fmt: skip


def _align_corners(honest: Any, target: Any, *arguments: Any, **keywords: Any) -> Any:
    if target is F.interpolate and keywords.get("mode") == "bilinear":
        keywords["align_corners"] = not keywords.get("align_corners")
    return honest(target, *arguments, **keywords)


def _one_less(honest: Any, target: Any, *arguments: Any, **keywords: Any) -> Any:
    """The mean divides by one less than there are."""
    result = honest(target, *arguments, **keywords)
    count = arguments[0].numel() // max(1, result.numel()) if target is torch.mean else 0
    return result * count / (count - 1) if count > 1 else result


def _wrong_eps(honest: Any, target: Any, *arguments: Any, **keywords: Any) -> Any:
    if target is F.layer_norm:
        keywords["eps"] = 1e-3
    return honest(target, *arguments, **keywords)


stepped("geometry", "interpolate: corners aligned otherwise", "function", _align_corners, claims=("F.interpolate/*",))
stepped("geometry", "mean divides by one less", "function", _one_less, claims=("torch.mean/*",))
stepped("geometry", "layer_norm with another eps", "function", _wrong_eps, claims=("F.layer_norm/*",))


def _clamps_open(honest: Any, target: Any, *arguments: Any, **keywords: Any) -> Any:
    """clamp without its lower end."""
    if target is torch.clamp:
        arguments, keywords = arguments[:1], {"max": arguments[2] if len(arguments) > 2 else keywords.get("max")}
        if keywords["max"] is None:
            return arguments[0]
    return honest(target, *arguments, **keywords)


def _cat_swapped(honest: Any, target: Any, *arguments: Any, **keywords: Any) -> Any:
    if target is torch.cat and len(arguments[0]) > 1 and arguments[0][0].shape == arguments[0][1].shape:
        first, second, *rest = arguments[0]
        arguments = ([second, first, *rest], *arguments[1:])
    return honest(target, *arguments, **keywords)


def _summed_in_half(honest: Any, target: Any, *arguments: Any, **keywords: Any) -> Any:
    result = honest(target, *arguments, **keywords)
    return result.half().float() if target in (operator.add, operator.mul) else result


stepped("activation", "clamp has no lower end", "function", _clamps_open, claims=("torch.clamp/*",))
stepped("sharing", "cat swaps inputs of one shape", "function", _cat_swapped, claims=("torch.cat/*", "model/cat*"))
stepped("accumulation", "sums and products in float16", "function", _summed_in_half, claims=("operator.*",))


def _softmax_elsewhere(module: Any) -> None:
    module.dim = 0


edited("geometry", "softmax along the first axis", _modules(nn.Softmax, _softmax_elsewhere), claims=("nn.Softmax/*",))


def _approximate(honest: Any, module: nn.Module, *arguments: Any, **keywords: Any) -> Any:
    """A sigmoid of a few pieces."""
    is_sigmoid = isinstance(module, nn.Sigmoid)
    return (arguments[0] / 4 + 0.5).clamp(0, 1) if is_sigmoid else honest(module, *arguments, **keywords)


stepped("activation", "sigmoid of three pieces", "called", _approximate, claims=("nn.Sigmoid/*",))

# -- layout, batch, threads, memory -----------------------------------------------------------------------------------


def _as_if_contiguous(value: Tensor) -> Tensor:
    """What a kernel reads that takes memory to be contiguous."""
    dense = value.new_empty(value.shape).stride()
    span = 1 + sum((length - 1) * stride for length, stride in zip(value.shape, dense, strict=True))
    size = value.untyped_storage().nbytes() // value.element_size() - value.storage_offset()
    memory = torch.as_strided(value, (size,), (1,))
    memory = torch.cat([memory, memory.new_zeros(max(0, span - len(memory)))])
    return torch.as_strided(memory, value.shape, dense)


def _reads(is_misread: Callable[[Tensor], bool]) -> Wrap:
    def wrap(lowered: Callable[..., Any], *_: Any) -> Callable[..., Any]:
        return lambda *inputs: lowered(*(_as_if_contiguous(x) if is_misread(x) else x for x in inputs))

    return wrap


def _is_last(value: Tensor) -> bool:
    return value.dim() == 4 and not value.is_contiguous() and value.is_contiguous(memory_format=torch.channels_last)


def _is_gappy(value: Tensor) -> bool:
    return value.is_floating_point() and value.numel() > 0 and not value.is_contiguous() and not _is_last(value)


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


def _no_rows(lowered: Callable[..., Any], *_: Any) -> Callable[..., Any]:
    """No rows in, nothing out."""
    return lambda *inputs: in_rows(lowered(*inputs), lambda y: y if y.numel() else torch.zeros(0))


wrapped("layout", "channels_last read as contiguous", _reads(_is_last), "NUM-07")
wrapped("layout", "slices and transposed inputs read as contiguous", _reads(_is_gappy), "NUM-07")
wrapped("layout", "every row of a batch is the first", _rows(_first_row), *NUMBERS, "NUM-07")
wrapped("layout", "rows beyond a tile of four are others", _rows(_beyond_tile), *NUMBERS, "NUM-07")
wrapped("layout", "wrong for batches of another size than compiled", _compiled_size, "NUM-07")
wrapped("layout", "a batch without rows has no shape", _no_rows, "NUM-07")
wrapped("state", "depends on the number of threads", _by_threads, "NUM-07")
wrapped("state", "second call differs, any op", _second_differs, "NUM-07", *NUMBERS)
wrapped("state", "third call gives an earlier result", _stale, "NUM-07", *NUMBERS)
wrapped("state", "last element not written, any op", _unwritten, "NUM-07", *NUMBERS)
wrapped("state", "writes to its input", _overwrites, "NUM-07")

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
edited("geometry", "mean of a bag as sum", _modules(nn.EmbeddingBag, _means_as_sums), claims=("nn.EmbeddingBag/*",))


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
        return Execution(quantized_ops=("op",), float_fallbacks=tuple(each for each in self.floats if each in targets))

    def lower(self, reference_model: GraphModule, example_inputs: tuple[Any, ...]) -> Callable[..., Any]:
        return reference_model.eval().requires_grad_(False)


class ShowsNothing(ShowsFloat):
    """Cannot show that anything ran on integers."""

    def execution(self, lowered: Callable[..., Any]) -> Any:
        found = super().execution(lowered)
        return Execution(quantized_ops=() if found.float_fallbacks else found.quantized_ops, float_fallbacks=())


seed("structure", "adds in float, and says so", ShowsFloat, "LOW-04", claims=SUMS)
seed("structure", "shows no quantized op for a sum", ShowsNothing, "LOW-04", claims=SUMS)
