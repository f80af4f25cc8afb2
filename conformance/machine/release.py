"""Which suite this is: its version and its commit, in a checkout, in an unpacked sdist and in an installed release.

A release says of itself from which commit it was built (`COMMIT`, which ``setup.py`` writes), and its RECORD has the
digest of every file. A checkout is held to the objects of its commit, file by file: ``git status`` believes an index, a
configuration and lists of what to ignore, which anyone may change. Nothing here needs another package: the build
imports it too. PYTEST_DONT_REWRITE: pytest caches it as it is.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import marshal
import os
import struct
import subprocess
import sys
from collections.abc import Collection, Iterator, Mapping
from importlib.machinery import all_suffixes
from importlib.metadata import Distribution, distributions
from importlib.util import cache_from_source, source_hash
from itertools import chain
from pathlib import Path

from fx_quant_conformance.conformance.machine.toml import TomlError, parse_toml

DISTRIBUTION = "fx-quant-conformance"
PACKAGE = "fx_quant_conformance"
"""The package that is installed, and that all modules of the suite belong to."""
FOLDERS = ("backends", "conformance", "refimpl", "reports")
"""The packages inside of it: in a checkout they lie beside it, and links in it lead to them."""
COMMIT = Path("conformance", "machine", "commit.txt")
"""The file of a release that names the commit, below the folder of the packages; a checkout does not have it."""
UNKNOWN = "unknown"
_OWN = Path(__file__).resolve()
ROOT = _OWN.parents[2]
"""The folder that `FOLDERS` lie in: a checkout, or the installed package itself."""
_CODE = tuple(all_suffixes())
"""How the names of files end that Python imports: sources, compiled code, extensions."""
_OF_PYTEST = frozenset(
    {"pytest.ini", ".pytest.ini", "pytest.toml", ".pytest.toml", "pyproject.toml", "tox.ini", "setup.cfg"}
)
"""Names of files that tell pytest what to load."""
FIRST = (
    "__init__.py",
    "__main__.py",
    "door.py",
    "plugin.py",
    "conformance/__init__.py",
    "conformance/conftest.py",
    "conformance/machine/__init__.py",
    "conformance/machine/bytecode.py",
    "conformance/machine/compiled.py",
    "conformance/machine/release.py",
    "conformance/machine/toml.py",
)
"""The modules of the package that a run may load before it compiles the suite from its sources (`bytecode`)."""
_BY_TIME, _BY_HASH = 0, 3
"""How a cached file names its source: by time and size, or by its hash."""
_WORD = 0xFFFFFFFF
_LINK, _FOLDER = "120000", "160000"
"""How git spells the mode of a symbolic link, and of another repository."""


def read_suite_version(root: Path) -> str:
    """Return the version of the suite whose packages lie in ``root``: a checkout's, or a release's; else "unknown"."""
    if not _is_checkout(root):
        return next((each.version for each in _find_distributions(root)), UNKNOWN)
    try:
        return str(parse_toml((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"])
    except (OSError, KeyError, TomlError):
        return UNKNOWN


def find_package(root: Path) -> Path:
    """Return the folder of the suite's package whose packages lie in ``root``."""
    return root / PACKAGE if _is_checkout(root) else root


def _is_checkout(root: Path) -> bool:
    """Tell whether a folder is a checkout, or an unpacked sdist: the package lies in it, and is not itself."""
    return (root / PACKAGE / "door.py").is_file()


def read_suite_commit(root: Path) -> str:
    """Return the git commit of the suite whose packages lie in ``root``: a checkout's, or that of which it was built.

    It ends in "-dirty" where files differ from the commit, or from a release's RECORD. It is "unknown" if neither git
    nor a release tells it.
    """
    if (root / ".git").exists():
        commit = _read_head(root)
    else:
        try:
            commit = (root / COMMIT).read_text(encoding="utf-8").strip()
        except OSError:
            commit = UNKNOWN
    is_changed = commit != UNKNOWN and not commit.endswith("-dirty") and find_change(root)
    return f"{commit}-dirty" if is_changed else commit


def find_change(root: Path) -> str:
    """Say in what the packages in ``root`` are not as their commit, or their release, has them; "" if in nothing.

    The first file is named that is missing, differs, or is code that the commit, or the release, does not have.
    """
    if (root / ".git").exists():
        changes = _list_differences(root)
    else:
        record = _read_record(root)
        changes = iter(["no RECORD names its files"]) if record is None else _list_changes(root, record)
    return next(chain(changes, _list_planted(root)), "")


def _list_planted(root: Path) -> Iterator[str]:
    """Yield what is cached of the modules that a run loads first, and Python or pytest takes, but is not their code."""
    bare = [root / name for name in FIRST if name.startswith("conformance/")]  # as pytest imports a checkout's
    for source in dict.fromkeys([*(find_package(root) / name for name in FIRST), *bare]):
        folder = Path(cache_from_source(str(source))).parent
        for cached in sorted(folder.glob(f"{source.stem}.{sys.implementation.cache_tag}*.pyc")):
            if (".opt-" in cached.name) == bool(sys.flags.optimize) and not _is_faithful(cached, source):
                yield f"{cached} is not the code of {source.relative_to(root).as_posix()}"


