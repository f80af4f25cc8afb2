"""refimpl and the suite with a torch that has no ``torch.ao``, no quantized dtypes and no quantized tensors."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from fx_quant_conformance.refimpl.observers.decomposed import TORCHS_MODULE
from fx_quant_conformance.reports.results import Results, read_results
from fx_quant_conformance.reports.schema import Check
from fx_quant_conformance.reports.verdicts import Verdict
from tests.support.torchao import ABSENCE, needs_torchao

ROOT = Path(__file__).resolve().parents[1]
REMOVED = Path(__file__).parent / "support" / "later_torch"
FAKES = ROOT / "tests" / "conformance" / "support" / "fake_backends"
NO_TENSORS = f"torch {torch.__version__} has no quantized tensors"
MINE = """
from fx_quant_conformance.backends.base import Representation
from fakes import FarOff

class Mine(FarOff):
    representation = Representation.DECOMPOSED
"""


def python(*words: str, folder: Path, is_removed: bool = True, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run Python in a folder, with a torch that lacks these names or with this one."""
    paths = [str(REMOVED)] * is_removed + [str(ROOT), str(FAKES), str(folder)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)} | variables
    environment = {key: value for key, value in environment.items() if not key.startswith("PYTEST_")}
    command = [sys.executable, "-W", "ignore", *words]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)


def certify(folder: Path, *options: str, is_removed: bool = True) -> tuple[int, str, Path]:
    """Run the suite in profile quick: its status, what it prints, and the folder of its reports."""
    words = ("-m", "pytest", str(ROOT / "conformance"), "-p", "no:cacheprovider", "--profile=quick", *options)
    report = folder / f"report-{is_removed}"
    done = python(*words, f"--report-dir={report}", folder=folder, is_removed=is_removed)
    return done.returncode, done.stdout + done.stderr, report


ALLOWED = [f"fx_quant_conformance.refimpl.lower.{name}" for name in ("packing", "sites", "table", "whole_range")]
"""What imports torch's quantized modules."""
IMPORTS = """
import importlib, pkgutil, sys, torch
import fx_quant_conformance
gone = [name for name in %r.split() if hasattr(torch, name)]
try:
    import torch.ao.nn
    gone.append("torch.ao.nn")
except ModuleNotFoundError:
    pass
failed = {}
names = [module.name for module in pkgutil.walk_packages(fx_quant_conformance.__path__, "fx_quant_conformance.")]
for name in names:
    if not name.endswith("__main__"):
        try:
            importlib.import_module(name)
        except Exception as error:
            failed[name] = f"{type(error).__name__}: {error}"
print(repr((gone, failed, len(names))))
"""
GONE = "ao quint8 qint8 qint32 quint4x2 quantize_per_tensor quantize_per_channel quantize_per_tensor_dynamic"


