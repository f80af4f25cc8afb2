"""Planning: the cases of a claim, which are the variants of its pattern, each in a value range of numbers."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

from fx_quant_conformance.backends.base import Capabilities, RoundingMode
from fx_quant_conformance.conformance.claims.build import Preluded
from fx_quant_conformance.conformance.claims.case import Case, ValueRange
from fx_quant_conformance.conformance.claims.claim import NO_WEIGHT, Claim
from fx_quant_conformance.conformance.claims.kinds import Kind, fixed_qparams_of
from fx_quant_conformance.conformance.claims.pattern_plan import PatternPlan, is_norm, is_taken, plan_pattern
from fx_quant_conformance.conformance.claims.qconfigs import fixed_range_of
from fx_quant_conformance.conformance.claims.quick import Share, choose_cases
from fx_quant_conformance.conformance.claims.registered_plan import evaluate, keep_finite, list_registered
from fx_quant_conformance.conformance.claims.registry import Registered, registered_for
from fx_quant_conformance.conformance.ops.op_model import Input
from fx_quant_conformance.conformance.ops.table import RECORDS, WEIGHTED
from fx_quant_conformance.refimpl import ObservationType
from fx_quant_conformance.refimpl.config.patterns import leaf_name

# Where the grids lie: zero points in the middle, at both ends and away from them; full, narrow and wide ranges (scales
# from 2⁻¹² to 2⁴); s_x·s_w / s_y from tiny to above 1; biases up to the end of int32.
VALUE_RANGES: tuple[ValueRange, ...] = (
    ValueRange(name="signed", ranges=((-1.0, 1.0), (-3.0, 0.0))),
    ValueRange(name="positive", ranges=((0.0, 2.0), (-0.5, 4.0))),
    ValueRange(name="negative", ranges=((-3.0, 0.0), (-1.0, 1.0))),
    ValueRange(name="skewed", ranges=((-0.5, 4.0), (0.0, 2.0))),
    ValueRange(name="symmetric", ranges=((-1.0, 1.0), (-0.5, 4.0)), is_symmetric=True),
    ValueRange(name="coarse_output", ranges=((-1.0, 1.0), (-2.0, 1.0)), output=64.0),
    ValueRange(name="fine_output", ranges=((-2.0, 1.0), (-1.0, 2.0)), output=2.0**-6),
    ValueRange(name="finest_output", ranges=((-2.0, 1.0), (-1.0, 2.0)), output=2.0**-10),
    ValueRange(name="narrow", ranges=((-(2.0**-6), 2.0**-6), (0.0, 2.0**-5)), bias=2.0**-6),
    ValueRange(name="wide", ranges=((-1000.0, 3080.0), (-2040.0, 2040.0))),
    ValueRange(name="ties", ranges=((-2.0, 1.0), (-0.5, 1.0)), has_ties=True),
    ValueRange(name="large_bias", ranges=((-1.0, 1.0), (0.0, 2.0)), bias=2.0**7),
    ValueRange(name="largest_bias", ranges=((-1.0, 1.0), (0.0, 2.0)), bias=math.inf),
    ValueRange(name="saturating_function", ranges=((-8.0, 8.0), (-5.0, 6.0))),
)
BENDS: tuple[ValueRange, ...] = (
    ValueRange(name="beyond_bends", ranges=((-40.0, 40.0), (-10.0, 30.0)), output=2.0),
    ValueRange(name="beyond_bends_symmetric", ranges=((-40.0, 24.0), (-16.0, 16.0)), is_symmetric=True, output=2.0),
    ValueRange(name="far_input", ranges=((-16.0, 48.0), (-16.0, 16.0))),
)
"""Where a function that clamps or bends away from zero shows: values beyond the bends, on a grid that goes on there.

