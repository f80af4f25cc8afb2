"""The rows of a results file (schema 1): one frozen class per kind of row, from and to plain JSON.

The annotations *are* the schema: `decode` walks them to check every value, so a field is declared once.
Contract: docs/architecture.md, "Results and reports".
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
import types
import typing
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, ClassVar, Literal, TypedDict, Union, cast, get_args, get_origin, is_typeddict

SCHEMA = 1

Scalar = str | int | float | bool | None
NonFinite = Literal["inf", "-inf", "nan"]  # JSON has no infinity: its spelling stands for it
Number = float | NonFinite


class SchemaError(ValueError):
    """A row that is not of schema 1; the message says which key, what was found, what is expected."""


class Verdict(StrEnum):
    """What the suite makes of a claim, worst first."""

    CRASHED = "CRASHED"
    TIMEOUT = "TIMEOUT"
    REFUTED = "REFUTED"
    FALLBACK = "FALLBACK"
    UNEXERCISED = "UNEXERCISED"
    QUALITY = "QUALITY"
    VERIFIED = "VERIFIED"

    @property
    def rank(self) -> int:
        """0 for the worst verdict; sorting by it puts the worst first."""
        return VERDICTS.index(self)

    def may_be(self, found: Verdict) -> bool:
        """Whether this may be `found` the next time: what leaves its memory dies, or is only wrong, by chance."""
        return found is self or (self is Verdict.CRASHED and found is Verdict.REFUTED)

    @classmethod
    def worst(cls, verdicts: Iterable[Verdict | str]) -> Verdict:
        """The worst of `verdicts`; of none at all, UNEXERCISED: nothing was shown."""
        return min((cls(v) for v in verdicts), key=lambda v: v.rank, default=cls.UNEXERCISED)


VERDICTS: tuple[Verdict, ...] = tuple(Verdict)
GREEN = frozenset({Verdict.QUALITY, Verdict.VERIFIED})


class Outcome(StrEnum):
    """How a whole run ended."""

    PASS = "PASS"
    FAIL = "FAIL"
    INCOMPLETE = "INCOMPLETE"


class Evidence(TypedDict, total=False):
    """What a check saw; further keys are allowed and are shown as they are."""

    case: str
    expected: list[Number]
    found: list[Number]
    index: list[list[int]]
    qparams: dict[str, dict[str, object]]
    attribution: str
    traceback: str
    float_ops: list[str]
    graph: str
    printed: str
    script: str
    nondeterministic: bool


class Waiver(TypedDict):
    """The vendor's words for what is waived; `max_lsb` is the largest error that is covered, `expires` an ISO date."""

    reason: str
    url: str | None
    expires: str | None
    max_lsb: Number | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """First row: what was run, on what, with which settings.

    `isa` is the instruction-set level of the kernels; `waivers` the file of them and its sha256, if there is one;
    `isolation` what a claim has to itself: "fork" (a process), "none". `limits`: op → argument → which values the
    backend declares to take; others were not tried.
    """

    kind: ClassVar[str] = "header"
    schema: int
    suite_version: str
    suite_commit: str
    backend: str
    versions: dict[str, str]
    torch: str
    python: str
    platform: str
    cpu: str
    cpu_flags: list[str]
    engine: str
    representation: Literal["QUANTIZED", "DECOMPOSED"]
    seed: int
    profile: str
    options: dict[str, object]
    config_name: str
    config_sha256: str
    claims: int
    claims_in_config: int
    pairs: int
    started: str
    isa: str = ""
    isolation: str = ""
    waivers: dict[str, str] = field(default_factory=dict)
    limits: dict[str, dict[str, str]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One rule checked at one stage of one claim; `verdict` is what it alone would make of the claim.

    `cases` is how many cases or comparisons it is of, `failing` how many of them do not pass.
    """

    kind: ClassVar[str] = "check"
    claim: str
    stage: str
    rule: str
    outcome: Literal["pass", "fail", "error", "skip"]
    verdict: Verdict
    message: str
    max_lsb: Number | None
    slack_lsb: Number | None
    cases: int | None
    seconds: float
    failing: int = 0
    evidence: Evidence = field(default_factory=Evidence)

    @property
    def failed(self) -> bool:
        return self.outcome in ("fail", "error")


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """One claim of the backend config, with the verdict over all its checks.

    `failing` is the sum over its checks; None: some of them saw chance, so that the next run may count others.
    """

    kind: ClassVar[str] = "claim"
    claim: str
    pattern: str
    dtype_config: str
    flow: Literal["ptq", "qat"]
    scheme: str
    verdict: Verdict
    waived: bool
    reason: str
    max_lsb: Number | None
    repro: str
    seconds: float
    failing: int | None = 0
    decisions: list[dict[str, Scalar]] = field(default_factory=list)
    waiver: Waiver | None = None

    @property
    def pair(self) -> tuple[str, str]:
        return self.pattern, self.dtype_config

    @property
    def green(self) -> bool:
        """Whether this claim lets a run pass."""
        return self.waived or self.verdict in GREEN


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A model of several patterns, judged end to end as a claim is; it is no claim of the config.

    Its evidence may have a `script` that shows by itself what is wrong; `script_path` is where it stands.
    """

    kind: ClassVar[str] = "model"
    model: str
    verdict: Verdict
    waived: bool
    message: str
    max_lsb: Number | None
    cases: int | None
    seconds: float
    evidence: Evidence = field(default_factory=Evidence)
    waiver: Waiver | None = None

    @property
    def green(self) -> bool:
        """Whether this model lets a run pass."""
        return self.waived or self.verdict in GREEN

    @property
    def script_path(self) -> str:
        """The file in the report folder that has the model's script; "" without one."""
        return f"scripts/{re.sub(r'[^A-Za-z0-9_-]+', '_', self.model)}.py" if "script" in self.evidence else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    """Something measured, shown and never judged: the `values` that `subject` has under `topic`."""

    kind: ClassVar[str] = "fact"
    topic: str
    subject: str
    values: dict[str, Scalar]


@dataclass(frozen=True, slots=True, kw_only=True)
class Footer:
    """Last row: the totals that every reader checks, and the digest of all bytes before it.

    `counts` and `models` are by verdict. `problems` fail the run beside the verdicts (waivers, expected verdicts);
    `notes` are what a reader should know. `peak_mib` is the resident size of the largest process.
    """

    kind: ClassVar[str] = "footer"
    counts: dict[Verdict, int]
    claims: int
    checks: int
    pairs: int
    outcome: Outcome
    exit_status: int
    seconds: float
    sha256: str
    models: dict[Verdict, int] = field(default_factory=dict)
    facts: int = 0
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    peak_mib: float | None = None


Row = Header | Check | Claim | Model | Fact | Footer
KINDS: dict[str, type[Row]] = {cls.kind: cls for cls in (Header, Check, Claim, Model, Fact, Footer)}


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
    text = repr(value)
    return text if len(text) <= width else text[: width - 1] + "…"
