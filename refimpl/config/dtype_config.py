"""DTypeWithConstraints and DTypeConfig: which dtypes, with what bounds, a backend takes (rules CFG-02 to CFG-04)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch

from fx_quant_conformance.refimpl.config.forms import NUMBER, coerce, instance_of, optional
from fx_quant_conformance.refimpl.errors import ConfigError, reject_unknown_keys
from fx_quant_conformance.refimpl.legacy.dtypes import DTYPES, is_dtype

_DTYPE = optional(instance_of(DTYPES, "a torch.dtype"))


@dataclass(frozen=True, slots=True)
class DTypeWithConstraints:
    """A dtype and the bounds that a QConfig must keep for it. Every field may be None: no bound. (CFG-02)

    Compared by value. A QConfig that breaks a bound is no error: the pattern stays float. (DTY-06) Raises ConfigError
    for a `dtype` that is no dtype, or a bound that is no number.
    """

    # rule: CFG-02
    dtype: torch.dtype | None = None
    """The dtype, such as ``quint8``; None: any, and the bounds do not matter."""
    quant_min_lower_bound: int | float | None = None
    """The smallest ``quant_min`` of an observer; acts where both ends are given. (DTY-03)"""
    quant_max_upper_bound: int | float | None = None
    """The largest ``quant_max`` of an observer; acts where both ends are given. (DTY-03)"""
    scale_min_lower_bound: int | float | None = None
    """The smallest ``eps`` of an observer, which is its smallest scale, in real units per step. (DTY-04)"""
    scale_max_upper_bound: int | float | None = None
    """The largest scale; recorded, and not enforced. (DTY-04)"""
    scale_exact_match: float | None = None
    """The scale that fixed qparams must have; acts together with the zero point. (DTY-05)"""
    zero_point_exact_match: int | None = None
    """The zero point that fixed qparams must have; acts together with the scale. (DTY-05)"""

    def __post_init__(self) -> None:
        for name in self.__slots__:
            form = _DTYPE if name == "dtype" else optional(NUMBER)
            coerce(ConfigError, f"DTypeWithConstraints.{name}", form, getattr(self, name))

    @classmethod
    def of(cls, value: object, *, where: str = "dtype") -> DTypeWithConstraints:
        """Return refimpl's for a dtype, None, or any object with these fields. (CFG-03, CFG-14)

        Raises ConfigError, naming `where`, for anything else.
        """
        if isinstance(value, DTypeWithConstraints):
            return value
        if value is None or is_dtype(value):
            return cls(dtype=value)
        if hasattr(value, "quant_min_lower_bound") and hasattr(value, "dtype"):  # rule: CFG-14
            return cls(*(getattr(value, field.name, None) for field in fields(cls)))
        raise ConfigError(f"{where}: expected a torch.dtype or a DTypeWithConstraints, found {value!r}")


_FLAG = optional(instance_of(bool, "a bool"))
_KEYS = ("input_dtype", "output_dtype", "weight_dtype", "bias_dtype", "is_dynamic")


@dataclass(frozen=True, slots=True, init=False)
class DTypeConfig:
    """One combination of dtypes that a backend supports for a pattern. (CFG-03)

    Each of the first three is a dtype, one with constraints, or None: a wildcard (DTY-01). `bias_dtype`: float32, or
    float16 with static float16 (DTY-08); None: any. `is_dynamic`: qparams of the input are chosen while running, and
    the output is float (DTY-07); None counts as False. Raises ConfigError for anything else in the place of a dtype.

    ``input_dtype`` and the like are the bare dtype, ``input_dtype_with_constraints`` and the like the whole object.
    Compared by value.
    """

    # rule: CFG-03
    input_dtype_with_constraints: DTypeWithConstraints
    output_dtype_with_constraints: DTypeWithConstraints
    weight_dtype_with_constraints: DTypeWithConstraints
    bias_dtype: torch.dtype | None
    is_dynamic: bool | None

    def __init__(
        self,
        input_dtype: torch.dtype | DTypeWithConstraints | None = None,
        output_dtype: torch.dtype | DTypeWithConstraints | None = None,
        weight_dtype: torch.dtype | DTypeWithConstraints | None = None,
        bias_dtype: torch.dtype | None = None,
        is_dynamic: bool | None = None,
    ) -> None:
        for name, value in zip(_KEYS[:3], (input_dtype, output_dtype, weight_dtype), strict=True):
            object.__setattr__(self, f"{name}_with_constraints", DTypeWithConstraints.of(value, where=name))
        object.__setattr__(self, "bias_dtype", coerce(ConfigError, "bias_dtype", _DTYPE, bias_dtype))
        object.__setattr__(self, "is_dynamic", coerce(ConfigError, "is_dynamic", _FLAG, is_dynamic))

    @property
    def input_dtype(self) -> torch.dtype | None:
        """The activation's dtype at the pattern's input, without its bounds."""
        return self.input_dtype_with_constraints.dtype

    @property
    def output_dtype(self) -> torch.dtype | None:
        """The activation's dtype at the pattern's output, without its bounds."""
        return self.output_dtype_with_constraints.dtype

    @property
    def weight_dtype(self) -> torch.dtype | None:
        """The weight's dtype, without its bounds."""
        return self.weight_dtype_with_constraints.dtype

    @classmethod
    def of(cls, value: object) -> DTypeConfig:
        """Return refimpl's for itself, a dict form, or torch's attributes; else raise ConfigError. (CFG-08, CFG-14)"""
        if isinstance(value, DTypeConfig):
            return value
        if isinstance(value, Mapping):
            return cls.from_dict(value)
        if hasattr(value, "input_dtype_with_constraints"):  # rule: CFG-14
            return cls(*(getattr(value, part.name, None) for part in fields(cls)))
        raise ConfigError(f"expected a DTypeConfig, found {value!r}")

    @classmethod
    def from_dict(cls, dtype_config_dict: Mapping[str, Any]) -> DTypeConfig:
        """Build from the public dict form, all keys optional. (CFG-04)

        The keys are the constructor's arguments. Raises ConfigError for another key, or a value that is no dtype.
        """
        reject_unknown_keys("DTypeConfig.from_dict", dtype_config_dict, _KEYS)
        return cls(**dtype_config_dict)  # rule: CFG-04

    def to_dict(self) -> dict[str, Any]:
        """Return the dict form, without the entries that are None. (CFG-04)"""
        parts = zip(_KEYS, (getattr(self, part.name) for part in fields(self)), strict=True)
        return {name: value for name, value in parts if getattr(self, name) is not None}
