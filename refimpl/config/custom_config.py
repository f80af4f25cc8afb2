"""The custom configs of fuse, prepare and convert, with torch's names and dict keys (STD-01, CUS-01 to CUS-04)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import IntEnum
from typing import TYPE_CHECKING, Any, TypeAlias

from fx_quant_conformance.refimpl.config.backend_config import BackendConfig, as_backend_config
from fx_quant_conformance.refimpl.config.forms import (
    ANYTHING,
    CLASS,
    INTEGER,
    STRING,
    Form,
    coerce,
    dict_of,
    instance_of,
    list_of,
    row_of,
    show,
)
from fx_quant_conformance.refimpl.config.qconfig import QConfigMapping, as_qconfig_mapping
from fx_quant_conformance.refimpl.errors import ConfigError, reject_unknown_keys, warn_dict_form

if TYPE_CHECKING:
    from typing import Self  # Python 3.11

ClassesByMode: TypeAlias = "dict[QuantType, dict[type, type]]"


class QuantType(IntEnum):
    """The mode that a custom class is for; torch's values, so that torch's enum finds the same keys. (CUS-01)"""

    DYNAMIC = 0
    """The QConfig's activation is dynamic."""
    STATIC = 1
    """The activation is neither dynamic nor float32, in quantization-aware training too."""
    QAT = 2
    """Accepted in mappings, and never looked up."""
    WEIGHT_ONLY = 3
    """The activation stays float32."""

    @classmethod
    def of(cls, value: object) -> QuantType:
        """Return refimpl's member for refimpl's, torch's, or the lower-case name of the dict forms. (CFG-14)

        Raises ConfigError for anything else.
        """
        name = str(getattr(value, "name", value)).upper()
        if name not in cls.__members__:
            members = ", ".join(repr(member.name.lower()) for member in cls)
            raise ConfigError(f"quantization mode: expected one of {members}, found {value!r}")
        return cls[name]  # rule: CUS-01


@dataclass(frozen=True, slots=True)
class StandaloneModuleConfigEntry:
    """How a standalone module is prepared and converted separately. (STD-01)

    Torch's objects and dict forms become refimpl's; anything else raises ConfigError or QConfigError. (CFG-14)
    """

    qconfig_mapping: QConfigMapping | None
    """The module's mapping; None: the QConfig that the parent's mapping has for it, for all of it."""
    example_inputs: tuple[Any, ...]
    """Positional inputs of the module; empty: not known."""
    prepare_custom_config: PrepareCustomConfig | None
    """The module's custom config, whose quantized indexes say what its boundary is; None: an empty one."""
    backend_config: BackendConfig | None
    """The module's config; None: the parent's."""

    def __post_init__(self) -> None:
        for name, kind, as_ours in (
            ("qconfig_mapping", QConfigMapping, as_qconfig_mapping),
            ("prepare_custom_config", PrepareCustomConfig, PrepareCustomConfig.of),
            ("backend_config", BackendConfig, as_backend_config),
        ):
            value: Any = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, kind.from_dict(value) if isinstance(value, Mapping) else as_ours(value))

    def to_tuple(self) -> tuple[Any, ...]:
        """Return the parts in the dict form; the backend config stays an object, as in torch's. (CUS-04)"""
        mapping, custom = self.qconfig_mapping, self.prepare_custom_config
        return mapping and mapping.to_dict(), self.example_inputs, custom and custom.to_dict(), self.backend_config


_PAIR = row_of(CLASS, CLASS)
_ENTRY = instance_of(StandaloneModuleConfigEntry, "a StandaloneModuleConfigEntry")
_ROWS = list_of("rows of 5 items", row_of(*[ANYTHING] * 5).take)
_BY_MODE = dict_of(Form("mode", QuantType.of), dict_of(CLASS, CLASS))

