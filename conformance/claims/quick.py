"""The quick profile's choice of cases: a few for each op, which the claims on that op share.

A config has many claims on one op (its dtypes, flows, weight schemes; module and function; fused and not). Each tries
other cases, together about as many as the op has arguments.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from fx_quant_conformance.conformance.claims.case import Case
from fx_quant_conformance.conformance.claims.claim import Claim
from fx_quant_conformance.conformance.ops.fused_modules import MEMBERS, QAT_OF

_ALIKE: dict[Any, Any] = {F.relu: nn.ReLU, torch.relu: nn.ReLU}


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """A claim's place among those on the same op, and their number."""

    place: int = 0
    of: int = 1


def shares_of(claims: Iterable[Claim]) -> dict[str, Share]:
    """Return each claim's share, by its ID. Claims are on one op if their float ops and kind of dtypes are the same."""
    groups = defaultdict[object, list[str]](list)
    for claim in claims:
        groups[_float_ops(claim), claim.kind].append(claim.id)
    return {name: Share(place=n, of=len(group)) for group in groups.values() for n, name in enumerate(group)}


def _float_ops(claim: Claim) -> tuple[Any, ...]:
    """Return the float ops of a pattern, in order. Only for the root, module and function of one op differ."""
    modules = (QAT_OF.get(leaf, leaf) for leaf in claim.ops)
    ops = [op for module in modules for op in MEMBERS.get(module, (module,))]
    return (ops[0], *(_ALIKE.get(op, op) for op in ops[1:]))


def choose_cases(cases: Sequence[Case], limit: int | None, share: Share) -> tuple[Case, ...]:
    """Choose a claim's share, of at least one, of an op's first ``limit`` cases; None: all of its cases.

    Take near-default cases and heavily varied ones, since either may select a kernel; within each, prefer the case with
    the most that is new: arguments, their values, and the value range. Of near-default ones, shapes and what no heavily
    varied case shows count twice. Both follow each other as in the sequence of Thue and Morse, in which no step finds
    one kind alone: claims on one op differ in scheme, flow and dtypes, which have steps of 2, 4 and more.
    """
    if limit is None:
        return tuple(cases)
    plain, varied = ([case for case in cases if (len(case.varied) > 1) is many] for many in (False, True))
    varied = _sort_by_news(varied, {})
    shown = {argument for case in varied[: limit // 2] for argument in case.varied if argument not in case.idle}
    missed = {argument for case in plain for argument in case.varied}
    plain = _sort_by_news(plain, dict.fromkeys((missed - shown) | {"shape"}, 2))
    pairs = enumerate(itertools.zip_longest(plain, varied))
    mixed = (case for number, pair in pairs for case in (pair[::-1] if number.bit_count() % 2 else pair))
    ordered = [case for case in mixed if case is not None][: max(limit, share.of)]
    return tuple(ordered[share.place % len(ordered) :: share.of])


def _sort_by_news(cases: Iterable[Case], weights: Mapping[str, int]) -> list[Case]:
    """Order cases: the first, then always the one with most that is new; repeat then. ``weights``: 1 for all others."""
    ordered, left, met = list[Case](), [(case, _list_items(case)) for case in cases], set[str]()
    while left:
        news = [sum(weights.get(item, 1) for item in items - met) for _, items in left]
        if ordered and not max(news):
            met = set()
            continue
        case, items = left.pop(news.index(max(news)) if ordered else 0)
        ordered.append(case)
        met |= items
    return ordered


def _list_items(case: Case) -> set[str]:
    """Return what a case may show: its varied arguments, by name and with their values, and its value range."""
    names = [name for name in case.varied if name not in case.idle]
    return {*names, *(f"{name}={case.arguments.get(name)}" for name in names), case.value_range.name}
