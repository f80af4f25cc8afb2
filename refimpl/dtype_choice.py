"""Choosing a dtype config for a QConfig, and saying why one does not fit (rules DTY-01 to DTY-07, DTY-09)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from refimpl.dtype_config import DTypeConfig, DTypeWithConstraints
from refimpl.errors import QConfigError
from refimpl.qconfig import QConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """Why one dtype config does not fit: the rule, where it was broken, the value found, and the bound. (DTY-09)"""

    # rule: DTY-09
    dtype_config: int
    rule: str
    where: str
    found: str
    bound: str

    def __str__(self) -> str:
        return f"dtype config {self.dtype_config}: {self.rule}: {self.where} is {self.found}, must be {self.bound}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ObserverFacts:
    """What a QConfig asks for one role, read off an observer that its constructor made."""

    dtype: torch.dtype
    quant_min: int | None
    quant_max: int | None
    eps: float | None
    is_dynamic: bool
    fixed: tuple[float, int] | None

    @classmethod
    def of(cls, observer: nn.Module) -> ObserverFacts:
        """Read an observer or fake quantize. Raises QConfigError if it names no dtype."""
        inner: Any = getattr(observer, "activation_post_process", observer)
        dtype = getattr(observer, "dtype", None)
        if not isinstance(dtype, torch.dtype):
            raise QConfigError(f"{type(observer).__name__} names no dtype: found {dtype!r}")
        eps, scale, zero_point = (getattr(inner, name, None) for name in ("eps", "scale", "zero_point"))
        has_fixed = scale is not None and zero_point is not None and not hasattr(inner, "min_val")
        return cls(
            dtype=dtype,
            quant_min=getattr(observer, "quant_min", None),
            quant_max=getattr(observer, "quant_max", None),
            eps=None if eps is None else float(eps),
            is_dynamic=bool(getattr(observer, "is_dynamic", False)),
            fixed=(float(scale), int(zero_point)) if has_fixed else None,  # type: ignore[arg-type]
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class QConfigFacts:
    """What a QConfig asks for, once its constructors have been called."""

    activation: ObserverFacts
    weight: ObserverFacts

    @classmethod
    def of(cls, qconfig: QConfig) -> QConfigFacts:
        """Call both constructors once and read the observers that they make."""
        return cls(activation=ObserverFacts.of(qconfig.activation()), weight=ObserverFacts.of(qconfig.weight()))


def choose_dtype_config(
    facts: QConfigFacts, dtype_configs: list[DTypeConfig]
) -> tuple[DTypeConfig | None, tuple[Refusal, ...]]:
    """Return the first dtype config that fits, and the refusals of those before it. (DTY-02)

    None: no one fits, and the pattern stays float. Nothing is raised for a misfit. (DTY-06)
    """
    refusals: list[Refusal] = []
    for index, dtype_config in enumerate(dtype_configs):
        refusal = next(_refusals(index, facts, dtype_config), None)
        if refusal is None:
            return dtype_config, tuple(refusals)  # rule: DTY-02
        refusals.append(refusal)
    return None, tuple(refusals)  # rule: DTY-06


def _refusals(index: int, facts: QConfigFacts, dtype_config: DTypeConfig) -> Iterator[Refusal]:
    """Yield every way in which a QConfig breaks a dtype config."""
    is_dynamic = bool(dtype_config.is_dynamic)
    if facts.activation.is_dynamic != is_dynamic:  # rule: DTY-07
        yield Refusal(
            dtype_config=index, rule="DTY-07", where="activation.is_dynamic",
            found=str(facts.activation.is_dynamic), bound=str(is_dynamic),
        )  # fmt: skip
    roles = [
        ("input", facts.activation, dtype_config.input_dtype_with_constraints),
        ("weight", facts.weight, dtype_config.weight_dtype_with_constraints),
    ]
    if not is_dynamic:
        roles.append(("output", facts.activation, dtype_config.output_dtype_with_constraints))
    for role, found, constraints in roles:
        for rule, what, value, bound in _violations(found, constraints):
            yield Refusal(dtype_config=index, rule=rule, where=f"{role} {what}", found=str(value), bound=str(bound))


def _violations(found: ObserverFacts, wanted: DTypeWithConstraints) -> Iterator[tuple[str, str, object, object]]:
    """Yield (rule, what, value found, bound) for every constraint that is not kept."""
    if wanted.dtype is None:
        return  # rule: DTY-01
    if found.dtype != wanted.dtype:
        yield "DTY-01", "dtype", found.dtype, wanted.dtype
    low, high = wanted.quant_min_lower_bound, wanted.quant_max_upper_bound
    if low is not None and high is not None:  # rule: DTY-03
        if found.quant_min is None or found.quant_min < low:
            yield "DTY-03", "quant_min", found.quant_min, f">= {low}"
        if found.quant_max is None or found.quant_max > high:
            yield "DTY-03", "quant_max", found.quant_max, f"<= {high}"
    least = wanted.scale_min_lower_bound
    if least is not None and (found.eps is None or found.eps < least):  # rule: DTY-04
        yield "DTY-04", "eps (smallest scale)", found.eps, f">= {least}"
    if wanted.scale_exact_match is not None and wanted.zero_point_exact_match is not None:  # rule: DTY-05
        exact = (float(wanted.scale_exact_match), int(wanted.zero_point_exact_match))
        if found.fixed != exact:
            yield "DTY-05", "fixed (scale, zero point)", found.fixed, exact
