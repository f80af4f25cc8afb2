"""Rows of a results file from and to lines of JSON, by the annotations of their classes (`reports.schema`)."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import types
import typing
from collections.abc import Hashable, Iterator, Mapping
from enum import Enum
from typing import Any, ClassVar, NoReturn, Protocol, TypeAlias, cast

from fx_quant_conformance.reports.schema import (
    SCHEMA,
    Check,
    ClaimResult,
    Footer,
    Header,
    Judged,
    Measurement,
    ModelResult,
    Row,
)
from fx_quant_conformance.reports.text import cut_end
from fx_quant_conformance.reports.text_enum import TextEnum

PlainRow: TypeAlias = dict[str, Any]
"""A row as parsed from JSON."""


class Message(Protocol):
    """A dataclass with a kind: a row of a results file, or anything else that is sent as such a line."""

    __dataclass_fields__: ClassVar[dict[str, Any]]
    kind: ClassVar[str]


KINDS: dict[str, type[Row]] = {cls.kind: cls for cls in (Header, Check, ClaimResult, ModelResult, Measurement, Footer)}


class SchemaError(ValueError):
    """A row that does not fit its class; the message says which key, the value found, and what is expected."""


class OtherSchemaError(SchemaError):
    """The header of another version of the schema."""


# -- lines ------------------------------------------------------------------------------------------------------------


def line_of(row: Message, *, ensure_ascii: bool = True) -> str:
    """Return a row as a line of JSON, without the newline. Raises SchemaError for what JSON cannot say faithfully."""
    plain = encode(row)
    for where, why in _find_unfaithful(plain, "row"):
        raise SchemaError(f"{where} is {why}")
    return json.dumps(plain, allow_nan=False, ensure_ascii=ensure_ascii, sort_keys=True)


def row_of(line: str) -> Row:
    """Return the row of a line. Raises SchemaError for a line that holds no row of schema 2."""
    return cast("Row", decode(loads(line)))


def loads(text: str) -> Any:
    """Parse JSON as the standard has it: ValueError for NaN and infinities, and for a number that no float holds."""
    return json.loads(text, parse_constant=_refuse_constant, parse_float=_parse_finite, parse_int=_parse_whole)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON; non-finite numbers are written as strings")


def _parse_finite(text: str) -> float:
    value = float(text)
    return value if math.isfinite(value) else _refuse_constant(text[:40])


def _parse_whole(text: str) -> int:
    _parse_finite(text)
    return int(text)


# -- plain builtins ---------------------------------------------------------------------------------------------------


def decode(row: Mapping[str, object], kinds: Mapping[str, type[Message]] = KINDS) -> Message:
    """Return the row as data, every key checked; keys that its class does not have are left out.

    Raises SchemaError for a kind that is not among ``kinds``, a missing key, or a value of another type.
    """
    kind = row.get("kind") if isinstance(row, Mapping) else None
    if not isinstance(kind, str) or kind not in kinds:
        raise SchemaError(f"unknown kind of row {_cut(kind)}; expected one of {', '.join(kinds)}")
    if kind == "header" and row.get("schema", SCHEMA) != SCHEMA:
        raise OtherSchemaError(
            f"schema {_cut(row['schema'])}, this suite reads {SCHEMA}: use the suite that wrote it "
            f"({_cut(row.get('suite_version', 'unknown'))}), or run again"
        )
    return cast("Message", _read_record(row, kinds[kind], f"{kind} row", ""))


def encode(row: Message) -> PlainRow:
    """Return the row as plain builtins, as `decode` takes it; optional keys that hold their defaults are left out."""
    first = {"kind": row.kind, row.kind: row.id} if isinstance(row, Judged) else {"kind": row.kind}  # for readers
    return first | _encode_fields(row)


def _encode_fields(record: Any) -> PlainRow:
    items = ((f, getattr(record, f.name)) for f in dataclasses.fields(record))
    return {f.name: _encode_value(value) for f, value in items if f.metadata.get("always") or value != _get_default(f)}


def _get_default(item: dataclasses.Field[Any]) -> object:
    """Return a field's default; MISSING, which no value equals, if it has none."""
    return item.default if item.default_factory is dataclasses.MISSING else item.default_factory()


