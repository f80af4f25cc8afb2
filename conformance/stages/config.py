"""The config stage: checks that a claim's entry is sound, in itself and among the others, and can be built. (CFG)

Nothing is run: its faults show without a model.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from fx_quant_conformance.conformance.claims.case import Case
from fx_quant_conformance.conformance.claims.claim import Claim
from fx_quant_conformance.conformance.claims.kinds import Kind
from fx_quant_conformance.conformance.claims.plan import plan_cases
from fx_quant_conformance.conformance.claims.qconfigs import format_misfit, wide_qconfig_for
from fx_quant_conformance.conformance.claims.quick import Share
from fx_quant_conformance.conformance.machine.fault import Fault, FaultFound
from fx_quant_conformance.conformance.machine.guard import guard
from fx_quant_conformance.conformance.stages.bench import Bench
from fx_quant_conformance.conformance.stages.state import ClaimState
from fx_quant_conformance.refimpl import BackendConfig, BackendPatternConfig, DTypeWithConstraints
from fx_quant_conformance.refimpl.config.backend_config import lint_entry
from fx_quant_conformance.refimpl.config.patterns import Pattern, is_match_all, leaves, pattern_name
from fx_quant_conformance.refimpl.observers.observers import dtype_range, is_quantized_dtype
from fx_quant_conformance.refimpl.prepare.dtype_choice import ObserverReader, choose_dtype_config
from fx_quant_conformance.reports.verdicts import Verdict


def plan_cases_of_claim(run: ClaimState) -> Iterator[Fault]:
    """Check that the entry is sound, and plan its cases."""
    yield from lint(run.claim, run.bench.config)
    run.cases = plan_claim(run.bench, run.claim)
    run.counted["config"] = len(run.cases)


def plan_claim(bench: Bench, claim: Claim) -> tuple[Case, ...]:
    """Return the cases of a claim. Raises FaultFound for a pattern that cannot be built."""
    if (reason := format_misfit(claim)) is not None:
        raise FaultFound(Fault(rule="DTY-02", verdict=Verdict.UNEXERCISED, message=reason))
    limit = bench.effort.cases
    share = bench.shares.get(claim.id, Share()) if limit is not None else Share()
    has_prelude = _has_prelude(claim, bench.config)
    cases = plan_cases(claim, bench.capabilities, limit=limit, share=share, has_prelude=has_prelude)
    if isinstance(cases, str):
        raise FaultFound(Fault(rule="CFG-09", verdict=Verdict.UNEXERCISED, message=cases))
    return cases


def _has_prelude(claim: Claim, config: BackendConfig) -> bool:
    """Tell whether the config takes an identity before a pattern of fixed qparams, so that an op makes its input."""
    if claim.kind is not Kind.FIXED:
        return False
    facts = ObserverReader().read_qconfig(wide_qconfig_for(claim, config))
    entries = [entry for entry in config.configs if entry.normal_pattern is nn.Identity]
    return any(choose_dtype_config(facts, entry.dtype_configs, has_weight=False)[0] for entry in entries)


def lint(claim: Claim, config: BackendConfig) -> Iterator[Fault]:
    """Yield the faults of a claim's entry that show without a model.

    Constraints that nothing can keep (CFG-02), modules without ``from_float`` (CVT-02, QAT-01), a fuser method that
    cannot be called (FUS-02), parts that act only together (FUS-08, CFG-11), an entry that can never match (PAT-05,
    PAT-07), and one that makes a class which no entry quantizes (FUS-08, QAT-01).
    """
    for check in (check_constraints, check_modules, check_fuser, check_matching):
        yield from check(claim, _gather_facts(config))


# -- the whole config --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Facts:
    """The facts about a whole config that lint needs."""

    patterns: frozenset[Pattern]
    """The normal forms of all entries."""
    swapped: frozenset[type]
    """The root classes that have a reference module."""
    shadows: Mapping[Pattern, Pattern]
    """By pattern, another one that takes all its matches."""


@lru_cache(maxsize=4)
def _gather_facts(config: BackendConfig) -> _Facts:
    entries = config.configs
    return _Facts(
        patterns=frozenset(entry.normal_pattern for entry in entries),
        swapped=frozenset(each.root_module for each in entries if each.root_module and each.reference_quantized_module),
        shadows=dict(_find_shadows(entries)),
    )


def _find_shadows(entries: Sequence[BackendPatternConfig]) -> Iterator[tuple[Pattern, Pattern]]:
    """Yield each pattern that can never match, and the one that is in its way. (PAT-07)

    At a node the pattern with most leaves is tried first, then the earlier registered one. So a pattern's matches are
    always taken by one with as many leaves, registered before, that has wildcards in the place of some: it matches
    wherever the other would. Entries with a fuser method are matched among themselves.
    """
    wide: list[tuple[int, BackendPatternConfig]] = []
    for entry in entries:
        ops = list(leaves(entry.normal_pattern))
        for count, earlier in wide:
            is_tried = earlier.fuser_method is not None or entry.fuser_method is None
            if count == len(ops) and is_tried and _covers(earlier.normal_pattern, entry.normal_pattern):
                yield entry.normal_pattern, earlier.normal_pattern
                break
        if any(map(is_match_all, ops)):  # two patterns without wildcards that cover each other are one
            wide.append((len(ops), entry))


def _covers(wide: Pattern, narrow: Pattern) -> bool:
    """Tell whether `wide` matches wherever `narrow` does, as ``refimpl.graph.matching`` matches. (PAT-03 to PAT-06)"""
    if is_match_all(wide) or is_match_all(narrow):
        return is_match_all(wide)
    head, *inner = wide if isinstance(wide, tuple) else (wide,)
    narrow_head, *narrow_inner = narrow if isinstance(narrow, tuple) else (narrow,)
    if head != narrow_head or not inner:
        return bool(head == narrow_head)
    return len(inner) == len(narrow_inner) and all(map(_covers, inner, narrow_inner))


# -- constraints -------------------------------------------------------------------------------------------------------


@guard("config.constraints")
def check_constraints(claim: Claim, _: _Facts) -> Iterator[Fault]:
    """Find constraints that no QConfig keeps. One observer serves a static pattern's input and output. (DTY-01)"""
    dtypes = claim.dtypes
    first, last = dtypes.input_dtype_with_constraints, dtypes.output_dtype_with_constraints
    roles = {"input": [first], "weight": [dtypes.weight_dtype_with_constraints], "output": [last]}
    if not dtypes.is_dynamic:
        roles["input and output"] = [first, last]
    for role, ends in roles.items():
        for fault in _find_contradictions([each for each in ends if each.dtype is not None]):  # rule: DTY-01
            yield Fault(rule="CFG-02", message=f"{role} dtype: {fault}")


