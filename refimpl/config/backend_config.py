"""BackendConfig and its entries: what a backend claims to quantize (rules CFG-01, CFG-05 to CFG-14).

Names, defaults and dict forms are those of torch's public API, so that a vendor swaps one import. Objects of torch's
own classes are taken too: ``as_backend_config`` reads them by attribute.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import Enum
from typing import TYPE_CHECKING, Any

from torch import nn

from fx_quant_conformance.refimpl.config.dtype_config import DTypeConfig
from fx_quant_conformance.refimpl.config.forms import (
    CALLABLE,
    CLASS,
    INTEGER,
    STRING,
    Form,
    coerce,
    dict_of,
    list_of,
    optional,
)
from fx_quant_conformance.refimpl.config.patterns import (
    Pattern,
    complex_normal_form,
    leaf_name,
    leaves,
    normal_form,
    pattern_name,
)
from fx_quant_conformance.refimpl.errors import ConfigError, reject_unknown_keys, warn_dict_form

if TYPE_CHECKING:
    from typing import Self  # Python 3.11


class ObservationType(Enum):
    """How a pattern's input and output are observed: where observers go when it is quantized statically. (CFG-01)"""

    # rule: CFG-01
    OUTPUT_USE_DIFFERENT_OBSERVER_AS_INPUT = 0
    """One observer for each input tensor of the root, another for the output of the last node. (OBS-01)"""
    OUTPUT_SHARE_OBSERVER_WITH_INPUT = 1
    """One observer at all inputs and the output: for ops that move values and compute none. (OBS-02)"""
    INPUT_OUTPUT_NOT_OBSERVED = 2
    """No observer: for ops whose result is no tensor, such as a size. (OBS-03)"""

    @classmethod
    def of(cls, value: object) -> ObservationType:
        """Return refimpl's member for refimpl's or torch's; ConfigError for anything else. (CFG-14)"""
        if isinstance(value, cls):
            return value
        try:
            return cls(getattr(value, "value", None))  # rule: CFG-14
        except ValueError:
            choices = ", ".join(member.name for member in cls)
            raise ConfigError(f"observation type: expected one of {choices}, found {value!r}") from None


DIFFERENT = ObservationType.OUTPUT_USE_DIFFERENT_OBSERVER_AS_INPUT
SHARE = ObservationType.OUTPUT_SHARE_OBSERVER_WITH_INPUT
NOT_OBSERVED = ObservationType.INPUT_OUTPUT_NOT_OBSERVED


