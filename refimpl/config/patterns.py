"""Pattern formats: the vendor's, the normal form that the matcher reads, readable names (PAT-01, PAT-02).

A pattern is a module class, a function, a method name, or a tuple of two or three of these in forward order. Its normal
form is reversed and nested, to be matched from the last node backwards: ``(a, b)`` becomes ``(b, a)``, ``(a, b, c)``
becomes ``(c, (b, a))``.
"""

from __future__ import annotations

import builtins
import operator
from collections.abc import Callable, Hashable, Iterator
from functools import cache, lru_cache, reduce
from typing import Any, TypeAlias, cast

import torch
import torch.nn.functional as F
from torch import nn

from fx_quant_conformance.refimpl.errors import ConfigError
from fx_quant_conformance.refimpl.legacy import nni, nniqat, nnqat

Leaf: TypeAlias = type | Callable[..., Any] | str
Pattern: TypeAlias = Leaf | tuple[Any, ...]


class MatchAllNode:
    """As part of a pattern: matches any argument, and leaves it free for another match. (PAT-05, PAT-09)"""


def is_match_all(leaf: object) -> bool:
    """Tell whether a leaf is the wildcard; torch's class of the same name counts too. (PAT-05, CFG-14)"""
    return isinstance(leaf, type) and leaf.__name__ == MatchAllNode.__name__


def normal_form(pattern: Pattern) -> Pattern:
    """Bring the forward-order format into the reversed, nested one. (PAT-02)

    Raises ConfigError for a tuple whose length is not 2 or 3, or for a leaf of another kind. (PAT-01)
    """
    try:
        return _known_normal_form(pattern)
    except TypeError:  # it cannot be hashed: it is no pattern
        return _make_normal_form(pattern)


def _make_normal_form(pattern: Pattern) -> Pattern:
    if isinstance(pattern, tuple) and len(pattern) not in (2, 3):  # rule: PAT-01
        raise ConfigError(
            f"pattern {pattern!r}: a tuple pattern has 2 or 3 items in forward order, found {len(pattern)}; "
            "write anything else with _set_pattern_complex_format"
        )
    items: Iterator[Any] = map(_check_leaf, pattern if isinstance(pattern, tuple) else (pattern,))
    return cast(Pattern, reduce(lambda nested, leaf: (leaf, nested), items))  # rule: PAT-02


_known_normal_form = lru_cache(maxsize=4096)(_make_normal_form)
"""The flow asks for the normal form of every entry of a config each time that it looks for matches."""


def complex_normal_form(pattern: Pattern) -> Pattern:
    """Return a vendor's normal form, with refimpl's wildcard in the place of torch's. (PAT-02, CFG-14)

    Raises ConfigError for a tuple that does not begin with an op, or for a leaf of another kind. (PAT-01)
    """
    if not isinstance(pattern, tuple):
        return _check_leaf(pattern)
    if not pattern or isinstance(pattern[0], tuple):  # rule: PAT-02
        raise ConfigError(f"complex pattern {pattern!r}: expected (op, argument, …), whose op is no tuple")
    return tuple(map(complex_normal_form, pattern))


def _check_leaf(leaf: Any) -> Leaf:
    """Return a leaf, torch's wildcard as refimpl's; ConfigError for no class, callable or method name. (PAT-01)"""
    if not (isinstance(leaf, str) or (callable(leaf) and isinstance(leaf, Hashable))):
        raise ConfigError(
            f"pattern item {leaf!r}: expected a module class, a function or a method name, found {type(leaf).__name__}"
        )
    return MatchAllNode if is_match_all(leaf) else cast(Leaf, leaf)  # rule: CFG-14


def leaves(pattern: Pattern) -> Iterator[Leaf]:
    """Yield the leaves of a normal form in forward order: arguments before the op that takes them."""
    head, *arguments = pattern if isinstance(pattern, tuple) else (pattern,)
    for argument in arguments:
        yield from leaves(argument)
    yield head


def is_chain(pattern: Pattern) -> bool:
    """Tell whether a normal form has a forward-order tuple: each op has one argument pattern at most."""
    if not isinstance(pattern, tuple):
        return True
    return len(pattern) == 2 and not isinstance(pattern[0], tuple) and is_chain(pattern[1])


_NAMESPACES = {
    "nn": nn,
    "nni": nni,
    "nnqat": nnqat,
    "nniqat": nniqat,
    "operator": operator,
    "torch": torch,
    "F": F,
    "builtins": builtins,
}


@cache
def _known_names() -> dict[int, str]:
    """Map the identity of every public op of the well-known namespaces to a short, importable name."""
    names: dict[int, str] = {}
    for prefix, namespace in _NAMESPACES.items():
        for name in sorted(dir(namespace)):
            if not name.startswith("_" if prefix == "torch" else "__"):
                names.setdefault(id(getattr(namespace, name)), f"{prefix}.{name}")
    return names


@cache
def leaf_name(leaf: Leaf) -> str:
    """Return the readable name of a leaf: ``nn.Linear``, ``F.relu``, ``operator.add``, ``.view`` for a method."""
    if isinstance(leaf, str):
        return f".{leaf}"
    if is_match_all(leaf):
        return "*"
    full_name = f"{getattr(leaf, '__module__', '?')}.{getattr(leaf, '__qualname__', repr(leaf))}"
    return _known_names().get(id(leaf), full_name)


def pattern_name(pattern: Pattern) -> str:
    """Return the readable name of a normal form: ``nn.Conv2d+nn.ReLU``, or ``torch.add(nn.Conv2d,*)+nn.ReLU``."""
    if not isinstance(pattern, tuple):
        return leaf_name(pattern)
    head, *arguments = pattern
    if len(arguments) == 1:
        return f"{pattern_name(arguments[0])}+{leaf_name(head)}"
    return f"{leaf_name(head)}({','.join(pattern_name(argument) for argument in arguments)})"
