"""QConfig and QConfigMapping: the user's request which parts to quantize, and how (rules QCM-01 to QCM-04)."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple, TypeAlias

import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrize import type_before_parametrizations

from fx_quant_conformance.refimpl.config.forms import ANYTHING, HASHABLE, Form, coerce, dict_of, row_of, show
from fx_quant_conformance.refimpl.errors import (
    QConfigError,
    reject_unknown_keys,
    suggest_name,
    warn_dict_form,
    warn_user,
)

ObjectType: TypeAlias = Callable[..., Any] | str
Order: TypeAlias = tuple[str, ObjectType, int]


class QConfig(NamedTuple):
    """How activations and weights are observed where it holds: two constructors of observers. (QCM-01)

    Each is called for every observer. A constructor is a class, or the result of its ``with_args(…)``; an instance in
    its place raises QConfigError in prepare. Torch's QConfig, or any object with these two attributes, is taken as
    well. (CFG-14)
    """

    # rule: QCM-01
    activation: Callable[..., nn.Module]
    """Makes the observer or fake quantize of inputs and outputs."""
    weight: Callable[..., nn.Module]
    """Makes the observer or fake quantize of a weight."""


class ResolvedQConfig(NamedTuple):
    """A QConfig and the key of the mapping that it came from. (QCM-02, QCM-03)"""

    qconfig: QConfig | None
    """None: do not quantize."""
    source: str


def as_qconfig(value: object, source: str = "") -> QConfig | None:
    """Return None, a QConfig of refimpl's or torch's as it is, or one of any object with the two constructors.

    Tools of torch's, such as its ModelReport, ask the modules of a prepared model for a QConfig of torch's class.
    Raises QConfigError, naming the source, for anything else: a module in the place of its constructor too.
    """
    if value is None:
        return None
    for part in QConfig._fields:
        make = getattr(value, part, None)
        if not (callable(make) and isinstance(make, Hashable)) or isinstance(make, nn.Module):
            advice = f"{part}, of class {type(make).__name__}; pass its constructor (a class, or class.with_args(…))"
            text = f"the instance {advice}" if isinstance(make, nn.Module) else show(value)
            where = f"QConfig of {source}" if source else "QConfig"
            raise QConfigError(f"{where}: expected constructors 'activation' and 'weight', found {text}")
    given: Any = value
    is_one = isinstance(given, tuple) and getattr(given, "_fields", None) == QConfig._fields
    return given if is_one else QConfig(given.activation, given.weight)  # rule: CFG-14


GLOBAL = "global"  # the source of the QConfig for parts that no other key names


def _check_regex(value: str) -> str:
    try:
        re.match(value, "")
    except re.error as error:
        raise QConfigError(f"module_name_regex {value!r} does not compile: {error}") from None
    return value


# The forms of keys. As in torch's mapping, a key that can match nothing is no error; prepare warns of it.
_KINDS: Mapping[str, Form] = {
    "object_type": HASHABLE,
    "module_name_regex": Form("a regular expression", _check_regex),
    "module_name": HASHABLE,
    "module_name_object_type_order": row_of(HASHABLE, HASHABLE, HASHABLE),
}
_FORMS = {f"{kind}_qconfigs": dict_of(key, ANYTHING) for kind, key in _KINDS.items()}


@dataclass
class QConfigMapping:
    """Which QConfig holds for which part of the model; None in its place: not quantized. (QCM-02, QCM-03)

    Of the keys for one place the most specific wins: module_name_object_type_order, then module_name,
    module_name_regex, object_type, and global last. Setters return the mapping, raise QConfigError for an impossible
    key, and check no QConfig: prepare does. It also warns of a key that matches nothing in the model.
    """

    global_qconfig: Any = None
    """QConfig of everything that no other key names; None: nothing is quantized."""
    object_type_qconfigs: dict[ObjectType, Any] = field(default_factory=dict)
    """QConfigs by module class, function, or name of a method."""
    module_name_regex_qconfigs: dict[str, Any] = field(default_factory=dict)
    """QConfigs by regular expression; the first one set that matches a module's full name wins."""
    module_name_qconfigs: dict[str, Any] = field(default_factory=dict)
    """QConfigs by full name of a module; the nearest enclosing one wins."""
    module_name_object_type_order_qconfigs: dict[Order, Any] = field(default_factory=dict)
    """QConfigs by module name, object type and index of the call."""

    def __setattr__(self, name: str, value: Any) -> None:
        form = _FORMS.get(name, ANYTHING)
        super().__setattr__(name, coerce(QConfigError, f"QConfigMapping.{name}", form, value))

    def _set(self, kind: str, key: Any, qconfig: Any) -> QConfigMapping:
        qconfigs = getattr(self, f"{kind}_qconfigs")
        qconfigs[coerce(QConfigError, f"QConfigMapping.set_{kind}", _KINDS[kind], key)] = qconfig
        return self

    def set_global(self, global_qconfig: Any) -> QConfigMapping:
        """Set the QConfig for everything that no other key names; None: nothing is quantized."""
        self.global_qconfig = global_qconfig
        return self

    def set_object_type(self, object_type: ObjectType, qconfig: Any) -> QConfigMapping:
        """Set the QConfig of a module class, function or method; a float class's holds for its fused class. (QCM-05)"""
        return self._set("object_type", object_type, qconfig)

    def set_module_name_regex(self, module_name_regex: str, qconfig: Any) -> QConfigMapping:
        """Set the QConfig of every module whose full name matches from its start; QConfigError if it cannot compile."""
        return self._set("module_name_regex", module_name_regex, qconfig)

    def set_module_name(self, module_name: str, qconfig: Any) -> QConfigMapping:
        """Set the QConfig of a module, by full name, and of all parts without a nearer name."""
        return self._set("module_name", module_name, qconfig)

    def set_module_name_object_type_order(
        self, module_name: str, object_type: ObjectType, index: int, qconfig: Any
    ) -> QConfigMapping:
        """Set the QConfig of one call: the index-th (from 0) of its type whose enclosing module has that full name."""
        return self._set("module_name_object_type_order", (module_name, object_type, index), qconfig)

    def to_dict(self) -> dict[str, Any]:
        """Return the public dict form; ``from_dict`` makes an equal mapping of it. (QCM-04)"""
        form: dict[str, Any] = {"": self.global_qconfig}
        for kind in _KINDS:  # rule: QCM-04
            rows = getattr(self, f"{kind}_qconfigs").items()
            form[kind] = [(*(key if kind.endswith("order") else (key,)), qconfig) for key, qconfig in rows]
        return form

    @classmethod
    def from_dict(cls, qconfig_dict: Mapping[str, Any]) -> QConfigMapping:
        """Build from the public dict form, all keys optional. (QCM-04, CFG-13)

        Raises ConfigError for an unknown key; QConfigError for a bad row, or an expression that does not compile.
        """
        reject_unknown_keys("QConfigMapping.from_dict", qconfig_dict, ("", *_KINDS))
        mapping = cls().set_global(qconfig_dict.get(""))
        for kind in _KINDS:
            size = 4 if kind.endswith("order") else 2
            rows = qconfig_dict.get(kind, ())
            if not isinstance(rows, tuple | list):
                raise QConfigError(f"QConfigMapping.from_dict: {kind} is {rows!r}; expected a list of rows")
            for row in rows:
                if not isinstance(row, tuple | list) or len(row) != size:
                    expected = "(key, QConfig)" if size == 2 else "(module name, type, index, QConfig)"
                    raise QConfigError(f"QConfigMapping.from_dict: {kind} has the row {row!r}; expected {expected}")
                getattr(mapping, f"set_{kind}")(*row)
        return mapping


