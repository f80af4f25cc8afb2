"""QConfigs at the edge of a claim: on its bounds, or breaking one by as little as possible. (DTY-01 to DTY-07)"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch

from fx_quant_conformance import refimpl
from fx_quant_conformance.conformance.claims.claim import NO_WEIGHT, Claim
from fx_quant_conformance.conformance.claims.kinds import fixed_qparams_of
from fx_quant_conformance.conformance.claims.qconfigs import make_min_max, observer_arguments_of, suite_qconfig_for
from fx_quant_conformance.refimpl.legacy import qint8, quint8
from fx_quant_conformance.refimpl.observers.observers import Constructor, dtype_range, is_quantized_dtype
from fx_quant_conformance.refimpl.prepare.dtype_choice import ObserverFacts

Side = Literal["activation", "weight"]
"""A side of a QConfig."""
SIDES: tuple[Side, ...] = ("activation", "weight")
Constraints = list[refimpl.DTypeWithConstraints]
"""The constraints on one side, of each end that they bound."""
Change = Callable[[Claim, Constraints, Constructor], tuple[Any, object] | None]
"""Returns a constructor that breaks a rule, and the value that breaks it; None: the claim has no such bound."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EdgeQConfig:
    """A QConfig at the edge of a claim."""

    name: str
    qconfig: refimpl.QConfig
    rule: str = ""
    """The rule that refuses it, or ""."""
    found: object = None
    """The value that the log must give as found."""
    is_weight: bool = False
    """Whether that value is the weight's."""


def edges_outside(claim: Claim) -> Iterator[EdgeQConfig]:
    """Yield QConfigs that break one rule each, by as little as possible."""
    base = suite_qconfig_for(claim)
    for name, rule, side, change in _OUTSIDE:
        constraints = _constraints_of(claim, side)
        changed = change(claim, constraints, getattr(base, side)) if constraints else None
        if changed is not None:
            make, value = changed
            qconfig = base._replace(**{side: make})
            yield EdgeQConfig(name=name, qconfig=qconfig, rule=rule, found=value, is_weight=side == "weight")


def edges_inside(claim: Claim) -> Iterator[EdgeQConfig]:
    """Yield the QConfig that keeps each of a claim's bounds exactly, where the claim's own does not ask the same."""
    base = suite_qconfig_for(claim)
    qconfig = base._replace(**{side: _bind_bounds(_constraints_of(claim, side), getattr(base, side)) for side in SIDES})
    if any(ObserverFacts.of(getattr(qconfig, side)()) != ObserverFacts.of(getattr(base, side)()) for side in SIDES):
        yield EdgeQConfig(name="exactly the bounds", qconfig=qconfig)


def _constraints_of(claim: Claim, side: Side) -> Constraints:
    """Return the constraints on a side of the QConfig (a static output has the input's); none for wildcards."""
    dtypes = claim.dtypes
    if side == "weight":
        weight = dtypes.weight_dtype_with_constraints
        return [] if claim.scheme == NO_WEIGHT or weight.dtype in (None, torch.float32) else [weight]
    ends = [dtypes.input_dtype_with_constraints]
    if not dtypes.is_dynamic:
        ends.append(dtypes.output_dtype_with_constraints)
    return [each for each in ends if each.dtype is not None]  # rule: DTY-01


def _bind(make: Constructor, **changes: Any) -> Constructor:
    """Bind other arguments; those of an observer that is bound itself, with its arguments, are bound there."""
    observer = make.keywords.get("observer")
    if isinstance(observer, Constructor):
        return make.with_args(observer=observer.with_args(**changes))
    return make.with_args(**changes)


def _change_dtype(_: Claim, ends: Constraints, make: Constructor) -> tuple[Any, object]:
    dtype = qint8 if ends[0].dtype is quint8 else quint8
    low, high = dtype_range(dtype)
    return _bind(make, dtype=dtype, quant_min=low, quant_max=high), dtype


def _change_mode(claim: Claim, ends: Constraints, _: Constructor) -> tuple[Any, object]:
    """Make a static observer dynamic, and the reverse."""
    is_dynamic = not claim.dtypes.is_dynamic
    return refimpl.PlaceholderObserver.with_args(dtype=ends[0].dtype, is_dynamic=is_dynamic), is_dynamic