class BackendPatternConfig:
    """One entry of a BackendConfig: a pattern and everything that is claimed for it. (CFG-05, CFG-06)

    `pattern`: a module class, a function, the name of a method, or a tuple of two or three of these in forward order
    (PAT-01); it may be set later. Every setter sets the attribute of its name without ``set_`` and returns the entry.
    Until then the attribute is None, empty or OUTPUT_USE_DIFFERENT_OBSERVER_AS_INPUT. Setters with a leading underscore
    are torch's advanced ones, under torch's names. A value of the wrong kind raises ConfigError.
    """

    pattern: Pattern | None
    observation_type: ObservationType
    dtype_configs: list[DTypeConfig]
    root_module: type[nn.Module] | None
    qat_module: type[nn.Module] | None
    reference_quantized_module: type[nn.Module] | None
    fused_module: type[nn.Module] | None
    fuser_method: Callable[..., nn.Module] | None
    _root_node_getter: Callable[..., Any] | None
    _extra_inputs_getter: Callable[..., Any] | None
    _num_tensor_args_to_observation_type: dict[int, ObservationType]
    _input_type_to_index: dict[str, int]
    _pattern_complex_format: Pattern | None

    def __init__(self, pattern: Pattern | None = None) -> None:
        values = vars(self)  # defaults need no check
        values.update(dict.fromkeys(self.__annotations__), pattern=pattern, dtype_configs=[])
        values["observation_type"] = ObservationType.OUTPUT_USE_DIFFERENT_OBSERVER_AS_INPUT
        values |= {"_num_tensor_args_to_observation_type": {}, "_input_type_to_index": {}}

    def __setattr__(self, name: str, value: Any) -> None:
        form = _FORMS.get(name)
        vars(self)[name] = value if form is None else coerce(ConfigError, f"BackendPatternConfig.{name}", form, value)

    def __repr__(self) -> str:
        is_set = {name: value for name, value in vars(self).items() if value is not None}
        return f"BackendPatternConfig({ {name: value for name, value in is_set.items() if value not in ([], {})} })"

    @property
    def normal_pattern(self) -> Pattern:
        """The pattern in normal form, reversed and nested. (PAT-02)

        Raises ConfigError when the entry has no pattern, or one that is not well formed.
        """
        if self._pattern_complex_format is not None:
            return complex_normal_form(self._pattern_complex_format)
        if self.pattern is None:
            raise ConfigError("BackendPatternConfig without a pattern: call set_pattern")
        return normal_form(self.pattern)

    def _set(self, **parts: Any) -> Self:
        pattern, complex_format = parts.get("pattern", self.pattern), self._pattern_complex_format
        if pattern is not None and parts.get("_pattern_complex_format", complex_format) is not None:  # rule: CFG-07
            raise ConfigError("Only one of 'pattern' or 'pattern_complex_format' can be set")
        for name, value in parts.items():
            setattr(self, name, value)
        return self  # rule: CFG-05

    def set_pattern(self, pattern: Pattern) -> Self:
        """Set the pattern in forward order, such as ``(nn.Conv2d, nn.ReLU)``. (PAT-01)

        Raises ConfigError if the complex format is set already. (CFG-07)
        """
        return self._set(pattern=pattern)

    def set_observation_type(self, observation_type: ObservationType) -> Self:
        """Set how input and output are observed; refimpl's or torch's. Raises ConfigError for anything else."""
        return self._set(observation_type=observation_type)

    def add_dtype_config(self, dtype_config: DTypeConfig) -> Self:
        """Append a dtype config; the first one in the list that fits a QConfig is used. (DTY-02)

        It is refimpl's, torch's, or a dict form; ConfigError for anything else. (CFG-08, CFG-14)
        """
        self.dtype_configs.append(DTypeConfig.of(dtype_config))
        return self

    def set_dtype_configs(self, dtype_configs: list[DTypeConfig]) -> Self:
        """Replace the list of dtype configs by a copy of the one given. (CFG-12) Raises ConfigError as for one."""
        return self._set(dtype_configs=dtype_configs)

    def set_root_module(self, root_module: type[nn.Module]) -> Self:
        """Set the class of the root, the module with the weight; it acts only with the reference module. (CFG-11)"""
        return self._set(root_module=root_module)

    def set_qat_module(self, qat_module: type[nn.Module]) -> Self:
        """Set the class that takes the place of the pattern's module in quantization-aware training. (QAT-01)

        It has ``from_float(module)``, ``to_float()`` and ``weight_fake_quant``, and acts if the pattern is one class.
        """
        return self._set(qat_module=qat_module)

    def set_reference_quantized_module(self, reference_quantized_module: type[nn.Module]) -> Self:
        """Set the class that the root module becomes in the reference model. (CFG-11, CVT-02)

        It has ``from_float(module, qparams)``, and acts only together with the root module.
        """
        return self._set(reference_quantized_module=reference_quantized_module)

    def set_fused_module(self, fused_module: type[nn.Module]) -> Self:
        """Set the class that the fuser method returns. (FUS-02)

        Fusing raises ConfigError for a module of another class; in eval mode the class of the parts without the batch
        norm is right as well.
        """
        return self._set(fused_module=fused_module)

    def set_fuser_method(self, fuser_method: Callable[..., nn.Module]) -> Self:
        """Set what fuses a match: ``fuser_method(is_qat, *parts)`` returns the fused module. (FUS-02)

        The parts are the pattern's modules in forward order, or nested as a complex pattern is.
        """
        return self._set(fuser_method=fuser_method)

    def _set_root_node_getter(self, root_node_getter: Callable[..., Any]) -> Self:
        """Set what picks the root of a match: ``getter(nested)`` returns its node. (CFG-06, FUS-03)

        `nested` has the shape of the normal form, with a node for each leaf, wildcards included. Without a getter the
        root is the first node in forward order.
        """
        return self._set(_root_node_getter=root_node_getter)  # rule: CFG-06

    def _set_extra_inputs_getter(self, extra_inputs_getter: Callable[..., Any]) -> Self:
        """Set what a fused module takes after the root's arguments: ``getter(nested)`` lists nodes. (CFG-06, FUS-04)

        `nested` is what the root's getter is given.
        """
        return self._set(_extra_inputs_getter=extra_inputs_getter)

    def _set_num_tensor_args_to_observation_type(
        self, num_tensor_args_to_observation_type: dict[int, ObservationType]
    ) -> Self:
        """Set the observation type by the root's number of float tensors; else the entry's holds. (CFG-06, OBS-07)"""
        return self._set(_num_tensor_args_to_observation_type=num_tensor_args_to_observation_type)

    def _set_input_type_to_index(self, input_type_to_index: dict[str, int]) -> Self:
        """Set where a function takes its parameters: ``{"weight": 1, "bias": 2}``, positions from 0. (CFG-06, OBS-06)

        An argument there is observed as a weight, or not at all.
        """
        return self._set(_input_type_to_index=input_type_to_index)

    def _set_pattern_complex_format(self, pattern: Pattern) -> Self:
        """Set the pattern in normal form, such as ``(nn.ReLU, (torch.add, MatchAllNode, nn.Conv2d))``. (CFG-06, PAT-02)

        Raises ConfigError if a pattern is set already. (CFG-07)
        """
        return self._set(_pattern_complex_format=pattern)

    @classmethod
    def from_dict(cls, backend_pattern_config_dict: Mapping[str, Any]) -> Self:
        """Build from the public dict form, all keys optional. (CFG-08)

        Raises ConfigError for an unknown key, or for what is no dtype config or observation type.
        """
        form = backend_pattern_config_dict
        reject_unknown_keys("BackendPatternConfig.from_dict", form, _KEYS.values())
        parts = {name: form[key] for name, key in _KEYS.items() if form.get(key) is not None}
        if "observation_type" in form:
            parts["observation_type"] = ObservationType.of(form["observation_type"])
        return cls()._read(parts, {})  # rule: CFG-08

    def _read(self, parts: Mapping[str, Any], known: dict[int, DTypeConfig]) -> Self:
        """Set attributes to refimpl's or torch's objects, or their dict forms; `known`: dtype configs by ``id``."""
        dtype_configs = coerce(ConfigError, "dtype_configs", list_of("DTypeConfigs"), parts.get("dtype_configs", ()))
        for dtype_config in dtype_configs:
            if id(dtype_config) not in known:
                known[id(dtype_config)] = DTypeConfig.of(dtype_config)
        return self._set(**{**parts, "dtype_configs": [known[id(dtype_config)] for dtype_config in dtype_configs]})

    def to_dict(self) -> dict[str, Any]:
        """Return the dict form, without the parts that are unset; ``from_dict`` takes it back. (CFG-08)"""
        parts = {key: getattr(self, name) for name, key in _KEYS.items()}
        parts["dtype_configs"] = [dtype_config.to_dict() for dtype_config in self.dtype_configs]
        parts |= {key: dict(value) for key, value in parts.items() if isinstance(value, dict)}
        return {key: value for key, value in parts.items() if value is not None and value != {}}


