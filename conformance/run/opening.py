"""A run as a judge opens it: the backend, its claims and jobs, and what its own process needs to know of them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields, replace
from datetime import date, datetime, timezone
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from fx_quant_conformance.backends.base import Backend, Capabilities, Representation, Taken
from fx_quant_conformance.backends.names import format_error
from fx_quant_conformance.conformance.claims.claim import Claim, config_digest, enumerate_claims
from fx_quant_conformance.conformance.claims.limits import LimitsError, check_limits
from fx_quant_conformance.conformance.claims.preparation import Preparation
from fx_quant_conformance.conformance.facts.fingerprint import jobs as fingerprint
from fx_quant_conformance.conformance.fuzz import search as fuzz
from fx_quant_conformance.conformance.machine import isa
from fx_quant_conformance.conformance.machine.child import StartError
from fx_quant_conformance.conformance.machine.environment import describe_environment, read_detection_power
from fx_quant_conformance.conformance.machine.release import ROOT
from fx_quant_conformance.conformance.own_models import jobs as own_models
from fx_quant_conformance.conformance.own_models.given import ModelSpecError, check_spec
from fx_quant_conformance.conformance.own_models.sets import ModelSetError, expand
from fx_quant_conformance.conformance.pipeline.job import Job
from fx_quant_conformance.conformance.remote.client import RemoteBackend
from fx_quant_conformance.conformance.remote.description import DescriptionError, Limit, read_description
from fx_quant_conformance.conformance.remote.executor import executor_of
from fx_quant_conformance.conformance.remote.worker import describe_backend
from fx_quant_conformance.conformance.rooms import find_rooms
from fx_quant_conformance.conformance.run.device import ElsewhereError
from fx_quant_conformance.conformance.run.elsewhere import open_command, open_vectors
from fx_quant_conformance.conformance.run.findings import read_findings
from fx_quant_conformance.conformance.run.options import Options, raise_usage_error_for, select_ids
from fx_quant_conformance.conformance.run.outline import Outline, Place, Unit
from fx_quant_conformance.conformance.run.waivers import WaiverError, Waivers, parse_waivers, read_waivers
from fx_quant_conformance.conformance.stages.bench import Bench
from fx_quant_conformance.conformance.stages.config import plan_claim
from fx_quant_conformance.conformance.stages.state import stages_of
from fx_quant_conformance.conformance.whole_models import jobs as whole_models
from fx_quant_conformance.refimpl import BackendConfig
from fx_quant_conformance.refimpl.config.backend_config import as_backend_config
from fx_quant_conformance.refimpl.releases import list_left_out
from fx_quant_conformance.reports.handed_in import COMMAND, VECTORS
from fx_quant_conformance.reports.results import digest_ids
from fx_quant_conformance.reports.schema import SCHEMA, Header

JOB_SOURCES = (fuzz.jobs, whole_models.jobs, fingerprint.jobs)
"""Functions that list the jobs of a profile, those with the longest jobs first."""
_FAULTS = (Exception, SystemExit)
_FORMS: dict[Representation, Literal["QUANTIZED", "DECOMPOSED", "EXPORTED"]] = {
    Representation.QUANTIZED: "QUANTIZED",
    Representation.DECOMPOSED: "DECOMPOSED",
    Representation.EXPORTED: "EXPORTED",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """What is certified, and how."""

    options: Options
    backend: Backend
    config_name: str
    claims: tuple[Claim, ...]
    """Those of the whole config."""
    jobs: tuple[Job, ...]
    """Those of the profile."""
    selected: Collection[str]
    """The IDs to run."""
    known: Collection[str]
    """All IDs that the backend has in any profile."""
    waivers: Waivers
    waiver_file: Path | None
    waiver_bytes: bytes = b""
    """The bytes of the file of waivers, which is read once."""
    findings: Mapping[str, str] = field(default_factory=dict)
    """The texts of what the waivers name."""

    @property
    def units(self) -> dict[str, Claim | Job]:
        """The selected claims and jobs, by ID: jobs first, because the longest are among them."""
        units: tuple[Claim | Job, ...] = (*self.jobs, *self.claims)
        return {unit.id: unit for unit in units if unit.id in self.selected}

    def needs_own_code(self, unit: Claim | Job) -> bool:
        """Tell whether a unit cannot be judged without the vendor's code: a job may meet any entry of the config."""
        own = executor_of(self.backend).vendor_claims
        return unit.id in own if isinstance(unit, Claim) else bool(own)

    @property
    def vendor_places(self) -> tuple[str, ...]:
        """The files and folders that the backend's code comes from, as far as its process can tell."""
        return executor_of(self.backend).sources or ()

    @property
    def outlined(self) -> tuple[Unit, ...]:
        """The selected claims and jobs, as the run's own process knows them."""
        return tuple(map(self._outline, self.units.values()))

    def make_outline(self, *, counts_cases: bool = False) -> Outline:
        """Return what the run's own process needs of it."""
        units = self.outlined
        if counts_cases:
            bench = self.make_bench()
            units = tuple(replace(unit, cases=_count_cases(bench, self.units[unit.id])) for unit in units)
        return Outline(
            header=self.make_header(),
            units=units,
            known=tuple(self.known),
            claims=tuple(claim.id for claim in self.claims),
            stages=stages_of(self.backend),
            sources=executor_of(self.backend).sources,
            left_out=tuple(list_left_out()),
            waiver_file=None if self.waiver_file is None else str(self.waiver_file),
            waivers=self.waiver_bytes.decode(),
        )

    def _outline(self, unit: Claim | Job) -> Unit:
        place: Place = "beside" if self.needs_own_code(unit) else "plain"
        if isinstance(unit, Job) and unit.is_users:
            place = "model beside" if place == "beside" else "model"
        if isinstance(unit, Job):
            kind: Literal["model", "measurement"] = "model" if unit.is_model else "measurement"
            return Unit(
                id=unit.id, kind=kind, place=place, is_adaptive=unit.is_adaptive, topic=unit.topic, subject=unit.subject
            )
        return Unit(
            id=unit.id,
            kind="claim",
            place=place,
            pattern=unit.pattern,
            dtype_config=unit.dtype_config,
            dtypes=unit.plain_dtypes,
            flow=unit.flow,
            scheme=unit.scheme,
        )

    def make_bench(self) -> Bench:
        """Return a bench for the backend."""
        options = self.options
        covered = self.waivers.find_covered(claim.id for claim in self.claims).values()
        return Bench(
            self.backend,
            seed=options.seed,
            profile=options.profile,
            max_examples=options.max_examples,
            spec=options.backend,
            repro=options.repro,
            waived=[name for names in covered for name in names],
        )

    def make_header(self) -> Header:
        """Return the results file's first row, as far as it is known here."""
        options, backend = self.options, self.backend
        return Header(
            schema=SCHEMA,
            **describe_environment(ROOT),
            backend=backend.name,
            versions={str(key): str(value) for key, value in dict(_call(backend, "versions")).items()},
            engine=str(backend.engine),
            representation=_FORMS[backend.representation],
            seed=options.seed,
            profile=options.profile,
            options={
                "backend": options.backend,
                "claim": list(options.claims),
                "model": list(options.models),
                "claim_timeout": options.claim_timeout,
                "max_examples": options.max_examples,
                "without_execution_evidence": options.without_execution_evidence,
                "isa": options.isa,
                "outputs": None if options.outputs is None else str(options.outputs),
            },
            config_name=self.config_name,
            config_sha256=config_digest(self.claims),
            claims=sum(isinstance(unit, Claim) for unit in self.units.values()),
            claims_in_config=len(self.claims),
            pairs=len({(claim.pattern, claim.dtype_config) for claim in self.claims}),
            started=datetime.now(timezone.utc).isoformat(timespec="seconds"),
            isa=_find_level(backend),
            waivers=_digest(self.waiver_file, self.waiver_bytes),
            findings=dict(self.findings),
            limits=describe_limits(backend.capabilities()),
            capabilities=_describe_capabilities(backend.capabilities()),
            registered=dict(executor_of(backend).registrations),
            claims_sha256=digest_ids(claim.id for claim in self.claims),
            shard=options.shard,
            detection=read_detection_power(),
        )