@pytest.mark.slow
def test_everything_but_what_lowers_to_torchs_modules_imports(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(IMPORTS % GONE)  # to a module of this name they are gone
    done = python("-c", "import conftest", folder=tmp_path, TORCHAO_IS_USED="1")
    assert done.returncode == 0, done.stderr
    left, failed, count = ast.literal_eval(done.stdout)
    assert left == [] and count > 250
    unexpected = {name: error for name, error in failed.items() if name not in ALLOWED}
    assert not unexpected or (ABSENCE and all("needs torchao" in error for error in unexpected.values())), unexpected


@pytest.mark.slow
def test_the_package_is_gone(tmp_path: Path) -> None:
    """What makes the other tests tests: torch loads without the package, and it cannot be imported."""
    for name in ("torch.ao.quantization", TORCHS_MODULE, "torch.ao.quantization.quantize_fx"):
        done = python("-c", f"import torch; print('loaded'); import {name}", folder=tmp_path)
        assert done.returncode == 1 and done.stdout == "loaded\n"
        assert done.stderr.endswith(f"ModuleNotFoundError: No module named '{name}'\n") or "No module" in done.stderr


@pytest.mark.slow
def test_every_flow_gives_the_same_bits(tmp_path: Path) -> None:
    """Static, trained and dynamic models, layers of each rank, recurrent ones, tables; the operators are ours."""
    said: dict[bool, dict[str, Any]] = {}
    for is_removed in (False, True):
        done = python(str(ROOT / "tests" / "support" / "all_flows.py"), folder=tmp_path, is_removed=is_removed)
        assert done.returncode == 0, done.stderr
        said[is_removed] = json.loads(done.stdout)
    before, later = said[False]["outputs"], said[True]["outputs"]
    assert len(later) == 7
    for flow, forms in later.items():
        assert {form: forms[form] == before[flow][form] for form in forms} == {
            "decomposed": True,
            "exported": True,
            "quantized": False,
            "lowered": False,
        }
        assert {forms[form].partition(":")[0] for form in ("quantized", "lowered")} == {NO_TENSORS}
    assert said[True]["registrar"] == "fx_quant_conformance.refimpl.observers.decomposed" and said[True]["left"] == []
    assert said[False]["registrar"] == TORCHS_MODULE and said[False]["left"]


CLAIMS = {
    "reference": (
        *("nn.Conv2d+nn.BatchNorm2d+nn.ReLU/*", "operator.add/*", "nn.Embedding*/*", "nn.GRUCell/*"),
        *("nn.Linear/*", "nniqat.ConvBnReLU1d/*", "nn.Sigmoid/*"),
    ),
    "reference, further": ("nn.LSTM*/*", "nn.ConvTranspose1d/*", "nniqat.LinearBn1d/*"),
    "onnxruntime": ("nn.Linear/*", "nni.ConvBnReLU2d/*", "operator.add/*", "nniqat.ConvBn1d/*", "nn.Sigmoid/*"),
}


@pytest.mark.slow
@pytest.mark.parametrize("claims", CLAIMS)
def test_the_suite_judges_as_before(tmp_path: Path, claims: str) -> None:
    """Claims of each kind: static, dynamic, trained, fused, per channel, tables, recurrent."""
    backend = claims.partition(",")[0]
    if backend == "onnxruntime":
        pytest.importorskip("onnxruntime")
    seen: dict[bool, Results] = {}
    for is_removed in (False, True):
        options = (f"--backend={backend}", *(f"--claim={claim}" for claim in CLAIMS[claims]), "--no-waivers")
        status, text, report = certify(tmp_path, *options, is_removed=is_removed)
        assert status in (0, 1), text
        seen[is_removed] = read_results(report / "results.jsonl")
    rows = [[(*facts_of(check), check.max_lsb, check.slack_lsb) for check in run.checks] for run in seen.values()]
    assert rows[0] == rows[1] and len(rows[0]) > 100
    assert "internal error" not in json.dumps([claim.reason for claim in seen[True].claims])


def facts_of(check: Check) -> tuple[object, ...]:
    """What a check says, but for its time."""
    return check.claim, check.stage, check.rule, check.verdict, check.cases, check.failing


MODEL = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Linear(4, 5)

    def forward(self, x):
        return self.head(torch.relu(self.norm(self.conv(x))).mean((2, 3)))

def net():
    return Net(), (torch.randn(2, 3, 8, 8),)
"""


@pytest.mark.slow
@pytest.mark.skipif(
    not torch.cpu._is_vnni_supported(), reason="ONNX Runtime's kernels saturate without VNNI (finding 122)"
)
def test_a_users_model_is_judged_by_both_flows(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    (tmp_path / "mynet.py").write_text(MODEL)
    options = ("--backend=onnxruntime", "--model=mynet:net", "--claim=model/own/*")
    status, text, report = certify(tmp_path, *options)
    assert status == 0, text
    models = {model.model.split("/")[3]: model.verdict for model in read_results(report / "results.jsonl").models}
    assert models["ptq"] is Verdict.VERIFIED and models.get("pt2e", Verdict.VERIFIED) is Verdict.VERIFIED


@pytest.mark.slow
def test_a_device_is_judged_by_files(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MINE.replace("FarOff", "Good"))
    door, select = ("-m", "fx_quant_conformance"), ("--claim=nn.Linear/static*", "--profile=quick")
    made = python(*door, "export", "--backend=mine:Mine", *select, "--format=fx", "-o", "bundle", folder=tmp_path)
    assert made.returncode == 0, made.stderr
    ran = python(*door, "run", "--backend=mine:Mine", "bundle/device", "outputs", folder=tmp_path)
    assert ran.returncode == 0, ran.stderr
    words = ("judge", "bundle", "outputs")
    judged = python(*door, *words, folder=tmp_path)
    assert judged.returncode == 0 and "2 claims: 2 VERIFIED" in judged.stdout, judged.stdout + judged.stderr


@pytest.mark.slow
@needs_torchao
def test_what_a_quantizer_annotates_is_read(tmp_path: Path) -> None:
    said = []
    for is_removed in (False, True):
        spec = "fx_quant_conformance.backends.pt2e_x86:make_quantizer"
        words = ("-m", "fx_quant_conformance", "claims-of", spec, "--pattern=nn.Linear*", "-o", "found.py")
        done = python(*words, folder=tmp_path, is_removed=is_removed, TORCHAO_IS_USED="1")
        assert done.returncode == 0, done.stderr
        said.append((done.stdout, (tmp_path / "found.py").read_text()))
    assert said[0] == said[1] and "DTypeConfig(" in said[0][1]


@pytest.mark.slow
def test_torchs_engines_say_that_they_are_gone(tmp_path: Path) -> None:
    status, text, _ = certify(tmp_path, "--backend=qnnpack", "--claim=nn.Linear/*")
    assert status == 5, text
    assert f"{NO_TENSORS}, which its engines compute with" in text and "Traceback" not in text


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
