"""LiteRT as a device behind a command: its files are read, and some claims hold."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest

from fx_quant_conformance.conformance.vectors.command import read_settings
from tests.support.warm_python import run_python

FOLDER = Path(__file__).parents[2] / "examples" / "litert_device"
CLAIMS = (
    "nn.Linear/*/ptq/per_channel*",
    "nn.Conv2d+nn.ReLU/*/ptq/per_channel*",
    "torch.mean/*/ptq/*",
    ".permute/*/ptq/*",
)


@pytest.mark.parametrize("kernels", ("xnnpack", "builtin", "reference"))
def test_a_file_names_its_kernels_and_takes_plain_graphs(kernels: str) -> None:
    settings = read_settings(FOLDER / f"{kernels}.toml")
    assert (settings.command[-1], settings.formats) == (f"--kernels={kernels}", ("json",))
    assert settings.waivers is None or settings.waivers.is_file()


@pytest.mark.slow
@pytest.mark.parametrize("kernels", ("xnnpack", "builtin"))
def test_some_claims_hold(tmp_path: Path, kernels: str) -> None:
    pytest.importorskip("ai_edge_litert", reason="ai-edge-litert is not installed")
    chosen = [f"--claim={glob}" for glob in CLAIMS]
    words = ("certify", f"--backend=command:{FOLDER / kernels}.toml", "--profile=quick", "-q", "-n0", *chosen)
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    done = run_python(
        "-m",
        "fx_quant_conformance",
        *words,
        "-pno:cacheprovider",
        cwd=tmp_path,
        environment=os.environ | {"PATH": path},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"(\d+) claims: \1 VERIFIED", done.stdout), done.stdout
