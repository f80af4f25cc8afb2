"""The machine in C: its claims hold, and each of its seeded faults is refuted where it touches and nowhere else."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

from fx_quant_conformance.conformance.run.elsewhere import adopt_bundle
from fx_quant_conformance.conformance.run.export import export
from fx_quant_conformance.conformance.run.judging import open_workplaces, rows_of
from fx_quant_conformance.conformance.run.options import Options
from fx_quant_conformance.conformance.run.session import open_session
from fx_quant_conformance.reports.handed_in import VECTORS
from fx_quant_conformance.reports.schema import ClaimResult
from tests.support.warm_python import run_python

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "c_machine"
BACKEND = "examples.c_machine.config:CMachine"
ENVIRONMENT = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))}
STRICT = ("-std=c99", "-O2", "-Wall", "-Wextra", "-Wpedantic", "-Werror")
QUICK = ("-std=c99", "-O0", "-Wall", "-Wextra", "-Wpedantic", "-Werror")
SANITIZED = ("-std=c99", "-g", "-O1", "-fsanitize=undefined,address", "-fno-sanitize-recover=all")
SOME = (
    "nn.Conv2d/*/ptq/*",
    "nn.Conv2d+nn.ReLU/*/ptq/*",
    "nn.Linear/*/ptq/*",
    "nn.ReLU/*/ptq/*",
    "operator.add/*/ptq/*",
    "operator.mul/*/ptq/*",
    "nn.MaxPool2d/*/ptq/*",
    "nn.AvgPool2d/*",
    "torch.cat/*/ptq/*",
    "nn.Sigmoid/*/ptq/*",
)
"""Claims that the faults are told apart by. The cases of an op are divided among its claims, and the averages whose
divisor differs at the border are those of QAT."""
WEIGHTED = {"nn.Conv2d", "nn.Conv2d+nn.ReLU", "nn.Linear"}
SEEDED: Mapping[int, tuple[set[str], str]] = {
    1: (WEIGHTED | {"operator.add", "operator.mul", "nn.AvgPool2d", "torch.cat"}, "the shift rounds down"),
    2: ({"nn.Conv2d", "nn.Conv2d+nn.ReLU"}, "padding is no zero"),
    3: (WEIGHTED, "a sum of products wraps at 16 bits"),
    4: (WEIGHTED, "a scale per channel is that of channel 0"),
    5: ({"nn.Conv2d+nn.ReLU", "nn.ReLU"}, "a relu ends at the integer 0"),
    6: ({"nn.AvgPool2d"}, "an average divides by the kernel's size"),
    7: ({"torch.cat"}, "the second operand keeps its grid"),
    8: ({"nn.Sigmoid"}, "the table is read one entry too far"),
}
"""The patterns that a fault must refute, and why these: it is in arithmetic that they have and the others have not."""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler: there is no command cc"),
]


def build(folder: Path, *flags: str) -> Path:
    """Compile the machine; return the program."""
    program = folder / "machine"
    subprocess.run(["cc", *flags, str(FOLDER / "machine.c"), "-o", str(program), "-lm"], check=True)
    return program


def run(program: Path, bundle: Path, outputs: Path, *cases: str) -> None:
    done = subprocess.run(
        [str(program), str(bundle / "device"), str(outputs), *cases], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def write_bundle(folder: Path, *claims: str) -> Path:
    options = Options(backend=BACKEND, report_dir=folder, seed=0, profile="quick", claim_timeout=60.0, claims=claims)
    export(options, folder, ("json",), None)
    return folder


def judge(bundle: Path, outputs: Path) -> dict[str, str]:
    """Return the verdict of each claim of a bundle, by its ID."""
    options = adopt_bundle(
        Options(
            backend=f"{VECTORS}{bundle}",
            report_dir=outputs,
            seed=0,
            profile="quick",
            claim_timeout=60.0,
            outputs=outputs,
        )
    )
    opened = open_session(options)
    places = open_workplaces(opened)
    try:
        rows = [row for name, unit in opened.units.items() for row in rows_of(opened, unit, places.run(name))]
    finally:
        places.close()
    return {each.claim: each.verdict.value for each in rows if isinstance(each, ClaimResult)}


@pytest.fixture(scope="session")
def some_claims(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_bundle(tmp_path_factory.mktemp("some") / "bundle", *SOME)


@pytest.mark.parametrize("number", SEEDED)
def test_a_fault_is_refuted_where_it_touches_and_nowhere_else(some_claims: Path, tmp_path: Path, number: int) -> None:
    run(build(tmp_path, *QUICK, f"-DBUG={number}"), some_claims, tmp_path / "outputs")
    verdicts = judge(some_claims, tmp_path / "outputs")
    refuted = {name.partition("/")[0] for name, verdict in verdicts.items() if verdict == "REFUTED"}
    patterns, why = SEEDED[number]
    assert refuted == patterns, why
    assert {*verdicts.values()} == {"REFUTED", "VERIFIED"}


def test_the_right_machine_is_certified(tmp_path: Path) -> None:
    """All claims and models of profile quick, by the commands of the README."""
    bundle = write_bundle(tmp_path / "bundle")
    run(build(tmp_path, *STRICT), bundle, tmp_path / "outputs")
    words = ("-m", "fx_quant_conformance", "judge", str(bundle), str(tmp_path / "outputs"))
    done = run_python(*words, "-p", "no:cacheprovider", "-n0", cwd=tmp_path, environment=ENVIRONMENT)
    assert done.returncode == 0, done.stdout + done.stderr
    line = next(line for line in done.stdout.splitlines() if " claims: " in line)
    assert re.fullmatch(r"(\d+) claims: \1 VERIFIED; (\d+) models: \2 VERIFIED", line)


def test_a_command_certifies_it(tmp_path: Path) -> None:
    """The suite calls the machine itself, as the README says."""
    for name in ("machine.toml", "config.py"):
        shutil.copy(FOLDER / name, tmp_path)
    build(tmp_path, *STRICT)
    words = ("-m", "fx_quant_conformance", "certify", "--backend=command:machine.toml", "-q", "--profile=quick")
    chosen = ("--claim=nn.Linear/*", "--claim=nn.ReLU/*", "-p", "no:cacheprovider")
    done = run_python(*words, *chosen, cwd=tmp_path, environment=ENVIRONMENT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"(\d+) claims: \1 VERIFIED", done.stdout)


def test_the_machine_does_nothing_undefined(some_claims: Path, tmp_path: Path) -> None:
    """Under the sanitizers of the compiler it gives the same outputs."""
    try:
        sanitized = build(tmp_path, *SANITIZED)
        subprocess.run([str(sanitized)], check=False, capture_output=True)
    except (subprocess.CalledProcessError, OSError):
        pytest.skip("this C compiler has no sanitizers")
    run(sanitized, some_claims, tmp_path / "sanitized")
    run(build(tmp_path, *QUICK), some_claims, tmp_path / "plain")
    files = {path.relative_to(tmp_path / "plain") for path in (tmp_path / "plain").rglob("*") if path.is_file()}
    assert len(files) > 100
    assert files == {
        path.relative_to(tmp_path / "sanitized") for path in (tmp_path / "sanitized").rglob("*") if path.is_file()
    }
    for file in files:
        assert (tmp_path / "plain" / file).read_bytes() == (tmp_path / "sanitized" / file).read_bytes(), file


def test_a_case_can_be_named_and_what_the_machine_has_not_is_declined(some_claims: Path, tmp_path: Path) -> None:
    """It gives the reason, and outputs of no other case."""
    manifest = json.loads((some_claims / "device" / "manifest.json").read_text(encoding="utf-8"))
    row = next(row for row in manifest["cases"] if row["claim"].startswith("nn.Sigmoid/"))
    device = tmp_path / "bundle" / "device"
    shutil.copytree(some_claims / "device", device)
    case = json.loads((device / row["file"]).read_text(encoding="utf-8"))
    model = device / case["model"]["json"]
    model.write_text(model.read_text(encoding="utf-8").replace('"nn.Sigmoid"', '"nn.Tanh"'), encoding="utf-8")
    run(build(tmp_path, *QUICK), tmp_path / "bundle", tmp_path / "outputs", row["case"])
    assert [path.name for path in (tmp_path / "outputs").iterdir()] == [row["case"]]
    (status,) = (tmp_path / "outputs" / row["case"]).iterdir()
    assert json.loads(status.read_text(encoding="utf-8")) == {
        "status": "refused",
        "reason": "op0: the machine has no nn.Tanh",
    }
