"""Which suite this is: its version and its commit, in a checkout, in an unpacked sdist and in an installed release.

A release says of itself from which commit it was built (`COMMIT`, which ``setup.py`` writes), and its RECORD has the
digest of every file. Nothing here needs another package: the build imports it too.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import subprocess
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.metadata import Distribution, distributions
from pathlib import Path

from conformance.machine.toml import TomlError, parse_toml

DISTRIBUTION = "fx-quant-conformance"
COMMIT = Path("conformance", "machine", "commit.txt")
"""The file of a release that names the commit, below the folder of the packages; a checkout does not have it."""
UNKNOWN = "unknown"
_OWN = Path(__file__).resolve()


def read_suite_version(root: Path) -> str:
    """Return the version of the suite whose packages lie in ``root``: a checkout's, or a release's; else "unknown"."""
    try:
        project = parse_toml((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        if project["name"] == DISTRIBUTION:  # beside installed packages may lie anyone's
            return str(project["version"])
    except (OSError, KeyError, TomlError):
        pass
    return next((each.version for each in _find_distributions(root)), UNKNOWN)


def read_suite_commit(root: Path) -> str:
    """Return the git commit of the suite whose packages lie in ``root``: a checkout's, or that of which it was built.

    It ends in "-dirty" where files differ from the commit, or from a release's RECORD. It is "unknown" if neither git
    nor a release tells it.
    """
    if (root / ".git").exists():
        return _read_checkout(root)
    try:
        commit = (root / COMMIT).read_text(encoding="utf-8").strip()
    except OSError:
        return UNKNOWN
    is_changed = find_change(root) and commit != UNKNOWN and not commit.endswith("-dirty")
    return f"{commit}-dirty" if is_changed else commit


@cache
def find_change(root: Path) -> str:
    """Say in what the release whose packages lie in ``root`` is not as it was built; "" if in nothing.

    The first file is named that is missing, differs from its digest in RECORD or, as a module, is not in RECORD. A
    checkout is no release: git knows its changes.
    """
    if (root / ".git").exists():
        return ""
    record = _read_record(root)
    return "no RECORD names its files" if record is None else next(_list_changes(root, record), "")


def _read_checkout(root: Path) -> str:
    commit = _run_git(root, "rev-parse", "--verify", "HEAD")
    changes = _run_git(root, "status", "--porcelain")
    if commit is None or changes is None:
        return UNKNOWN
    return f"{commit}-dirty" if changes else commit


def _find_distributions(root: Path) -> Iterator[Distribution]:
    return iter(distributions(name=DISTRIBUTION, path=[str(root)]))


def _read_record(root: Path) -> dict[str, str] | None:
    """Return the digests of the files of the packages that are installed in ``root``, by their paths below it.

    None if no RECORD there names this module. That of an editable installation does not: a checkout is not installed.
    (`Distribution.files` leaves out files that are missing.)
    """
    for each in _find_distributions(root):
        rows = [row for row in csv.reader((each.read_text("RECORD") or "").splitlines()) if len(row) == 3]
        record = {path: digest for path, digest, _ in rows if not path.partition("/")[0].endswith((".dist-info", ".."))}
        if any((root / path).resolve() == _OWN for path in record):
            return record
    return None


def _list_changes(root: Path, record: Mapping[str, str]) -> Iterator[str]:
    for path, stated in record.items():
        if path.endswith(".pyc"):  # pip compiles them, and RECORD has no digest of them
            continue
        try:
            data = (root / path).read_bytes()
        except OSError:
            yield f"{path} is missing"
            continue
        if stated != _spell_digest(data):
            yield f"{path} differs from its digest in RECORD"
    for package in sorted({path.partition("/")[0] for path in record}):
        for module in sorted((root / package).rglob("*.py")):
            if module.relative_to(root).as_posix() not in record:
                yield f"{module.relative_to(root).as_posix()} is not in RECORD"


def _spell_digest(data: bytes) -> str:
    """Return a digest as installers write it into RECORD."""
    return "sha256=" + base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()


def _run_git(root: Path, *arguments: str) -> str | None:
    command = ["git", "-C", str(root), *arguments]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
