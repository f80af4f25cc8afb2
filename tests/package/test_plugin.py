"""pytest where the suite is installed: it has the suite's options when the suite is asked for, and else as before."""

from __future__ import annotations

import re
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import tomllib

from fx_quant_conformance.conformance.run.hooks import WARNINGS
from fx_quant_conformance.reports.results import read_results
from tests.package.conftest import Release

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
CLAIM = "nn.ReLU/static:in=quint8,w=*,b=*,out=quint8/ptq/no_weight"
SUITE = ("-m", "pytest", "--pyargs", "fx_quant_conformance")
OTHER = {
    "conformance/__init__.py": "",
    "conformance/checks.py": "def check(value):\n    assert value == 2\n",
    "conformance/test_own.py": "def test_own():\n    pass\n",
    "reports/__init__.py": "def compare(one, other):\n    assert one == other\n",
    "tests/test_other.py": """
import sys
import pytest

@pytest.fixture
def claim():
    return 1

@pytest.mark.parametrize("job", [])
def test_of_nothing(job): ...

def test_a_check_of_its_own_package(claim):
    from conformance.checks import check
    check(claim)

def test_of_reports(claim):
    from reports import compare
    compare([claim], [2])

def test_nothing_else_is_here():
    assert not {"torch", "fx_quant_conformance.refimpl", "fx_quant_conformance.conformance"} & set(sys.modules)
""",
}
"""A project whose packages have the names of the suite's."""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    for name, text in OTHER.items():
        path = tmp_path / "project" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path / "project"


def test_the_options_are_there_only_when_the_suite_is_asked_for(release: Release, empty: Path) -> None:
    for words in (SUITE, (*SUITE[:-1], "fx_quant_conformance.conformance.test_claims::test_claim")):
        asked = release.run(*words, "--help", cwd=empty)
        assert asked.returncode == 0 and "--list-claims" in asked.stdout, asked.stderr
    for other in (["conformance"], ["--pyargs", "conformance_of_others"]):
        assert "--list-claims" not in release.run("-m", "pytest", *other, "--help", cwd=empty).stdout


def test_a_run_from_an_empty_folder(release: Release, empty: Path) -> None:
    words = ("--backend=qnnpack", "--profile=quick", f"--claim={CLAIM}", "-n1")
    done = release.run(*SUITE, *words, cwd=empty)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "warnings" not in done.stdout and "qnnpack: PASS" in done.stdout
    assert {path.name for path in empty.iterdir()} <= {"build", ".pytest_cache"}
    results = read_results(empty / "build" / "conformance" / "qnnpack" / "results.jsonl")
    header = results.header
    assert (header.suite_commit, header.suite_version) == (release.commit, release.wheel.name.split("-")[1])
    assert header.findings and header.detection and not any("findings" in note for note in results.footer.notes)  # type: ignore[union-attr]
    assert [claim.claim for claim in results.claims] == [CLAIM]
    assert results.claims[0].repro.startswith("pytest --pyargs fx_quant_conformance --backend=qnnpack ")


def test_a_changed_release_is_named_in_the_run(release: Release, empty: Path, tmp_path: Path) -> None:
    site = Path(shutil.copytree(release.site, tmp_path / "site"))
    with (site / "fx_quant_conformance" / "backends" / "torch_engines" / "qnnpack.py").open("a") as file:
        file.write("# changed\n")
    done = release.run(*SUITE, "--backend=qnnpack", "--profile=quick", f"--claim={CLAIM}", cwd=empty, site=site)
    note = "the suite is not as its commit has it: fx_quant_conformance/backends/torch_engines/qnnpack.py differs"
    assert note in done.stdout
    header = read_results(empty / "build" / "conformance" / "qnnpack" / "results.jsonl").header
    assert header.suite_commit == f"{release.commit}-dirty"


