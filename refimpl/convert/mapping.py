"""Convert's own QConfigMapping: which decisions of prepare it takes back (rule CVT-05)."""

from __future__ import annotations

from functools import partial
from typing import Any

from fx_quant_conformance.refimpl.config.qconfig import (
    QConfig,
    QConfigMapping,
    QConfigResolver,
    as_qconfig,
    as_qconfig_mapping,
)
from fx_quant_conformance.refimpl.errors import QConfigError
from fx_quant_conformance.refimpl.prepare.plan import Plan
from fx_quant_conformance.refimpl.prepare.prepare import name_types


def find_float_decisions(plan: Plan, prepared: QConfigMapping, value: object | None) -> frozenset[str]:
    """Return the last nodes of the matches that convert's mapping leaves in float. (CVT-05)

    `prepared`: prepare's mapping, `value`: convert's or None; in the first object types are readable names. Raises
    QConfigError for a key of prepare's that is missing, or whose value is neither the same nor None.
    """
    if value is None:
        return frozenset()
    mapping = name_types(as_qconfig_mapping(value))
    _check_keys(prepared, mapping)
    resolver = QConfigResolver(mapping)
    floating = set()
    for decision in (decision for decision in plan.decisions if decision.is_quantized):
        for place in decision.places:
            qconfig, source = resolver.resolve(place.object_types, place.name, place.order)
            if qconfig is None:
                floating.add(decision.node)  # rule: CVT-05
            elif place is decision.places[-1] and not _are_alike(qconfig, decision.qconfig):
                raise QConfigError(
                    f"convert: {decision.node} was prepared with {decision.qconfig}; convert's qconfig_mapping says "
                    f"{qconfig} ({source}), must be the same or None"
                )
    return frozenset(floating)


def _check_keys(prepared: QConfigMapping, mapping: QConfigMapping) -> None:
    """Raise QConfigError unless the mapping has at least prepare's keys, with the same values or None."""
    for kind, values in vars(prepared).items():
        before, after = (form if isinstance(form, dict) else {"": form} for form in (values, getattr(mapping, kind)))
        for key, qconfig in before.items():
            if key not in after:
                raise QConfigError(f"convert: qconfig_mapping lacks prepare's {kind} key {key!r}; set it, even to None")
            new = None if after[key] is qconfig else as_qconfig(after[key], f"convert's {kind} {key!r}")
            if new is not None and not _are_alike(new, as_qconfig(qconfig, f"prepare's {kind} {key!r}")):
                raise QConfigError(
                    f"convert: qconfig_mapping's {kind} {key!r} is {after[key]}, must be prepare's {qconfig}, or None"
                )


def _are_alike(qconfig: QConfig, expected: QConfig | None) -> bool:
    """Tell whether two QConfigs make equal observers: their constructors are made from the same parts."""
    if expected is None:
        return False
    found, wanted = ((_unwrap(each.activation), _unwrap(each.weight)) for each in (qconfig, expected))
    return found == wanted


def _unwrap(make: Any) -> Any:
    """Return the parts of a constructor that is a partial, which torch's wrappers hold as ``p``; else itself."""
    inner = getattr(make, "p", make)
    if isinstance(inner, partial):
        return _unwrap(inner.func), inner.args, {key: _unwrap(value) for key, value in inner.keywords.items()}
    return inner