On the grid that calibration gives, the end of the range may hide where a clamp is. Tried in every profile."""
BIASES = (ValueRange(name="bias", ranges=((-2.0, 1.0), (-1.0, 2.0)), output=2.0**-12, bias=2.0**-12, rests=True),)
"""Where the rounding of a bias shows: a step of the sum is several of the result. Tried in a limited profile by the
first claim on an op with a weight; without a limit so many results are near a tie that some show it."""
TIES = tuple(each for each in VALUE_RANGES if each.has_ties)
"""Where a rounding that is declared shows: tried in every profile."""
_PADDED = ("padding", "padding_mode", "_network", "_uneven")
"""Arguments with which an op pads its input."""
_WHOLE = Share()


def plan_cases(
    claim: Claim,
    capabilities: Capabilities,
    *,
    limit: int | None = None,
    share: Share = _WHOLE,
    has_prelude: bool = False,
) -> tuple[Case, ...] | str:
    """Return the cases of a claim, or the reason why the suite cannot build one: such a claim is UNEXERCISED.

    They are within the limits that the backend declares. With a `limit` the claims on one op share that many cases, and
    this one gets its share. ``has_prelude``: an identity may stand before the pattern, so that a pattern of fixed
    qparams also gets an input outside of them that another op made.
    """
    kind, registered = claim.kind, registered_for(claim.entry.normal_pattern)
    if kind is Kind.OTHER:
        return f"no QConfig for activations of dtype {claim.dtypes.input_dtype}"
    plan, chosen = plan_pattern(claim), list[Case]()
    if not isinstance(plan, str) and (variants := list(_variants_of(plan, claim, capabilities))):
        cases = _assign_value_ranges(claim, variants)
        if has_prelude and kind is Kind.FIXED:
            takes = [number % 2 == 0 and len(case.inputs) == 1 for number, case in enumerate(cases)]
            cases = [_add_prelude(case) if is_taken else case for case, is_taken in zip(cases, takes, strict=True)]
        chosen += choose_cases(cases, limit, share)
        if limit is not None and share.place == 0 and claim.scheme != NO_WEIGHT:
            chosen += _in_value_ranges(claim, variants[0], BIASES)
        chosen += _in_value_ranges(claim, variants[0], BENDS) if plan.bends else []
        chosen += _try_fixed_grid(claim, variants[0])
        if capabilities.requantize_for(leaf_name(plan.root)).rounding is not RoundingMode.NEAREST:
            chosen += [case for case in _in_value_ranges(claim, variants[0], TIES) if case not in chosen]
    elif registered is None:
        outside = "no case is within the limits that the backend declares of"
        return plan if isinstance(plan, str) else f"{outside} {leaf_name(plan.root)}"
    if registered is not None:
        vary = partial(_variants_of, claim=claim, capabilities=capabilities)
        more = _plan_registered(claim, registered, vary, partial(choose_cases, limit=limit, share=share))
        if isinstance(more, str):
            return more
        chosen += more
    first, *others = chosen
    return (replace(first, is_first=True), *others)


def _plan_registered(
    claim: Claim,
    registered: Registered,
    vary: Callable[[PatternPlan], Iterator[Case]],
    choose: Callable[[Sequence[Case]], tuple[Case, ...]],
) -> list[Case] | str:
    """Return the cases of a vendor's models, or the reason why there are none: those of a claim's share, then others.

    In every profile each model that is given is tried, and the first one beyond its bends, on and beyond a grid that
    the claim fixes, and in the vendor's ranges.
    """
    models = list_registered(claim, registered, vary, VALUE_RANGES[0])
    if isinstance(models, str):
        return models
    usual = keep_finite(_assign_value_ranges(claim, models))
    always = keep_finite(_in_value_ranges(claim, models[0], (*BENDS, *registered.value_ranges)))
    always += _try_fixed_grid(claim, models[0])
    shared = choose(usual) if usual else ()
    met, missed = {case.variant for case in shared}, dict[str, Case]()
    for case in usual if registered.builds else ():
        if case.variant not in met:
            missed.setdefault(case.variant, case)
    cases = [*shared, *missed.values(), *always]
    return cases or f"the results of the model registered for {claim.pattern} are finite in no range of inputs"


# -- variants ---------------------------------------------------------------------------------------------------------


def _variants_of(plan: PatternPlan, claim: Claim, capabilities: Capabilities) -> Iterator[Case]:
    """Yield a case for each variant of a pattern's root op, the base first, all in the first value range."""
    plan = replace(plan, limits=capabilities.limits)
    conditions = capabilities.conditions_for(leaf_name(plan.root))
    return (case for case in _vary(plan, claim, capabilities) if case.may_be(conditions))


def _vary(plan: PatternPlan, claim: Claim, capabilities: Capabilities) -> Iterator[Case]:
    limits = capabilities.limits.get(leaf_name(plan.root), {})
    is_trained_norm = plan.has_norm and (claim.flow == "qat" or plan.holds_qat)
    is_whole = plan.is_single_op or plan.root not in WEIGHTED
    for varied, arguments, resolved in _list_op_variants(plan.root, whole=is_whole, known=plan.is_single_op):
        if not is_taken(limits, is_trained_norm, resolved) or not plan.fits(arguments):
            continue
        name = ",".join(f"{key}={_spell(arguments[key])}" for key in varied) or "default"
        build, inputs = partial(plan.build, arguments), plan.inputs_for(arguments)
        idle = tuple(plan.samples.idle(arguments))
        case = partial(Case, build=build, value_range=VALUE_RANGES[0], arguments=resolved, idle=idle)
        if not plan.has_second_input:
            yield case(name=name, inputs=inputs, varied=varied)
            continue
        shape = plan.output_shape_for(arguments)
        yield case(name=name, inputs=(*inputs, Input(shape=shape)), varied=varied)
        if not varied:
            broadcast = Input(shape=(1, shape[1], *[1] * (len(shape) - 2)))
            more = {**resolved, "second": "broadcast"}
            yield case(name="broadcast", inputs=(*inputs, broadcast), varied=("second",), arguments=more)


_Variant = tuple[tuple[str, ...], dict[str, Any], dict[str, Any]]
"""The names of the arguments away from their base; all arguments; these as the op gets them."""


