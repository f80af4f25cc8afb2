"""fx-quant-conformance claims-of: what it writes, what it prints, and its exit status."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from torch import nn

from fx_quant_conformance.conformance.pt2e import asking
from fx_quant_conformance.conformance.pt2e.command import find_quantizer
from fx_quant_conformance.door import main
from tests.support.torchao import needs_torchao

QUANTIZERS = "tests.conformance.support.quantizers"


@pytest.mark.slow
@needs_torchao
def test_the_module_and_the_table_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["claims-of", f"{QUANTIZERS}:StaticLinear", "--pattern=nn.Linear", "--pattern=nn.ReLU"]) == 0
    out = capsys.readouterr().out
    assert "nn.Linear  static:in=quint8[s>=2^-12],w=qint8[-127..127],b=float32,out=quint8[s>=2^-12]" in out
    assert out.endswith("claims_of_StaticLinear.py: 1 claims, of 2 patterns\n")
    text = (tmp_path / "claims_of_StaticLinear.py").read_text(encoding="utf-8")
    for line in (
        f"Quantizer: {QUANTIZERS}.StaticLinear",
        "Versions: torch ",
        "Flow of StaticLinear: prepare_pt2e, in eval mode",
    ):
        assert line in text
    names: dict[str, object] = {}
    exec(compile(text, "claims_of_StaticLinear.py", "exec"), names)
    [entry] = names["backend_config"]().configs  # type: ignore[operator]
    assert entry.normal_pattern is nn.Linear


@pytest.mark.slow
@needs_torchao
def test_a_quantizer_gets_programs_that_call_no_module(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of the checks of inputs that torch adds, Quantizers raise, or do not look past."""
    output = tmp_path / "mine.py"
    assert main(["claims-of", f"{QUANTIZERS}:NoModules", "--pattern=nn.Linear", "-o", str(output)]) == 0
    assert "1 claims, of 1 patterns" in capsys.readouterr().out


@needs_torchao
def test_an_instance_is_taken() -> None:
    found = find_quantizer(f"{QUANTIZERS}:INSTANCE")
    assert type(found).__name__ == "ByTarget" and found is find_quantizer(f"{QUANTIZERS}:INSTANCE")


@pytest.mark.slow
@needs_torchao
def test_of_several_quantizers_one_config_is_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "mine.py"
    specs = [f"{QUANTIZERS}:{name}" for name in ("StaticLinear", "make_dynamic", "make_trained")]
    words = [
        *specs[:2],
        "--qat",
        specs[2],
        "--name=my-npu",
        "--line-length=120",
        "--pattern=*nn.Linear",
        "-o",
        str(path),
    ]
    assert main(["claims-of", *words]) == 0
    assert "nn.Linear  static:" in capsys.readouterr().out
    text = path.read_text(encoding="utf-8")
    for line in ("Flow of StaticLinear: prepare_pt2e", "Flow of make_trained: prepare_qat_pt2e", 'NAME = "my-npu"'):
        assert line in text
    names: dict[str, object] = {}
    exec(compile(text, str(path), "exec"), names)
    [entry] = names["backend_config"]().configs  # type: ignore[operator]
    assert [bool(dtypes.is_dynamic) for dtypes in entry.dtype_configs] == [False, True]
    assert entry.qat_module is None, "it is trained with static activations only"


def test_no_quantizer_at_all(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["claims-of"]) == 4
    assert "no Quantizer is named" in capsys.readouterr().err


@needs_torchao
@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (f"{QUANTIZERS}:Static", f"module '{QUANTIZERS}' has no attribute 'Static'"),
        (f"{QUANTIZERS}:NO_QUANTIZER", "is no torchao.quantization.pt2e.quantizer.Quantizer: found builtins.int"),
        (f"{QUANTIZERS}:fail", "calling it raised RuntimeError: no licence found"),
    ],
)
def test_a_spec_that_names_no_quantizer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], spec: str, message: str
) -> None:
    output = tmp_path / "mine.py"
    assert main(["claims-of", spec, "-o", str(output)]) == 4
    [line] = capsys.readouterr().err.strip().split("\n")
    assert line.startswith(f"ERROR: Quantizer {spec!r}")
    assert message in line
    assert not output.exists()


@pytest.mark.slow
@needs_torchao
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("NothingAtAll", "annotates none of 1 patterns: does it need a configuration?"),
        ("Raising", "annotates no pattern: the Quantizer raised: NotImplementedError: no licence for this program"),
        ("Dying", "the process that holds both the suite and the Quantizer exited with status 7"),
        ("Hanging", "took more than 1 s: give a longer --timeout"),
    ],
)
def test_a_quantizer_that_cannot_be_probed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, message: str
) -> None:
    output = tmp_path / "mine.py"
    words = [f"{QUANTIZERS}:{name}", "--pattern=nn.Linear", "--timeout=1" if name == "Hanging" else "--timeout=60"]
    assert main(["claims-of", *words, "-o", str(output)]) == 2
    assert message in capsys.readouterr().err
    assert not output.exists()


def test_without_torchao_the_command_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asking, "find_spec", lambda name: None)
    with pytest.raises(asking.QuantizerNotFound, match="torchao is not installed"):
        find_quantizer(f"{QUANTIZERS}:StaticLinear")


def test_the_command_line_imports_no_torch() -> None:
    code = "import sys, fx_quant_conformance.conformance.commands; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
