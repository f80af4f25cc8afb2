"""refimpl and the suite where ``torch.ao.quantization`` cannot be imported: torch announces its removal."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fx_quant_conformance.refimpl.observers.decomposed import TORCHS_MODULE
from fx_quant_conformance.reports.results import Results, read_results

ROOT = Path(__file__).resolve().parents[1]
REMOVED = Path(__file__).parent / "support" / "without_ao_quantization"
FAKES = ROOT / "tests" / "conformance" / "support" / "fake_backends"
MINE = """
from fx_quant_conformance.backends.base import Representation
from fakes import FarOff

class Mine(FarOff):
    representation = Representation.DECOMPOSED
"""


def python(*words: str, folder: Path, is_removed: bool = True) -> subprocess.CompletedProcess[str]:
    """Run Python in a folder, with or without torch.ao.quantization."""
    paths = [str(REMOVED)] * is_removed + [str(ROOT), str(FAKES), str(folder)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    environment = {key: value for key, value in environment.items() if not key.startswith("PYTEST_")}
    command = [sys.executable, "-W", "ignore", *words]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)


def certify(folder: Path, *options: str, is_removed: bool = True) -> tuple[int, str, Path]:
    """Run the suite in profile quick: its status, what it prints, and the folder of its reports."""
    words = ("-m", "pytest", str(ROOT / "conformance"), "-p", "no:cacheprovider", "--profile=quick", *options)
    report = folder / f"report-{is_removed}"
    done = python(*words, f"--report-dir={report}", folder=folder, is_removed=is_removed)
    return done.returncode, done.stdout + done.stderr, report


@pytest.mark.slow
def test_the_package_is_gone(tmp_path: Path) -> None:
    """What makes the other tests tests: torch loads without the package, and it cannot be imported."""
    for name in ("torch.ao.quantization", TORCHS_MODULE, "torch.ao.quantization.quantize_fx"):
        done = python("-c", f"import torch; print('loaded'); import {name}", folder=tmp_path)
        assert done.returncode == 1 and done.stdout == "loaded\n"
        assert done.stderr.endswith(f"ModuleNotFoundError: No module named '{name}'\n") or "No module" in done.stderr


@pytest.mark.slow
def test_every_flow_gives_the_same_bits(tmp_path: Path) -> None:
    """Static, dynamic and trained models, to each form; the operators are ours."""
    said: dict[bool, dict[str, Any]] = {}
    for is_removed in (False, True):
        done = python(str(ROOT / "tests" / "support" / "all_flows.py"), folder=tmp_path, is_removed=is_removed)
        assert done.returncode == 0, done.stderr
        said[is_removed] = json.loads(done.stdout)
    assert said[True]["outputs"] == said[False]["outputs"]
    assert [len(forms) for forms in said[True]["outputs"].values()] == [3, 3, 3]
    assert said[True]["registrar"] == "fx_quant_conformance.refimpl.observers.decomposed" and said[True]["left"] == []
    assert said[False]["registrar"] == TORCHS_MODULE and said[False]["left"]


@pytest.mark.slow
def test_the_suite_judges_as_before(tmp_path: Path) -> None:
    """A claim of each kind: static, dynamic, trained, fused, per channel."""
    claims = ("--claim=nn.Linear/*", "--claim=nn.Conv2d+nn.BatchNorm2d/*", "--claim=operator.add/*")
    seen: dict[bool, Results] = {}
    for is_removed in (False, True):
        status, text, report = certify(tmp_path, "--backend=qnnpack", *claims, "--no-waivers", is_removed=is_removed)
        assert status in (0, 1), text
        seen[is_removed] = read_results(report / "results.jsonl")
    verdicts = [{claim.claim: (claim.verdict, claim.failing) for claim in run.claims} for run in seen.values()]
    assert verdicts[0] == verdicts[1] and len(verdicts[0]) > 20
    assert "internal error" not in json.dumps([claim.reason for claim in seen[True].claims])


@pytest.mark.slow
def test_a_script_of_a_failure_imports_who_registers_the_operators(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MINE)
    status, text, report = certify(tmp_path, "--backend=mine:Mine", "--claim=nn.Linear/static*")
    assert status == 1, text
    script = next((report / "scripts").glob("*.py"))
    assert "import fx_quant_conformance.refimpl.observers.decomposed  # registers the ops" in script.read_text()
    done = python(str(script), folder=tmp_path)
    assert done.returncode == 1 and "AssertionError" in done.stderr, done.stderr


@pytest.mark.slow
def test_configs_that_are_torchs_own_say_so(tmp_path: Path) -> None:
    status, text, _ = certify(tmp_path, "--backend=reference-tensorrt")
    assert status == 4, text
    assert "the config tensorrt is read from torch.ao.quantization.backend_config, which torch " in text
    assert "Traceback" not in text
