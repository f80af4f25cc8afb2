"""The run of a process of pytest's: what is certified, and how. It imports no torch, and no code of the vendor's."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import date, datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from fx_quant_conformance.conformance.machine import isa
from fx_quant_conformance.conformance.machine.child import Child, ChildLost, StartError
from fx_quant_conformance.conformance.machine.fork_server import join_server, start_server
from fx_quant_conformance.conformance.machine.frames import Frame
from fx_quant_conformance.conformance.machine.release import ROOT, find_package
from fx_quant_conformance.conformance.remote.sources import SourcesError, digest_sources
from fx_quant_conformance.conformance.remote.worker import ask_description, make_worker
from fx_quant_conformance.conformance.run.device import ElsewhereError
from fx_quant_conformance.conformance.run.options import Options, raise_usage_error_for, read_options
from fx_quant_conformance.conformance.run.outline import Outline, Unit
from fx_quant_conformance.conformance.run.setup import OUTLINE, Setup
from fx_quant_conformance.conformance.run.waivers import WaiverEntry, Waivers, parse_waivers
from fx_quant_conformance.conformance.run.workplaces import Openers, make_judge_recipe
from fx_quant_conformance.reports.handed_in import COMMAND, VECTORS
from fx_quant_conformance.reports.schema import Header
from fx_quant_conformance.reports.text import join_lines, show

if TYPE_CHECKING:
    from fx_quant_conformance.conformance.remote.client import RemoteBackend

DESCRIPTION, GIVEN_OUTLINE, DONE = "conformance_backend", "conformance_outline", "conformance_done"
SERVER = "conformance_server"
"""Keys in what a worker gets from the controlling process: what the backend says of itself, the run's outline, the IDs
that an earlier run has judged, and where it finds the server of processes."""
_RUN = pytest.StashKey["Run"]()
_NO_RUN_OPTIONS = ("help", "version", "markers", "cacheshow")


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What is certified, and how."""

    setup: Setup
    """What a judge needs to open the run."""
    outline: Outline
    waivers: Waivers
    elsewhere: RemoteBackend | None = None
    """The backend of ``vectors:`` or ``command:``."""
    openers: Openers = field(default_factory=Openers)
    """They have opened it, and may do its first work."""
    done: Collection[str] = frozenset()
    """The selected IDs that an earlier run has judged."""
    sources_sha256: str = ""
    """The digest of the files that the backend's code comes from."""

    @classmethod
    def of(cls, setup: Setup, outline: Outline, **given: Any) -> Run:
        """Return the run of an outline, with its waivers."""
        header, entries = outline.header, tuple[WaiverEntry, ...]()
        if outline.waiver_file is not None:
            data = outline.waivers.encode()
            entries = parse_waivers(data, Path(outline.waiver_file), header.isa, header.torch)
        waivers = Waivers(entries, date.today(), setup.options.is_complete)
        return cls(setup=setup, outline=outline, waivers=waivers, **given)

    @property
    def options(self) -> Options:
        """The options of the run."""
        return self.setup.options

    @property
    def units(self) -> dict[str, Unit]:
        """The selected claims and jobs, by ID."""
        return {unit.id: unit for unit in self.outline.units}

    @property
    def waiver_file(self) -> Path | None:
        """The file of waivers, if there is one."""
        return None if self.outline.waiver_file is None else Path(self.outline.waiver_file)

    def make_params(self, *kinds: str) -> list[Any]:
        """Return pytest's parameters: the selected units of these kinds that are not done.

        They come in order, but those of which it was counted with the most cases first: no long one is left to the end,
        when other workers have nothing to do.
        """
        units = [unit for unit in self.outline.units if unit.kind in kinds and unit.id not in self.done]
        units.sort(key=lambda unit: -unit.cases)
        return [pytest.param(unit, id=param_id(unit.id)) for unit in units]

    def make_header(self, claims: int | None = None) -> Header:
        """Return the results file's first row; ``claims``: how many are to be judged, if not all that are selected."""
        header, started = self.outline.header, datetime.now(timezone.utc).isoformat(timespec="seconds")
        claims = header.claims if claims is None else claims
        return replace(header, claims=claims, started=started, sources_sha256=self.sources_sha256)


