"""Choosing a dtype config for a QConfig, and saying why one does not fit (rules DTY-01 to DTY-09)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import nn

from fx_quant_conformance.refimpl.config.dtype_config import DTypeConfig, DTypeWithConstraints
from fx_quant_conformance.refimpl.config.qconfig import QConfig
from fx_quant_conformance.refimpl.errors import QConfigError, blame
from fx_quant_conformance.refimpl.legacy import is_dtype
from fx_quant_conformance.refimpl.observers.qparams import is_quantized_dtype

Violation: TypeAlias = tuple[str, str, object, object]  # rule, property, the value found, the bound
Misfit: TypeAlias = tuple[str, str, str, object, object]  # rule, role, where, the value found, the bound


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """Why one dtype config does not fit: the rule, where it was broken, the value found, and the bound. (DTY-09)"""

    # rule: DTY-09
    dtype_config: int
    rule: str
    role: str
    """That of the value: ``"input"``, ``"weight"``, ``"output"``, ``"bias"``, or ``"activation"`` for the QConfig's."""
    where: str
    found: str
    bound: str

    def __str__(self) -> str:
        return f"dtype config {self.dtype_config}: {self.rule}: {self.where} is {self.found}, must be {self.bound}"


def is_observed_dtype(dtype: torch.dtype | None) -> bool:
    """Tell whether a value of this dtype gets an observer: integers and float16 do, float32 does not."""
    return dtype == torch.float16 or is_quantized_dtype(dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class ObserverFacts:
    """The request of a QConfig for one role, read off an observer that its constructor made."""

    observer_class: type[nn.Module]
    dtype: torch.dtype | None
    quant_min: int | None
    quant_max: int | None
    eps: float | None
    is_dynamic: bool
    fixed: tuple[float, int] | None
    reuses_input: bool

    @classmethod
    def of(cls, observer: nn.Module) -> ObserverFacts:
        """Read an observer or fake quantize; a module that names no dtype asks for nothing (dtype None)."""
        inner: Any = getattr(observer, "activation_post_process", observer)
        dtype = getattr(observer, "dtype", None)
        eps, scale, zero_point = (getattr(inner, name, None) for name in ("eps", "scale", "zero_point"))
        has_fixed = scale is not None and zero_point is not None and not hasattr(inner, "min_val")
        return cls(
            observer_class=type(observer),
            dtype=dtype if is_dtype(dtype) else None,
            quant_min=getattr(observer, "quant_min", None),
            quant_max=getattr(observer, "quant_max", None),
            eps=None if eps is None else float(eps),
            is_dynamic=bool(getattr(observer, "is_dynamic", False)),
            fixed=(float(scale), int(zero_point)) if has_fixed else None,  # type: ignore[arg-type]
            reuses_input=type(inner).__name__ == "ReuseInputObserver",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class QConfigFacts:
    """The requests of a QConfig."""

    activation: ObserverFacts
    weight: ObserverFacts

    @property
    def bias_dtype(self) -> torch.dtype:
        """Float32, but float16 with static float16 activations and weights. (DTY-08)"""
        is_half = self.activation.dtype == self.weight.dtype == torch.float16 and not self.activation.is_dynamic
        return torch.float16 if is_half else torch.float32  # rule: DTY-08


class ObserverReader:
    """Reads what QConfigs ask for; each constructor is called once."""

    def __init__(self) -> None:
        self._facts: dict[Callable[..., nn.Module], ObserverFacts] = {}

    def read(self, make: Callable[..., nn.Module], source: str = "") -> ObserverFacts:
        """Read an observer that a constructor makes. Raises QConfigError with the mapping's key if it fails."""
        if make not in self._facts:
            with blame(QConfigError, f"QConfig ({source})", f"the observer constructor {make!r}"):
                observer = make()
                facts = ObserverFacts.of(observer)
            if not isinstance(observer, nn.Module):
                message = f"{make!r} made {observer!r}; expected an observer, an nn.Module"
                raise QConfigError(f"QConfig ({source}): {message}")
            self._facts[make] = facts
        return self._facts[make]

    def read_qconfig(self, qconfig: QConfig, source: str = "") -> QConfigFacts:
        """Read both observers of a QConfig. Raises QConfigError as for one."""
        return QConfigFacts(activation=self.read(qconfig.activation, source), weight=self.read(qconfig.weight, source))


def choose_dtype_config(
    facts: QConfigFacts, dtype_configs: list[DTypeConfig], *, has_weight: bool = True, is_module: bool = True
) -> tuple[DTypeConfig | None, tuple[Refusal, ...]]:
    """Return the first dtype config that fits, and the refusals of those before it. (DTY-02)

    None: none fits, and the pattern stays float. (DTY-06) Without `has_weight` the dtypes of weight and bias do not
    matter; a module's weight (`is_module`) stays as it is where a dtype config says float32.
    """
    refusals: list[Refusal] = []
    for index, dtype_config in enumerate(dtype_configs):
        misfit = next(_find_misfits(facts, dtype_config, has_weight, is_module), None)
        if misfit is None:
            return dtype_config, tuple(refusals)  # rule: DTY-02
        rule, role, where, found, bound = misfit
        refusals.append(
            Refusal(dtype_config=index, rule=rule, role=role, where=where, found=str(found), bound=str(bound))
        )
    return None, tuple(refusals)  # rule: DTY-06


def _find_misfits(facts: QConfigFacts, config: DTypeConfig, has_weight: bool, is_module: bool) -> Iterator[Misfit]:
    """Yield every way in which a QConfig breaks a dtype config."""
    is_dynamic = bool(config.is_dynamic)
    if facts.activation.is_dynamic != is_dynamic:  # rule: DTY-07
        yield "DTY-07", "activation", "activation.is_dynamic", facts.activation.is_dynamic, is_dynamic
    roles = [("input", facts.activation, config.input_dtype_with_constraints)]
    if has_weight and not (is_module and config.weight_dtype == torch.float32):  # rule: DTY-01
        roles.append(("weight", facts.weight, config.weight_dtype_with_constraints))
    if not is_dynamic:
        roles.append(("output", facts.activation, config.output_dtype_with_constraints))
    for role, facts_of_role, constraints in roles:
        for rule, field, value, bound in find_violations(facts_of_role, constraints):
            yield rule, role, f"{role} {field}", value, bound
    if has_weight and config.bias_dtype not in (None, facts.bias_dtype):  # rule: DTY-08
        yield "DTY-08", "bias", "bias dtype", facts.bias_dtype, config.bias_dtype


def find_violations(facts: ObserverFacts, constraints: DTypeWithConstraints) -> Iterator[Violation]:
    """Yield every constraint that is not kept."""
    if constraints.dtype is None:
        return  # rule: DTY-01
    if facts.dtype != constraints.dtype:
        yield "DTY-01", "dtype", facts.dtype, constraints.dtype
    low, high = constraints.quant_min_lower_bound, constraints.quant_max_upper_bound
    if low is not None and high is not None:  # rule: DTY-03
        if facts.quant_min is None or facts.quant_min < low:
            yield "DTY-03", "quant_min", facts.quant_min, f">= {low}"
        if facts.quant_max is None or facts.quant_max > high:
            yield "DTY-03", "quant_max", facts.quant_max, f"<= {high}"
    least = constraints.scale_min_lower_bound
    if least is not None and (facts.eps is None or facts.eps < least):  # rule: DTY-04
        yield "DTY-04", "eps (smallest scale)", facts.eps, f">= {least}"
    if constraints.scale_exact_match is not None and constraints.zero_point_exact_match is not None:  # rule: DTY-05
        exact = (round_to_float32(constraints.scale_exact_match), int(constraints.zero_point_exact_match))
        if facts.fixed is None or (round_to_float32(facts.fixed[0]), facts.fixed[1]) != exact:
            yield "DTY-05", "fixed (scale, zero point)", facts.fixed, exact


def round_to_float32(value: float) -> float:
    """Return the nearest float32 number, as which observers hold a scale."""
    return float(torch.tensor(value, dtype=torch.float32))