# Fields of the configs: their keys in the dict form (CUS-04), and their forms; a list or dict is copied. (CFG-14)
_FIELDS: Mapping[str, tuple[str, Form]] = {
    "standalone_module_names": ("standalone_module_name", dict_of(STRING, _ENTRY)),
    "standalone_module_classes": ("standalone_module_class", dict_of(CLASS, _ENTRY)),
    "float_to_observed_mapping": ("float_to_observed_custom_module_class", _BY_MODE),
    "observed_to_quantized_mapping": ("observed_to_quantized_custom_module_class", _BY_MODE),
    "non_traceable_module_names": ("non_traceable_module_name", list_of("strings", STRING.take)),
    "non_traceable_module_classes": ("non_traceable_module_class", list_of("classes", CLASS.take)),
    "input_quantized_indexes": ("input_quantized_idxs", list_of("integers", INTEGER.take)),
    "output_quantized_indexes": ("output_quantized_idxs", list_of("integers", INTEGER.take)),
    "preserved_attributes": ("preserved_attributes", list_of("strings", STRING.take)),
}


@dataclass
class _CustomConfig:
    """Base of the three configs: fields are lists, dicts of standalone modules, or classes by mode.

    A value of the wrong kind raises ConfigError. (CFG-14)
    """

    preserved_attributes: list[str] = field(default_factory=list)
    """Names of attributes of the model that every pass keeps although its forward does not read them. (CUS-03)"""

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, self._coerce(name, _FIELDS.get(name, ("", ANYTHING))[1], value))

    def _coerce(self, name: str, form: Form, value: object) -> Any:
        return coerce(ConfigError, f"{type(self).__name__}.{name}", form, value)

    def _set(self, name: str, value: object) -> Self:
        setattr(self, name, value)
        return self

    def set_preserved_attributes(self, attributes: list[str]) -> Self:
        """Set the names of attributes that are kept although forward does not read them; return the config. (CUS-03)

        Raises ConfigError for a string in the place of the list.
        """
        return self._set("preserved_attributes", attributes)  # rule: CUS-03

    @classmethod
    def from_dict(cls, custom_config_dict: Mapping[str, Any]) -> Self:
        """Build from torch's public dict form, all keys optional. (CUS-04, CFG-13)

        Raises ConfigError for an unknown key, or an entry that is not of its form.
        """
        names = {_FIELDS[part.name][0]: part.name for part in fields(cls)}
        reject_unknown_keys(f"{cls.__name__}.from_dict", custom_config_dict, names)
        config = cls()
        for key, value in custom_config_dict.items():  # rule: CUS-04
            if key.startswith("standalone"):
                for row in config._coerce(key, _ROWS, value):
                    getattr(config, f"set_{key}")(*row)
            else:
                config._set(names[key], value)
        return config

    def to_dict(self) -> dict[str, Any]:
        """Return torch's dict form, without empty fields; from_dict takes it back. (CUS-04)"""
        form: dict[str, Any] = {_FIELDS[name][0]: list(value) for name, value in vars(self).items() if value}
        for name, (key, _) in _FIELDS.items():
            if key in form and key.startswith("standalone"):
                form[key] = [(module, *entry.to_tuple()) for module, entry in getattr(self, name).items()]
            elif key in form and key.endswith("custom_module_class"):
                form[key] = {mode.name.lower(): dict(classes) for mode, classes in getattr(self, name).items()}
        return form

    @classmethod
    def of(cls, value: Any) -> Self:
        """Return refimpl's for None (empty), refimpl's, torch's, or the dict form with a FutureWarning. (CFG-14)

        Raises ConfigError for anything else.
        """
        if value is None or isinstance(value, cls):
            return cls() if value is None else value
        if isinstance(value, Mapping):
            warn_dict_form(cls.__name__)  # rule: CUS-04
            return cls.from_dict(value)
        if isinstance(value, _CustomConfig) or not all(hasattr(value, part.name) for part in fields(cls)):
            raise ConfigError(f"expected a {cls.__name__}, found {show(value)}")
        return cls.from_dict(value.to_dict())  # rule: CFG-14


@dataclass
class FuseCustomConfig(_CustomConfig):
    """Settings of ``fuse_fx`` for one model. (CUS-03)"""


