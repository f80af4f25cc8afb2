"""What Python has cached of the suite's modules is not executed by a run: such a file may hold anything."""

from __future__ import annotations

import importlib.util
import marshal
import os
import py_compile
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from fx_quant_conformance.conformance.machine.release import FIRST, PACKAGE, _list_planted
from fx_quant_conformance.reports.results import read_results
from tests.conformance.support.suite_runs import FAKES, clean_environment
from tests.support.checkout import make_checkout

PLANTED_MARK = b"PLANTED"
PLANTED = "print('PLANTED')\nVALUE = 'planted'\n"


def plant(source: Path, *, by_hash: bool = False) -> Path:
    """Write other code into Python's cache of a module, as Python would take it for that of its source."""
    about = source.stat()
    if by_hash:  # as pytest has it
        header = struct.pack("<I", 3) + importlib.util.source_hash(source.read_bytes())
    else:
        header = struct.pack("<III", 0, int(about.st_mtime) & 0xFFFFFFFF, about.st_size & 0xFFFFFFFF)
    cached = Path(importlib.util.cache_from_source(str(source)))
    cached.parent.mkdir(exist_ok=True)
    cached.write_bytes(importlib.util.MAGIC_NUMBER + header + marshal.dumps(compile(PLANTED, str(source), "exec")))
    return cached


@pytest.mark.parametrize("name", FIRST)
def test_what_is_cached_of_the_first_modules_is_compared_with_them(tmp_path: Path, name: str) -> None:
    """It is executed: nothing can tell Python before that not to."""
    source = tmp_path / name
    source.parent.mkdir(parents=True, exist_ok=True)
    source.write_text("VALUE = 1\n")
    py_compile.compile(str(source))
    assert list(_list_planted(tmp_path)) == []
    for by_hash in (True, False):
        cached = plant(source, by_hash=by_hash)
        assert list(_list_planted(tmp_path)) == [f"{cached} is not the code of {name}"]
    os.utime(source, (1, 1))
    assert list(_list_planted(tmp_path)) == [], "of an earlier source, which Python does not take"


def test_a_checkouts_conftest_has_a_cache_by_each_of_its_two_paths(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where Python is told to put caches elsewhere, they lie there by the path of the source."""
    monkeypatch.setattr(sys, "pycache_prefix", str(tmp_path / "caches"))
    (tmp_path / "suite" / PACKAGE).mkdir(parents=True)
    (tmp_path / "suite" / PACKAGE / "door.py").touch()
    source = tmp_path / "suite" / "conformance" / "conftest.py"
    source.parent.mkdir()
    source.write_text("VALUE = 1\n")
    (tmp_path / "suite" / PACKAGE / "conformance").symlink_to("../conformance")
    inside = tmp_path / "suite" / PACKAGE / "conformance" / "conftest.py"
    for path in (source, inside):
        cached = Path(importlib.util.cache_from_source(str(path)))
        cached.parent.mkdir(parents=True)
        assert list(_list_planted(tmp_path / "suite")) == []
        plant(path)
        name = path.relative_to(tmp_path / "suite").as_posix()
        assert list(_list_planted(tmp_path / "suite")) == [f"{cached} is not the code of {name}"]
        cached.unlink()


@pytest.mark.slow
def test_a_run_executes_no_planted_code(tmp_path: Path) -> None:
    """Nor does its worker, which starts anew."""
    commit = make_checkout(tmp_path / "suite")
    for name in ("conformance/run/options", "conformance/oracle/evaluate", "refimpl/convert/walk", "reports/text"):
        plant(tmp_path / "suite" / f"{name}.py")
    words = ("-m", "pytest", str(tmp_path / "suite" / "conformance"), "-p", "no:cacheprovider", "-n1")
    options = ("--backend=fakes:Good", "--profile=quick", "--claim=nn.Linear/*", f"--report-dir={tmp_path / 'report'}")
    environment = clean_environment() | {"PYTHONPATH": os.pathsep.join(map(str, (tmp_path / "suite", FAKES)))}
    done = subprocess.run(
        [sys.executable, *words, *options],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0 and "PLANTED" not in done.stdout + done.stderr, done.stdout + done.stderr
    before = list_cached(tmp_path / "suite")
    assert before <= {*FIRST, *(f"{PACKAGE}/{name}" for name in FIRST)}, before
    header = read_results(tmp_path / "report" / "results.jsonl").header
    assert header.suite_commit == commit, "what lies in a cache and is not executed changes no suite"


def list_cached(suite: Path) -> set[str]:
    """Return the suite's modules whose code was cached while it ran: they were not compiled from their sources."""
    cached = [path for path in suite.rglob("__pycache__/*.pyc") if PLANTED_MARK not in path.read_bytes()]
    sources = (path.parent.parent / f"{path.name.partition('.')[0]}.py" for path in cached)
    return {source.relative_to(suite).as_posix() for source in sources}
