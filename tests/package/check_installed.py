"""What `tox -e package` does: builds, checks and installs the package, and uses it as a stranger would.

It works in a temporary folder, outside of the checkout, whose settings pytest would find. Exit status: 0, or 1 with
what went wrong.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
OTHER = "def test_other():\n    pass\n\n\ndef test_that_fails():\n    assert [1] == [2]\n"


def run(*words: str | Path, cwd: Path = ROOT, status: int = 0) -> str:
    """Run a command, show it and what it prints, and return that. Raises SystemExit for another status."""
    print(f"$ {' '.join(map(str, words))}", flush=True)
    started = time.monotonic()
    hidden = ("PYTEST_", "PYTHONPATH", "VIRTUAL_ENV", "GITHUB_STEP_SUMMARY")
    kept = {key: value for key, value in os.environ.items() if not key.startswith(hidden)}
    done = subprocess.run(
        words, cwd=cwd, env=kept, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    print(f"{done.stdout}(status {done.returncode}, {time.monotonic() - started:.0f} s)\n", flush=True)
    if done.returncode != status:
        raise SystemExit(f"{words[0]}: ended with status {done.returncode}, not {status}")
    return done.stdout


def make_environment(folder: Path) -> Path:
    """Make an empty environment, and return the folder of its programs."""
    venv.create(folder, with_pip=True)
    return folder / "bin"


def run_other_project(programs: Path, folder: Path) -> str:
    """Run the tests of a project that has nothing to do with the suite; return what pytest prints, without times."""
    folder.mkdir(exist_ok=True)
    (folder / "test_other.py").write_text(OTHER, encoding="utf-8")
    return re.sub(
        r"^=+ (?=\d+ failed)| in \d+\.\d+s =+$|fx-quant-conformance-[^,\n]*, |, fx-quant-conformance-[^,\n]*",
        "",
        run(programs / "pytest", "-p", "no:cacheprovider", cwd=folder, status=1),
        flags=re.MULTILINE,
    )


def main(folder: Path) -> None:
    """Build, install and try the package in a folder. Raises SystemExit if something is not as it should be."""
    run(sys.executable, "-m", "build", "--outdir", folder / "dist", ROOT)
    files = sorted((folder / "dist").iterdir())
    run(sys.executable, "-m", "twine", "check", "--strict", *files)
    (wheel,) = (file for file in files if file.suffix == ".whl")
    programs = make_environment(folder / "environment")
    install = (programs / "python", "-m", "pip", "install", "-q", "-c", ROOT / "constraints.txt")
    # what the suite needs and pytest names in its header: black brings platformdirs, which is a plugin too
    run(*install, "pytest", "pytest-xdist", "pytest-timeout", "hypothesis", "black")
    before = run_other_project(programs, folder / "other")
    run(*install, f"{wheel}[digits]")
    empty = folder / "empty"
    empty.mkdir()
    suite = (programs / "pytest", "--pyargs", "fx_quant_conformance", "-n", "2")
    if "that the suite judged alone" in run(*suite, "--backend=qnnpack", "--profile=quick", cwd=empty):
        raise SystemExit("the run names foreign code where nothing but the suite is installed")
    if strange := {path.name for path in empty.iterdir()} - {".pytest_cache", "build"}:
        raise SystemExit(f"the run left {', '.join(sorted(strange))} in an empty folder")
    door = programs / "fx-quant-conformance"
    run(door, "--version", cwd=empty)
    run(door, "init", "my_npu", cwd=empty)
    # `init` gives a package that runs in float; what shows integers is left to the vendor (docs/vendor-guide.md).
    mine = ("--backend=my_npu.backend:MyNpu", "--without-execution-evidence")
    run(door, "certify", "-n", "2", "-q", *mine, cwd=empty / "my_npu")
    results = Path("build", "conformance", "qnnpack", "results.jsonl")  # nothing of my_npu is VERIFIED
    if "-dirty" not in run(door, "--version", cwd=empty):
        run(door, "report", "certify", results, "-o", "certificate", cwd=empty)
        run(door, "report", "verify", "certificate", "--rerun=3", cwd=empty)
    if (after := run_other_project(programs, folder / "other")) != before:
        raise SystemExit(f"another project's tests print something else where the suite is installed:\n{after}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        main(Path(temporary).resolve())