@cache
def _list_op_variants(root: Any, *, whole: bool, known: bool) -> tuple[_Variant, ...]:
    """List the variants of an op, once for all patterns that have it."""
    samples = RECORDS[root]
    return tuple((*variant, samples.resolve(variant[1])) for variant in samples.variants(whole=whole, known=known))


def _spell(value: Any) -> str:
    is_several = isinstance(value, (tuple, list)) and len(value) > 1
    return "x".join(map(str, value)) if is_several else str(value)


def _add_prelude(case: Case) -> Case:
    name, variant = (f"{text} behind an identity" for text in (case.name, case.variant))
    arguments = {**case.arguments, "behind an identity": True}
    return replace(case, name=name, variant=variant, arguments=arguments, build=lambda: Preluded(case.build()))


# -- value ranges -----------------------------------------------------------------------------------------------------


def _assign_value_ranges(claim: Claim, variants: Sequence[Case]) -> list[Case]:
    """Give each variant a value range, in turn; the base also gets those that the variants do not reach.

    Only the base gets those of a coarse or the finest output and of a large bias, where a kernel's errors are small
    against a step or beyond the ends. A padded variant gets no zero point of 0, which would hide wrong padding.
    An op without a weight that computes gets all of them on its base, and zero points at both ends on other shapes.
    """
    value_ranges = [value_range for value_range in VALUE_RANGES if _is_relevant(value_range, claim)]
    turns = [
        value_range for value_range in value_ranges if 2.0**-6 <= value_range.output <= 1.0 and value_range.bias <= 1.0
    ]
    in_turn = zip(variants, itertools.cycle(turns), strict=False)
    pairs = [(variant, _choose_value_range(variant, value_range, turns)) for variant, value_range in in_turn]
    met = [value_range for _, value_range in pairs]
    more = [(variants[0], value_range) for value_range in value_ranges if value_range not in met]
    if claim.scheme == NO_WEIGHT and not claim.moves_only:
        shapes = [variant for variant in variants if variant.varied == ("shape",)]
        ends = [value_range for value_range in turns if value_range.name in ("positive", "negative")]
        more = [*itertools.product(variants[:1], value_ranges), *itertools.product(shapes, ends)]
    pairs += [pair for pair in more if pair not in pairs]
    return [_set_value_range(variant, value_range) for variant, value_range in pairs]


def _in_value_ranges(claim: Claim, variant: Case, value_ranges: Iterable[ValueRange]) -> list[Case]:
    """Return a variant in each of these value ranges that the claim can be in."""
    return [_set_value_range(variant, value_range) for value_range in value_ranges if _is_relevant(value_range, claim)]


def _try_fixed_grid(claim: Claim, variant: Case) -> list[Case]:
    """Return a variant with inputs that fill just the grid that its claim fixes, and with inputs thrice as wide.

    The result of an op that can leave the grid is then beyond both of its ends, that of a product too: a second input
    goes beyond 1 whatever the grid. Of an op that cannot, such as a sigmoid, there are none.
    """
    fixed, ends = fixed_qparams_of(claim.dtypes), fixed_range_of(claim.dtypes)
    if fixed is None or ends is None or claim.kind is not Kind.FIXED:
        return []
    (low, high), width, step = ends, ends[1] - ends[0], fixed[0]
    value_ranges = (
        ValueRange(name="fixed_grid", ranges=(ends,), goes_beyond=True),
        ValueRange(name="beyond_fixed_grid", ranges=((low - width, high + width), (-2.0, 2.0)), goes_beyond=True),
    )
    cases = keep_finite(_in_value_ranges(claim, variant, value_ranges))
    results = [each for case in cases for each in evaluate(case) if each.numel()]
    leaves_it = any(float(each.min()) < low - step or float(each.max()) > high + step for each in results)
    return cases if leaves_it else []


def _set_value_range(variant: Case, value_range: ValueRange) -> Case:
    return replace(variant, name=f"{variant.name} {value_range.name}", variant=variant.name, value_range=value_range)


def _choose_value_range(variant: Case, value_range: ValueRange, turns: Sequence[ValueRange]) -> ValueRange:
    """Return a variant's value range, or another one whose zero point is not 0 where the variant pads."""
    is_padded = any(name in _PADDED for name in variant.varied)
    return turns[-1] if is_padded and value_range.ranges[0][0] == 0.0 else value_range


def _is_relevant(value_range: ValueRange, claim: Claim) -> bool:
    kind = claim.kind
    if kind in (Kind.DYNAMIC, Kind.FLOAT16, Kind.WEIGHT_ONLY):
        return value_range.name == "signed" or 1.0 < value_range.bias < math.inf
    shares = claim.entry.observation_type is not ObservationType.OUTPUT_USE_DIFFERENT_OBSERVER_AS_INPUT
    if value_range.output != 1.0 and (shares or kind is Kind.FIXED):
        return False
    if value_range.bias == math.inf and any(map(is_norm, (*claim.ops, *claim.members))):
        return False  # a norm takes the bias away, and a folded bias is another one
    return value_range.bias <= 1.0 or claim.scheme != NO_WEIGHT
