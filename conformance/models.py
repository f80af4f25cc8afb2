"""Models: a float model for every variant of a claim's pattern, and the QConfig that the claim is about.

``plan_cases`` returns the cases of a claim, or the reason why none can be built; such a claim is UNEXERCISED.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from conformance import recipes
from conformance.claims import Claim
from conformance.recipes import CONVOLUTIONS, MATRICES, Convolution, Matrix, Variant
from refimpl import MinMaxObserver, PerChannelMinMaxObserver, QConfig
from refimpl.dtype_config import DTypeWithConstraints
from refimpl.observers import dtype_range, is_quantized_dtype
from refimpl.patterns import is_chain, leaf_name, leaves


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One float model for a claim: how to build it (weights come from torch's generator), and its inputs.

    ``ranges``: from where to where the calibration values of each input reach; they decide its zero point.
    ``is_symmetric``: activations are observed symmetrically, so that the zero point after a relu is not the low end.
    """

    name: str
    build: Callable[[], PatternModel]
    shapes: tuple[tuple[int, ...], ...]
    ranges: tuple[tuple[float, float], ...] = ()
    is_symmetric: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One op of a pattern: a module, a function or a method name, and the arguments after its tensors."""

    op: nn.Module | Callable[..., Any] | str
    arguments: tuple[Any, ...] = ()
    keywords: tuple[tuple[str, Any], ...] = ()
    parameters: tuple[Tensor | None, ...] = ()
    takes_list: bool = False


class PatternModel(nn.Module):
    """Runs the steps of a pattern one after the other; the first takes all inputs."""

    def __init__(self, steps: Sequence[Step]) -> None:
        super().__init__()
        self.steps = tuple(steps)
        for number, step in enumerate(steps):
            if isinstance(step.op, nn.Module):
                self.add_module(f"op{number}", step.op)
            for name, parameter in zip(("weight", "bias"), step.parameters, strict=False):
                self.register_parameter(f"{name}{number}", None if parameter is None else nn.Parameter(parameter))

    def run(self, values: tuple[Any, ...]) -> Any:
        """Apply the steps to the inputs."""
        for number, step in enumerate(self.steps):
            values = (self._call_step(number, step, values),)
        return values[0]

    def _call_step(self, number: int, step: Step, values: tuple[Any, ...]) -> Any:
        keywords = dict(step.keywords)
        if isinstance(step.op, nn.Module):
            return step.op(*values)
        if isinstance(step.op, str):
            return getattr(values[0], step.op)(*values[1:], *step.arguments, **keywords)
        names = ("weight", "bias")[: len(step.parameters)]
        parameters = [getattr(self, f"{name}{number}") for name in names]
        tensors = (list(values),) if step.takes_list else values
        return step.op(*tensors, *parameters, *step.arguments, **keywords)


class OneInput(PatternModel):
    """A pattern of one input tensor."""

    def forward(self, x: Tensor) -> Any:
        return self.run((x,))


class TwoInputs(PatternModel):
    """A pattern of two input tensors."""

    def forward(self, x: Tensor, y: Tensor) -> Any:
        return self.run((x, y))


def plan_cases(claim: Claim) -> tuple[Case, ...] | str:
    """Return the cases of a claim, or the reason why the suite cannot build one."""
    reason = _unbuilt_flow(claim)
    if reason is not None:
        return reason
    pattern = claim.entry.normal_pattern
    if not is_chain(pattern):
        return "no recipe for a pattern that is not a chain of ops"
    root, *rest = leaves(pattern)
    if root in recipes.FUSED_MODULES and not rest:
        return _with_ranges(_fused_cases(root))
    unknown = [leaf_name(leaf) for leaf in rest if leaf not in recipes.RELUS and leaf not in recipes.BATCH_NORMS]
    if unknown:
        return f"no recipe for {unknown[0]} after {leaf_name(root)}"
    return _with_ranges(_root_cases(root, rest)) or f"no recipe for {leaf_name(root)}"


# Ranges of the inputs, as (low, high): zero point in the middle, at both ends, and away from them.
RANGES = ((-1.0, 1.0), (0.0, 2.0), (-3.0, 0.0), (-0.5, 4.0))


def _with_ranges(cases: Sequence[Case]) -> tuple[Case, ...]:
    """Give each input of each case a range; the cases of an op are repeated until every range has been met.

    The case after the last range is observed symmetrically. Two inputs have ranges of different width, whose product
    is positive somewhere.
    """
    rounds = len(RANGES) + 1
    repeated = itertools.islice(itertools.cycle(cases), max(len(cases), rounds) if cases else 0)
    return tuple(
        replace(
            case,
            name=case.name if number < len(cases) else f"{case.name}_again{number // len(cases)}",
            ranges=tuple(RANGES[(number + 2 * position) % len(RANGES)] for position in range(len(case.shapes))),
            is_symmetric=number % rounds == len(RANGES),
        )
        for number, case in enumerate(repeated)
    )


_DRAWS = 64


def build_model(case: Case) -> PatternModel:
    """Build a case's model, in eval mode, with parameters under which it gives something else than zeros.

    A single output after a relu is often zero for all inputs, and then there is no range to quantize it to.
    """
    with torch.no_grad():
        for _ in range(_DRAWS):
            model = case.build()
            model.eval()
            if any(bool((model(*inputs) != 0).any()) for inputs in calibration_inputs(case)):
                break
    return model


def _unbuilt_flow(claim: Claim) -> str | None:
    dtypes = claim.dtypes
    if claim.flow == "qat":
        return "quantization-aware training is not exercised yet"
    if dtypes.is_dynamic:
        return "dynamic quantization is not exercised yet"
    if not is_quantized_dtype(dtypes.input_dtype):
        return f"activations of dtype {dtypes.input_dtype} (weight-only or float16) are not exercised yet"
    ends = (dtypes.input_dtype_with_constraints, dtypes.output_dtype_with_constraints)
    if any(constraints.scale_exact_match is not None for constraints in ends):
        return "fixed qparams are not exercised yet"
    return None


def _root_cases(root: Any, rest: list[Any]) -> list[Case]:
    """Cases for a chain: variants of the root op, then the ops that follow it."""
    if root in recipes.WEIGHTED_MODULES:
        return _weighted_cases(root, recipes.WEIGHTED_MODULES[root], rest, _weighted_module)
    if root in recipes.WEIGHTED_FUNCTIONS:
        return _weighted_cases(root, recipes.WEIGHTED_FUNCTIONS[root], rest, _weighted_function)
    if root in recipes.BINARY:
        return [_plain_case(root, v, rest) for v in recipes.binary_variants()]
    if root in recipes.LIST_OPS:
        return [_plain_case(root, v, rest, takes_list=True) for v in recipes.LIST_OPS[root]]
    if root in recipes.UNARY and not rest:
        return [_plain_case(root, v, rest) for v in recipes.UNARY[root]]
    return []


def _plain_case(op: Any, variant: Variant, rest: list[Any], *, takes_list: bool = False) -> Case:
    def build() -> PatternModel:
        is_module = isinstance(op, type)
        made = op(*variant.arguments, **variant.keywords) if is_module else op
        first = Step(
            op=made,
            arguments=() if is_module else variant.arguments,
            keywords=() if is_module else tuple(variant.keywords.items()),
            takes_list=takes_list,
        )
        kind = OneInput if len(variant.shapes) == 1 else TwoInputs
        return kind([first, *(_follower(leaf, 0) for leaf in rest)])

    return Case(name=variant.name, build=build, shapes=variant.shapes)


def _follower(leaf: Any, channels: int) -> Step:
    """A batch norm with drawn statistics, or a relu."""
    if leaf in recipes.BATCH_NORMS:
        norm = leaf(channels)
        nn.init.normal_(norm.weight)
        nn.init.normal_(norm.bias)
        norm.running_mean.normal_()
        norm.running_var.uniform_(0.5, 2.0)
        return Step(op=norm)
    return Step(op=leaf() if isinstance(leaf, type) else leaf)


Geometry = Convolution | Matrix


def _geometries(rank: int, rest: list[Any]) -> Sequence[Geometry]:
    if rank:
        return CONVOLUTIONS
    has_norm = any(leaf in recipes.BATCH_NORMS for leaf in rest)
    return [matrix for matrix in MATRICES if not has_norm or len(matrix.batch) == 1]


def _weighted_cases(root: Any, rank: int, rest: list[Any], make: Callable[[Any, int, Geometry], Step]) -> list[Case]:
    def case(geometry: Geometry) -> Case:
        def build() -> PatternModel:
            channels = geometry.c_out if isinstance(geometry, Convolution) else geometry.features_out
            return OneInput([make(root, rank, geometry), *(_follower(leaf, channels) for leaf in rest)])

        return Case(name=geometry.name, build=build, shapes=(_input_shape(rank, geometry),))

    return [case(geometry) for geometry in _geometries(rank, rest)]


def _fused_cases(fused: Any) -> list[Case]:
    """Cases for a fused module that the user's model contains as such."""
    root, follower = recipes.FUSED_MODULES[fused]

    def join(kind: Any, rank: int, geometry: Geometry) -> Step:
        inner = _weighted_module(kind, rank, geometry).op
        return Step(op=fused(inner, follower()))

    return _weighted_cases(root, recipes.WEIGHTED_MODULES[root], [], join)