def _find_contradictions(ends: Sequence[DTypeWithConstraints]) -> Iterator[str]:
    """Say why nothing keeps all of these constraints."""
    dtypes = {each.dtype for each in ends}
    if len(dtypes) > 1:
        yield f"{_join(dtypes)} exclude each other, and one observer is asked for both"
    for end in ends:
        yield from _find_lacking_integers(end)
    bounds = [(each.quant_min_lower_bound, each.quant_max_upper_bound) for each in ends]
    both = [(low, high) for low, high in bounds if low is not None and high is not None]  # rule: DTY-03
    low, high = max((low for low, _ in both), default=None), min((high for _, high in both), default=None)
    if low is not None and high is not None and low >= high:
        yield f"no range fits between {low} and {high}"
    yield from _find_scale_faults(ends)
    zeros = {each.zero_point_exact_match for each in ends if each.zero_point_exact_match is not None}
    if len(zeros) > 1:
        yield f"zero points {_join(zeros)} exclude each other"
    for zero in zeros:
        if low is not None and high is not None and not low <= zero <= high:
            yield f"zero point {zero} is outside of {low}..{high}"


def _find_lacking_integers(end: DTypeWithConstraints) -> Iterator[str]:
    """Say which integers of a constraint its dtype does not have."""
    values = (end.quant_min_lower_bound, end.quant_max_upper_bound, end.zero_point_exact_match)
    integers = [value for value in values if value is not None]
    if end.dtype is None or not is_quantized_dtype(end.dtype):
        if integers or end.scale_exact_match is not None:
            yield f"{end.dtype} has no integers to bound and no scale to fix"
        return
    low, high = dtype_range(end.dtype)
    for value in integers:
        if not low <= value <= high:
            yield f"{value} is outside of {low}..{high} of {end.dtype}"


def _find_scale_faults(ends: Sequence[DTypeWithConstraints]) -> Iterator[str]:
    """Say why no scale fits; scales are positive."""
    floors = [each.scale_min_lower_bound for each in ends if each.scale_min_lower_bound is not None]
    ceilings = [each.scale_max_upper_bound for each in ends if each.scale_max_upper_bound is not None]
    fixed = {each.scale_exact_match for each in ends if each.scale_exact_match is not None}
    floor, ceiling = max(floors, default=0.0), min(ceilings, default=float("inf"))
    if floor > ceiling or ceiling <= 0:
        yield f"no scale fits between {floor} and {ceiling}"
    if len(fixed) > 1:
        yield f"scales {_join(fixed)} exclude each other"
    if floors and any(None not in (each.scale_exact_match, each.zero_point_exact_match) for each in ends):
        yield "a smallest scale is asked of an observer of fixed qparams, which has none"  # rule: DTY-04
    for scale in fixed:
        if not (scale > 0 and floor <= scale <= ceiling):
            yield f"fixed scale {scale} is outside of {floor}..{ceiling}, or not positive"


