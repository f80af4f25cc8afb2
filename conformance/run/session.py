"""The run of a process of pytest's: what is certified, and how. It imports no torch, and no code of the vendor's."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date, datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from conformance.machine import isa
from conformance.machine.child import Child, ChildLost, Recipe, StartError
from conformance.machine.frames import Frame
from conformance.machine.release import PACKAGES
from conformance.remote.sources import SourcesError, digest_sources
from conformance.remote.worker import describe_backend
from conformance.run.device import COMMAND, VECTORS, ElsewhereError
from conformance.run.options import ROOT, Options, raise_usage_error_for, read_options
from conformance.run.outline import Outline, Unit
from conformance.run.setup import OUTLINE, Setup
from conformance.run.waivers import WaiverError, Waivers, parse_waivers, read_waivers
from reports.schema import Header
from reports.text import join_lines, show

if TYPE_CHECKING:
    from conformance.remote.client import RemoteBackend

DESCRIPTION, GIVEN_OUTLINE, DONE = "conformance_backend", "conformance_outline", "conformance_done"
"""Keys in what a worker gets from the controlling process: what the backend says of itself, the run's outline, and the
IDs that an earlier run has judged."""
_RUN = pytest.StashKey["Run"]()
_NO_RUN_OPTIONS = ("help", "version", "markers", "cacheshow")


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What is certified, and how.

    ``text``: what the backend says of itself. ``elsewhere``: the backend of ``vectors:`` or ``command:``.
    ``waiver_bytes`` are those of the file of waivers. ``done``: the selected IDs that an earlier run has judged.
    ``sources_sha256``: the digest of the files that the backend's code comes from.
    """

    options: Options
    outline: Outline
    waivers: Waivers
    waiver_bytes: bytes = b""
    text: str = ""
    elsewhere: RemoteBackend | None = None
    done: Collection[str] = frozenset()
    sources_sha256: str = ""

    @classmethod
    def of(cls, options: Options, outline: Outline, **given: Any) -> Run:
        """Return the run of an outline, with its waivers. Raises UsageError for a file of waivers that is none."""
        file = None if outline.waiver_file is None else Path(outline.waiver_file)
        with raise_usage_error_for(WaiverError):
            data = b"" if file is None else read_waivers(file)
            header = outline.header
            entries = () if file is None else parse_waivers(data, file, header.isa, header.torch)
        waivers = Waivers(entries, date.today(), options.is_complete)
        return cls(options=options, outline=outline, waivers=waivers, waiver_bytes=data, **given)

    @property
    def units(self) -> dict[str, Unit]:
        """The selected claims and jobs, by ID."""
        return {unit.id: unit for unit in self.outline.units}

    @property
    def waiver_file(self) -> Path | None:
        """The file of waivers, if there is one."""
        return None if self.outline.waiver_file is None else Path(self.outline.waiver_file)

    @property
    def setup(self) -> Setup:
        """What a judge needs to open the run."""
        remake = None if self.elsewhere is None else self.elsewhere.remake
        return Setup(options=self.options, text=self.text, remake=remake)

    def make_params(self, *kinds: str) -> list[Any]:
        """Return pytest's parameters: the selected units of these kinds that are not done, in order."""
        units = (unit for unit in self.outline.units if unit.kind in kinds and unit.id not in self.done)
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
        from conformance.run.elsewhere import adopt_bundle

        with raise_usage_error_for(ElsewhereError):
            options = adopt_bundle(options)
    given: Mapping[str, Any] | None = getattr(config, "workerinput", None)
    if given is not None:
        outline = Outline.of(json.loads(given[GIVEN_OUTLINE]))
        run = open_session(options, given[DESCRIPTION], outline)
        _leave_timeouts(config)
        return limit_run(config, run, given[DONE])
    text, elsewhere = _describe(options)
    said = json.loads(text)
    if options.isa is not None:
        if elsewhere is not None:
            raise pytest.UsageError(f"--isa={options.isa}: the kernels of {options.backend} do not run on this CPU")
        with raise_usage_error_for(isa.IsaError):
            isa.apply(options.isa, str(said.get("engine", "")))
    if said.get("unavailable") is not None:
        print(join_lines(f"backend {said.get('name')} skipped: {said['unavailable']}"))
        return pytest.ExitCode.NO_TESTS_COLLECTED
    run = _open(options, text, elsewhere)
    if options.list_claims:
        for unit in run.outline.units:
            if unit.kind == "claim" or options.claims:
                print(show(unit.id.replace("\n", "\\n")))
        return pytest.ExitCode.OK
    _leave_timeouts(config)
    return limit_run(config, replace(run, sources_sha256=digest_code(run)))


def open_session(options: Options, text: str | None = None, outline: Outline | None = None) -> Run:
    """Return the run of some options. ``text``, ``outline``: what another process has been told already.

    Raises UsageError for a backend that cannot be had, or whose config cannot be read or selected from.
    """
    text, elsewhere = _describe(options, text)
    return _open(options, text, elsewhere, outline)


def _open(options: Options, text: str, elsewhere: RemoteBackend | None, outline: Outline | None = None) -> Run:
    remake = None if elsewhere is None else elsewhere.remake
    outline = outline or _ask_outline(Setup(options=options, text=text, remake=remake))
    return Run.of(options, outline, text=text, elsewhere=elsewhere)


def _describe(options: Options, text: str | None = None) -> tuple[str, RemoteBackend | None]:
    """Return what the backend says of itself; and the backend, if it runs elsewhere. Raises UsageError."""
    if options.backend.startswith((VECTORS, COMMAND)):
        from conformance.run.opening import find_described

        backend = find_described(options, text)
        return backend.text, backend
    if text is None:
        with raise_usage_error_for(StartError):
            text = json.dumps(describe_backend(options.backend, limit=options.claim_timeout))
    return text, None


def _ask_outline(setup: Setup) -> Outline:
    """Have a judge open the run. Raises UsageError with what it refuses, or says of its end."""
    recipe = Recipe(open="conformance.run.judge:open_judge", arguments=(setup,))
    try:
        with raise_usage_error_for(StartError), Child(recipe) as judge:
            answer = judge.ask(Frame(head={"do": OUTLINE}), limit=setup.options.claim_timeout).head
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
    waivers = json.loads(run.text).get("waivers")
    left_out = [run.options.report_dir, *([] if waivers is None else [Path(waivers)])]
    try:
        return digest_sources([*(ROOT / name for name in PACKAGES), *places], left_out)
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
        raise pytest.UsageError("the suite runs by its own path: pytest --pyargs conformance --backend=NAME")
    return run


def param_id(unit_id: str) -> str:
    """Return the bracketed part of a test's node ID, in characters that pytest, and CI's log, leave as they are."""
    return unit_id.encode("unicode_escape").decode("ascii").replace("\\", "~").replace("##", "#~x23")
