"""The commands about results: what each takes and leaves, its exit status, and one line for what it cannot read."""

from __future__ import annotations

import json
import lzma
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fx_quant_conformance.reports.commands import REMOVED
from fx_quant_conformance.reports.html import render_html
from fx_quant_conformance.reports.markdown import markdown
from fx_quant_conformance.reports.results import digest_ids, read_results
from tests.support.reporting import main

ROOT = Path(__file__).resolve().parents[2]


def _replace(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def words(command: str, bad: Path, good: Path, folder: Path) -> list[str]:
    """A command line that reads a bad file, beside a good one where it takes two."""
    both = {name: [str(good), str(bad)] for name in ("diff", "compare")}
    target = {
        "certify": folder / "certificate",
        "merge": folder / "m.jsonl",
        "compare": folder / "c.html",
    }
    out = ["-o", str(target[command])] if command in target else []
    return [command, *both.get(command, [str(bad)]), *out]


COMMANDS = ("render", "markdown", "diff", "compare", "merge", "certify")


@pytest.mark.parametrize("command", COMMANDS)
def test_a_file_that_cannot_be_read_is_one_line_and_says_by_its_status_why(
    runs: Any, command: str, capsys: Any
) -> None:
    good, bad = (runs.lines([runs.check(), runs.claim()]) for _ in range(2))
    _replace(bad, '"schema": 2', '"schema": 1')
    assert main(words(command, bad, good, runs.directory)) == 4
    what = "schema 1, this suite reads 2: use the suite that wrote it ('0.1.0'), or run again"
    assert capsys.readouterr() == ("", f"reports: {bad}:1: {what}\n")
    bad.write_text("hello\n")
    assert main(words(command, bad, good, runs.directory)) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1) and err.startswith(f"reports: {bad}:1: not a line of JSON")


@pytest.mark.parametrize("command", ["render", "markdown"])
def test_an_edited_file_is_told_and_never_passes(runs: Any, command: str, capsys: Any) -> None:
    path = runs.lines([runs.check(), runs.claim()])
    _replace(path, "0.4996", "0.4995")
    assert main([command, str(path)]) == 1
    assert "the footer" in capsys.readouterr().out.replace("&#39;", "'")


@pytest.mark.parametrize("command", ["render", "markdown"])
def test_a_baseline_that_cannot_be_read_is_told(runs: Any, command: str, capsys: Any) -> None:
    path = str(runs.lines([runs.claim()]))
    assert main([command, path, "--baseline", path + "x"]) == 2
    assert "cannot be read" in capsys.readouterr().err


def test_render_and_markdown_are_the_functions_that_the_run_calls(runs: Any, capsys: Any) -> None:
    path, old = runs.lines(runs.refuted("a")), runs.lines([runs.claim("a")])
    target = runs.directory / "o"
    assert main(["render", str(path), "-o", str(target), "--baseline", str(old)]) == 1
    assert target.read_text() == render_html(read_results(path), read_results(old))
    assert main(["markdown", str(path), "-o", str(target), "--baseline", str(old)]) == 1
    assert target.read_text() == markdown(read_results(path), read_results(old))
    capsys.readouterr()
    assert main(["markdown", str(path)]) == 1
    assert capsys.readouterr().out == markdown(read_results(path))


def test_a_packed_file_is_read_as_the_plain_one(runs: Any, capsys: Any) -> None:
    path = runs.lines([runs.check(), runs.claim()])
    packed = path.with_suffix(".jsonl.xz")
    packed.write_bytes(lzma.compress(path.read_bytes()))
    assert read_results(packed) == read_results(path)
    packed.write_bytes(b"no xz")
    assert main(["render", str(packed)]) == 2
    assert "is no xz file" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [[], ["rendre"], ["verify", "x", "--rerun", "0"], ["diff", "a"]])
def test_a_wrong_command_line_is_explained(arguments: list[str], capsys: Any) -> None:
    assert main(arguments) == 4 and capsys.readouterr().err.startswith("usage: fx-quant-conformance report")


ALONE = """
import json, sys
for name in ("conformance", "backends", "refimpl"):
    sys.modules[f"fx_quant_conformance.{name}"] = None
for name in ("torch", "numpy", "pytest"):
    sys.modules[name] = None
from tests.support.reporting import main
assert [main(words) for words in json.loads(sys.argv[1])] == json.loads(sys.argv[2])
"""


@pytest.mark.parametrize("name", REMOVED)
def test_what_was_removed_says_what_to_do(name: str, capsys: Any) -> None:
    command, *option = name.split()
    assert main([command, "a", *(f"{each}=b" for each in option)]) == 4
    assert capsys.readouterr().err == f"fx-quant-conformance report: {name} is gone: {REMOVED[name]}\n"


@pytest.mark.slow
def test_no_command_needs_torch_or_another_package(runs: Any) -> None:
    parts = ({"place": place, "of": 2} for place in (1, 2))
    of_none = {"claims_sha256": digest_ids(["linear", "linear"])}  # merged, the file has one claim twice
    a, b = (str(runs.lines([runs.check(), runs.claim()], shard=shard, **of_none)) for shard in parts)
    out, whole = str(runs.directory / "out"), str(runs.lines([runs.claim()]))
    commands = {
        ("render", a, "-o", out, "--baseline", b): 0,
        ("markdown", a): 0,
        ("diff", a, b): 0,
        ("compare", whole, "-o", out): 0,
        ("certify", a, "-o", out + "c"): 1,
        ("merge", a, b, "-o", out): 1,
        ("verify", out): 2,
    }
    given = map(json.dumps, (list(commands), list(commands.values())))
    done = subprocess.run([sys.executable, "-c", ALONE, *given], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, (done.stdout, done.stderr)
