"""BackendConfig and its entries: what a backend claims to quantize (rules CFG-01, CFG-05 to CFG-14).

Names, defaults and dict forms are those of torch's public API, so that a vendor swaps one import. Objects of torch's
own classes are taken as they are: ``as_backend_config`` reads them by attribute.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from typing import Any

from torch import nn

from refimpl.dtype_config import DTypeConfig
from refimpl.errors import ConfigError, reject_unknown_keys
from refimpl.patterns import Pattern, complex_normal_form, normal_form, pattern_name


class ObservationType(Enum):
    """How a pattern's input and output are observed. (CFG-01)"""

    # rule: CFG-01
    OUTPUT_USE_DIFFERENT_OBSERVER_AS_INPUT = 0
    OUTPUT_SHARE_OBSERVER_WITH_INPUT = 1
    INPUT_OUTPUT_NOT_OBSERVED = 2

    @classmethod
    def of(cls, value: object) -> ObservationType:
        """Take ours, or torch's enum of the same values. (CFG-14)"""
        if isinstance(value, cls):
            return value
        try:
            return cls(getattr(value, "value", None))  # rule: CFG-14
        except ValueError:
            choices = ", ".join(member.name for member in cls)
            raise ConfigError(f"observation type: expected one of {choices}, found {value!r}") from None


# Attribute, dict key and default of every optional part of an entry besides the pattern. (CFG-05, CFG-06, CFG-08)
_PARTS: tuple[tuple[str, str], ...] = (
    ("root_module", "root_module"),
    ("qat_module", "qat_module"),
    ("reference_quantized_module", "reference_quantized_module_for_root"),
    ("fused_module", "fused_module"),
    ("fuser_method", "fuser_method"),
    ("_root_node_getter", "root_node_getter"),
    ("_extra_inputs_getter", "extra_inputs_getter"),
    ("_num_tensor_args_to_observation_type", "num_tensor_args_to_observation_type"),
    ("_input_type_to_index", "input_type_to_index"),
)
_ENTRY_KEYS = ("pattern", "pattern_complex_format", "observation_type", "dtype_configs", *(key for _, key in _PARTS))


