"""Backends on runtimes that are not installed: one line that says what to install, and status 5."""

from __future__ import annotations

from pathlib import Path

import pytest

from backends import exporting
from backends.discovery import find_backend
from tests.conformance.support.suite_runs import FAKES, clean_environment, command
from tests.support.warm_python import run_python

pytestmark = pytest.mark.slow

RUNTIMES = {"onnxruntime": "onnxruntime", "openvino": "openvino", "onnx-reference": "onnx"}
"""Backend → a package that it needs."""


@pytest.mark.parametrize("name", RUNTIMES)
def test_a_runtime_that_is_not_installed_is_a_skip_that_says_what_to_install(name: str, tmp_path: Path) -> None:
    package, words = RUNTIMES[name], command(tmp_path, name)[3:]
    hidden = f"import sys; sys.modules[{package!r}] = None; import pytest; sys.exit(pytest.main({words!r}))"
    done = run_python("-c", hidden, cwd=FAKES, environment=clean_environment())
    assert done.returncode == 5
    [line] = [line for line in (done.stdout + done.stderr).splitlines() if "pip install" in line]
    assert f"backend {name} skipped: {package}" in line
    assert line.endswith(f" not installed: pip install -c constraints.txt 'fx-quant-conformance[{name}]'")


@pytest.mark.parametrize("name", RUNTIMES)
def test_each_package_that_is_missing_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = find_backend(name)
    monkeypatch.setattr(exporting, "find_spec", lambda package: None if package == "onnxscript" else object())
    command = f"pip install -c constraints.txt 'fx-quant-conformance[{name}]'"
    assert backend.unavailable_reason() == f"onnxscript not installed: {command}"
    monkeypatch.setattr(exporting, "find_spec", lambda package: object())
    assert backend.unavailable_reason() is None