# Forms of an entry's attributes: refimpl's, torch's or a dict form; lists and dicts are copied. (CFG-12, CFG-14)
_FORMS: dict[str, Form] = {
    "observation_type": Form("an ObservationType", ObservationType.of),
    "dtype_configs": list_of("DTypeConfigs", DTypeConfig.of),
    "_num_tensor_args_to_observation_type": dict_of(INTEGER, Form("ObservationType", ObservationType.of)),
    "_input_type_to_index": dict_of(STRING, INTEGER),
    **dict.fromkeys(("root_module", "qat_module", "reference_quantized_module", "fused_module"), optional(CLASS)),
    **dict.fromkeys(("fuser_method", "_root_node_getter", "_extra_inputs_getter"), optional(CALLABLE)),
}  # rule: CFG-12

# Attributes of an entry, and their keys in the dict form. (CFG-05, CFG-06, CFG-08)
_KEYS = {name: name.removeprefix("_") for name in vars(BackendPatternConfig())}
_KEYS["reference_quantized_module"] = "reference_quantized_module_for_root"


class BackendConfig:
    """All the patterns that a backend can quantize, each with its claims. (CFG-09)

    `name` is for reports. Fuse, prepare and convert take it as ``backend_config=``, and torch's own class or the dict
    form (with a FutureWarning) as well. (CFG-14)
    """

    def __init__(self, name: str = "") -> None:
        self.name = name
        self._entries: dict[Pattern, BackendPatternConfig] = {}

    def __repr__(self) -> str:
        return f"BackendConfig(name={self.name!r}, patterns={[pattern_name(p) for p in self._entries]})"

    def set_name(self, name: str) -> BackendConfig:
        """Set the name of the backend; return the config."""
        self.name = name
        return self

    def set_backend_pattern_config(self, config: BackendPatternConfig) -> BackendConfig:
        """Add an entry, refimpl's or torch's; return the config. (CFG-09)

        It replaces an earlier one for the same normal pattern, in its place. Raises ConfigError for anything else, or
        an entry without a well-formed pattern.
        """
        entry = as_backend_pattern_config(config)
        self._entries[entry.normal_pattern] = entry  # rule: CFG-09
        return self

    def set_backend_pattern_configs(self, configs: Iterable[BackendPatternConfig]) -> BackendConfig:
        """Add several entries in order; return the config. Raises ConfigError as for one."""
        for config in coerce(ConfigError, "configs", list_of("entries"), configs):
            self.set_backend_pattern_config(config)
        return self

    @property
    def configs(self) -> list[BackendPatternConfig]:
        """A copy of the list of entries, in the order in which their patterns were first set. (CFG-09)"""
        return list(self._entries.values())

    @property
    def _pattern_complex_format_to_config(self) -> dict[Pattern, BackendPatternConfig]:
        """The entries by normal pattern, under torch's name: torch's tools and vendors' read it. (CFG-14)"""
        return self._entries  # rule: CFG-14

    @classmethod
    def from_dict(cls, backend_config_dict: Mapping[str, Any]) -> BackendConfig:
        """Build from ``{"name": …, "configs": [entry or its dict form, …]}``. (CFG-10)

        Raises ConfigError for an unknown key, or for an entry that is neither.
        """
        reject_unknown_keys("BackendConfig.from_dict", backend_config_dict, ("name", "configs"))
        config = cls(backend_config_dict.get("name", ""))
        for entry in coerce(ConfigError, "configs", list_of("entries"), backend_config_dict.get("configs", [])):
            pattern_config = BackendPatternConfig.from_dict(entry) if isinstance(entry, Mapping) else entry
            config.set_backend_pattern_config(pattern_config)  # rule: CFG-10
        return config

    def to_dict(self) -> dict[str, Any]:
        """Return the dict form; the round trip is the identity. (CFG-10)"""
        return {"name": self.name, "configs": [entry.to_dict() for entry in self.configs]}