def preflight(config: pytest.Config) -> Run | int | None:
    """Open the run before pytest starts a session.

    Returns an exit status if no session is to start; None if pytest does something else than run tests.
    """
    if any(getattr(config.option, name, False) for name in _NO_RUN_OPTIONS):
        return None
    options = read_options(config)
    if options.backend.startswith(VECTORS) or options.outputs is not None:
        from fx_quant_conformance.conformance.run.elsewhere import adopt_bundle

        with raise_usage_error_for(ElsewhereError):
            options = adopt_bundle(options)
    given: Mapping[str, Any] | None = getattr(config, "workerinput", None)
    if given is not None:
        join_server(given[SERVER])
        setup, elsewhere = _describe(options, Openers(), given[DESCRIPTION])
        run = Run.of(setup, Outline.of(json.loads(given[GIVEN_OUTLINE])), elsewhere=elsewhere)
        _leave_timeouts(config)
        return limit_run(config, run, given[DONE])
    start_server()
    openers = Openers()
    config.add_cleanup(openers.close)
    setup, elsewhere = _describe(options, openers)
    said = json.loads(setup.text)
    if options.isa is not None:
        if elsewhere is not None:
            raise pytest.UsageError(f"--isa={options.isa}: the kernels of {options.backend} do not run on this CPU")
        openers.close()  # the command may start again, at another level
        with raise_usage_error_for(isa.IsaError):
            isa.apply(options.isa, str(said.get("engine", "")))
    if said.get("unavailable") is not None:
        print(join_lines(f"backend {said.get('name')} skipped: {said['unavailable']}"))
        return pytest.ExitCode.NO_TESTS_COLLECTED
    has_workers = bool(getattr(config.option, "numprocesses", None) or getattr(config.option, "tx", None))
    outline = _ask_outline(setup, openers, counts_cases=has_workers)
    run = Run.of(setup, outline, elsewhere=elsewhere, openers=openers)
    if options.list_claims:
        for unit in run.outline.units:
            if unit.kind == "claim" or options.claims:
                print(show(unit.id.replace("\n", "\\n")))
        return pytest.ExitCode.OK
    _leave_timeouts(config)
    return limit_run(config, replace(run, sources_sha256=digest_code(run)))


def open_session(options: Options) -> Run:
    """Return the run of some options, whose openers are the caller's to end.

    Raises UsageError for a backend that cannot be had, or whose config cannot be read or selected from.
    """
    openers = Openers()
    try:
        setup, elsewhere = _describe(options, openers)
        return Run.of(setup, _ask_outline(setup, openers), elsewhere=elsewhere, openers=openers)
    except BaseException:
        openers.close()
        raise


def _describe(options: Options, openers: Openers, text: str | None = None) -> tuple[Setup, RemoteBackend | None]:
    """Return what a judge needs, with what the backend says of itself; and the backend, if it runs elsewhere.

    ``text``: what it has said to another process. Raises UsageError.
    """
    if options.backend.startswith((VECTORS, COMMAND)):
        from fx_quant_conformance.conformance.run.opening import find_described

        backend = find_described(options, text)
        return Setup(options=options, text=backend.text, remake=backend.remake), backend
    if text is None:
        limit = options.claim_timeout
        with raise_usage_error_for(StartError):
            openers.worker = make_worker(options.backend, limit=limit)
            text = json.dumps(ask_description(openers.worker, options.backend, limit=limit))
    return Setup(options=options, text=text), None


def _ask_outline(setup: Setup, openers: Openers, *, counts_cases: bool = False) -> Outline:
    """Have a judge open the run. Raises UsageError with what it refuses, or says of its end."""
    try:
        with raise_usage_error_for(StartError):
            judge = openers.judge = Child(make_judge_recipe(setup))
        judge.begin()
        answer = judge.ask(
            Frame(head={"do": OUTLINE, "counts_cases": counts_cases}), limit=setup.options.claim_timeout
        ).head
    except ChildLost as lost:
        said = f"; it printed:\n{lost.text.strip()}" if lost.text.strip() else ""
        raise pytest.UsageError(f"the judge's process, which opens the run, {lost}{said}") from lost
    if "refused" in answer:
        raise pytest.UsageError(str(answer["refused"]))
    return Outline.of(answer["outline"])


def _leave_timeouts(config: pytest.Config) -> None:
    """Switch pytest-timeout off: the suite has its own limits."""
    if getattr(config.option, "timeout", None) is None:
        config.option.timeout = 0


def digest_code(run: Run) -> str:
    """Return the digest of the files of the suite and of the backend's code; "" if these cannot be told."""
    places: Sequence[str] | None = run.outline.sources
    if run.elsewhere is not None:
        places = ()  # the versions have the digests of a device's files
    if places is None:
        return ""
    waivers = json.loads(run.setup.text).get("waivers")
    left_out = [run.options.report_dir, *([] if waivers is None else [Path(waivers)])]
    try:
        return digest_sources([find_package(ROOT), *places], left_out)
    except SourcesError:
        return ""


def limit_run(config: pytest.Config, run: Run, done: Iterable[str] = ()) -> Run:
    """Make a run that of this process; return it. ``done``: as Run has it."""
    config.stash[_RUN] = limited = replace(run, done=frozenset(done))
    return limited


def run_of(config: pytest.Config) -> Run:
    """Return this process's run. Raises UsageError outside of a run."""
    run = config.stash.get(_RUN, None)
    if run is None:
        raise pytest.UsageError("the suite runs by its own path: pytest --pyargs fx_quant_conformance --backend=NAME")
    return run


def param_id(unit_id: str) -> str:
    """Return the bracketed part of a test's node ID, in characters that pytest, and CI's log, leave as they are."""
    return unit_id.encode("unicode_escape").decode("ascii").replace("\\", "~").replace("##", "#~x23")
