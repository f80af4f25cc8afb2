"""Conditions: what a limit or a waiver says of a case, in a part of Python's expressions (docs/limits.md).

``groups == in_channels``, ``dim in (-1, rank - 1)``, ``s_in / s_out < 128 and shape[1] % 4 == 0``. A name may stand for
several numbers, one for each axis or input: then a comparison says something of each of them.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import cache, partial
from math import prod
from typing import Any

_OPERATORS: Mapping[type[ast.AST], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
_FUNCTIONS: Mapping[str, Callable[..., Any]] = {"len": len, "min": min, "max": max, "abs": abs, "prod": prod}
_KINDS: tuple[type[ast.AST], ...] = (
    ast.BoolOp,
    ast.UnaryOp,
    ast.BinOp,
    ast.Compare,
    ast.Constant,
    ast.Name,
    ast.Tuple,
    ast.Subscript,
    ast.Call,
)
_PARTS: tuple[type[ast.AST], ...] = (ast.And, ast.Or, ast.Not, ast.USub, ast.In, ast.NotIn, ast.Load, *_OPERATORS)
_WORDS = "and, or, not, comparisons, in, + - * / // %, tuples, [ ], len, min, max, abs, prod"
_LONGEST = 400


class ConditionError(ValueError):
    """A condition that cannot be read; the message is one line: what was found, and what to give."""


class _Unknown(Exception):
    """A name has no value yet."""


@dataclass(frozen=True, slots=True)
class CaseCondition:
    """A condition as it is written, and as it is read."""

    text: str
    tree: ast.expr
    names: frozenset[str]
    """What it says something of."""

    def holds(self, values: Mapping[str, Any]) -> bool | None:
        """Tell whether it holds of a case; None: that depends on names which have no value.

        Whoever compares what cannot be compared, such as None with a number, does not hold.
        """
        try:
            return _is_true(self.tree, values)
        except _Unknown:
            return None

    def check_names(self, known: Collection[str]) -> None:
        """Raise ConditionError for a name that no case has a value of."""
        if unknown := sorted(self.names.difference(known)):
            raise ConditionError(f"{self.text!r} names {unknown[0]!r}; known are {', '.join(sorted(known))}")

    def __str__(self) -> str:
        return self.text


@cache
def read_condition(text: str) -> CaseCondition:
    """Return the condition that a text spells. Raises ConditionError."""
    if not isinstance(text, str) or not 0 < len(text) <= _LONGEST:
        raise ConditionError(f"found {str(text)[:_LONGEST]!r}; give an expression such as 'groups == in_channels'")
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise ConditionError(f"{text!r} is no expression; give one such as 'groups == in_channels'") from None
    names = set[str]()
    for node in ast.walk(tree):
        is_call = isinstance(node, ast.Call)
        if not isinstance(node, (*_KINDS, *_PARTS)) or (is_call and not _is_known_call(node)):
            found = ast.unparse(node) or type(node).__name__
            raise ConditionError(f"{text!r} has {found!r}; a condition has names, numbers and {_WORDS}")
        if isinstance(node, ast.Name) and node.id not in _FUNCTIONS:
            names.add(node.id)
    return CaseCondition(text.strip(), tree, frozenset(names))


def _is_known_call(node: Any) -> bool:
    return isinstance(node.func, ast.Name) and node.func.id in _FUNCTIONS and not node.keywords


def _is_true(node: ast.expr, values: Mapping[str, Any]) -> bool:
    """Evaluate what is true or false; of several parts one may decide although others are not known."""
    if isinstance(node, ast.BoolOp):
        return _join(node, values)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        return not _is_true(node.operand, values)
    try:
        return bool(_evaluate(node, values))
    except (TypeError, ValueError, ZeroDivisionError, IndexError, KeyError):
        return False


def _join(node: ast.BoolOp, values: Mapping[str, Any]) -> bool:
    decides, is_known = isinstance(node.op, ast.Or), True
    for part in node.values:
        try:
            if _is_true(part, values) is decides:
                return decides
        except _Unknown:
            is_known = False
    if not is_known:
        raise _Unknown
    return not decides


def _evaluate(node: ast.expr, values: Mapping[str, Any]) -> Any:
    match node:
        case ast.Constant():
            return node.value
        case ast.Name():
            if node.id not in values:
                raise _Unknown
            return values[node.id]
        case ast.Tuple():
            return tuple(_evaluate(each, values) for each in node.elts)
        case ast.Subscript():
            return _evaluate(node.value, values)[_evaluate(node.slice, values)]
        case ast.Call():
            return _FUNCTIONS[node.func.id](*(_evaluate(each, values) for each in node.args))  # type: ignore[attr-defined]
        case ast.BinOp():
            return _map(partial(_compute, type(node.op)), _evaluate(node.left, values), _evaluate(node.right, values))
        case ast.Compare():
            return _compare(node, values)
        case ast.UnaryOp() if isinstance(node.op, ast.USub):
            return _map(partial(_compute, ast.Mult), _evaluate(node.operand, values), -1)
        case _:
            return _is_true(node, values)


def _compute(kind: type[ast.AST], left: Any, right: Any) -> Any:
    if not isinstance(left, (int, float)) or not isinstance(right, (int, float)):
        raise TypeError("arithmetic is done with numbers")
    return _OPERATORS[kind](left, right)


def _compare(node: ast.Compare, values: Mapping[str, Any]) -> bool:
    left = _evaluate(node.left, values)
    for compare, other in zip(node.ops, node.comparators, strict=True):
        right = _evaluate(other, values)
        if isinstance(compare, (ast.In, ast.NotIn)):
            is_in = left in right or (isinstance(left, tuple) and all(each in right for each in left))
            holds = is_in is isinstance(compare, ast.In)
        elif isinstance(left, tuple) and isinstance(right, tuple) and isinstance(compare, (ast.Eq, ast.NotEq)):
            holds = _OPERATORS[type(compare)](left, right)
        else:
            holds = _all(_map(_OPERATORS[type(compare)], left, right))
        if not holds:
            return False
        left = right
    return True


def _map(function: Callable[[Any, Any], Any], left: Any, right: Any) -> Any:
    """Apply a function to two values, of which each may be several."""
    if isinstance(left, tuple) and isinstance(right, tuple):
        left, right = left * (len(right) if len(left) == 1 else 1), right * (len(left) if len(right) == 1 else 1)
        return tuple(_map(function, *pair) for pair in zip(left, right, strict=True))
    if isinstance(left, tuple):
        return tuple(_map(function, each, right) for each in left)
    return tuple(_map(function, left, each) for each in right) if isinstance(right, tuple) else function(left, right)


def _all(value: Any) -> bool:
    return all(map(_all, value)) if isinstance(value, tuple) else bool(value)