def _join(values: Iterable[object]) -> str:
    return " and ".join(sorted(map(str, values)))


# -- the entry ---------------------------------------------------------------------------------------------------------


@guard("config.modules")
def check_modules(claim: Claim, facts: _Facts) -> Iterator[Fault]:
    """Find modules that cannot be made of the float ones, or are not swapped in."""
    entry, name = claim.entry, claim.pattern
    reference, trained, root = entry.reference_quantized_module, entry.qat_module, entry.root_module
    if reference is not None and not hasattr(reference, "from_float"):
        yield Fault(rule="CVT-02", message=f"reference module {reference.__name__} has no from_float")
    if claim.flow == "qat" and trained is not None:
        if not hasattr(trained, "from_float"):
            yield Fault(rule="QAT-01", message=f"QAT module {trained.__name__} has no from_float")
        if isinstance(entry.normal_pattern, type) and trained not in facts.patterns:
            text = f"{name} becomes {trained.__name__} for training, and no entry quantizes that"
            yield Fault(rule="QAT-01", message=text)
    is_float = claim.dtypes.weight_dtype in (None, torch.float32)
    if root is not None and root not in facts.swapped and not is_float:  # rule: CFG-11
        yield Fault(rule="CFG-11", message=f"no entry gives a reference module for root_module {root.__name__}")


@guard("config.fuser")
def check_fuser(claim: Claim, facts: _Facts) -> Iterator[Fault]:
    """Find a fuser method that cannot be called, or makes a module that no entry quantizes."""
    entry = claim.entry
    for rule, message in lint_entry(entry):  # rule: FUS-08
        yield Fault(rule=rule, message=message)
    if entry.fuser_method is not None and (misfit := _format_misfit(entry, entry.fuser_method)):
        yield Fault(rule="FUS-02", message=f"fuser_method of {claim.pattern} {misfit}")
    fused = entry.fused_module
    if fused is None or _is_folded(claim):
        return
    if not any(isinstance(pattern, type) and issubclass(pattern, fused) for pattern in facts.patterns):
        text = f"{claim.pattern} is fused to {fused.__name__}, and no entry quantizes that"
        yield Fault(rule="FUS-08", message=text)


def _format_misfit(entry: BackendPatternConfig, method: Callable[..., Any]) -> str:
    """Say why a fuser method cannot be called with is_qat and the arguments of its pattern's format. (FUS-02)

    In forward order these are one module for each leaf; in the complex format, the outermost op and its arguments. A
    callable without a signature is left to be tried.
    """
    normal = entry.normal_pattern
    count = len(list(leaves(normal))) if entry.pattern is not None else len(normal) if isinstance(normal, tuple) else 1
    try:
        signature = inspect.signature(method)
    except ValueError:
        return ""
    try:
        signature.bind(False, *[None] * count)
    except TypeError as error:
        return f"has the parameters {signature}, and is called with is_qat and {count} more: {error}"
    return ""


def _is_folded(claim: Claim) -> bool:
    """Tell whether fuse makes something else than the fused module: it folds batch norms away in eval mode. (FUS-06)"""
    epilogues = [leaf for leaf in claim.ops[1:] if isinstance(leaf, type)]
    return claim.flow == "ptq" and any(issubclass(leaf, _BatchNorm) for leaf in epilogues)


@guard("config.matching")
def check_matching(claim: Claim, facts: _Facts) -> Iterator[Fault]:
    """Find an entry that can never match."""
    pattern = claim.entry.normal_pattern
    if _has_open_head(pattern):
        yield Fault(rule="PAT-05", message=f"{claim.pattern} can never match: its op is a wildcard")
    taker = facts.shadows.get(pattern)
    if taker is not None:
        text = f"{claim.pattern} can never match: {pattern_name(taker)}, registered earlier, takes all that it would"
        yield Fault(rule="PAT-07", message=text)


def _has_open_head(pattern: Pattern, *, is_inner: bool = False) -> bool:
    """Tell whether a wildcard stands where an op must: only an argument can be anything. (PAT-05)"""
    if not isinstance(pattern, tuple):
        return is_match_all(pattern) and not is_inner
    return is_match_all(pattern[0]) or any(_has_open_head(part, is_inner=True) for part in pattern[1:])
