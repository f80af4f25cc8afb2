"""What a backend says of itself, as data: the judge knows no more of it, and imports nothing of the vendor's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from fx_quant_conformance.backends.base import (
    REMOVED_CAPABILITIES,
    Backend,
    Capabilities,
    Representation,
    Requantize,
    RoundingMode,
    Taken,
    Tolerance,
)
from fx_quant_conformance.backends.names import format_error
from fx_quant_conformance.conformance.claims.claim import Claim, enumerate_claims
from fx_quant_conformance.conformance.claims.limits import LimitsError, check_globs, check_limits
from fx_quant_conformance.conformance.claims.preparation import OWN_OF_THE_SUITE, Preparation
from fx_quant_conformance.conformance.claims.registry import describe_registered, registered_for
from fx_quant_conformance.conformance.ops.table import RECORDS
from fx_quant_conformance.conformance.remote.config_data import (
    ConfigDataError,
    config_from_data,
    config_to_data,
    has_own_code,
)
from fx_quant_conformance.refimpl import BackendConfig
from fx_quant_conformance.refimpl.config.backend_config import as_backend_config
from fx_quant_conformance.refimpl.config.patterns import leaf_name, leaves

_FAULTS = (Exception, SystemExit)


class DescriptionError(Exception):
    """The backend cannot be had, or what it says of itself is not what it should be; one line."""


class Limit(tuple[Any, ...]):
    """The values of an argument that a backend takes, of those that the suite tries."""

    text: str
    """How the backend says so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    """A backend as the judge knows it."""

    name: str
    representation: Representation
    engine: str = ""
    waivers: Path | None = None
    unavailable: str | None = None
    """Why it cannot run here; the rest is then empty."""
    versions: Mapping[str, str]
    capabilities: Capabilities
    config: BackendConfig
    vendor_claims: frozenset[str] = frozenset()
    """The IDs of claims that need the vendor's own classes or functions: of the pattern, of its fusion or root; all
    claims if the vendor ``prepares`` models its own way."""
    prepares: bool = False
    """Whether the vendor prepares models its own way."""
    has_quantizer: bool = False
    """Whether it gives a torchao Quantizer."""
    sources: tuple[str, ...] | None = None
    """The files and folders that its code comes from; None: they cannot be told."""
    registrations: Mapping[str, str] = field(default_factory=dict)
    """What its code registers, in words, by the pattern's name."""
    preparation: Preparation = OWN_OF_THE_SUITE
    """It is known where the backend's code is imported."""


def describe(backend: Backend) -> dict[str, Any]:
    """Ask a backend what it is; return that as data that JSON holds. Raises DescriptionError.

    This runs the vendor's code, in the backend's process.
    """
    reason = _ask(backend, "unavailable_reason")
    data: dict[str, Any] = {
        "name": backend.name,
        "representation": backend.representation.name,
        "engine": str(backend.engine),
        "waivers": None if backend.waivers is None else str(Path(backend.waivers).absolute()),
        "unavailable": None if reason is None else str(reason),
    }
    if reason is not None:
        return data
    raw, capabilities = _ask(backend, "backend_config"), _ask(backend, "capabilities")
    if not isinstance(capabilities, Capabilities):
        raise DescriptionError(f"capabilities() returned {capabilities!r}; return Capabilities")
    try:
        check_limits(capabilities.limits)
    except LimitsError as error:
        raise DescriptionError(str(error)) from error
    try:
        config = as_backend_config(raw)
        claims = enumerate_claims(config, capabilities)
        check_globs(capabilities, config)
    except LimitsError as error:
        raise DescriptionError(str(error)) from error
    except Exception as error:
        raise DescriptionError(f"what backend_config() returned cannot be read: {format_error(error)}") from error
    try:
        given = Preparation.of(backend)
    except _FAULTS as error:
        raise DescriptionError(f"qconfigs() or a custom config: {format_error(error)}") from error
    versions = _ask(backend, "versions")
    try:
        data["versions"] = {str(key): str(value) for key, value in dict(versions).items()}
    except (TypeError, ValueError) as error:
        raise DescriptionError(f"versions() returned {versions!r}; return a dict of strings") from error
    data["capabilities"] = _describe_capabilities(capabilities)
    data["config"] = config_to_data(config)
    data["has_quantizer"] = type(backend).quantizer is not Backend.quantizer
    data["prepares"] = given != OWN_OF_THE_SUITE
    data["registered"] = [claim.id for claim in claims if registered_for(claim.entry.normal_pattern) is not None]
    data["registrations"] = describe_registered()
    return data


def _ask(backend: Backend, method: str) -> Any:
    try:
        return getattr(backend, method)()
    except _FAULTS as error:
        raise DescriptionError(f"{method}() raised {format_error(error)}{_find_remedy(error)}") from error


def _find_remedy(error: BaseException) -> str:
    """Say what to do about a field of Capabilities that was removed; "" for any other error."""
    for name, remedy in REMOVED_CAPABILITIES.items():
        if isinstance(error, TypeError) and f"unexpected keyword argument '{name}'" in str(error):
            return f"; Capabilities has no {name} any more: {remedy}"
    return ""


# -- capabilities -----------------------------------------------------------------------------------------------------