def _is_faithful(cached: Path, source: Path) -> bool:
    """Tell whether a cached file has a source's code, or says itself that it is of another source, and is not taken."""
    try:
        about, text, data = source.stat(), source.read_bytes(), cached.read_bytes()
        time_and_size = struct.pack("<II", int(about.st_mtime) & _WORD, about.st_size & _WORD)
        named = {_BY_TIME: time_and_size, _BY_HASH: source_hash(text)}.get(data[4], data[8:16])
        if data[8:16] != named:
            return True
        return bool(marshal.loads(data[16:]) == compile(text, str(source), "exec", dont_inherit=True))
    except FileNotFoundError:  # without its source it is not loaded
        return True
    except (OSError, EOFError, IndexError, ValueError, TypeError):
        return False


# -- checkouts --------------------------------------------------------------------------------------------------------


def _read_head(root: Path) -> str:
    output = _run_git(root, "rev-parse", "--verify", "HEAD")
    return UNKNOWN if output is None else output.decode().strip()


def _list_differences(root: Path) -> Iterator[str]:
    """Yield in what a checkout differs from its commit, a line each."""
    listing = _run_git(root, "ls-tree", "-r", "-z", "HEAD")
    if listing is None:
        yield "git cannot list the files of its commit"
        return
    tracked = set[str]()
    for entry in filter(None, listing.split(b"\0")):
        about, _, name = entry.partition(b"\t")
        mode, _, digest = about.decode().split()
        path = os.fsdecode(name)
        tracked.add(path)
        if _digest_blob(root / path, mode, len(digest)) != digest:
            yield f"{path} differs from its commit, or is missing"
    yield from _list_strangers(root, tracked)


def _digest_blob(path: Path, mode: str, length: int) -> str:
    """Return a file's digest as git names its blob: SHA-1, or SHA-256 where digests have 64 digits; "" without one."""
    try:
        if path.is_symlink() != (mode == _LINK) or mode == _FOLDER:
            return ""
        data = os.fsencode(os.readlink(path)) if mode == _LINK else path.read_bytes()
    except OSError:
        return ""
    digest = hashlib.sha256 if length == 64 else hashlib.sha1
    return digest(b"blob %d\0" % len(data) + data).hexdigest()


def _list_strangers(root: Path, tracked: Collection[str]) -> Iterator[str]:
    """Yield what the commit does not have, beside its files, and Python imports, pytest reads, or the suite may read.

    Python's caches do not count: a run does not read them (`conformance.machine.bytecode`).
    """
    folders = {"", *(parent.as_posix() for path in tracked for parent in Path(path).parents)} - {"."}
    for folder in sorted(folders):
        for entry in os.scandir(root / folder):
            path = f"{folder}/{entry.name}" if folder else entry.name
            if path in tracked or path in folders:
                continue
            is_own = folder.partition("/")[0] in (PACKAGE, *FOLDERS)
            is_file = not entry.is_dir()
            if _is_package(entry.path) or (is_file and (is_own or entry.name.endswith(_CODE) or path in _OF_PYTEST)):
                yield f"{path} is not in its commit"


def _is_package(folder: str) -> bool:
    return any(os.path.exists(os.path.join(folder, f"__init__{suffix}")) for suffix in _CODE)


def _run_git(root: Path, *arguments: str) -> bytes | None:
    """Return what git says of the repository of ``root``, whatever its variables name; None if it does not."""
    command = ["git", f"--git-dir={root / '.git'}", "--no-replace-objects", *arguments]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}
    try:
        return subprocess.run(command, capture_output=True, env=environment, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None


# -- releases ---------------------------------------------------------------------------------------------------------


def _find_distributions(root: Path) -> Iterator[Distribution]:
    """Yield the installed distributions of which ``root`` is the package."""
    return iter(distributions(name=DISTRIBUTION, path=[str(root.parent)]))


def _read_record(root: Path) -> dict[str, str] | None:
    """Return the digests of the files of the package that is installed as ``root``, by their paths beside it.

    None if no RECORD there names this module. That of an editable installation does not: a checkout is not installed.
    (`Distribution.files` leaves out files that are missing.)
    """
    for each in _find_distributions(root):
        rows = [row for row in csv.reader((each.read_text("RECORD") or "").splitlines()) if len(row) == 3]
        record = {path: digest for path, digest, _ in rows if not path.partition("/")[0].endswith((".dist-info", ".."))}
        if any((root.parent / path).resolve() == _OWN for path in record):
            return record
    return None


def _list_changes(root: Path, record: Mapping[str, str]) -> Iterator[str]:
    for path, stated in record.items():
        if path.endswith(".pyc") and Path(path).parent.name == "__pycache__":  # pip compiles them without a digest
            continue
        try:
            data = (root.parent / path).read_bytes()
        except OSError:
            yield f"{path} is missing"
            continue
        if stated != _format_digest(data):
            yield f"{path} differs from its digest in RECORD"
    for package in sorted({path.partition("/")[0] for path in record}):
        for file in sorted((root.parent / package).rglob("*")):
            name = file.relative_to(root.parent).as_posix()
            if file.name.endswith(_CODE) and file.parent.name != "__pycache__" and name not in record:
                yield f"{name} is not in RECORD"


def _format_digest(data: bytes) -> str:
    """Return a digest as installers write it into RECORD."""
    return "sha256=" + base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