def as_qconfig_mapping(value: object) -> QConfigMapping:
    """Return refimpl's mapping; read torch's by attribute, or the dict form with a FutureWarning. (CFG-14)

    Raises QConfigError for anything else, and for a module_name_regex that does not compile.
    """
    if isinstance(value, QConfigMapping):
        return value
    if isinstance(value, Mapping):
        warn_dict_form("QConfigMapping")
        return QConfigMapping.from_dict(value)
    if not hasattr(value, "module_name_object_type_order_qconfigs"):
        raise QConfigError(f"expected a QConfigMapping, found {show(value)}")
    parts: dict[str, Any] = {part.name: getattr(value, part.name, None) for part in fields(QConfigMapping)}
    return QConfigMapping(**parts)  # rule: CFG-14


class QConfigResolver:
    """Resolves which QConfig of a mapping holds for a place in the model, and why. (QCM-02)

    A place is (object types, module name): the class and full name of a module, or the function or method and the name
    of the module that calls it. Results by name are cached: cost is linear in the number of places.
    """

    def __init__(self, mapping: QConfigMapping) -> None:
        self._mapping = mapping
        self._by_name: dict[str, ResolvedQConfig | None] = {}
        self._checked: dict[int, QConfig | None] = {}  # by id: each QConfig is checked once, and stays one object

    def resolve(self, object_types: Iterable[ObjectType], name: str, order: Order | None = None) -> ResolvedQConfig:
        """Return the QConfig for a place: its types, the strongest first, its name, and its key by order."""
        mapping = self._mapping
        if order in mapping.module_name_object_type_order_qconfigs:  # rule: QCM-02
            qconfig = mapping.module_name_object_type_order_qconfigs[order]
            return self._check(qconfig, f"module_name_object_type_order {order}")
        if name not in self._by_name:
            self._by_name[name] = next(self._find_by_name(name), None)
        if (by_name := self._by_name[name]) is not None:
            return by_name
        for object_type in object_types:
            if object_type in mapping.object_type_qconfigs:
                return self._check(mapping.object_type_qconfigs[object_type], f"object_type {_name_key(object_type)}")
        return self._check(mapping.global_qconfig, GLOBAL)

    def _check(self, qconfig: object, source: str) -> ResolvedQConfig:
        if id(qconfig) not in self._checked:
            self._checked[id(qconfig)] = as_qconfig(qconfig, source)
        return ResolvedQConfig(self._checked[id(qconfig)], source)  # rule: QCM-03

    def _find_by_name(self, name: str) -> Iterator[ResolvedQConfig]:
        parts, by_name = name.split("."), self._mapping.module_name_qconfigs
        for enclosing in (".".join(parts[:depth]) for depth in range(len(parts), -1, -1)):
            if enclosing in by_name:
                yield self._check(by_name[enclosing], f"module_name {enclosing!r}")
        for regex, qconfig in self._mapping.module_name_regex_qconfigs.items():
            if re.match(regex, name):
                yield self._check(qconfig, f"module_name_regex {regex!r}")


