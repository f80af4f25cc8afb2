"""Readings as plain data: from the vendor's process, which has the Quantizer, to the judge, which trusts no pickle."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import torch
from torch import nn

from fx_quant_conformance.conformance.machine.frames import WireError
from fx_quant_conformance.conformance.pt2e.probe import BothPlaces, Probed
from fx_quant_conformance.conformance.pt2e.reading import Observed, PatternReading
from fx_quant_conformance.refimpl.prepare.dtype_choice import ObserverFacts

_TENSORS = ("inputs", "outputs")
_TEXTS = ("floats", "inside", "ops", "asking", "silent_takers", "silent_givers")
_ANSWERS = ("owns_output", "is_annotated")


def describe_places(found: Mapping[str, BothPlaces]) -> dict[str, Any]:
    """Return what came of probes as data that JSON holds."""
    return {
        name: [_describe_probed(places.alone), _describe_probed(places.between), places.has_neighbours]
        for name, places in found.items()
    }


def read_places(data: Any) -> dict[str, BothPlaces] | None:
    """Return what came of probes from data; None for None. Raises WireError for data that say nothing of them."""
    try:
        return None if data is None else {str(name): _read_places(*each) for name, each in data.items()}
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise WireError(f"no readings of annotations: {type(error).__name__}: {error}") from error


def _read_places(alone: Any, between: Any, has_neighbours: Any) -> BothPlaces:
    other = None if between is None else _read_probed(between)
    return BothPlaces(alone=_read_probed(alone), between=other, has_neighbours=bool(has_neighbours))


def _describe_probed(probed: Probed | None) -> Any:
    if probed is None:
        return None
    if probed.reading is None:
        return {"failure": probed.failure, "is_refused": probed.is_refused}
    reading = probed.reading
    return {
        **{name: list(map(_describe_observed, getattr(reading, name))) for name in _TENSORS},
        "parameters": {name: _describe_observed(each) for name, each in reading.parameters.items()},
        **{name: list(getattr(reading, name)) for name in _TEXTS},
        **{name: getattr(reading, name) for name in _ANSWERS},
    }


def _read_probed(data: Any) -> Probed:
    if "failure" in data:
        return Probed(failure=str(data["failure"]), is_refused=bool(data["is_refused"]))
    texts: dict[str, Any] = {name: tuple(map(str, data[name])) for name in _TEXTS}
    answers: dict[str, Any] = {name: bool(data[name]) for name in _ANSWERS}
    tensors: dict[str, Any] = {name: tuple(map(_read_observed, data[name])) for name in _TENSORS}
    named = {str(name): _read_observed(each) for name, each in data["parameters"].items()}
    parameters = {name: each for name, each in named.items() if each is not None}
    return Probed(reading=PatternReading(**tensors, **texts, **answers, parameters=parameters))


def _describe_observed(observed: Observed | None) -> Any:
    if observed is None:
        return None
    facts = {each.name: getattr(observed.facts, each.name) for each in fields(ObserverFacts)}
    del facts["observer_class"]  # the vendor's own
    return {
        **facts,
        "dtype": _name(observed.facts.dtype),
        "qscheme": _name(observed.qscheme),
        "axis": observed.axis,
        "is_fake": observed.is_fake,
        "group": observed.group,
        "sources": list(observed.sources),
    }


def _read_observed(data: Any) -> Observed | None:
    if data is None:
        return None
    fixed = data["fixed"]
    facts = ObserverFacts(
        observer_class=nn.Module,
        dtype=_look_up(data["dtype"], torch.dtype),
        quant_min=_integer(data["quant_min"]),
        quant_max=_integer(data["quant_max"]),
        eps=None if data["eps"] is None else float(data["eps"]),
        is_dynamic=bool(data["is_dynamic"]),
        fixed=None if fixed is None else (float(fixed[0]), int(fixed[1])),
        reuses_input=bool(data["reuses_input"]),
    )
    return Observed(
        facts=facts,
        qscheme=_look_up(data["qscheme"], torch.qscheme),
        axis=_integer(data["axis"]),
        is_fake=bool(data["is_fake"]),
        group=int(data["group"]),
        sources=tuple(map(int, data["sources"])),
    )


def _integer(value: Any) -> int | None:
    return None if value is None else int(value)


def _name(value: torch.dtype | torch.qscheme | None) -> str:
    return "" if value is None else str(value).removeprefix("torch.")


def _look_up(name: Any, kind: type) -> Any:
    value = getattr(torch, str(name)) if name else None
    if value is not None and not isinstance(value, kind):
        raise ValueError(f"torch.{name} is no {kind.__name__}")
    return value
