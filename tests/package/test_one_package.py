"""All modules belong to one package, and none is loaded under two names."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fx_quant_conformance.conformance.machine.fork_server import PRELOADED
from fx_quant_conformance.conformance.machine.release import FOLDERS, PACKAGE
from tests.conformance.support.suite_runs import REPO, clean_environment, run

OF_PYTEST = {"conformance", "conformance.conftest", "conformance.test_claims"}
"""What pytest imports of a checkout by the path of its folder: two files, and the marker of their package."""
TELLS = """
import json, os, sys
from pathlib import Path

def tell(name):
    found = {}
    for module, each in list(sys.modules.items()):
        path = getattr(each, "__file__", None)
        if path and os.path.realpath(path).startswith(%r):
            found.setdefault(os.path.realpath(path), []).append(module)
    Path(%r, f"{name}{os.getpid()}.json").write_text(json.dumps(list(found.values())))
"""
OF_SUITE = tuple(f"{REPO / folder}{os.sep}" for folder in (*FOLDERS, PACKAGE))
OF_RUN = "def pytest_sessionfinish():\n    tell('run')\n"


def read(folder: Path) -> list[list[str]]:
    """The names under which each module of the suite was loaded, of every process that told."""
    return [names for file in folder.glob("*.json") for names in json.loads(file.read_text())]


def test_names_of_the_packages_are_refused_without_the_one_that_they_are_in() -> None:
    for name in sorted({*FOLDERS} - {"conformance"}):
        done = subprocess.run([sys.executable, "-c", f"import {name}"], cwd=REPO, capture_output=True, text=True)
        said = f"ImportError: {name} is gone: its package is fx_quant_conformance.{name} now; "
        assert done.returncode == 1 and done.stderr.splitlines()[-1].startswith(said)


@pytest.mark.slow
@pytest.mark.parametrize("workers", ["-n0", "-n1"])
def test_no_module_of_a_checkout_has_two_names_in_a_run(tmp_path: Path, workers: str) -> None:
    (tmp_path / "telling.py").write_text(TELLS % (OF_SUITE, str(tmp_path)) + OF_RUN)
    path = f"{clean_environment()['PYTHONPATH']}:{tmp_path}"
    ran = run(tmp_path, "fakes:Good", "-p", "telling", workers, PYTHONPATH=path)
    assert ran.status == 0, ran.out + ran.err
    found = read(tmp_path)
    assert any("fx_quant_conformance.conformance.run.session" in names for names in found)
    twice = [set(names) for names in found if len(names) > 1]
    assert twice == [{"conformance", "fx_quant_conformance.conformance"}] * len(list(tmp_path.glob("*.json")))
    others = {name for names in found for name in names if not name.startswith("fx_quant_conformance")}
    assert others == OF_PYTEST


@pytest.mark.slow
def test_no_module_has_two_names_in_a_judge_or_a_worker(tmp_path: Path) -> None:
    """They are made of a process that has these modules, and import others by the names that these have."""
    code = TELLS % (OF_SUITE, str(tmp_path)) + f"import {', '.join(PRELOADED)}\ntell('child')\n"
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=clean_environment(), check=True)
    found = read(tmp_path)
    assert len(found) > 100 and all(len(names) == 1 and names[0].startswith("fx_quant_") for names in found)