def _encode_value(value: object) -> object:
    if isinstance(value, str) and isinstance(value, Enum):
        return value.value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _encode_fields(value)
    if isinstance(value, dict):
        return {_encode_value(key): _encode_value(item) for key, item in value.items()}
    return [_encode_value(item) for item in value] if isinstance(value, list) else value


def _find_unfaithful(value: object, where: str) -> Iterator[tuple[str, str]]:
    """Yield where `value` holds what JSON cannot say faithfully, and what it is."""
    if type(value) is dict:
        for key, item in value.items():
            if type(key) is not str:
                yield where, f"keyed by {key!r} of {type(key).__name__}; keys are strings"
            yield from _find_unfaithful(item, f"{where}[{key!r}]")
    elif type(value) is list or type(value) is tuple:
        for index, item in enumerate(value):
            yield from _find_unfaithful(item, f"{where}[{index}]")
    elif type(value) is float and not math.isfinite(value):
        yield where, f"{value!r}; write a non-finite number as a string"
    elif value is not None and type(value) not in (str, int, float, bool):
        kind = f"{type(value).__module__}.{type(value).__name__}"
        yield where, f"{value!r} of {kind}; convert it to a plain builtin"


# -- reading by annotations -------------------------------------------------------------------------------------------


def _read_record(row: Mapping[str, object], cls: Any, name: str, place: str) -> object:
    """Return a mapping as an object of a dataclass."""
    missing = [f.name for f in dataclasses.fields(cls) if f.name not in row and _is_required(f)]
    if missing:
        raise SchemaError(f"{name} has no {', '.join(map(repr, missing))}")
    hints = _get_hints(cast("Hashable", cls))
    names = [f.name for f in dataclasses.fields(cls) if f.name in row]
    return cls(**{key: _read(row[key], hints[key], f"{place}{key}") for key in names})


def _is_required(item: dataclasses.Field[Any]) -> bool:
    return item.default is dataclasses.MISSING and item.default_factory is dataclasses.MISSING


@functools.cache
def _get_hints(cls: Hashable) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def _read(value: object, hint: Any, key: str) -> object:
    """Return `value` as `hint` asks for it. Raises SchemaError, which names the key."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return _read_union(value, hint, key)
    if typing.is_typeddict(hint) and isinstance(value, dict):
        known = _get_hints(hint)
        return {k: _read(v, known.get(k, object), f"{key}.{k}") for k, v in value.items()}
    if dataclasses.is_dataclass(hint) and isinstance(value, dict):
        return _read_record(value, hint, repr(key), f"{key}.")
    if origin is dict and isinstance(value, dict):
        return {_read(k, args[0], f"key of {key}"): _read(v, args[1], f"{key}.{k}") for k, v in value.items()}
    if origin is list and isinstance(value, list):
        return [_read(item, args[0], f"{key}[{i}]") for i, item in enumerate(value)]
    if isinstance(hint, type) and issubclass(hint, TextEnum) and value in list(hint):
        return hint(str(value))
    if _is_a(value, hint):
        return value
    raise SchemaError(f"{key!r} is {_cut(value)}; expected {_spell(hint)}")


def _read_union(value: object, hint: Any, key: str) -> object:
    for option in typing.get_args(hint):
        try:
            return _read(value, option, key)
        except SchemaError:
            continue
    raise SchemaError(f"{key!r} is {_cut(value)}; expected {_spell(hint)}")


def _is_a(value: object, hint: Any) -> bool:
    """Tell whether a value has exactly this type: a bool is no int here; an int is a float."""
    if typing.get_origin(hint) is typing.Literal:
        return isinstance(value, str) and value in typing.get_args(hint)
    if hint is float:
        return type(value) in (int, float)
    return hint is object or type(value) is hint


def _spell(hint: Any) -> str:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_spell(arg) for arg in args)
    if origin is typing.Literal:
        return " or ".join(map(repr, args))
    if isinstance(hint, type) and issubclass(hint, TextEnum):
        return f"one of {', '.join(hint)}"
    names = {type(None): "null", str: "a string", int: "an integer", float: "a number", bool: "true or false"}
    return names.get(hint) or ("a list" if origin is list else "an object")


def _cut(value: object, width: int = 60) -> str:
    return cut_end(repr(value), width)