class BackendPatternConfig:
    """One entry of a BackendConfig: a pattern and everything that is claimed for it. (CFG-05, CFG-06)

    The setters return ``self``. Those with a leading underscore are torch's advanced ones, under torch's names.
    """

    def __init__(self, pattern: Pattern | None = None) -> None:
        self.pattern: Pattern | None = pattern
        self.observation_type = ObservationType.OUTPUT_USE_DIFFERENT_OBSERVER_AS_INPUT
        self.dtype_configs: list[DTypeConfig] = []
        self.root_module: type[nn.Module] | None = None
        self.qat_module: type[nn.Module] | None = None
        self.reference_quantized_module: type[nn.Module] | None = None
        self.fused_module: type[nn.Module] | None = None
        self.fuser_method: Callable[..., nn.Module] | None = None
        self._root_node_getter: Callable[..., Any] | None = None
        self._extra_inputs_getter: Callable[..., Any] | None = None
        self._num_tensor_args_to_observation_type: dict[int, ObservationType] = {}
        self._input_type_to_index: dict[str, int] = {}
        self._pattern_complex_format: Pattern | None = None

    def __repr__(self) -> str:
        shown = {name: value for name, value in vars(self).items() if value not in (None, [], {})}
        return f"BackendPatternConfig({shown})"

    @property
    def normal_pattern(self) -> Pattern:
        """The pattern in normal form, whichever way it was given. (PAT-02)

        Raises ConfigError when the entry has no pattern, or one that is not well formed.
        """
        if self._pattern_complex_format is not None:
            return complex_normal_form(self._pattern_complex_format)
        if self.pattern is None:
            raise ConfigError("BackendPatternConfig without a pattern: call set_pattern")
        return normal_form(self.pattern)

    def set_pattern(self, pattern: Pattern) -> BackendPatternConfig:
        """Set the pattern in forward order. Raises ConfigError if the complex format is set already. (CFG-07)"""
        if self._pattern_complex_format is not None:  # rule: CFG-07
            raise ConfigError("Only one of 'pattern' or 'pattern_complex_format' can be set")
        self.pattern = pattern
        return self

    def set_observation_type(self, observation_type: ObservationType) -> BackendPatternConfig:
        """Set how the pattern's input and output are observed."""
        self.observation_type = observation_type
        return self

    def add_dtype_config(self, dtype_config: DTypeConfig) -> BackendPatternConfig:
        """Append a dtype config; the first one in the list that fits a QConfig is used. (DTY-02)"""
        self.dtype_configs.append(dtype_config)
        return self

    def set_dtype_configs(self, dtype_configs: list[DTypeConfig]) -> BackendPatternConfig:
        """Replace the list of dtype configs by a copy of the one given. (CFG-12)"""
        self.dtype_configs = list(dtype_configs)  # rule: CFG-12
        return self

    def set_root_module(self, root_module: type[nn.Module]) -> BackendPatternConfig:
        """Set the class that convert swaps; acts together with the reference module only. (CFG-11)"""
        self.root_module = root_module
        return self

    def set_qat_module(self, qat_module: type[nn.Module]) -> BackendPatternConfig:
        """Set the class that stands for the pattern in quantization-aware training."""
        self.qat_module = qat_module
        return self

    def set_reference_quantized_module(self, reference_quantized_module: type[nn.Module]) -> BackendPatternConfig:
        """Set the class that the root module becomes in the reference model. (CFG-11)"""
        self.reference_quantized_module = reference_quantized_module
        return self

    def set_fused_module(self, fused_module: type[nn.Module]) -> BackendPatternConfig:
        """Set the class that the fuser method returns."""
        self.fused_module = fused_module
        return self

    def set_fuser_method(self, fuser_method: Callable[..., nn.Module]) -> BackendPatternConfig:
        """Set ``fuser_method(is_qat, *modules in pattern order)``. (FUS-02)"""
        self.fuser_method = fuser_method
        return self

    def _set_root_node_getter(self, root_node_getter: Callable[..., Any]) -> BackendPatternConfig:
        self._root_node_getter = root_node_getter
        return self

    def _set_extra_inputs_getter(self, extra_inputs_getter: Callable[..., Any]) -> BackendPatternConfig:
        self._extra_inputs_getter = extra_inputs_getter
        return self

    def _set_num_tensor_args_to_observation_type(
        self, num_tensor_args_to_observation_type: dict[int, ObservationType]
    ) -> BackendPatternConfig:
        self._num_tensor_args_to_observation_type = dict(num_tensor_args_to_observation_type)
        return self

    def _set_input_type_to_index(self, input_type_to_index: dict[str, int]) -> BackendPatternConfig:
        self._input_type_to_index = dict(input_type_to_index)
        return self

    def _set_pattern_complex_format(self, pattern: Pattern) -> BackendPatternConfig:
        if self.pattern is not None:  # rule: CFG-07
            raise ConfigError("Only one of 'pattern' or 'pattern_complex_format' can be set")
        self._pattern_complex_format = pattern
        return self

    @classmethod
    def from_dict(cls, backend_pattern_config_dict: Mapping[str, Any]) -> BackendPatternConfig:
        """Build from the public dict form. Raises ConfigError for an unknown key or a bad entry. (CFG-08)"""
        given = backend_pattern_config_dict
        reject_unknown_keys("BackendPatternConfig.from_dict", given, _ENTRY_KEYS)
        entry = cls(given.get("pattern"))
        if given.get("pattern_complex_format") is not None:
            entry._set_pattern_complex_format(given["pattern_complex_format"])
        if "observation_type" in given:
            entry.set_observation_type(ObservationType.of(given["observation_type"]))
        for dtype_config in given.get("dtype_configs", []):
            entry.add_dtype_config(_dtype_config_of(dtype_config))
        for attribute, key in _PARTS:  # rule: CFG-08
            if given.get(key) is not None:
                setattr(entry, attribute, given[key])
        return entry

    def to_dict(self) -> dict[str, Any]:
        """Return the dict form, without the parts that are unset. (CFG-08)"""
        found: dict[str, Any] = {
            "observation_type": self.observation_type,
            "dtype_configs": [dtype_config.to_dict() for dtype_config in self.dtype_configs],
        }
        if self.pattern is not None:
            found["pattern"] = self.pattern
        if self._pattern_complex_format is not None:
            found["pattern_complex_format"] = self._pattern_complex_format
        found.update({key: getattr(self, attribute) for attribute, key in _PARTS if getattr(self, attribute)})
        return found