@dataclass
class ConvertCustomConfig(_CustomConfig):
    """Settings of ``convert_fx`` and the reference forms for one model. (CUS-01, CUS-03)"""

    observed_to_quantized_mapping: ClassesByMode = field(default_factory=dict)
    """By mode and observed class, the class that convert puts in its place."""

    def set_observed_to_quantized_mapping(
        self, observed_class: type, quantized_class: type, quant_type: QuantType = QuantType.STATIC
    ) -> Self:
        """Set the class that ``quantized_class.from_observed`` makes of an observed custom module in convert. (CUS-01)

        A static one takes and returns quantized tensors. Returns the config.
        """
        pair = self._coerce("set_observed_to_quantized_mapping", _PAIR, (observed_class, quantized_class))
        self.observed_to_quantized_mapping.setdefault(QuantType.of(quant_type), {}).update([pair])
        return self


@dataclass
class PrepareCustomConfig(_CustomConfig):
    """Settings of ``prepare_fx`` and ``prepare_qat_fx`` for one model. (STD-01, CUS-01 to CUS-04)"""

    standalone_module_names: dict[str, StandaloneModuleConfigEntry] = field(default_factory=dict)
    """By full name, the modules that are prepared separately."""
    standalone_module_classes: dict[type, StandaloneModuleConfigEntry] = field(default_factory=dict)
    """By class, the modules that are prepared separately; a name has priority."""
    float_to_observed_mapping: ClassesByMode = field(default_factory=dict)
    """By mode and float class, the class that prepare puts in its place."""
    non_traceable_module_names: list[str] = field(default_factory=list)
    """Full names of modules that stay one call."""
    non_traceable_module_classes: list[type] = field(default_factory=list)
    """Classes of modules that stay one call."""
    input_quantized_indexes: list[int] = field(default_factory=list)
    """The graph inputs, counted from 0, that come as quantized tensors."""
    output_quantized_indexes: list[int] = field(default_factory=list)
    """The graph outputs, counted from 0, that stay quantized; none in the decomposed form."""

    def set_standalone_module_name(self, module_name: str, *parts: Any, **named: Any) -> Self:
        """Prepare the module of that full name separately; return the config. (STD-01)

        Further arguments, in order or by name: the four of a StandaloneModuleConfigEntry.
        """
        name = self._coerce("set_standalone_module_name", STRING, module_name)
        self.standalone_module_names[name] = StandaloneModuleConfigEntry(*parts, **named)
        return self

    def set_standalone_module_class(self, module_class: type, *parts: Any, **named: Any) -> Self:
        """Prepare the modules of that very class separately; return the config. Arguments as for a name. (STD-01)"""
        kind = self._coerce("set_standalone_module_class", CLASS, module_class)
        self.standalone_module_classes[kind] = StandaloneModuleConfigEntry(*parts, **named)
        return self

    def set_float_to_observed_mapping(
        self, float_class: type, observed_class: type, quant_type: QuantType = QuantType.STATIC
    ) -> Self:
        """Set the class that ``observed_class.from_float`` makes of a custom module; return the config. (CUS-01)

        The module gets one QConfig, as ``module.qconfig``, whose activation decides which mode is looked up.
        """
        pair = self._coerce("set_float_to_observed_mapping", _PAIR, (float_class, observed_class))
        self.float_to_observed_mapping.setdefault(QuantType.of(quant_type), {}).update([pair])
        return self

    def set_non_traceable_module_names(self, module_names: list[str]) -> Self:
        """Set the full names of modules that are not traced into; return the config. (CUS-02)"""
        return self._set("non_traceable_module_names", module_names)

    def set_non_traceable_module_classes(self, module_classes: list[type]) -> Self:
        """Set the classes whose modules are not traced into; return the config. (CUS-02)"""
        return self._set("non_traceable_module_classes", module_classes)

    def set_input_quantized_indexes(self, indexes: list[int]) -> Self:
        """Set the graph inputs, counted from 0, that come as quantized tensors; return the config. (OBS-11)"""
        return self._set("input_quantized_indexes", indexes)

    def set_output_quantized_indexes(self, indexes: list[int]) -> Self:
        """Set the graph outputs, counted from 0, that stay quantized; return the config. (OBS-11)"""
        return self._set("output_quantized_indexes", indexes)
