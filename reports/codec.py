"""Rows of a results file from and to plain JSON, by the annotations of their classes (`reports.schema`)."""

from __future__ import annotations

import dataclasses
import functools
import math
import types
import typing
from collections.abc import Hashable, Iterator, Mapping
from enum import StrEnum
from typing import Any, Literal, TypeAlias, Union, cast, get_args, get_origin, is_typeddict

from reports.schema import SCHEMA, Check, Claim, Fact, Footer, Header, Model, Row
from reports.text import end

PlainRow: TypeAlias = dict[str, Any]
"""A row as plain builtins, as JSON has it."""

KINDS: dict[str, type[Row]] = {cls.kind: cls for cls in (Header, Check, Claim, Model, Fact, Footer)}


class SchemaError(ValueError):
    """A row that is not of schema 1; the message says which key, what was found, what is expected."""


def decode(row: Mapping[str, object]) -> Row:
    """The row as data, every key checked; keys that schema 1 does not know are left out."""
    kind = row.get("kind")
    if not isinstance(kind, str) or kind not in KINDS:
        raise SchemaError(f"unknown kind of row {_cut(kind)}; expected one of {', '.join(KINDS)}")
    if kind == "header" and row.get("schema", SCHEMA) != SCHEMA:
        raise SchemaError(f"schema {_cut(row['schema'])}; expected {SCHEMA}: use the suite that wrote it")
    cls = KINDS[kind]
    missing = [f.name for f in dataclasses.fields(cls) if f.name not in row and _required(f)]
    if missing:
        raise SchemaError(f"{kind} row has no {', '.join(map(repr, missing))}")
    hints = _hints(cast("Hashable", cls))
    known: dict[str, Any] = {key: _read(row[key], hints[key], key) for key in _names(cls) if key in row}
    return cls(**known)


def unknown_keys(row: Mapping[str, object]) -> list[str]:
    """The keys of a row that its kind does not have."""
    return sorted(set(row) - {"kind", *_names(KINDS[str(row["kind"])])})


def encode(row: Row) -> dict[str, object]:
    """The row as plain builtins: what `decode` takes; optional keys that hold nothing are left out."""
    values = {f.name: getattr(row, f.name) for f in dataclasses.fields(row)}
    optional = {f.name for f in dataclasses.fields(row) if not _required(f)}
    kept = {key: _plain(value) for key, value in values.items() if value or key not in optional}
    return {"kind": row.kind, **kept}


def not_plain(value: object, where: str) -> Iterator[tuple[str, str]]:
    """Where `value` holds what JSON cannot say faithfully, and what it is."""
    if type(value) is dict:
        for key, item in value.items():
            if type(key) is not str:
                yield where, f"keyed by {key!r} of {type(key).__name__}; keys are strings"
            yield from not_plain(item, f"{where}[{key!r}]")
    elif type(value) is list or type(value) is tuple:
        for index, item in enumerate(value):
            yield from not_plain(item, f"{where}[{index}]")
    elif type(value) is float and not math.isfinite(value):
        yield where, f"{value!r}; write a non-finite number as a string"
    elif value is not None and type(value) not in (str, int, float, bool):
        kind = f"{type(value).__module__}.{type(value).__name__}"
        yield where, f"{value!r} of {kind}; convert it to a plain builtin"


def _required(item: dataclasses.Field[Any]) -> bool:
    return item.default is dataclasses.MISSING and item.default_factory is dataclasses.MISSING


def _plain(value: object) -> object:
    if isinstance(value, StrEnum):
        return value.value
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list) else value


@functools.cache
def _hints(cls: Hashable) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def _names(cls: type[Row]) -> tuple[str, ...]:
    return tuple(f.name for f in dataclasses.fields(cls))


def _read(value: object, hint: Any, key: str) -> object:
    """`value` as `hint` asks for it, or a SchemaError that names the key."""
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return _read_union(value, hint, key)
    if is_typeddict(hint) and isinstance(value, dict) and hint.__required_keys__ <= value.keys():
        known = _hints(hint)
        return {k: _read(v, known.get(k, object), f"{key}.{k}") for k, v in value.items()}
    if origin is dict and isinstance(value, dict):
        return {_read(k, args[0], f"key of {key}"): _read(v, args[1], f"{key}.{k}") for k, v in value.items()}
    if origin is list and isinstance(value, list):
        return [_read(item, args[0], f"{key}[{i}]") for i, item in enumerate(value)]
    if isinstance(hint, type) and issubclass(hint, StrEnum) and value in list(hint):
        return hint(str(value))
    if _is_a(value, hint):
        return value
    raise SchemaError(f"{key!r} is {_cut(value)}; expected {_spell(hint)}")


def _read_union(value: object, hint: Any, key: str) -> object:
    for option in get_args(hint):
        try:
            return _read(value, option, key)
        except SchemaError:
            continue
    raise SchemaError(f"{key!r} is {_cut(value)}; expected {_spell(hint)}")


def _is_a(value: object, hint: Any) -> bool:
    """Exact types: a bool is no int here; an int is a float."""
    if get_origin(hint) is Literal:
        return isinstance(value, str) and value in get_args(hint)
    if hint is float:
        return type(value) in (int, float)
    return hint is object or type(value) is hint


def _spell(hint: Any) -> str:
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return " or ".join(_spell(arg) for arg in args)
    if origin is Literal:
        return " or ".join(map(repr, args))
    if isinstance(hint, type) and issubclass(hint, StrEnum):
        return f"one of {', '.join(hint)}"
    names = {type(None): "null", str: "a string", int: "an integer", float: "a number", bool: "true or false"}
    return names.get(hint) or ("a list" if origin is list else "an object")


def _cut(value: object, width: int = 60) -> str:
    return end(repr(value), width)
