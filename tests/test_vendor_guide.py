"""The vendor guide's commands work as they are written, on a clean checkout, in an environment that they make anew."""

from __future__ import annotations

import doctest
import os
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from fx_quant_conformance.conformance.scaffold.skeleton import FILES, render_files
from tests.support.checkout import make_checkout

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
GUIDE = ROOT / "docs" / "vendor-guide.md"
EXAMPLE = ROOT / "examples" / "vendor_backend"
ENDED = "--ended with status"
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


@dataclass(frozen=True, slots=True)
class Command:
    """A command of the guide and what it prints, as far as the guide says."""

    line: str
    output: str


def commands() -> Iterator[Command]:
    """Read the console blocks: a line behind ``$`` is a command, the lines below it are what it prints."""
    for block in re.findall(r"^```console\n(.*?)^```", GUIDE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL):
        for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            line, _, output = part.partition("\n")
            yield Command(line, output)


def environment() -> dict[str, str]:
    """The environment of a newcomer: nothing leads to this one's packages or options."""
    hidden = {"PYTHONPATH", "VIRTUAL_ENV", "GITHUB_STEP_SUMMARY", "PYTEST_ADDOPTS", "PYTHONHOME"}
    hidden |= {name for name in os.environ if name.startswith(("PYTEST_XDIST", "COV_", "TOX"))}
    kept = {name: value for name, value in os.environ.items() if name not in hidden}
    return kept | {"COLUMNS": "120", "PIP_NO_COMPILE": "1"}  # most of what pip would compile is never imported


@pytest.mark.timeout(1200)
def test_the_guides_commands_do_what_it_says(tmp_path: Path) -> None:
    make_checkout(tmp_path / "suite")
    steps = list(commands())
    assert len(steps) > 12
    script = "\n".join(f'{step.line}\necho "{ENDED} $?"' for step in steps)
    done = subprocess.run(
        ["bash"],
        input=script,
        cwd=tmp_path,
        env=environment(),
        text=True,
        check=False,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    parts = re.split(rf"^{ENDED} (\d+)\n", done.stdout, flags=re.MULTILINE)
    assert len(parts) == 2 * len(steps) + 1, done.stdout
    for step, output, status in zip(steps, parts[::2], parts[1::2], strict=False):
        assert status == "0", f"$ {step.line}\n{output}\nended with status {status}"
        if step.output:
            is_so = doctest.OutputChecker().check_output(step.output, output, FLAGS)
            assert is_so, f"$ {step.line}\nThe guide says\n{step.output}\nand it printed\n{output}"


def test_what_the_guide_quotes_is_in_the_example() -> None:
    code = "\n".join(path.read_text(encoding="utf-8") for path in EXAMPLE.rglob("*") if path.suffix in (".py", ".toml"))
    guide = GUIDE.read_text(encoding="utf-8")
    blocks = re.findall(r"^```(?:python|toml)\n(.*?)^```", guide, re.MULTILINE | re.DOTALL)
    quoted = [block for block in blocks if "PowerOfTwoObserver" not in block]  # run by test_preparation.py
    assert len(quoted) == len(blocks) - 1
    lines = [line.partition("  # ")[0].strip() for block in quoted for line in block.splitlines() if line.strip()]
    assert len(lines) > 10
    missing = [line for line in lines if line not in code]
    assert not missing, f"not in examples/vendor_backend: {missing}"


@pytest.mark.parametrize("file", [".github/workflows/conformance.yml", ".gitignore"])
def test_the_example_is_what_the_skeleton_becomes(file: str) -> None:
    assert file in FILES
    assert (EXAMPLE / file).read_text(encoding="utf-8") == render_files("toy_npu")[file]