def describe_limits(capabilities: Capabilities) -> dict[str, dict[str, str]]:
    """Return limits and conditions as text: the values that are taken, or the first line of a callable's docstring."""

    def text(taken: Taken) -> str:
        if isinstance(taken, Limit):
            return taken.text
        limit = (taken.__doc__ or taken.__name__).strip() if callable(taken) else ", ".join(map(str, taken))
        return limit.partition("\n")[0].rstrip(".")

    limits = capabilities.limits.items()
    described = {op: {name.lstrip("_"): text(taken) for name, taken in each.items()} for op, each in limits}
    for glob, condition in capabilities.where.items():
        described.setdefault(glob, {})["where"] = condition
    return described


def _describe_capabilities(capabilities: Capabilities) -> dict[str, str]:
    """Return what is declared, apart from the limits, as text; defaults are left out."""
    pairs = {
        item.name: getattr(capabilities, item.name)
        for item in fields(capabilities)
        if item.name not in ("limits", "where")
    }
    default = Capabilities()
    return {name: _show_declared(value) for name, value in pairs.items() if value != getattr(default, name)}


def _show_declared(value: object) -> str:
    return "; ".join(f"{glob}: {each}" for glob, each in value.items()) if isinstance(value, dict) else str(value)


def find_described(options: Options, text: str | None = None, *, needs_lower: bool = True) -> RemoteBackend:
    """Return the backend as it is described: by itself, in a process of its own, or in a text from there.

    ``needs_lower``: whether a config alone is no backend. Raises UsageError if it cannot be had.
    """
    with (
        raise_usage_error_for(StartError),
        raise_usage_error_for(DescriptionError),
        raise_usage_error_for(ElsewhereError),
    ):
        if options.backend.startswith(VECTORS):
            return open_vectors(options)
        if options.backend.startswith(COMMAND):
            return open_command(options, text)
        if text is None:
            said = describe_backend(options.backend, limit=options.claim_timeout, needs_lower=needs_lower)
            text = json.dumps(said)
        return RemoteBackend(read_description(json.loads(text)), text=text)


