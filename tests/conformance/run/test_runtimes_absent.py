"""Backends on runtimes that are not installed: one line that says what to install."""

from __future__ import annotations

from pathlib import Path

import pytest

from fx_quant_conformance.backends import exporting
from fx_quant_conformance.backends.discovery import find_backend
from tests.conformance.support.suite_runs import clean_environment
from tests.support.warm_python import run_python

pytestmark = pytest.mark.slow

RUNTIMES = {"onnxruntime": "onnxruntime", "openvino": "openvino", "onnx-reference": "onnx"}
"""Backend → a package that it needs."""


def test_a_runtime_that_is_not_installed_is_a_reason_that_says_what_to_install(tmp_path: Path) -> None:
    code = f"""
import sys
sys.modules |= dict.fromkeys({[*RUNTIMES.values()]})
from fx_quant_conformance.backends.discovery import find_backend
for name in {[*RUNTIMES]}:
    print(find_backend(name).unavailable_reason())
"""
    done = run_python("-c", code, cwd=tmp_path, environment=clean_environment())
    assert done.returncode == 0, done.stderr
    for (name, package), told in zip(RUNTIMES.items(), done.stdout.splitlines(), strict=True):
        assert told.startswith(package)
        assert told.endswith(f" not installed: pip install -c constraints.txt 'fx-quant-conformance[{name}]'")


@pytest.mark.parametrize("name", RUNTIMES)
def test_each_package_that_is_missing_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = find_backend(name)
    monkeypatch.setattr(exporting, "find_spec", lambda package: None if package == "onnxscript" else object())
    command = f"pip install -c constraints.txt 'fx-quant-conformance[{name}]'"
    assert backend.unavailable_reason() == f"onnxscript not installed: {command}"
    monkeypatch.setattr(exporting, "find_spec", lambda package: object())
    assert backend.unavailable_reason() is None
