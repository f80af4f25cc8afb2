"""Choosing a dtype config for a QConfig, and saying why one does not fit (rules DTY-01 to DTY-09)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import nn

from refimpl.dtype_config import DTypeConfig, DTypeWithConstraints
from refimpl.observers import is_quantized_dtype

Misfit: TypeAlias = tuple[str, str, object, object]  # rule, where, the value found, the bound


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


def is_observed_dtype(dtype: torch.dtype | None) -> bool:
    """Tell whether a value of this dtype gets an observer: integers and float16 do, float32 is what there is."""
    return dtype == torch.float16 or is_quantized_dtype(dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class ObserverFacts:
    """What a QConfig asks for one role, read off an observer that its constructor made."""

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
            dtype=dtype if isinstance(dtype, torch.dtype) else None,
            quant_min=getattr(observer, "quant_min", None),
            quant_max=getattr(observer, "quant_max", None),
            eps=None if eps is None else float(eps),
            is_dynamic=bool(getattr(observer, "is_dynamic", False)),
            fixed=(float(scale), int(zero_point)) if has_fixed else None,  # type: ignore[arg-type]
            reuses_input=type(inner).__name__ == "ReuseInputObserver",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class QConfigFacts:
    """What a QConfig asks for, once its constructors have been called."""

    activation: ObserverFacts
    weight: ObserverFacts

    @property
    def bias_dtype(self) -> torch.dtype:
        """Float, but float16 beside static float16 activations and weights. (DTY-08)"""
        is_half = self.activation.dtype == self.weight.dtype == torch.float16 and not self.activation.is_dynamic
        return torch.float16 if is_half else torch.float32  # rule: DTY-08


def choose_dtype_config(
    facts: QConfigFacts, dtype_configs: list[DTypeConfig], *, has_weight: bool = True, is_module: bool = True
) -> tuple[DTypeConfig | None, tuple[Refusal, ...]]:
    """Return the first dtype config that fits, and the refusals of those before it. (DTY-02)

    None: no one fits, and the pattern stays float. (DTY-06) Without `has_weight` what is said about weights and biases
    does not matter; a module's weight (`is_module`) stays as it is where a dtype config says float32.
    """
    refusals: list[Refusal] = []
    for index, dtype_config in enumerate(dtype_configs):
        misfit = next(_misfits(facts, dtype_config, has_weight, is_module), None)
        if misfit is None:
            return dtype_config, tuple(refusals)  # rule: DTY-02
        rule, where, found, bound = misfit
        refusals.append(Refusal(dtype_config=index, rule=rule, where=where, found=str(found), bound=str(bound)))
    return None, tuple(refusals)  # rule: DTY-06


def _misfits(facts: QConfigFacts, dtype_config: DTypeConfig, has_weight: bool, is_module: bool) -> Iterator[Misfit]:
    """Yield every way in which a QConfig breaks a dtype config."""
    is_dynamic = bool(dtype_config.is_dynamic)
    if facts.activation.is_dynamic != is_dynamic:  # rule: DTY-07
        yield "DTY-07", "activation.is_dynamic", facts.activation.is_dynamic, is_dynamic
    roles = [("input", facts.activation, dtype_config.input_dtype_with_constraints)]
    if has_weight and not (is_module and dtype_config.weight_dtype == torch.float32):  # rule: DTY-01
        roles.append(("weight", facts.weight, dtype_config.weight_dtype_with_constraints))
    if not is_dynamic:
        roles.append(("output", facts.activation, dtype_config.output_dtype_with_constraints))
    for role, found, constraints in roles:
        for rule, what, value, bound in _violations(found, constraints):
            yield rule, f"{role} {what}", value, bound
    if has_weight and dtype_config.bias_dtype not in (None, facts.bias_dtype):  # rule: DTY-08
        yield "DTY-08", "bias dtype", facts.bias_dtype, dtype_config.bias_dtype


def _violations(found: ObserverFacts, wanted: DTypeWithConstraints) -> Iterator[Misfit]:
    """Yield every constraint that is not kept."""
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
        exact = (_single(wanted.scale_exact_match), int(wanted.zero_point_exact_match))
        if found.fixed is None or (_single(found.fixed[0]), found.fixed[1]) != exact:
            yield "DTY-05", "fixed (scale, zero point)", found.fixed, exact


def _single(value: float) -> float:
    """Round to float32, as observers hold their scales."""
    return float(torch.tensor(value, dtype=torch.float32))
