"""Which of a claim's cases the quick profile tries: a few, which the claims on one op share out among them.

A config has many claims on one op (its dtypes, flows, weight schemes; module and function; fused and not), and each
tries what the others do not: together about as many cases as an op has arguments.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from conformance.claims.case import Case
from conformance.claims.claim import Claim
from conformance.claims.qconfigs import kind_of
from conformance.ops.table import PARTS, QAT_OF
from refimpl.patterns import leaves

_ALIKE: dict[Any, Any] = {F.relu: nn.ReLU, torch.relu: nn.ReLU}


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """A claim's place among those on the same op, and how many these are."""

    place: int = 0
    of: int = 1


def turns(claims: Iterable[Claim]) -> dict[str, Turn]:
    """Return each claim's turn, by its ID. Claims are on one op whose float ops and kind of dtypes are the same."""
    groups = defaultdict[object, list[str]](list)
    for claim in claims:
        groups[_op(claim), kind_of(claim.dtypes)].append(claim.id)
    return {name: Turn(place=n, of=len(group)) for group in groups.values() for n, name in enumerate(group)}


def _op(claim: Claim) -> tuple[Any, ...]:
    """The float ops of a pattern, in order; of the root itself, whether it is a module or a function counts."""
    parts = [part for leaf in leaves(claim.entry.normal_pattern) for part in _parts(leaf)]
    return (parts[0], *(_ALIKE.get(part, part) for part in parts[1:]))


def _parts(leaf: Any) -> tuple[Any, ...]:
    leaf = QAT_OF.get(leaf, leaf)
    return PARTS.get(leaf, (leaf,))


def chosen(cases: Sequence[Case], limit: int | None, turn: Turn) -> tuple[Case, ...]:
    """Choose a claim's share, of at least one, of an op's first ``limit`` cases.

    In turn one whose arguments are as good as the op's defaults, and one that has many others: a kernel may be chosen
    by either. Of both kinds first what brings most that is new.
    """
    if limit is None:
        return tuple(cases)
    plain, other = (
        _by_news([case for case in cases if (len(case.varied) > 1) is is_other]) for is_other in (False, True)
    )
    pairs = itertools.zip_longest(plain, other)
    ordered = [case for pair in pairs for case in pair if case is not None][: max(limit, turn.of)]
    return tuple(ordered[turn.place % len(ordered) :: turn.of])


def _by_news(cases: Sequence[Case]) -> list[Case]:
    """The first case, then always that with most arguments and regimes which none before it has; over and over."""
    ordered, left = list[Case](), list(cases)
    met = set[str]()
    while left:
        news = [len({*case.varied, case.regime.name} - met) for case in left]
        if ordered and not max(news):
            met = set()
            continue
        ordered.append(left.pop(news.index(max(news)) if ordered else 0))
        met |= {*ordered[-1].varied, ordered[-1].regime.name}
    return ordered