def _describe_capabilities(capabilities: Capabilities) -> dict[str, Any]:
    plain = {each.name: getattr(capabilities, each.name) for each in fields(capabilities)}
    limits = {
        str(op): {str(name): _describe_limit(str(op), str(name), taken) for name, taken in arguments.items()}
        for op, arguments in capabilities.limits.items()
    }
    requantize = _describe_requantize(capabilities.requantize)
    of = [[glob, _describe_requantize(each)] for glob, each in capabilities.requantize_of.items()]
    tolerance = [[glob, each.lsb] for glob, each in capabilities.tolerance.items()]
    tuples = {name: list(getattr(capabilities, name)) for name in ("weight_schemes", "flows")}
    spelled = {"limits": limits, "requantize": requantize, "requantize_of": of, "tolerance": tolerance}
    return {**plain, **tuples, **spelled}


def _describe_requantize(requantize: Requantize) -> dict[str, Any]:
    return asdict(requantize) | {"rounding": requantize.rounding.value}


def _read_requantize(data: Mapping[str, Any]) -> Requantize:
    return Requantize(**{**data, "rounding": RoundingMode(data["rounding"])})


def _describe_limit(op: str, argument: str, taken: Taken) -> dict[str, Any]:
    """Say which of the values that the suite tries are taken, and how the backend describes them."""
    tried = list(_values_of(op, argument))
    try:
        places = [number for number, value in enumerate(tried) if (taken(value) if callable(taken) else value in taken)]
    except Exception as error:
        raise DescriptionError(f"capabilities().limits[{op!r}][{argument!r}] raised {format_error(error)}") from error
    text = str(taken.__doc__ or getattr(taken, "__name__", "")) if callable(taken) else ", ".join(map(str, taken))
    return {"taken": places, "text": text.strip().partition("\n")[0].rstrip(".")}


def _values_of(op: str, argument: str) -> Iterator[Any]:
    """Yield the values that the suite tries for an argument of an op, each once, always in the same order."""
    seen: list[Any] = []
    for root, samples in RECORDS.items():
        if leaf_name(root) != op:
            continue
        for _, arguments in samples.variants(whole=True, known=True):
            value = samples.resolve(arguments).get(argument, seen)
            if value is not seen and not any(type(value) is type(other) and value == other for other in seen):
                seen.append(value)
    yield from seen


def _read_limit(op: str, argument: str, data: Mapping[str, Any]) -> Limit:
    tried = list(_values_of(op, argument))
    limit = Limit(tried[int(number)] for number in data["taken"])
    limit.text = str(data["text"])
    return limit


# -- the judge's side -------------------------------------------------------------------------------------------------


def read_description(data: Mapping[str, Any]) -> Description:
    """Return the description that data spell. Raises DescriptionError for data that spell none."""
    try:
        return _read_description(data)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, ConfigDataError) as error:
        raise DescriptionError(f"what the backend says of itself cannot be read: {format_error(error)}") from error


def _read_description(data: Mapping[str, Any]) -> Description:
    waivers = data["waivers"]
    known = Description(
        name=str(data["name"]),
        representation=Representation[data["representation"]],
        engine=str(data["engine"]),
        waivers=None if waivers is None else Path(waivers),
        unavailable=data["unavailable"],
        versions={},
        capabilities=Capabilities(),
        config=BackendConfig(str(data["name"])),
    )
    if known.unavailable is not None:
        return known
    spelled = dict(data["capabilities"])
    limits = {
        str(op): {str(name): _read_limit(str(op), str(name), taken) for name, taken in arguments.items()}
        for op, arguments in spelled.pop("limits").items()
    }
    requantize = _read_requantize(spelled["requantize"])
    of = {str(glob): _read_requantize(each) for glob, each in spelled["requantize_of"]}
    tolerance = {str(glob): Tolerance(lsb=lsb) for glob, lsb in spelled["tolerance"]}
    tuples = {name: tuple(spelled[name]) for name in ("weight_schemes", "flows")}
    changed = {**tuples, "limits": limits, "requantize": requantize, "requantize_of": of, "tolerance": tolerance}
    capabilities = Capabilities(**{**spelled, **changed})
    config = config_from_data(data["config"])
    registered = frozenset(map(str, data["registered"]))
    prepares = bool(data["prepares"])
    own = {
        claim.id
        for claim in enumerate_claims(config, capabilities)
        if prepares or claim.id in registered or needs_own_code(claim)
    }
    versions = {str(key): str(value) for key, value in data["versions"].items()}
    sources = data.get("sources")
    return replace(
        known,
        versions=versions,
        capabilities=capabilities,
        config=config,
        vendor_claims=frozenset(own),
        prepares=prepares,
        has_quantizer=bool(data.get("has_quantizer")),
        sources=None if sources is None else tuple(map(str, sources)),
        registrations={str(pattern): str(text) for pattern, text in data.get("registrations", {}).items()},
    )


def needs_own_code(claim: Claim) -> bool:
    """Tell whether a claim is about the vendor's own classes or functions: in its pattern, its fusion or its root."""
    entry = claim.entry
    named = (entry.root_module, entry.qat_module, entry.reference_quantized_module, entry.fused_module)
    called = (entry.fuser_method, entry._root_node_getter, entry._extra_inputs_getter)
    return has_own_code((*leaves(entry.normal_pattern), *named, *called))
