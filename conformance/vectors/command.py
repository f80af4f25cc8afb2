"""A command that runs a device: what a TOML file says of it, one call of it, and the cases of a bundle through calls.

A call gets a folder with the cases to run and one to fill. If it dies or hangs, the cases that it has finished count;
the first one that it has not finished is run alone, and what happens then is that case's verdict. (docs/vectors.md)
"""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fx_quant_conformance.conformance.machine.child import Answer, Child, ChildLost, Parent, Recipe
from fx_quant_conformance.conformance.machine.frames import Frame
from fx_quant_conformance.conformance.machine.process import PATIENCE, format_exit
from fx_quant_conformance.conformance.machine.seconds import LONGEST
from fx_quant_conformance.conformance.machine.toml import TomlError, parse_toml
from fx_quant_conformance.conformance.vectors.bundle import DEVICE, MANIFEST, Bundle, list_model_files
from fx_quant_conformance.conformance.vectors.files import LOST_CALLS, format_json, remove
from fx_quant_conformance.conformance.vectors.outputs import STATUS, HandedIn
from fx_quant_conformance.reports.reading import FileFault, open_to_append, read_text

CALL = "call.json"
"""The file, beside a chunk's bundle, of what is called: for the scripts of its cases."""
PLACES = ("{bundle}", "{outputs}", "{device}")
_MOST_PRINTED = 1 << 14
_MOST_LOGGED = 1000
_WAIT = 0.05


