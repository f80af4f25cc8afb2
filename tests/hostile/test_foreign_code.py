"""What else ran where claims are judged: the results, page, summary, certificate and `verify` name it, or refuse it."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from fx_quant_conformance.conformance.run.report_folder import RESULTS
from fx_quant_conformance.reports.certificate import CERTIFICATE, find_shortcomings
from fx_quant_conformance.reports.html import build_report
from fx_quant_conformance.reports.results import Results, read_results
from fx_quant_conformance.reports.writer import ResultsWriter
from tests.conformance.support.suite_runs import FAKES, REPO, Ran, run
from tests.support.reporting import main
from tests.support.warm_python import NEW_CHILDREN

pytestmark = pytest.mark.slow

SITE = Path(__file__).resolve().parent / "site"
DECIDES = """
import fx_quant_conformance.refimpl.prepare.decide

_make_plan = fx_quant_conformance.refimpl.prepare.decide.make_plan
fx_quant_conformance.refimpl.prepare.decide.make_plan = lambda *arguments: _make_plan(*arguments)
"""
CONFTEST = """
def pytest_sessionfinish(session):
    if hasattr(session.config, "workerinput"):
        import late_code
"""
IMPORTS_VENDOR = """
def patch(judge):
    original = judge.run_claim

    def run_claim(bench, claim):
        import fakes
        return original(bench, claim)

    judge.run_claim = run_claim
"""


def foreign_code_of(results: Results) -> list[str]:
    """The foreign code that a run names, but for what is installed here besides: it has a version, and no file."""
    return [text for text in results.foreign_code if "/" in text or text.endswith(")")]


def certify(ran: Ran, folder: Path) -> int:
    """Certify a run as if its suite were that of a clean checkout."""
    source, footer = folder / RESULTS, ran.results.footer
    assert footer is not None
    header, *rows, _ = ran.rows
    with ResultsWriter(source) as writer:
        for row in (header | {"suite_commit": "4fd1c0ffee" * 4}, *rows):
            writer.write_line(json.dumps(row))
        writer.close(outcome=footer.outcome, exit_status=0, seconds=1.0, foreign_code=footer.foreign_code)
    return main(["certify", str(source), "-o", str(folder / "certificate")])


def test_a_plain_run_names_nothing_but_what_is_installed(tmp_path: Path) -> None:
    ran = run(tmp_path, "fakes:Good", cwd=tmp_path)
    assert ran.status == 0 and foreign_code_of(ran.results) == [], ran.out


def test_a_plugin_that_meddles_is_named_to_the_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "evil_plugin.py").write_text(DECIDES)
    ran = run(tmp_path, "fakes:Good", "-p", "evil_plugin", cwd=tmp_path)
    results = ran.results
    assert ran.status == 0, ran.out
    assert foreign_code_of(results) == ["pytest plugin evil_plugin (evil_plugin.py)"]
    assert set(foreign_code_of(results)) <= set(results.header.foreign_code)
    told = f"beside it ran {'; '.join(results.foreign_code)}"
    assert f"not shown by this run: that the suite judged alone: {told}\n" in ran.out
    assert f"that the suite judged alone: {told}" in build_report(results).untried
    assert certify(ran, tmp_path) == 0
    assert f"NOT THE SUITE ALONE: {told}\n" in capsys.readouterr().out
    folder = tmp_path / "certificate"
    predicate = json.loads((folder / CERTIFICATE).read_text())["predicate"]
    assert predicate["foreign_code"] == results.foreign_code
    assert main(["verify", str(folder)]) == 0
    assert f"NOT THE SUITE ALONE: {told}\n" in capsys.readouterr().out


ENTRY = "[torch.backends]\nautoloaded = autoloaded:start\n"


def test_what_torch_loads_where_claims_are_judged_is_named(tmp_path: Path) -> None:
    """torch imports the backends that installed packages give it; pytest's process has no torch."""
    (tmp_path / "autoloaded.py").write_text("def start(): pass\n")
    about = tmp_path / "autoloaded-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: autoloaded\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(ENTRY)
    path = os.pathsep.join([str(REPO), str(FAKES), str(tmp_path)])
    ran = run(tmp_path, "fakes:Good", cwd=tmp_path, PYTHONPATH=path, **NEW_CHILDREN)
    assert ran.status == 0 and foreign_code_of(ran.results) == ["module autoloaded (autoloaded.py)"], ran.out
    assert "autoloaded" in str(ran.results.header.foreign_code)


def test_a_conftest_of_other_tests_and_what_a_worker_loads_are_named(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_own.py").write_text("def test_own(): pass\n")
    (tmp_path / "late_code.py").write_text("")
    ran = run(tmp_path, "fakes:Good", str(tmp_path), "-n1", cwd=tmp_path)
    assert ran.status == 0, ran.out + ran.err
    results = ran.results
    late = ["module late_code (late_code.py)", "module test_own (test_own.py)"]
    assert foreign_code_of(results) == [f"conftest.py of {tmp_path}", *late]
    assert results.footer is not None and results.footer.foreign_code == late


def test_a_judge_that_imported_the_vendors_code_gets_no_certificate(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "meddling.py").write_text(IMPORTS_VENDOR)
    path = os.pathsep.join([str(REPO), str(FAKES), str(tmp_path), str(SITE)])
    ran = run(tmp_path, "fakes:Good", cwd=tmp_path, PYTHONPATH=path, JUDGE_PATCH="meddling", **NEW_CHILDREN)
    assert ran.status == 0, ran.out
    told = f"the vendor's module fakes ({FAKES / 'fakes.py'})".replace(f"{REPO}/", "")
    assert [claim.foreign_code for claim in ran.results.claims] == [[told]] * 2
    assert not any("fakes" in text for text in ran.results.header.foreign_code)
    assert certify(ran, tmp_path) == 1
    assert f"{told} was loaded where claims are judged" in capsys.readouterr().err
    assert any(told in reason for reason in find_shortcomings(read_results(tmp_path / RESULTS)))


def test_claims_beside_own_code_say_so_and_are_not_refused(tmp_path: Path) -> None:
    ran = run(tmp_path, "own_modules:Zeros", cwd=tmp_path)
    results = ran.results
    own = f"module own_modules ({FAKES / 'own_modules.py'})".replace(f"{REPO}/", "")
    assert {tuple(claim.foreign_code) for claim in results.claims if claim.beside_own_code} == {(own,)}
    told = f"{len(results.claims)} claims judged beside the vendor's own code"
    assert f"not shown by this run: that the suite judged alone: {told}\n" in ran.out
    assert not any("was loaded where claims are judged" in reason for reason in find_shortcomings(results))
