"""What failing cases share and passing ones do not: a search over the arguments and value ranges of a claim's cases.

Exact and deterministic: a condition is said only if it holds in every failing case and in no passing one. Single
conditions come first, at most one for each argument; two conditions, joined by ``and`` or ``or``, only if no single one
separates.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from fx_quant_conformance.conformance.claims.case import Case

LEAST_CASES = 6
"""Least cases that are searched: fewer are told apart by nearly anything."""
MOST_SHOWN = 3
"""Most conditions that are said, each of which separates alone: if more do, none of them tells the cause."""
LEAST_FOR_PAIRS = 3
"""Least failing cases for which pairs are searched: some two conditions single out nearly any two cases by chance."""

_PER_AXIS = frozenset({"kernel_size", "stride", "padding", "output_padding", "dilation", "output_size", "repeats"})
"""Arguments that are one number, or one for each axis: the largest is compared."""

_OF_VALUE_RANGE = ("output factor", "bias factor", "lowest input", "highest input")
"""Facts that the name of a value range stands for."""

Facts = Mapping[str, object]
"""What is known of a case, by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """A condition on cases."""

    about: str
    """The fact that it is about."""
    text: str
    holds: int
    """A bit for each case in which it holds."""


def find_shared(cases: Sequence[Case], failing: Collection[str]) -> list[str]:
    """Return conditions, such as ``groups > 1``, that all failing cases meet and no other; none if none separates.

    ``cases``: all that were tried. ``failing``: names of those that fail. With several conditions each separates alone.
    """
    bad = _to_bits(case.name in failing for case in cases)
    if len(cases) < LEAST_CASES or bad in (0, _to_bits(True for _ in cases)):
        return []
    conditions = list(_list_conditions([describe_case(case) for case in cases]))
    singles: dict[str, str] = {}
    for condition in conditions:
        if condition.holds == bad:
            singles.setdefault(condition.about, condition.text)
    if singles or bad.bit_count() < LEAST_FOR_PAIRS:
        return list(singles.values()) if len(singles) <= MOST_SHOWN else []
    return list(itertools.islice(_join_pairs(conditions, bad), 1))


def _join_pairs(conditions: Sequence[Condition], bad: int) -> Iterator[str]:
    """Yield two conditions that hold together in the failing cases only, then two of which one holds in each of them.

    Each of the latter holds in two cases or more: one that singles out a case would be chance.
    """
    wide = [each for each in conditions if each.holds & bad == bad]
    narrow = [each for each in conditions if each.holds & ~bad == 0 and each.holds.bit_count() > 1]
    for word, candidates, joined in (("and", wide, operator.and_), ("or", narrow, operator.or_)):
        for a, b in itertools.combinations(candidates, 2):
            if a.about != b.about and joined(a.holds, b.holds) == bad:
                yield f"{a.text} {word} {b.text}"


def describe_case(case: Case) -> Facts:
    """Return the arguments of a case, its inputs' form, and its value range."""
    arguments = {
        name.lstrip("_"): value
        for name, value in case.arguments.items()
        if name != "_network" and not hasattr(value, "_fields")  # a layer's numbers are there one by one
    }
    shape, value_range = case.inputs[0].shape, case.value_range
    low, high = value_range.ranges[0]
    return {
        **arguments,
        "rank": len(shape),
        "batch": shape[0] if len(shape) > 1 else None,
        "value range": value_range.name,
        "output factor": value_range.output,
        "bias factor": value_range.bias,
        "lowest input": low,
        "highest input": high,
        "elements": case.size,
    }


def _list_conditions(facts: Sequence[Facts]) -> Iterator[Condition]:
    """Yield all conditions on the cases: by the order of a case's facts, and of each ``=``, ``>``, ``<``, ``≠``."""
    for name in dict.fromkeys(name for each in facts for name in each):
        values = [each.get(name) for each in facts]
        spelled = [_spell(value) for value in values]
        distinct = list(dict.fromkeys(spelled))
        sizes = [_size_of(name, value) for value in values]
        if len(distinct) < 2:
            continue
        about = "value range" if name in _OF_VALUE_RANGE else name
        for text in distinct:
            yield Condition(about=about, text=f"{name} = {text}", holds=_to_bits(each == text for each in spelled))
        for limit in sorted({size for size in sizes if size is not None}):
            holds = _to_bits(size is not None and size > limit for size in sizes)
            yield Condition(about=about, text=f"{name} > {_spell(limit)}", holds=holds)
            holds = _to_bits(size is not None and size < limit for size in sizes)
            yield Condition(about=about, text=f"{name} < {_spell(limit)}", holds=holds)
        for text in distinct:
            yield Condition(about=about, text=f"{name} ≠ {text}", holds=_to_bits(each != text for each in spelled))


def _to_bits(each: Iterable[bool]) -> int:
    return sum(1 << number for number, holds in enumerate(each) if holds)


def _spell(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _size_of(name: str, value: object) -> float | None:
    """Return the number by which a value is compared, of one for each axis the largest; None: it is no number."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return value
    if name in _PER_AXIS and isinstance(value, tuple):
        return max((each for each in value if isinstance(each, int)), default=None)
    return None
