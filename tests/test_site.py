"""The site is built without a warning, and its API reference shows what a program may call, no more and no less."""

from __future__ import annotations

import ast
import importlib.util
import re
import subprocess
import sys
import zlib
from pathlib import Path

import pytest

from fx_quant_conformance import refimpl

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
WHOLE = (
    "fx_quant_conformance.backends.base",
    "fx_quant_conformance.backends.exporting",
    "fx_quant_conformance.reports.schema",
    "fx_quant_conformance.reports.verdicts",
)
"""Modules of which everything public is documented."""
DOORS = (
    "fx_quant_conformance.backends.lowering.lower_reference",
    "fx_quant_conformance.register",
    "fx_quant_conformance.Input",
    "fx_quant_conformance.reports.results.read_results",
    "fx_quant_conformance.reports.html.render_html",
    "fx_quant_conformance.reports.markdown.markdown",
    "fx_quant_conformance.reports.diff.compare_runs",
    "fx_quant_conformance.reports.merge.merge",
    "fx_quant_conformance.reports.compare.render_board",
    "fx_quant_conformance.reports.certificate.certify",
    "fx_quant_conformance.reports.certificate.verify",
)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if importlib.util.find_spec("sphinx") is None:
        pytest.skip("Sphinx is not installed: pip install -e '.[test]'")
    target = tmp_path_factory.mktemp("site")
    options = ("-W", "--keep-going", "-q", "-b", "html", "-d", str(target / "doctrees"))
    command = (sys.executable, "-m", "sphinx", *options, str(DOCS), str(target / "html"))
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return target / "html"


def documented(built: Path) -> dict[str, str]:
    """Every Python name in Sphinx's inventory, and where it is: ``page.html#anchor``."""
    *_, packed = (built / "objects.inv").read_bytes().split(b"\n", maxsplit=4)
    lines = [line.split(" ") for line in zlib.decompress(packed).decode().splitlines()]
    python = [(name, where) for name, role, _, where, *_ in lines if role.startswith("py:")]
    return {name: where.removesuffix("$") + name * where.endswith("$") for name, where in python}


def public(module: str) -> set[str]:
    """The public classes and functions that a module defines."""
    tree = ast.parse((ROOT / module.replace(".", "/")).with_suffix(".py").read_text(encoding="utf-8"))
    names = [node.name for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef)]
    return {f"{module}.{name}" for name in names if not name.startswith("_")}


def test_what_is_documented_of_refimpl_is_what_it_exports(built: Path) -> None:
    found = {name for name in documented(built) if re.fullmatch(r"fx_quant_conformance\.refimpl\.\w+", name)}
    assert found == {f"fx_quant_conformance.refimpl.{name}" for name in refimpl.__all__ if not name.startswith("_")}


@pytest.mark.parametrize("module", WHOLE)
def test_everything_public_of_a_contract_is_documented(built: Path, module: str) -> None:
    assert len(public(module)) >= 2  # Outcome and Verdict are all of reports.verdicts
    assert public(module) <= documented(built).keys()


def test_the_doors_of_the_other_packages_are_documented(built: Path) -> None:
    assert documented(built).keys() >= set(DOORS)


def test_links_between_documents_lead_to_pages_of_the_site(built: Path) -> None:
    """GitHub's links to Markdown files must not be left: the site has none of these files."""
    for page in built.glob("*.html"):
        targets = re.findall(r'href="([^"#?]+)[^"]*"', page.read_text(encoding="utf-8"))
        own = [target for target in targets if ":" not in target]
        assert [target for target in own if not (built / target).exists()] == [], page.name


def test_the_site_has_the_scoreboard_of_the_committed_results(built: Path) -> None:
    text = (built / "scoreboard.html").read_text(encoding="utf-8")
    assert all(path.name.removesuffix(".jsonl.xz") in text for path in (DOCS / "results").glob("*.xz"))
