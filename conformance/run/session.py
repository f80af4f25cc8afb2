"""A run of the suite: opened from the command line, in every process alike.

``Run`` says what is certified, and how. The controlling process alone records it (recorder.py).
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any, Literal

import pytest

from backends.base import Backend, Capabilities, Representation, Taken
from backends.discovery import BackendNotFound, describe_error, find_backend
from conformance.claims.claim import Claim, config_digest, enumerate_claims
from conformance.facts import unclaimed
from conformance.facts.fingerprint import jobs as fingerprint
from conformance.fuzz import search as fuzz
from conformance.machine import isa
from conformance.machine.environment import detection_power, environment_facts
from conformance.machine.isolation import CAN_FORK
from conformance.pipeline.job import Job
from conformance.run.options import ROOT, Options, read_options, select_ids
from conformance.run.waivers import WaiverError, Waivers, load_waivers
from conformance.stages.bench import Bench
from conformance.whole_models import jobs as whole_models
from refimpl import BackendConfig
from refimpl.backend_config import as_backend_config
from reports.results import ids_digest
from reports.schema import SCHEMA, Header
from reports.verdicts import PASSING, Verdict

JOB_SOURCES = (fuzz.jobs, whole_models.jobs, fingerprint.jobs, unclaimed.jobs)
"""What lists the jobs of a profile, those that take longest first."""
_RUN = pytest.StashKey["Run"]()
_FAULTS = (Exception, SystemExit)
_FORMS: dict[Representation, Literal["QUANTIZED", "DECOMPOSED"]] = {
    Representation.QUANTIZED: "QUANTIZED",
    Representation.DECOMPOSED: "DECOMPOSED",
}
_NO_RUN_OPTIONS = ("help", "version", "markers", "cacheshow")

Unit = Claim | Job


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What is certified, and how: equal in every process of a run.

    ``claims`` are those of the whole config, ``jobs`` those of the profile; ``selected`` are the IDs to run, ``known``
    all that the backend has in any profile.
    """

    options: Options
    backend: Backend
    config_name: str
    claims: tuple[Claim, ...]
    jobs: tuple[Job, ...]
    selected: Collection[str]
    known: Collection[str]
    waivers: Waivers
    waiver_file: Path | None

    @property
    def units(self) -> dict[str, Unit]:
        """What is to be run, by ID: jobs first, for the longest are among them."""
        every: tuple[Unit, ...] = (*self.jobs, *self.claims)
        return {unit.id: unit for unit in every if unit.id in self.selected}

    @property
    def passing(self) -> frozenset[Verdict]:
        """The verdicts that need no waiver."""
        return PASSING - {Verdict.QUALITY} if self.options.strict else PASSING

    def params(self, kind: type[Unit]) -> list[Any]:
        """Return pytest's parameters: every selected claim (or job), in order."""
        return [pytest.param(unit, id=param_id(unit.id)) for unit in self.units.values() if isinstance(unit, kind)]

    def bench(self) -> Bench:
        """Return a bench for the backend."""
        options = self.options
        covered = self.waivers.covered(claim.id for claim in self.claims).values()
        return Bench(
            self.backend, seed=options.seed, profile=options.profile, max_examples=options.max_examples,
            spec=options.backend, repro=options.repro, waived=[name for names in covered for name in names],
        )  # fmt: skip

    def header(self, claims: int) -> Header:
        """Return the results file's first row; ``claims`` of them are to be judged."""
        options, backend = self.options, self.backend
        versions = _ask(backend, "versions")
        return Header(
            schema=SCHEMA,
            **environment_facts(ROOT),
            backend=backend.name,
            versions={str(key): str(value) for key, value in dict(versions).items()},
            engine=str(backend.engine),
            representation=_FORMS[backend.representation],
            seed=options.seed,
            profile=options.profile,
            options={
                "backend": options.backend,
                "claim": list(options.claims),
                "claim_timeout": options.claim_timeout,
                "max_examples": options.max_examples,
                "strict": options.strict,
                "isa": options.isa,
            },
            config_name=self.config_name,
            config_sha256=config_digest(self.claims),
            claims=claims,
            claims_in_config=len(self.claims),
            pairs=len({(claim.pattern, claim.dtype_config) for claim in self.claims}),
            started=datetime.now(UTC).isoformat(timespec="seconds"),
            isa=isa.current_level(backend.engine),
            isolation="fork" if CAN_FORK else "none",
            waivers=_digested(self.waiver_file),
            limits=_limits(backend.capabilities().limits),
            claims_sha256=ids_digest(claim.id for claim in self.claims),
            shard=options.shard,
            detection=detection_power(),
        )