class CommandError(Exception):
    """A file that describes a command cannot be used; one line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandSettings:
    """What a ``command:FILE.toml`` says."""

    file: Path
    config: str
    """``module:attribute`` of a Backend, with or without ``lower``, or of what returns a BackendConfig."""
    command: tuple[str, ...]
    """The words of the command, with PLACES for the folder to read, the folder to fill and the number of the device."""
    name: str = ""
    timeout: float = 60.0
    """Seconds for one call."""
    batch: int = 16
    """Cases of one call."""
    devices: int = 1
    """Calls at once, over all processes."""
    retries: int = 0
    """How often a case that dies or hangs alone is run again."""
    refused: tuple[int, ...] = ()
    """The exit statuses that mean refused; others that are not 0 mean crashed."""
    folder: Path = field(default_factory=Path.cwd)
    """Where the command runs."""
    environment: Mapping[str, str] = field(default_factory=dict)
    waivers: Path | None = None
    formats: tuple[str, ...] = ("json",)


_KINDS: dict[str, tuple[type, ...]] = {
    "name": (str,),
    "config": (str,),
    "command": (list,),
    "timeout": (int, float),
    "batch": (int,),
    "devices": (int,),
    "retries": (int,),
    "refused": (list,),
    "folder": (str,),
    "environment": (dict,),
    "waivers": (str,),
    "formats": (list,),
}
_LEAST: dict[str, float] = {"timeout": 1e-3, "batch": 1, "devices": 1, "retries": 0}


def read_settings(file: Path) -> CommandSettings:
    """Read a file. Raises CommandError, naming the key, for anything but the attributes of CommandSettings."""
    try:
        data = parse_toml(read_text(file))
    except FileFault as fault:
        raise CommandError(f"{file}: {fault}") from fault
    except TomlError as error:
        raise CommandError(f"{file}: no TOML: {error}") from error
    for key, value in data.items():
        if key not in _KINDS:
            raise CommandError(f"{file}: unknown key {key!r}; there are {', '.join(_KINDS)}")
        if not isinstance(value, _KINDS[key]) or isinstance(value, bool) or value in (math.inf, -math.inf):
            kinds = " or ".join(kind.__name__ for kind in _KINDS[key])
            raise CommandError(f"{file}: {key} is {value!r}; give a {kinds}")
        if isinstance(value, (int, float)) and not value >= _LEAST.get(key, value):  # NaN is not
            raise CommandError(f"{file}: {key} is {value!r}; give {_LEAST[key]} or more")
    if data.get("timeout", 0) > LONGEST:
        raise CommandError(f"{file}: timeout is {data['timeout']!r}; give at most {LONGEST:.0f}")
    for key in ("config", "command"):
        if not data.get(key):
            raise CommandError(f"{file}: {key} is missing")
    _check_lists(file, data)
    place = file.parent
    folder = place / data.pop("folder", ".")
    if not folder.is_dir():
        raise CommandError(f"{file}: folder is {folder}, which is none")
    waivers = data.pop("waivers", None)
    lists: dict[str, Any] = {key: tuple(data.pop(key)) for key in ("command", "refused", "formats") if key in data}
    return CommandSettings(
        file=file, folder=folder, waivers=None if waivers is None else place / waivers, **lists, **data
    )


def _check_lists(file: Path, data: Mapping[str, Any]) -> None:
    words: list[Any] = data["command"]
    if not all(isinstance(word, str) for word in words):
        raise CommandError(f"{file}: command is {words!r}; give a list of words")
    text = " ".join(words)
    if missing := [place for place in PLACES[:2] if place not in text]:
        raise CommandError(f"{file}: command does not name {missing[0]}; a call is told by it where its files are")
    if not all(isinstance(number, int) and 0 < number < 256 for number in data.get("refused", ())):
        raise CommandError(f"{file}: refused is {data['refused']!r}; give exit statuses from 1 to 255")
    environment = data.get("environment", {})
    if not all(isinstance(value, str) for value in environment.values()):
        raise CommandError(f"{file}: environment is {environment!r}; give texts")
    if any("\0" in text for text in (*words, *environment, *environment.values())) or any(
        "=" in key for key in environment
    ):
        raise CommandError(f"{file}: a word of the command has a NUL, or a name in the environment a NUL or =")


# -- one call ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class CallResult:
    """How a call ended."""

    code: int | None
    """Its exit status, negative for a signal; None: it was killed at the limit."""
    printed: str
    """The end of its output."""

    @property
    def is_done(self) -> bool:
        """Whether it ended by itself, with status 0."""
        return self.code == 0


def describe_call(settings: CommandSettings) -> dict[str, Any]:
    """Return what is called, with the places to fill, as data."""
    return {
        "command": list(settings.command),
        "folder": str(settings.folder.absolute()),
        "environment": dict(settings.environment),
        "timeout": settings.timeout,
    }


def call(settings: CommandSettings, bundle: Path, outputs: Path, device: int) -> CallResult:
    """Call the command once, in a guarded child. It is killed at the limit; all that it has started ends with it."""
    places = dict(zip(PLACES, (str(bundle), str(outputs), str(device)), strict=True))
    words = [_fill(word, places) for word in settings.command]
    given = {"words": words, "folder": str(settings.folder), "environment": dict(settings.environment)}
    with Child(Recipe(open="fx_quant_conformance.conformance.vectors.command:open_call", is_guarded=True)) as child:
        try:
            head = child.ask(Frame(head={**given, "timeout": settings.timeout}), limit=settings.timeout + PATIENCE).head
        except ChildLost as lost:  # the command has harmed its parent, or is not to be stopped
            return CallResult(code=lost.status, printed=lost.text)
    return CallResult(code=head["code"], printed=head["printed"])


def open_call(parent: Parent) -> Answer:
    """Return what calls a command, in a process of its own."""
    return _call_here


def _call_here(request: Frame) -> Frame:
    """Call a command, which prints where this process does."""
    head, code, own_output = request.head, None, sys.stdout.fileno()
    try:
        process = subprocess.Popen(
            head["words"], cwd=head["folder"], env={**os.environ, **head["environment"]}, stdin=subprocess.DEVNULL
        )
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = process.wait(head["timeout"])
    except OSError as error:
        return Frame(head={"code": 127, "printed": f"{head['words'][0]}: {error.strerror}"})
    printed = os.pread(own_output, _MOST_PRINTED, max(0, os.fstat(own_output).st_size - _MOST_PRINTED))
    return Frame(head={"code": code, "printed": printed.decode("utf-8", "replace")})


def _fill(word: str, places: Mapping[str, str]) -> str:
    for place, text in places.items():
        word = word.replace(place, text)
    return word


@contextlib.contextmanager
def lock_file(path: Path) -> Iterator[None]:
    """Hold the lock of a file; wait for it."""
    with open_to_append(path, follows_links=False) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)  # closing does not: processes forked meanwhile have the file too


@contextlib.contextmanager
def occupy_device(folder: Path, count: int) -> Iterator[int]:
    """Occupy one of the devices, as soon as one is free in all processes; yield its number."""
    while True:
        for number in range(count):
            with open_to_append(folder / f"device-{number}.lock", follows_links=False) as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    continue
                try:
                    yield number
                finally:
                    fcntl.flock(file, fcntl.LOCK_UN)
                return
        time.sleep(_WAIT)


# -- the cases of a bundle --------------------------------------------------------------------------------------------


class Caller:
    """Has the cases of a bundle run by calls, until each has outputs or a status.

    ``locks``: a folder that all processes share, for the locks of devices.
    """

    def __init__(self, settings: CommandSettings, bundle: Bundle, outputs: Path, locks: Path) -> None:
        self._settings = settings
        self._bundle = bundle
        self._outputs = outputs
        self._locks = locks
        self._calls = 0

    def run_all(self) -> None:
        """Run all cases."""
        left = list(self._bundle.cases)
        while left:
            now, left = left[: self._settings.batch], left[self._settings.batch :]
            left = self._run_together(now) + left

    def _run_together(self, names: Sequence[str]) -> list[str]:
        """Run cases in one call; return those that are still to be run."""
        if len(names) == 1:
            self._run_alone(names[0])
            return []
        result = self._call(names)
        if result.is_done:
            return []
        unfinished = [name for name in names if not self._is_finished(name)]
        if result.code in self._settings.refused:
            for name in unfinished or names:
                self._run_alone(name)
            return []
        suspect, *others = unfinished or names[-1:]
        self._run_alone(suspect)
        return others

    def _run_alone(self, name: str) -> None:
        """Run one case, again as often as the settings say; how its last call ends is its status."""
        for _ in range(1 + self._settings.retries):
            result = self._call([name])
            if result.is_done:
                return
            if result.code in self._settings.refused:
                break
        folder = self._outputs / name
        if not folder.is_dir() or folder.is_symlink():
            remove(folder)
        folder.mkdir(parents=True, exist_ok=True)
        remove(folder / STATUS)
        (folder / STATUS).write_text(format_json(self._describe(result)), encoding="utf-8")

    def _describe(self, result: CallResult) -> dict[str, str]:
        """Return the status of a case whose call did not end well."""
        lines = result.printed.strip().splitlines()
        said = f": {lines[-1]}" if lines else ""
        if result.code is None:
            limit = f"{self._settings.timeout:g} s (timeout in {self._settings.file.name})"
            return {"status": "timeout", "reason": f"the command did not end within {limit}", "text": result.printed}
        if result.code in self._settings.refused:
            return {"status": "refused", "reason": f"exit status {result.code}{said}", "text": result.printed}
        reason = f"the command: the process {format_exit(result.code)}{said}"
        return {"status": "crashed", "reason": reason, "text": result.printed}

    def _call(self, names: Sequence[str]) -> CallResult:
        """Call the command for cases; what they had before is removed."""
        for name in names:
            remove(self._outputs / name)
        self._calls += 1
        folder = self._bundle.folder / "calls" / str(self._calls)
        device = folder / DEVICE
        self._link(device, names)
        self._outputs.mkdir(parents=True, exist_ok=True)
        try:
            with occupy_device(self._locks, self._settings.devices) as number:
                result = call(self._settings, device, self._outputs, number)
        finally:
            remove(folder)
        if not result.is_done:
            line = {"cases": list(names), "code": result.code, "printed": result.printed[-_MOST_LOGGED:]}
            with open_to_append(self._bundle.folder / LOST_CALLS, follows_links=False) as log:
                log.write(f"{format_json(line)}\n".encode())
        return result

    def _link(self, device: Path, names: Sequence[str]) -> None:
        """Make the device's folder of some cases: a manifest of them, and links to their files."""
        manifest = dict(self._bundle.manifest)
        wanted = {*names}
        manifest["cases"] = [row for row in manifest["cases"] if row["case"] in wanted]
        paths = set[str]()
        for name in names:
            case = self._bundle.read_case(name)
            paths |= {f"cases/{name}.json", case["inputs"], *list_model_files(case)}
        manifest["files"] = {path: manifest["files"][path] for path in sorted(paths)}
        for path in sorted(paths):
            (device / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(self._bundle.device / path, device / path)  # no link: the command may write to it
        (device / MANIFEST).write_text(format_json(manifest), encoding="utf-8")

    def _is_finished(self, name: str) -> bool:
        """Tell whether all of a case's outputs are there and can be read, or a status."""
        handed_in = HandedIn(self._outputs / name, self._bundle.read_case(name))
        try:
            if handed_in.read_status().status == "done":
                handed_in.check_complete()
        except Exception:  # whatever a device writes: the case is run alone, and then judged
            return False
        return True
