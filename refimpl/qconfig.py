"""QConfig and QConfigMapping: what the user asks to be quantized, and how (rules QCM-01 to QCM-04)."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import nn

from refimpl.errors import QConfigError, reject_unknown_keys
from refimpl.observers import MinMaxObserver, PerChannelMinMaxObserver

ObjectType: TypeAlias = Callable[..., Any] | str


class QConfig(NamedTuple):
    """Constructors of the observers (or fake quantizes) for activations and for weights. (QCM-01)"""

    # rule: QCM-01
    activation: Callable[..., nn.Module]
    weight: Callable[..., nn.Module]


class ResolvedQConfig(NamedTuple):
    """A QConfig and the key of the mapping that it came from; ``qconfig`` None: do not quantize. (QCM-02, QCM-03)"""

    qconfig: QConfig | None
    source: str


def as_qconfig(value: object) -> QConfig | None:
    """Take None, ours, or any object with callable ``activation`` and ``weight``. Raises QConfigError otherwise."""
    if value is None or isinstance(value, QConfig):
        return value
    activation, weight = getattr(value, "activation", None), getattr(value, "weight", None)
    if not (callable(activation) and callable(weight)):
        raise QConfigError(f"expected a QConfig with constructors 'activation' and 'weight', found {value!r}")
    return QConfig(activation, weight)  # rule: CFG-14


GLOBAL = "global"  # the source of a QConfig that no other key names
_KEYS = ("", "object_type", "module_name_regex", "module_name", "module_name_object_type_order")


class QConfigMapping:
    """Which QConfig holds for which part of the model. Later kinds of key override earlier ones (QCM-02):

    global, object_type, module_name_regex (first regex set that matches wins), module_name (nearest enclosing name),
    module_name_object_type_order (the index-th call of that type inside the module of that name).
    """

    def __init__(self) -> None:
        self.global_qconfig: Any = None
        self.object_type_qconfigs: dict[ObjectType, Any] = {}
        self.module_name_regex_qconfigs: dict[str, Any] = {}
        self.module_name_qconfigs: dict[str, Any] = {}
        self.module_name_object_type_order_qconfigs: dict[tuple[str, ObjectType, int], Any] = {}

    def __repr__(self) -> str:
        return f"QConfigMapping({self.to_dict()})"

    def set_global(self, global_qconfig: Any) -> QConfigMapping:
        """Set the QConfig for everything that no other key names; None: nothing is quantized."""
        self.global_qconfig = global_qconfig
        return self

    def set_object_type(self, object_type: ObjectType, qconfig: Any) -> QConfigMapping:
        """Set the QConfig of a module class, a function or a method name."""
        self.object_type_qconfigs[object_type] = qconfig
        return self

    def set_module_name_regex(self, module_name_regex: str, qconfig: Any) -> QConfigMapping:
        """Set the QConfig of every module whose full name matches, anchored at the start.

        Raises QConfigError if the expression does not compile.
        """
        try:
            re.compile(module_name_regex)
        except re.error as error:
            raise QConfigError(f"module_name_regex {module_name_regex!r} does not compile: {error}") from error
        self.module_name_regex_qconfigs[module_name_regex] = qconfig
        return self

    def set_module_name(self, module_name: str, qconfig: Any) -> QConfigMapping:
        """Set the QConfig of a module, and of everything inside it that has no nearer name."""
        self.module_name_qconfigs[module_name] = qconfig
        return self

    def set_module_name_object_type_order(
        self, module_name: str, object_type: ObjectType, index: int, qconfig: Any
    ) -> QConfigMapping:
        """Set the QConfig of the index-th call (from 0) of a type inside a module."""
        self.module_name_object_type_order_qconfigs[(module_name, object_type, index)] = qconfig
        return self

    def to_dict(self) -> dict[str, Any]:
        """Return the public dict form; the round trip is the identity. (QCM-04)"""
        return {  # rule: QCM-04
            "": self.global_qconfig,
            "object_type": list(self.object_type_qconfigs.items()),
            "module_name_regex": list(self.module_name_regex_qconfigs.items()),
            "module_name": list(self.module_name_qconfigs.items()),
            "module_name_object_type_order": [
                (*key, qconfig) for key, qconfig in self.module_name_object_type_order_qconfigs.items()
            ],
        }

    @classmethod
    def from_dict(cls, qconfig_dict: Mapping[str, Any]) -> QConfigMapping:
        """Build from the public dict form. Raises ConfigError for an unknown key. (QCM-04, CFG-13)"""
        reject_unknown_keys("QConfigMapping.from_dict", qconfig_dict, _KEYS)
        mapping = cls().set_global(qconfig_dict.get(""))
        for object_type, qconfig in qconfig_dict.get("object_type", []):
            mapping.set_object_type(object_type, qconfig)
        for regex, qconfig in qconfig_dict.get("module_name_regex", []):
            mapping.set_module_name_regex(regex, qconfig)
        for name, qconfig in qconfig_dict.get("module_name", []):
            mapping.set_module_name(name, qconfig)
        for name, object_type, index, qconfig in qconfig_dict.get("module_name_object_type_order", []):
            mapping.set_module_name_object_type_order(name, object_type, index, qconfig)
        return mapping


def as_qconfig_mapping(value: object) -> QConfigMapping:
    """Take ours, its dict form, or torch's by attribute. Raises QConfigError for anything else. (CFG-14)"""
    if isinstance(value, QConfigMapping):
        return value
    if isinstance(value, Mapping):
        return QConfigMapping.from_dict(value)
    if not hasattr(value, "module_name_object_type_order_qconfigs"):
        raise QConfigError(f"expected a QConfigMapping, found {value!r}")
    mapping = QConfigMapping()  # rule: CFG-14
    for name in vars(mapping):
        found = getattr(value, name)
        setattr(mapping, name, dict(found) if isinstance(found, Mapping) else found)
    return mapping