def as_backend_pattern_config(value: object, known: dict[int, DTypeConfig] | None = None) -> BackendPatternConfig:
    """Return refimpl's entry as it is, or read torch's by attribute. Raises ConfigError for anything else. (CFG-14)

    `known`: dtype configs read before, by ``id``: torch's entries share them, and reading one costs most.
    """
    if isinstance(value, BackendPatternConfig):
        return value
    if not (hasattr(value, "dtype_configs") and hasattr(value, "observation_type")):
        raise ConfigError(f"expected a BackendPatternConfig, found {value!r}")
    parts = {name: part for name in _KEYS if (part := getattr(value, name, None)) is not None}
    return BackendPatternConfig()._read(parts, {} if known is None else known)  # rule: CFG-14


def as_backend_config(value: object) -> BackendConfig:
    """Return refimpl's BackendConfig as it is; read torch's by attribute, the dict form with a FutureWarning. (CFG-14)

    Raises ConfigError for anything else.
    """
    if isinstance(value, BackendConfig):
        return value
    if isinstance(value, Mapping):
        warn_dict_form("BackendConfig")
        return BackendConfig.from_dict(value)
    if not (hasattr(value, "configs") and hasattr(value, "name")):
        raise ConfigError(f"expected a BackendConfig, found {value!r}")
    known: dict[int, DTypeConfig] = {}
    entries = coerce(ConfigError, "configs", list_of("entries"), value.configs)
    return BackendConfig(value.name).set_backend_pattern_configs(  # rule: CFG-14
        as_backend_pattern_config(entry, known) for entry in entries
    )


def lint_config(config: object) -> tuple[str, ...]:
    """Return a line per fault of a config that can be seen without a model; () if it has none."""
    faults = (fault for entry in as_backend_config(config).configs for fault in lint_entry(entry))
    return tuple(f"{rule}: {message}" for rule, message in faults)


def lint_entry(entry: BackendPatternConfig) -> Iterator[tuple[str, str]]:
    """Yield (rule, message) for every fault of an entry that can be seen without a model.

    A fuser method without a fused module is right with a root_module: the fused module is then of the root's class.
    """
    name, first = pattern_name(entry.normal_pattern), next(leaves(entry.normal_pattern))
    fused, fuser, root = entry.fused_module, entry.fuser_method, entry.root_module
    if fused and not fuser:  # rule: FUS-08
        yield "FUS-08", f"{name} has fused_module {fused.__name__}, but no fuser_method: never fused"
    if fuser and not fused and not root:
        yield "FUS-08", f"{name} has a fuser_method, but neither fused_module nor root_module says what it makes"
    if fuser and not entry._root_node_getter and not isinstance(first, type):
        yield "FUS-03", f"{name} has a fuser_method, but its root {leaf_name(first)} is no module to be replaced"
    if entry.reference_quantized_module and not root:  # rule: CFG-11
        yield "CFG-11", f"{name} has a reference_quantized_module, but no root_module that it stands for"