def _dtype_config_of(value: object) -> DTypeConfig:
    """Take a DTypeConfig or its dict form; anything else is an error. (CFG-08)"""
    return DTypeConfig.from_dict(value) if isinstance(value, Mapping) else DTypeConfig.of(value)


class BackendConfig:
    """All the patterns that a backend can quantize, each with its claims. (CFG-09)"""

    def __init__(self, name: str = "") -> None:
        self.name = name
        self._entries: dict[Pattern, BackendPatternConfig] = {}

    def __repr__(self) -> str:
        return f"BackendConfig(name={self.name!r}, patterns={[pattern_name(p) for p in self._entries]})"

    def set_name(self, name: str) -> BackendConfig:
        """Set the name of the backend."""
        self.name = name
        return self

    def set_backend_pattern_config(self, config: BackendPatternConfig) -> BackendConfig:
        """Add an entry; a later one for the same normal pattern replaces the earlier whole, in its place. (CFG-09)"""
        entry = as_backend_pattern_config(config)
        self._entries[entry.normal_pattern] = entry  # rule: CFG-09
        return self

    def set_backend_pattern_configs(self, configs: Iterable[BackendPatternConfig]) -> BackendConfig:
        """Add several entries in order."""
        for config in configs:
            self.set_backend_pattern_config(config)
        return self

    @property
    def configs(self) -> list[BackendPatternConfig]:
        """A copy of the list of entries, in the order in which their patterns were first set. (CFG-09)"""
        return list(self._entries.values())

    @classmethod
    def from_dict(cls, backend_config_dict: Mapping[str, Any]) -> BackendConfig:
        """Build from ``{"name": …, "configs": [entry or its dict form, …]}``. (CFG-10)

        Raises ConfigError for an unknown key, or for an entry that is neither.
        """
        reject_unknown_keys("BackendConfig.from_dict", backend_config_dict, ("name", "configs"))
        config = cls(backend_config_dict.get("name", ""))
        for entry in backend_config_dict.get("configs", []):
            if isinstance(entry, Mapping):
                entry = BackendPatternConfig.from_dict(entry)
            config.set_backend_pattern_config(entry)  # rule: CFG-10
        return config

    def to_dict(self) -> dict[str, Any]:
        """Return the dict form; the round trip is the identity. (CFG-10)"""
        return {"name": self.name, "configs": [entry.to_dict() for entry in self.configs]}


def as_backend_pattern_config(value: object) -> BackendPatternConfig:
    """Take our entry as it is, or read torch's by attribute. Raises ConfigError for anything else. (CFG-14)"""
    if isinstance(value, BackendPatternConfig):
        return value
    if not (hasattr(value, "dtype_configs") and hasattr(value, "observation_type")):
        raise ConfigError(f"expected a BackendPatternConfig, found {value!r}")
    entry = BackendPatternConfig()  # rule: CFG-14
    entry.pattern = getattr(value, "pattern", None)
    entry._pattern_complex_format = getattr(value, "_pattern_complex_format", None)
    entry.observation_type = ObservationType.of(value.observation_type)
    entry.dtype_configs = [DTypeConfig.of(dtype_config) for dtype_config in value.dtype_configs]
    for attribute, _ in _PARTS:
        found = getattr(value, attribute, None)
        if found is not None:
            setattr(entry, attribute, found)
    by_count = entry._num_tensor_args_to_observation_type
    entry._num_tensor_args_to_observation_type = {n: ObservationType.of(kind) for n, kind in by_count.items()}
    return entry


def as_backend_config(value: object) -> BackendConfig:
    """Take our BackendConfig as it is, its dict form, or torch's by attribute; else raise ConfigError. (CFG-14)"""
    if isinstance(value, BackendConfig):
        return value
    if isinstance(value, Mapping):
        return BackendConfig.from_dict(value)
    if not (hasattr(value, "configs") and hasattr(value, "name")):
        raise ConfigError(f"expected a BackendConfig, found {value!r}")
    config = BackendConfig(value.name)  # rule: CFG-14
    return config.set_backend_pattern_configs(value.configs)
