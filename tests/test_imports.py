"""Who may import whom (the import contracts of pyproject.toml, and what they cannot say)."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def imported(path: Path) -> Iterator[str]:
    """Every module that a file imports, wherever in the file."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{name.name}" for name in node.names)


def files(package: str) -> list[Path]:
    found = sorted((ROOT / package).rglob("*.py"))
    assert found, f"no files in {package}"
    return found


def is_or_is_in(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")


def test_what_adds_to_the_suite_is_named_by_its_registration_alone() -> None:
    room = ROOT / "conformance" / "pt2e"
    others = [path for path in (*files("conformance"), *files("fx_quant_conformance")) if room not in path.parents]
    naming = {path.name for path in others if "conformance.pt2e" in path.read_text(encoding="utf-8")}
    assert naming == {"rooms.py"}


def test_what_is_added_is_listed_without_torch_and_the_room_itself() -> None:
    code = (
        "import sys; from fx_quant_conformance.conformance.rooms import list_rooms; list_rooms(); print(*sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    loaded = {name for name in done.stdout.split() if is_or_is_in(name, "fx_quant_conformance.conformance.pt2e")}
    assert loaded == {f"fx_quant_conformance.conformance.pt2e{end}" for end in ("", ".room")}
    assert "torch" not in done.stdout.split()


@pytest.mark.slow
def test_the_import_contracts_hold() -> None:
    command = shutil.which(
        "lint-imports", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    )
    if command is None:
        pytest.skip("import-linter is not installed: pip install -e '.[test]'")
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([command], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr


def test_refimpl_does_not_import_the_code_that_it_specifies() -> None:
    """What takes something of it, such as its decomposed operators, does without where it is missing."""
    breaches = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in files("refimpl")
        for name in imported(path)
        if is_or_is_in(name, "torch.ao.quantization")
    ]
    assert breaches == []
    named = [path.parent.name for path in files("refimpl") if "import_module(" in path.read_text(encoding="utf-8")]
    assert named == ["legacy", "refimpl"], "its own modules, and what of torch.ao is there (releases.py)"