def _input_shape(rank: int, geometry: Geometry) -> tuple[int, ...]:
    if isinstance(geometry, Convolution):
        extent = geometry.extent if rank < 3 else min(geometry.extent, 5)
        return (geometry.batch, geometry.c_in, *range(extent, extent - rank, -1))
    return (*geometry.batch, geometry.features_in)


def _weighted_module(kind: Any, rank: int, geometry: Geometry) -> Step:
    if isinstance(geometry, Convolution):
        g = geometry
        kernel, stride, padding, dilation = _axes(g, rank)
        module = kind(
            g.c_in, g.c_out, kernel, stride=stride, padding=padding, dilation=dilation, groups=g.groups, bias=g.bias
        )
    else:
        module = kind(geometry.features_in, geometry.features_out, bias=geometry.bias)
    with torch.no_grad():
        module.weight.copy_(_drawn_weight(module.weight.shape))
        if module.bias is not None:
            module.bias.uniform_(-1, 1)
    return Step(op=module)


def _weighted_function(function: Any, rank: int, geometry: Geometry) -> Step:
    if isinstance(geometry, Convolution):
        g = geometry
        kernel, stride, padding, dilation = _axes(g, rank)
        weight = _drawn_weight(torch.Size((g.c_out, g.c_in // g.groups, *kernel)))
        bias = torch.empty(g.c_out).uniform_(-1, 1) if g.bias else None
        arguments: tuple[Any, ...] = (stride, padding, dilation, g.groups)
        return Step(op=function, parameters=(weight, bias), arguments=arguments)
    weight = _drawn_weight(torch.Size((geometry.features_out, geometry.features_in)))
    bias = torch.empty(geometry.features_out).uniform_(-1, 1) if geometry.bias else None
    return Step(op=function, parameters=(weight, bias))


def _axes(g: Convolution, rank: int) -> tuple[tuple[int, ...], ...]:
    """Kernel, stride, padding and dilation along each axis."""
    return tuple(recipes.along(value, rank) for value in (g.kernel, g.stride, g.padding, g.dilation))


def _drawn_weight(shape: torch.Size) -> Tensor:
    """Draw a weight whose output channels differ in magnitude by powers of two, so a wrong channel's scale shows.

    The first few weights of a channel are at the end of its range: two products of neighbours do not fit 16 bits.
    """
    weight = torch.empty(shape).uniform_(-1, 1)
    weight.flatten(1)[:, : min(4, weight[0].numel() // 3)] = 1.0
    magnitude = torch.tensor([2.0 ** -(channel % 4) for channel in range(shape[0])])
    scaled: Tensor = weight * magnitude.reshape(-1, *[1] * (len(shape) - 1)) / max(1.0, weight[0].numel() ** 0.5)
    return scaled


_SCHEMES: dict[str, tuple[Any, torch.qscheme]] = {
    "per_tensor_symmetric": (MinMaxObserver, torch.per_tensor_symmetric),
    "per_channel_symmetric": (PerChannelMinMaxObserver, torch.per_channel_symmetric),
    "per_tensor_affine": (MinMaxObserver, torch.per_tensor_affine),
    "per_channel_affine": (PerChannelMinMaxObserver, torch.per_channel_affine),
}


def qconfig_for(claim: Claim, *, is_symmetric: bool = False) -> QConfig:
    """The QConfig that a claim is about: its dtypes, its bounds exactly, its weight scheme."""
    dtypes = claim.dtypes
    ends = (dtypes.input_dtype_with_constraints, dtypes.output_dtype_with_constraints)
    scheme = torch.per_tensor_symmetric if is_symmetric else torch.per_tensor_affine
    activation = MinMaxObserver.with_args(qscheme=scheme, **_observer_arguments(*ends))
    weight_constraints = dtypes.weight_dtype_with_constraints
    observer, qscheme = _SCHEMES.get(claim.scheme, _SCHEMES["per_tensor_symmetric"])
    has_dtype = weight_constraints.dtype is not None
    arguments = _observer_arguments(weight_constraints) if has_dtype else {"dtype": torch.qint8}
    return QConfig(activation=activation, weight=observer.with_args(qscheme=qscheme, **arguments))


def _observer_arguments(first: DTypeWithConstraints, *others: DTypeWithConstraints) -> dict[str, Any]:
    """The dtype of the first, and the widest range and smallest scale that all of them allow."""
    assert first.dtype is not None
    low, high = dtype_range(first.dtype)
    lows, highs = [low], [high]
    floors = []
    for constraints in (first, *others):
        if constraints.quant_min_lower_bound is not None:
            lows.append(int(constraints.quant_min_lower_bound))
        if constraints.quant_max_upper_bound is not None:
            highs.append(int(constraints.quant_max_upper_bound))
        if constraints.scale_min_lower_bound is not None:
            floors.append(float(constraints.scale_min_lower_bound))
    arguments: dict[str, Any] = {"dtype": first.dtype}
    if (max(lows), min(highs)) != (low, high):
        arguments |= {"quant_min": max(lows), "quant_max": min(highs)}
    return arguments | ({"eps": max(*floors, torch.finfo(torch.float32).eps)} if floors else {})


def calibration_inputs(case: Case) -> tuple[tuple[Tensor, ...], ...]:
    """Draw two batches of calibration inputs; each input reaches both ends of its range."""
    batches = []
    for number in range(2):  # a single element is at the high end first, then at the low one
        inputs = []
        for shape, (low, high) in zip(case.shapes, case.ranges, strict=True):
            drawn = torch.empty(shape).uniform_(low, high)
            flat = drawn.view(-1)
            flat[0], flat[-1] = (low, high) if number == 0 else (high, low)
            inputs.append(drawn)
        batches.append(tuple(inputs))
    return tuple(batches)


def integer_inputs(
    shapes: tuple[tuple[int, ...], ...], ranges: Sequence[tuple[int, int, int]], count: int
) -> list[tuple[str, tuple[Tensor, ...]]]:
    """Draw integer inputs inside (low, high, zero point) of each input: aimed ones first, then `count` random ones."""
    aimed: list[tuple[str, Callable[[tuple[int, ...], int, int, int], Tensor]]] = [
        ("all at the low end", lambda shape, low, high, zero: torch.full(shape, low)),
        ("all at the high end", lambda shape, low, high, zero: torch.full(shape, high)),
        ("alternating ends", _alternating),
        ("all at the zero point", lambda shape, low, high, zero: torch.full(shape, zero)),
    ]
    random = [(f"random {n}", _random) for n in range(count)]
    return [
        (name, tuple(draw(shape, *bounds) for shape, bounds in zip(shapes, ranges, strict=True)))
        for name, draw in itertools.chain(aimed, random)
    ]


def _alternating(shape: tuple[int, ...], low: int, high: int, zero: int) -> Tensor:
    flat = torch.arange(int(torch.Size(shape).numel())) % 2
    return torch.where(flat == 0, high, low).reshape(shape)


def _random(shape: tuple[int, ...], low: int, high: int, zero: int) -> Tensor:
    return torch.randint(low, high + 1, shape)
