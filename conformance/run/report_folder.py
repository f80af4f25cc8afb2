"""The folder of a run's report: locked while the run lasts, and nothing of a user's in it is ever replaced.

What an earlier run has written says its results file: the texts of the scripts, the digest of the waivers, and its own
digest, which its page states. That alone gives way to the new run; anything else where a run writes is refused. No link
in the folder is followed: files are written aside, and then renamed.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from fx_quant_conformance.conformance.machine.whole_files import UNFINISHED, write_whole
from fx_quant_conformance.conformance.run.device import CALLS
from fx_quant_conformance.conformance.vectors.files import remove
from fx_quant_conformance.reports.handed_in import COMMAND
from fx_quant_conformance.reports.reading import FileFault, open_to_append, read_bytes
from fx_quant_conformance.reports.results import Results, ResultsError, read_results

if sys.platform != "win32":
    import fcntl

RESULTS, HTML, SCRIPTS = "results.jsonl", "report.html", "scripts"
WAIVERS = "waivers.toml"
"""Name of the copy of the waivers, for a certificate."""
KEPT = "results.resumed.jsonl"
"""Name of the earlier results if the new ones take their place."""
_ASIDE = f"{UNFINISHED}{RESULTS}"
"""Name of the new ones until they have all that is taken from the earlier."""
LOCK = ".lock"


class FolderError(Exception):
    """A folder cannot take the report; one line."""


class ReportFolder:
    """A folder that this process alone writes a report to, until it is released or the process ends."""

    def __init__(self, path: Path) -> None:
        """Make and lock a folder. Raises FolderError if it cannot be written to, or another run has it."""
        self.path = path
        self.results = path / RESULTS
        """Where the results are to be written."""
        try:
            path.mkdir(parents=True, exist_ok=True)
            self._lock = open_to_append(path / LOCK, follows_links=False)
        except OSError as error:
            raise FolderError(f"cannot write to {path}: {error.strerror}") from error
        except FileFault as fault:
            raise FolderError(f"cannot write to {path}: {LOCK} {fault}") from fault
        try:
            if sys.platform != "win32":
                fcntl.lockf(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # processes that this one forks do not hold it
        except OSError as error:
            self._lock.close()
            raise FolderError(f"another run writes to {path}; wait for it, or name another folder") from error

    def release(self) -> None:
        """Let another run have the folder."""
        (self.path / _ASIDE).unlink(missing_ok=True)
        self._lock.close()

    def clear(self, waivers: bytes | None = None, *, keeps_results: bool = False) -> None:
        """Remove what an earlier run has written; with ``keeps_results`` not its results, which `put_results` replaces.

        ``waivers``: those of this run; a file with just these, as the user's own, stays. Raises FolderError, before
        anything is removed, for a file that no earlier run has written, and if one cannot be removed.
        """
        target = self.path / RESULTS
        own = list(_list_own(self.path, _read_earlier(target), waivers))
        if keeps_results:
            _read_earlier(self.path / KEPT)
        try:
            for path in own:
                remove(path)
            if keeps_results:
                self.results = self.path / _ASIDE
            write_whole(self.results, b"")
        except OSError as error:
            raise FolderError(f"cannot write to {self.path}: {error.strerror}") from error

    def put_results(self) -> None:
        """Have results that were begun aside take their place; the earlier ones are kept. Raises FolderError.

        A run that is killed at any time leaves the one or the other under the name.
        """
        target = self.path / RESULTS
        if self.results == target:
            return
        try:
            write_whole(self.path / KEPT, target.read_bytes())
            self.results = self.results.replace(target)
        except OSError as error:
            raise FolderError(f"cannot write to {self.path}: {error.strerror}") from error

    def write(self, name: str, data: bytes) -> None:
        """Write a file, in the place of a link too. Raises OSError."""
        write_whole(self.path / name, data)


def _read_earlier(path: Path) -> Results | None:
    """Return an earlier run's results; None where there are none, as of a run that ended before its first row."""
    if not os.path.lexists(path) or not _read(path):
        return None
    try:
        return read_results(path)
    except ResultsError as error:
        raise _refuse(path) from error


def _list_own(folder: Path, earlier: Results | None, waivers: bytes | None) -> Iterator[Path]:
    """Yield what an earlier run has written beside its results. Raises FolderError for what it has not."""
    scripts, copy, page, calls = (folder / name for name in (SCRIPTS, WAIVERS, HTML, CALLS))
    if os.path.lexists(scripts) and not _is_folder(scripts):
        raise _refuse(scripts)
    texts = {row.script_path: row.script.encode() for row in earlier.judged} if earlier else {}
    for path in sorted(scripts.glob("*.py")):
        yield _hold(path, _read(path) == texts.get(f"{SCRIPTS}/{path.name}"))
    if os.path.lexists(copy) and (data := _read(copy)) != waivers:
        known = earlier.header.waivers.get("sha256") if earlier else None
        yield _hold(copy, hashlib.sha256(data).hexdigest() == known)
    if os.path.lexists(page):
        digest = earlier.footer.sha256 if earlier and earlier.footer else None
        yield _hold(page, digest is not None and digest.encode() in _read(page))
    if os.path.lexists(calls):
        backend = str(earlier.header.options.get("backend")) if earlier else ""
        yield _hold(calls, _is_folder(calls) and backend.startswith(COMMAND))


def _hold(path: Path, is_own: bool) -> Path:
    """Return the path of what is our own. Raises FolderError for other files."""
    if not is_own:
        raise _refuse(path)
    return path


def _read(path: Path) -> bytes:
    try:
        return read_bytes(path, follows_links=False)
    except FileFault as fault:
        raise _refuse(path) from fault


def _is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def _refuse(path: Path) -> FolderError:
    return FolderError(f"{path} is not what an earlier run has written: move it away, or name another folder")