def _widen(end: str, _: Claim, ends: Constraints, make: Constructor) -> tuple[Any, object] | None:
    """Make a range one wider than the bounds at an end, where they leave an integer of the dtype outside."""
    bounds = _bounded_range(ends)
    if bounds is None or ends[0].dtype is None:
        return None
    low, high = bounds
    widest_low, widest_high = dtype_range(ends[0].dtype)
    if end == "quant_min":
        return (_bind(make, quant_min=low - 1, quant_max=high), low - 1) if low > widest_low else None
    return (_bind(make, quant_min=low, quant_max=high + 1), high + 1) if high < widest_high else None


def _bounded_range(ends: Constraints) -> tuple[int, int] | None:
    """Return the widest range within the bounds of all ends that have both; None: no integers."""
    bounded = [end for end in ends if end.quant_min_lower_bound is not None and end.quant_max_upper_bound is not None]
    return _range_of(bounded)  # rule: DTY-03


def _range_of(ends: Constraints) -> tuple[int, int] | None:
    """Return the widest range that is within all bounds; None: no integers."""
    if not ends or not is_quantized_dtype(ends[0].dtype):
        return None
    arguments = observer_arguments_of(*ends)
    low, high = dtype_range(arguments["dtype"])
    return arguments.get("quant_min", low), arguments.get("quant_max", high)


def _smallest_scale_of(ends: Constraints) -> float | None:
    """Return the bound of the smallest scale, where a QConfig can keep it: fixed qparams are not measured."""
    largest = max((each.scale_min_lower_bound for each in ends if each.scale_min_lower_bound is not None), default=0.0)
    is_fixed = any(each.scale_exact_match is not None for each in ends)
    return largest if largest > 0 and not is_fixed else None


def _step_towards(value: float, end: float) -> float:
    """Return the next float32 number: observers hold scales in float32."""
    return float(torch.nextafter(torch.tensor(value), torch.tensor(end)))


def _lower_smallest_scale(_: Claim, ends: Constraints, make: Constructor) -> tuple[Any, object] | None:
    if (bound := _smallest_scale_of(ends)) is None:
        return None
    eps = _step_towards(bound, 0.0)
    return _bind(make, eps=eps), eps


def _bind_bounds(ends: Constraints, make: Constructor) -> Constructor:
    """Bind the range and the smallest scale that the bounds name."""
    eps, bounds = _smallest_scale_of(ends), _bounded_range(ends)
    if eps is not None:
        make = _bind(make, eps=eps)
    return make if bounds is None else _bind(make, quant_min=bounds[0], quant_max=bounds[1])


def _change_scale(claim: Claim, _: Constraints, make: Constructor) -> tuple[Any, object] | None:
    if (exact := fixed_qparams_of(claim.dtypes)) is None:
        return None
    scale = _step_towards(exact[0], float("inf"))
    return _bind(make, scale=scale), (scale, exact[1])


def _change_zero_point(claim: Claim, ends: Constraints, make: Constructor) -> tuple[Any, object] | None:
    exact, bounds = fixed_qparams_of(claim.dtypes), _range_of(ends)
    if exact is None or bounds is None:
        return None
    zero_point = exact[1] + (1 if exact[1] < bounds[1] else -1)
    return _bind(make, zero_point=zero_point), (exact[0], zero_point)


def _measure_qparams(claim: Claim, ends: Constraints, _: Constructor) -> tuple[Any, object] | None:
    """Measure qparams where fixed ones are prescribed."""
    if fixed_qparams_of(claim.dtypes) is None:
        return None
    return make_min_max(claim.flow == "qat", observer_arguments_of(*ends)), None


_OUTSIDE: tuple[tuple[str, str, Side, Change], ...] = (
    ("another activation dtype", "DTY-01", "activation", _change_dtype),
    ("another weight dtype", "DTY-01", "weight", _change_dtype),
    ("the activation's quant_min one lower", "DTY-03", "activation", partial(_widen, "quant_min")),
    ("the activation's quant_max one higher", "DTY-03", "activation", partial(_widen, "quant_max")),
    ("the weight's quant_min one lower", "DTY-03", "weight", partial(_widen, "quant_min")),
    ("the weight's quant_max one higher", "DTY-03", "weight", partial(_widen, "quant_max")),
    ("the activation's smallest scale just below", "DTY-04", "activation", _lower_smallest_scale),
    ("the weight's smallest scale just below", "DTY-04", "weight", _lower_smallest_scale),
    ("another fixed scale", "DTY-05", "activation", _change_scale),
    ("another fixed zero point", "DTY-05", "activation", _change_zero_point),
    ("measured qparams for fixed ones", "DTY-05", "activation", _measure_qparams),
    ("dynamic against static", "DTY-07", "activation", _change_mode),
)
