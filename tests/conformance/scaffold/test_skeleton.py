"""fx-quant-conformance init: the skeleton of a vendor's package (that it certifies: tests/test_vendor_guide.py)."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import tomllib

from fx_quant_conformance.conformance.scaffold.skeleton import FILES, render_files
from fx_quant_conformance.door import USAGE, main
from fx_quant_conformance.reports.certificate import PREDICATE, SIGNATURE


def test_it_writes_what_it_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["init", "my_npu"]) == 0
    written = {str(path.relative_to(tmp_path / "my_npu")) for path in tmp_path.rglob("*") if path.is_file()}
    assert written == {path.format(name="my_npu") for path in FILES}
    printed = capsys.readouterr().out
    assert all(path in printed for path in written) and "--backend=my_npu.backend:MyNpu" in printed


def test_its_files_are_whole() -> None:
    texts = render_files("my_npu")
    project = tomllib.loads(texts["pyproject.toml"])["project"]
    assert project["entry-points"] == {"fx_quant_conformance.backends": {"my_npu": "my_npu.backend:MyNpu"}}
    assert any(
        isinstance(node, ast.ClassDef) and node.name == "MyNpu" for node in ast.parse(texts["my_npu/backend.py"]).body
    )
    assert tomllib.loads(texts["my_npu/waivers.toml"]) == {}
    example = "\n".join(line.removeprefix("# ") for line in texts["my_npu/waivers.toml"].splitlines()[2:])
    assert tomllib.loads(example)["waiver"][0]["verdict"] == "REFUTED"
    assert not [path for path, text in texts.items() if "{{" in text.replace("${{", "") or "{%" in text]


def test_its_workflow_signs_the_certificate_where_it_can() -> None:
    """What it signs is what `verify` expects; a fork, a pull request and a private repository go without."""
    text = render_files("my_npu")[".github/workflows/conformance.yml"]
    job, sign = (
        text.partition("steps:")[0],
        text.partition("actions/attest@")[2].partition("- run: fx-quant-conformance")[0],
    )
    assert "permissions: {contents: read, id-token: write, attestations: write}" in job
    assert "if: github.event_name == 'push'" in sign and "continue-on-error: true" in sign
    assert f"predicate-type: {PREDICATE}\n" in sign and "subject-path: build/certificate/*\n" in sign
    assert (
        f"""if: steps.sign.outcome == 'success'
        run: cp "${{{{ steps.sign.outputs.bundle-path }}}}" build/certificate/{SIGNATURE}
"""
        in sign
    )


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["init", "My-npu"], "cannot name a package"),
        (["init", "class"], "cannot name a package"),
        (["init", "qnnpack"], "is taken by a backend of the suite"),
        (["init", "torch"], "is taken by the module"),
        (["init", "there"], "is there already"),
        (["init", "capabilities"], "would be Capabilities, which its module imports"),
        (["init"], "NAME"),
        ([], "init"),
    ],
)
def test_what_it_cannot_do_it_says(
    words: list[str], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there").mkdir()
    assert main(words) == USAGE
    assert told in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["there"]


def test_a_folder_that_cannot_be_written_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(self: Path, *_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Path, "mkdir", refuse)
    assert main(["init", "my_npu"]) == USAGE
    assert "cannot be written: Permission denied" in capsys.readouterr().err