class QConfigResolver:
    """Answers, for a place in the model, which QConfig of a mapping holds there and why. (QCM-02)

    A place is (object types, module name): the class and full name of a module, or the function or method and the name
    of the module that calls it. Answers by name are cached: cost is linear in the number of places.
    """

    def __init__(self, mapping: QConfigMapping) -> None:
        self._mapping = mapping
        self._by_name: dict[str, ResolvedQConfig | None] = {}

    def resolve(
        self, object_types: Iterable[ObjectType], name: str, order: tuple[str, ObjectType, int] | None = None
    ) -> ResolvedQConfig:
        """Return the QConfig for a place.

        `object_types`: what the place is, the strongest first. `order`: enclosing module's name, type, and the index
        of the call among that type there.
        """
        mapping = self._mapping
        if order in mapping.module_name_object_type_order_qconfigs:  # rule: QCM-02
            found = mapping.module_name_object_type_order_qconfigs[order]
            return _resolved(found, f"module_name_object_type_order {order}")
        by_name = self._named(name)
        if by_name is not None:
            return by_name
        for object_type in object_types:
            if object_type in mapping.object_type_qconfigs:
                shown = getattr(object_type, "__name__", object_type)
                return _resolved(mapping.object_type_qconfigs[object_type], f"object_type {shown}")
        return _resolved(mapping.global_qconfig, GLOBAL)

    def _named(self, name: str) -> ResolvedQConfig | None:
        if name not in self._by_name:
            self._by_name[name] = self._nearest_name(name) or self._first_regex(name)
        return self._by_name[name]

    def _nearest_name(self, name: str) -> ResolvedQConfig | None:
        named = self._mapping.module_name_qconfigs
        while True:
            if name in named:
                return _resolved(named[name], f"module_name {name!r}")
            if not name:
                return None
            name = name.rpartition(".")[0]

    def _first_regex(self, name: str) -> ResolvedQConfig | None:
        for regex, qconfig in self._mapping.module_name_regex_qconfigs.items():
            if re.match(regex, name):
                return _resolved(qconfig, f"module_name_regex {regex!r}")
        return None


def _resolved(qconfig: object, source: str) -> ResolvedQConfig:
    return ResolvedQConfig(as_qconfig(qconfig), source)  # rule: QCM-03


def minmax_qconfig(
    activation_dtype: Any, weight_dtype: Any, *, per_channel: bool, symmetric: bool = True, **arguments: Any
) -> QConfig:
    """Return a static QConfig of min/max observers: affine activations, symmetric (or affine) weights.

    `arguments` with the prefix ``weight_`` go to the weight's observer, the others to the activation's.
    """
    weight_arguments = {k.removeprefix("weight_"): v for k, v in arguments.items() if k.startswith("weight_")}
    activation_arguments = {k: v for k, v in arguments.items() if not k.startswith("weight_")}
    schemes = {
        (False, False): torch.per_tensor_affine,
        (False, True): torch.per_tensor_symmetric,
        (True, False): torch.per_channel_affine,
        (True, True): torch.per_channel_symmetric,
    }
    observer = PerChannelMinMaxObserver if per_channel else MinMaxObserver
    return QConfig(
        activation=MinMaxObserver.with_args(dtype=activation_dtype, **activation_arguments),
        weight=observer.with_args(dtype=weight_dtype, qscheme=schemes[per_channel, symmetric], **weight_arguments),
    )