def open_run(options: Options, backend: Backend) -> Opened:
    """Enumerate the backend's claims. Raises UsageError if its config cannot be obtained, read or selected from."""
    raw, capabilities = _call(backend, "backend_config"), _call(backend, "capabilities")
    if not isinstance(capabilities, Capabilities):
        raise pytest.UsageError(
            f"backend {backend.name}: capabilities() returned {capabilities!r}; return Capabilities"
        )
    with raise_usage_error_for(LimitsError, f"backend {backend.name}: "):
        check_limits(capabilities.limits)
    try:
        config = as_backend_config(raw)
        claims = enumerate_claims(config, capabilities)
    except Exception as error:
        raise pytest.UsageError(
            f"backend {backend.name}: what backend_config() returned cannot be read: {format_error(error)}"
        ) from error
    with raise_usage_error_for(Exception, f"backend {backend.name}: qconfigs() or a custom config: "):
        Preparation.of(backend)
    if not claims:
        raise pytest.UsageError(f"backend {backend.name}: backend_config() claims nothing: no entry has a dtype config")
    added = [job for room in find_rooms(backend) for job in room.list_jobs(claims)]
    own = own_models.jobs(_find_models(options, backend), claims, capabilities, backend.representation)
    jobs = (*own, *_jobs_of(options.profile, config, capabilities), *added)
    if _runs_elsewhere(backend):
        jobs = tuple(job for job in jobs if not job.is_adaptive)
    stress_jobs = _jobs_of("stress", config, capabilities)
    claim_ids = [claim.id for claim in claims]
    selected = select_ids([*claim_ids, *(job.id for job in jobs)], options.claims)
    waiver_file = None if options.no_waivers else options.waivers or backend.waivers
    with raise_usage_error_for(WaiverError):
        level = _find_level(backend)
        waiver_bytes = read_waivers(waiver_file) if waiver_file else b""
        waivers = parse_waivers(waiver_bytes, waiver_file, level, str(torch.__version__)) if waiver_file else ()
        findings = read_findings(waivers)
    return Opened(
        options=options,
        backend=backend,
        config_name=str(config.name or ""),
        claims=claims,
        jobs=jobs,
        selected=frozenset(name for name in selected if options.shard is None or options.shard.has(name)),
        known=tuple(dict.fromkeys([*claim_ids, *(job.id for job in (*jobs, *stress_jobs))])),
        waivers=Waivers(waivers, date.today(), options.is_complete),
        waiver_file=waiver_file,
        waiver_bytes=waiver_bytes,
        findings=findings,
    )


def _find_models(options: Options, backend: Backend) -> list[str]:
    """Return the specs of the models that are handed in, globs expanded. Raises UsageError."""
    if options.models and _runs_elsewhere(backend):
        raise pytest.UsageError(
            f"--model={options.models[0]}: the models of {options.backend} run elsewhere, by files, which cannot hold "
            "what an evaluation will ask for; give a backend in Python"
        )
    with raise_usage_error_for(ModelSpecError), raise_usage_error_for(ModelSetError, "--model: "):
        for spec in options.models:
            check_spec(spec)
        return [one for spec in options.models for one in expand(spec)]


def _runs_elsewhere(backend: Backend) -> bool:
    return executor_of(backend).runs_elsewhere


def _find_level(backend: Backend) -> str:
    """Return the level of instruction sets at which the kernels run; "" if that is not on this CPU."""
    return "" if _runs_elsewhere(backend) else isa.find_current_level(backend.engine)


def _count_cases(bench: Bench, unit: Claim | Job) -> int:
    """Return how many cases a claim has; 0 if it has none, or they cannot be planned, as its own check says."""
    try:
        return len(plan_claim(bench, unit)) if isinstance(unit, Claim) else 0
    except Exception:
        return 0


def _jobs_of(profile: str, config: BackendConfig, capabilities: Capabilities) -> tuple[Job, ...]:
    return tuple(job for source in JOB_SOURCES for job in source(config, capabilities, profile))


def _digest(path: Path | None, data: bytes) -> dict[str, str]:
    return {} if path is None else {"file": path.name, "sha256": hashlib.sha256(data).hexdigest()}


def _call(backend: Backend, method: str) -> Any:
    """Call one of the backend's methods without arguments. Raises UsageError when it fails."""
    try:
        return getattr(backend, method)()
    except _FAULTS as error:
        raise pytest.UsageError(f"backend {backend.name}: {method}() raised {format_error(error)}") from error