def _limits(limits: Mapping[str, Mapping[str, Taken]]) -> dict[str, dict[str, str]]:
    """The limits as text: the values that are taken, or what the callable that tells says of itself."""

    def text(taken: Taken) -> str:
        said = (taken.__doc__ or taken.__name__).strip() if callable(taken) else ", ".join(map(str, taken))
        return said.partition("\n")[0].rstrip(".")

    return {op: {name.lstrip("_"): text(taken) for name, taken in each.items()} for op, each in limits.items()}


def preflight(config: pytest.Config) -> Run | int | None:
    """Open the run before pytest starts a session.

    An exit status means that there is no session to start; None, that pytest does something else than run tests.
    """
    if any(getattr(config.option, name, False) for name in _NO_RUN_OPTIONS):
        return None
    options = read_options(config)
    backend = _find_backend_or_usage_error(options.backend)
    worker = hasattr(config, "workerinput")
    if options.isa is not None and not worker:
        _hold_to(options.isa, backend)
    reason = None if worker else _ask(backend, "unavailable_reason")
    if reason is not None:
        print(f"backend {backend.name} skipped: {reason}")
        return pytest.ExitCode.NO_TESTS_COLLECTED
    run = open_run(options, backend)
    if options.list_claims:
        print("\n".join(unit.id for unit in run.units.values() if isinstance(unit, Claim) or options.claims))
        return pytest.ExitCode.OK
    config.stash[_RUN] = run
    if getattr(config.option, "timeout", None) is None:
        config.option.timeout = 0  # pytest-timeout's: the suite has limits of its own
    return run


def open_run(options: Options, backend: Backend) -> Run:
    """Enumerate the backend's claims. Raises UsageError when its config cannot be had, read or selected from."""
    raw, capabilities = _ask(backend, "backend_config"), _ask(backend, "capabilities")
    if not isinstance(capabilities, Capabilities):
        raise pytest.UsageError(
            f"backend {backend.name}: capabilities() returned {capabilities!r}; return a backends.base.Capabilities"
        )
    try:
        config = as_backend_config(raw)
        claims = enumerate_claims(config, capabilities)
    except Exception as error:
        raise pytest.UsageError(
            f"backend {backend.name}: what backend_config() returned cannot be read: {describe_error(error)}"
        ) from error
    if not claims:
        raise pytest.UsageError(f"backend {backend.name}: backend_config() claims nothing: no entry has a dtype config")
    jobs = _jobs_of(options.profile, config, capabilities)
    every = _jobs_of("stress", config, capabilities)
    claim_ids = [claim.id for claim in claims]
    selected = select_ids([*claim_ids, *(job.id for job in jobs)], options.claims)
    waiver_file = None if options.no_waivers else options.waivers or backend.waivers
    return Run(
        options=options,
        backend=backend,
        config_name=str(config.name or ""),
        claims=claims,
        jobs=jobs,
        selected=frozenset(name for name in selected if options.shard is None or options.shard.has(name)),
        known=tuple(dict.fromkeys([*claim_ids, *(job.id for job in (*jobs, *every))])),
        waivers=_waivers(waiver_file, options, isa.current_level(backend.engine)),
        waiver_file=waiver_file,
    )


def _jobs_of(profile: str, config: BackendConfig, capabilities: Capabilities) -> tuple[Job, ...]:
    return tuple(job for source in JOB_SOURCES for job in source(config, capabilities, profile))


def run_of(config: pytest.Config) -> Run:
    """Return the run that this process works for. Raises UsageError outside of one."""
    run = config.stash.get(_RUN, None)
    if run is None:
        raise pytest.UsageError("the suite runs by its own path: pytest conformance --backend=NAME")
    return run


def param_id(unit_id: str) -> str:
    """Return the bracketed part of a test's node ID, in characters that pytest leaves as they are."""
    return unit_id.encode("unicode_escape").decode("ascii").replace("\\", "~")


def _waivers(path: Path | None, options: Options, level: str) -> Waivers:
    try:
        return Waivers(() if path is None else load_waivers(path, level), date.today(), options.is_complete)
    except WaiverError as error:
        raise pytest.UsageError(str(error)) from error


def _digested(path: Path | None) -> dict[str, str]:
    return {} if path is None else {"file": path.name, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}


def _hold_to(level: str, backend: Backend) -> None:
    """Start again at this level of instruction sets, or go on where it is in force."""
    try:
        isa.apply(level, backend.engine)
    except isa.IsaError as error:
        raise pytest.UsageError(str(error)) from error


def _find_backend_or_usage_error(spec: str) -> Backend:
    try:
        return find_backend(spec)
    except BackendNotFound as error:
        raise pytest.UsageError(str(error)) from error


def _ask(backend: Backend, method: str) -> Any:
    """Call one of the backend's methods that take nothing. Raises UsageError when it fails."""
    try:
        return getattr(backend, method)()
    except _FAULTS as error:
        raise pytest.UsageError(f"backend {backend.name}: {method}() raised {describe_error(error)}") from error
