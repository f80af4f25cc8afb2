"""The header's facts about the processor, also where they cannot be had."""

from __future__ import annotations

from pathlib import Path

import pytest

from fx_quant_conformance.conformance.machine.environment import read_cpu

X86 = "processor: 0\nmodel name\t: Some CPU @ 2GHz\nflags\t\t: sse2 avx2 avx512_vnni amx_tile avx2 smep\n"
ARM = "processor\t: 0\nFeatures\t: fp asimd asimddp i8mm sha2 sve\n"


@pytest.mark.parametrize(
    ("machine", "text", "model", "flags"),
    [
        ("x86_64", X86, "Some CPU @ 2GHz", ["amx_tile", "avx2", "avx512_vnni"]),
        ("aarch64", ARM, None, ["asimd", "asimddp", "i8mm", "sve"]),
        ("aarch64", X86, "Some CPU @ 2GHz", []),  # emulated
    ],
)
def test_cpuinfo_of_x86_and_arm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, machine: str, text: str, model: str | None, flags: list[str]
) -> None:
    monkeypatch.setattr("platform.machine", lambda: machine)
    file = tmp_path / "cpuinfo"
    file.write_text(text)
    found_model, found_flags = read_cpu(file)
    assert found_flags == flags and found_model
    assert model in (None, found_model)


def test_no_cpuinfo_is_no_error(tmp_path: Path) -> None:
    model, flags = read_cpu(tmp_path / "cpuinfo")
    assert model and flags == []