@pytest.mark.parametrize("words", [("tests",), ("--pyargs", "conformance"), ("-n1",)], ids=" ".join)
def test_another_project_notices_nothing_but_the_plugins_name(
    release: Release, project: Path, tmp_path: Path, words: tuple[str, ...]
) -> None:
    """Beside its own packages of the same names, and with their assertions as they are without the suite."""
    outputs = []
    for site, more in ((release.site, ()), (tmp_path / "nothing", ("-p", "no:fx-quant-conformance"))):
        done = release.run("-m", "pytest", "-p", "no:cacheprovider", *words, *more, cwd=project, site=site)
        printed = re.sub(r"in \d+\.\d+s|fx-quant-conformance-[^,]*, ", "", done.stdout)
        outputs.append((done.returncode, printed, done.stderr))
    assert outputs[0] == outputs[1]
    assert "collected" in outputs[0][1] or "-n1" in words


def test_the_conftest_of_a_release_and_the_plugin_register_the_hooks_once(release: Release, empty: Path) -> None:
    for words in ([], ["--pyargs"]):
        words = [str(release.site / "fx_quant_conformance" / "conformance"), *words]
        done = release.run("-m", "pytest", *words, "--backend=qnnpack", f"--claim={CLAIM}", "--list-claims", cwd=empty)
        assert (done.returncode, done.stdout) == (0, f"{CLAIM}\n"), done.stderr


def test_a_checkout_beside_an_installed_release_is_not_taken_for_it(release: Release, empty: Path) -> None:
    """Python has imported the release before pytest sees the checkout: both would be mixed."""
    done = release.run("-m", "pytest", str(release.checkout / "conformance"), "--list-claims", cwd=empty)
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    advice = f"install it (pip install -e {release.checkout}), or run pytest --pyargs fx_quant_conformance"
    assert f"{release.checkout} is a checkout, and Python imports the suite of {release.site}" in done.stderr
    assert advice in done.stderr


SCRIPT = "import sys, pytest; sys.path[:] = [each for each in sys.path if each]; sys.exit(pytest.console_main())"
"""pytest's own script, which does not put the current folder first, as ``-m`` does."""


@pytest.mark.skipif(sys.version_info < (3, 11), reason="a server of processes looks in the current folder first")
def test_a_release_is_run_from_within_a_checkout(release: Release, tmp_path: Path) -> None:
    """As README says; and no process of the run is of the checkout's suite, which says so if it is imported."""
    checkout = Path(shutil.copytree(release.checkout, tmp_path / "suite", symlinks=True))
    for module in ("conformance/run/opening.py", "conformance/remote/server.py", "conformance/run/judge.py"):
        (checkout / module).write_text("raise SystemExit('the suite of the checkout')\n")
    words = (
        *SUITE[2:],
        "--backend=qnnpack",
        "--profile=quick",
        f"--claim={CLAIM}",
        f"--report-dir={tmp_path / 'report'}",
    )
    done = release.run("-c", SCRIPT, *words, cwd=checkout)
    assert done.returncode == 0 and "qnnpack: PASS" in done.stdout, done.stdout + done.stderr


@pytest.mark.skipif(find_spec("argcomplete") is None, reason="needs argcomplete")
@pytest.mark.parametrize(
    ("line", "module", "expected"),
    [
        ("pytest --pyargs fx_quant_conformance --backend qn", "pytest", {"qnnpack"}),
        ("fx-quant-conformance certify --without-ex", "fx_quant_conformance", {"--without-execution-evidence"}),
        ("fx-quant-conformance report mer", "fx_quant_conformance", {"merge"}),
    ],
)
def test_the_shell_completes(
    release: Release,
    empty: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    line: str,
    module: str,
    expected: set[str],
) -> None:
    out = tmp_path / "answer"
    program = (
        "import os, runpy, sys; os.environ.update({'_ARGCOMPLETE': '1', '_ARGCOMPLETE_IFS': chr(10), 'COMP_TYPE': '9', "
        f"'_ARGCOMPLETE_SHELL': 'bash', 'COMP_LINE': {line!r}, 'COMP_POINT': '{len(line)}', "
        f"'_ARGCOMPLETE_STDOUT_FILENAME': {str(out)!r}}}); "
        f"sys.argv[:] = [{module!r}]; runpy.run_module({module!r}, run_name='__main__')"
    )
    done = release.run("-c", program, cwd=empty)
    assert out.is_file(), done.stderr
    assert {word.strip() for word in out.read_text().split("\n")} == expected


def test_the_filters_of_warnings_are_those_of_the_project() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert list(WARNINGS) == project["tool"]["pytest"]["ini_options"]["filterwarnings"]
