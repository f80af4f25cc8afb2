"""A release, built of a clean checkout and unpacked as an installer does it; no network is needed."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.checkout import make_checkout

FAKES = Path(__file__).resolve().parents[1] / "conformance" / "support" / "fake_backends"
BUILD = "import sys; from setuptools import build_meta; print(getattr(build_meta, sys.argv[1])(sys.argv[2]))"


def build(kind: str, source: Path, target: Path) -> Path:
    """Build a ``wheel`` or an ``sdist`` of a folder, with the setuptools that is here; return the file."""
    command = [sys.executable, "-c", BUILD, f"build_{kind}", str(target)]
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(command, cwd=source, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return target / done.stdout.split()[-1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """What was built: the checkout, its commit, the files, and the folder into which the wheel was unpacked."""

    checkout: Path
    commit: str
    sdist: Path
    wheel: Path
    site: Path

    def run(self, *words: str, cwd: Path, site: Path | None = None) -> subprocess.CompletedProcess[str]:
        """Run ``python WORDS`` in a folder; it finds the release (or ``site``) before this checkout."""
        hidden = ("PYTEST_", "GITHUB_STEP_SUMMARY", "_ARGCOMPLETE")
        kept = {key: value for key, value in os.environ.items() if not key.startswith(hidden)}
        path = os.pathsep.join(map(str, (site or self.site, FAKES)))
        command = [sys.executable, *words]
        environment = kept | {"PYTHONPATH": path, "COLUMNS": "120"}
        return subprocess.run(
            command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=300, check=False
        )


@pytest.fixture(scope="package")
def release(tmp_path_factory: pytest.TempPathFactory) -> Release:
    pytest.importorskip("setuptools", minversion="77", reason="needs setuptools: pip install -e '.[test]'")
    folder = tmp_path_factory.mktemp("release")
    commit = make_checkout(folder / "suite")
    sdist, wheel = (build(kind, folder / "suite", folder / "dist") for kind in ("sdist", "wheel"))
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "site")
    return Release(checkout=folder / "suite", commit=commit, sdist=sdist, wheel=wheel, site=folder / "site")


@pytest.fixture
def empty(tmp_path: Path) -> Path:
    folder = tmp_path / "empty"
    folder.mkdir()
    return folder