def warn_unmatched_keys(
    mapping: QConfigMapping, model: nn.Module, targets: Iterable[ObjectType], orders: Collection[Order]
) -> None:
    """Warn of every key of a mapping that matches nothing in a model, with the nearest name that would. (QCM-02)

    `targets`: functions and methods that the model calls. `orders`: the module_name_object_type_order keys that match.
    Object types that torch itself defines are left out: default mappings name them for every model.
    """
    callers = (name for name, _, _ in orders)
    names = dict.fromkeys((*(name for name, _ in model.named_modules()), *callers))  # a module's first name only
    types = {type_before_parametrizations(module) for module in model.modules()} | set(targets)
    regexes = (key for key in mapping.module_name_regex_qconfigs if not any(re.match(key, name) for name in names))
    own_types = (key for key in mapping.object_type_qconfigs if not (key in types or _is_of_torch(key)))
    by_order = (key for key in mapping.module_name_object_type_order_qconfigs if key not in orders)
    unmatched: list[tuple[str, Iterable[ObjectType | Order], Iterable[ObjectType | Order]]] = [
        ("module_name", (key for key in mapping.module_name_qconfigs if key not in names), names),
        ("module_name_regex", regexes, names),
        ("object_type", own_types, types),
        ("module_name_object_type_order", by_order, orders),
    ]
    for kind, keys, candidates in unmatched:
        for key in map(_name_key, keys):
            hint = suggest_name(key, sorted(map(_name_key, candidates)), cutoff=0.0)
            warn_user(f"QConfigMapping: {kind} {key} matches nothing in {type(model).__name__}; {hint}")


def _is_of_torch(key: ObjectType) -> bool:
    """Tell whether a default mapping of torch's can name an object type: a model without it is no mistake."""
    if isinstance(key, str):
        return hasattr(Tensor, key) or hasattr(F, key.rstrip("_"))
    return (getattr(key, "__module__", None) or "torch").startswith(("torch", "_operator", "builtins"))


def _name_key(key: ObjectType | Order) -> str:
    if isinstance(key, tuple) and len(key) == 3:
        return f"({key[0]!r}, {_name_key(key[1])}, {key[2]})"
    return key if isinstance(key, str) else getattr(key, "__name__", repr(key))
