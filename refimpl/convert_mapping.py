"""Convert's own QConfigMapping: which decisions of prepare it takes back (rule CVT-05)."""

from __future__ import annotations

from functools import partial
from typing import Any

from refimpl.errors import QConfigError
from refimpl.plan import Plan
from refimpl.prepare import named_types
from refimpl.qconfig import QConfigMapping, QConfigResolver, as_qconfig, as_qconfig_mapping


def float_decisions(plan: Plan, prepared: QConfigMapping, value: object | None) -> frozenset[str]:
    """Return the last nodes of the matches that convert's mapping leaves in float. (CVT-05)

    `prepared`: prepare's mapping, `value`: convert's or None; in the first object types are readable names. Raises
    QConfigError for a key of prepare's that is missing, or whose value is neither the same nor None.
    """
    if value is None:
        return frozenset()
    mapping = named_types(as_qconfig_mapping(value))
    _check_keys(prepared, mapping)
    resolver = QConfigResolver(mapping)
    found = set()
    for decision in plan.decisions:
        if not decision.is_quantized:
            continue
        for place in decision.places:
            qconfig, source = resolver.resolve(place.object_types, place.name, place.order)
            if qconfig is None:
                found.add(decision.node)  # rule: CVT-05
            elif place is decision.places[-1] and not same_constructors(qconfig, decision.qconfig):
                raise QConfigError(
                    f"convert: {decision.node} was prepared with {decision.qconfig}; convert's qconfig_mapping says "
                    f"{qconfig} ({source}), must be the same or None"
                )
    return frozenset(found)


def _check_keys(prepared: QConfigMapping, mapping: QConfigMapping) -> None:
    """Raise QConfigError unless the mapping has at least prepare's keys, with the same values or None."""
    for kind, values in vars(prepared).items():
        before, after = (form if isinstance(form, dict) else {"": form} for form in (values, getattr(mapping, kind)))
        for key, qconfig in before.items():
            if key not in after:
                raise QConfigError(f"convert: qconfig_mapping lacks prepare's {kind} key {key!r}; set it, even to None")
            asked = None if after[key] is qconfig else as_qconfig(after[key], f"convert's {kind} {key!r}")
            if asked is not None and not same_constructors(asked, as_qconfig(qconfig, f"prepare's {kind} {key!r}")):
                raise QConfigError(
                    f"convert: qconfig_mapping's {kind} {key!r} is {after[key]}, must be prepare's {qconfig}, or None"
                )


def same_constructors(one: Any, other: Any) -> bool:
    """Tell whether two QConfigs make equal observers: constructors are compared by what they were made from."""
    if one is None or other is None:
        return one is other
    return all(_facts(getattr(one, part)) == _facts(getattr(other, part)) for part in ("activation", "weight"))


def _facts(make: Any) -> Any:
    """What a constructor is made from: a partial, which torch's wrappers hold as ``p``."""
    inner = getattr(make, "p", make)
    if isinstance(inner, partial):
        return _facts(inner.func), inner.args, {key: _facts(value) for key, value in inner.keywords.items()}
    return inner
