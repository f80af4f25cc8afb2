"""Levels of instruction sets: the table, the level in force, and that a forced level reaches all three libraries."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from fx_quant_conformance.conformance.machine import isa
from fx_quant_conformance.conformance.machine.isa import (
    LEVELS,
    MARK,
    VARIABLES,
    IsaError,
    apply,
    find_current_level,
    find_own_level,
)
from fx_quant_conformance.reports.levels import may_run_at

pytestmark = pytest.mark.slow

REPO = Path(__file__).resolve().parents[3]
Cpu = Callable[[str], None]

CPUS = {
    "old": ("sse4_1 ssse3", "sse41"),
    "haswell": ("sse4_1 avx avx2 fma f16c", "avx2"),
    "alder": ("sse4_1 avx avx2 fma f16c avx_vnni", "avx2_vnni"),
    "skylake": ("sse4_1 avx2 fma f16c avx512f avx512bw avx512dq avx512vl", "avx512"),
    "icelake": ("sse4_1 avx2 fma f16c avx512f avx512bw avx512dq avx512vl avx512_vnni", "avx512_vnni"),
    "sapphire": (
        "sse4_1 avx2 fma f16c avx512f avx512bw avx512dq avx512vl avx512_vnni avx_vnni amx_tile amx_int8 amx_bf16",
        "amx",
    ),
}

SATURATES = """
import os, sys, warnings
import torch
from fx_quant_conformance.conformance.machine.isa import apply, find_current_level
print("began", os.getpid())
apply({level!r}, "fbgemm")
warnings.simplefilter("ignore")
x = torch.quantize_per_tensor(torch.full((1, 64), 255.0), 1.0, 0, torch.quint8)
w = torch.quantize_per_tensor(torch.full((32, 64), 127.0), 1.0, 0, torch.qint8)
scale = 255 * 127 * 64 / 200
for engine in ("fbgemm", "onednn"):
    torch.backends.quantized.engine = engine
    packed = torch.ops.quantized.linear_prepack(w, None)
    print(engine, int(torch.ops.quantized.linear(x, packed, scale, 0).int_repr().max()))
print("ended", os.getpid(), find_current_level(), torch.backends.cpu.get_cpu_capability(), sys.argv[1:])
"""


@pytest.fixture(autouse=True)
def nothing_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*VARIABLES, MARK):
        monkeypatch.setenv(name, "")  # so that what a test sets is undone
        monkeypatch.delenv(name)


@pytest.fixture
def on_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cpu:
    """Let the suite see a CPU with the given flags."""

    def install(flags: str) -> None:
        (tmp_path / "cpuinfo").write_text(f"model name: made up\nflags: {flags}\n")
        monkeypatch.setattr(isa, "CPUINFO", tmp_path / "cpuinfo")

    return install


@pytest.fixture
def no_restart(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Record the commands that would replace this process."""
    commands: list[list[str]] = []
    monkeypatch.setattr(os, "execv", lambda path, command: commands.append([path, *command]))
    return commands


def run(script: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(REPO), "ONEDNN_VERBOSE": "1", **variables}
    command = [sys.executable, "-c", script, "an argument"]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize(("flags", "level"), CPUS.values(), ids=CPUS)
def test_a_cpus_own_level_is_the_highest_it_has(on_cpu: Cpu, flags: str, level: str) -> None:
    on_cpu(flags)
    assert find_own_level() == find_current_level() == find_current_level("x86") == level


@pytest.mark.parametrize(("torch_says", "level"), [("DEFAULT", "aarch64"), ("SVE256", "aarch64_sve256")])
@pytest.mark.parametrize(
    "cpuinfo", ["Features: fp asimd asimddp", f"flags: {CPUS['sapphire'][0]}"], ids=["its own", "an emulator's host"]
)
def test_the_level_of_another_machine_is_what_torch_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cpuinfo: str, torch_says: str, level: str
) -> None:
    (tmp_path / "cpuinfo").write_text(f"{cpuinfo}\n")
    monkeypatch.setattr(isa, "CPUINFO", tmp_path / "cpuinfo")
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    monkeypatch.setattr("torch.backends.cpu.get_cpu_capability", lambda: torch_says)
    for variables in ({}, LEVELS["avx2"].variables):
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        assert find_current_level() == find_current_level("x86") == level
    with pytest.raises(IsaError, match=rf"the CPU's own level is {level}; run without --isa$"):
        apply("avx2", "")
    assert may_run_at(level, [], "Linux-6.8-aarch64-with-glibc2.39")
    assert not may_run_at(level, [], "Linux-6.8-x86_64-with-glibc2.39")


def test_no_two_levels_have_one_environment() -> None:
    assert len({tuple(level.variables.items()) for level in LEVELS.values()}) == len(LEVELS)


def test_a_level_above_the_cpu_is_refused_by_name(on_cpu: Cpu, no_restart: list[list[str]]) -> None:
    on_cpu(CPUS["skylake"][0])
    with pytest.raises(IsaError) as caught:
        apply("avx512_vnni", "")
    assert str(caught.value) == (
        "--isa=avx512_vnni: this CPU lacks avx512_vnni; "
        "the CPU's own level is avx512; choose one of sse41, avx2, avx512"
    )
    assert not no_restart and not set(VARIABLES) & set(os.environ)


@pytest.mark.parametrize("engine", ["fbgemm", "x86"])
def test_a_level_without_the_engine_is_refused(on_cpu: Cpu, engine: str) -> None:
    on_cpu(CPUS["haswell"][0])
    with pytest.raises(IsaError, match=f"--isa=sse41: torch has no engine {engine} at this level; .* one of avx2$"):
        apply("sse41", engine)


def test_a_process_starts_again_once(on_cpu: Cpu, no_restart: list[list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    on_cpu(CPUS["icelake"][0])
    apply("avx2", "fbgemm")
    assert no_restart == [[sys.executable, sys.executable, *sys.orig_argv[1:]]]
    assert find_current_level() == "avx2" and os.environ["ATEN_CPU_CAPABILITY"] == "avx2"
    apply("avx2", "fbgemm")
    assert len(no_restart) == 1, "the level is in force"
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "avx512")
    with pytest.raises(IsaError, match="changes the variables at its start; found ATEN_CPU_CAPABILITY=avx512, FBGEMM"):
        apply("avx2", "fbgemm")
    monkeypatch.setenv(MARK, "1")
    apply("avx512", "fbgemm")
    assert len(no_restart) == 2, "another process's restart is not this one's"


@pytest.mark.parametrize(
    ("cpu", "forced", "engine", "level"),
    [
        ("icelake", "avx512", "fbgemm", "avx512"),
        ("icelake", "avx512", "x86", "avx512_on_avx512_vnni"),
        ("icelake", "avx512_vnni", "x86", "avx512_vnni"),
        ("skylake", "avx2", "x86", "avx2"),
        ("haswell", "avx512", "fbgemm", "custom"),
    ],
)
def test_the_level_in_force(
    on_cpu: Cpu, monkeypatch: pytest.MonkeyPatch, cpu: str, forced: str, engine: str, level: str
) -> None:
    on_cpu(CPUS[cpu][0])
    for name, value in LEVELS[forced].variables.items():
        monkeypatch.setenv(name, value)
    assert find_current_level(engine) == level


def test_variables_that_are_no_level_are_custom(on_cpu: Cpu, monkeypatch: pytest.MonkeyPatch) -> None:
    on_cpu(CPUS["icelake"][0])
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    assert find_current_level() == find_current_level("x86") == "custom"


@pytest.mark.skipif(find_own_level() not in ("avx512_vnni", "amx"), reason="the CPU's own level is to saturate nowhere")
@pytest.mark.parametrize(
    ("level", "starts", "torch_says", "onednn_says", "most"),
    [
        # 255·127 + 255·127 is held at 2¹⁵ − 1 by vpmaddubsw: 32767/64770 of the sum, 101.2 of 200, is left
        ("avx2", 2, "AVX2", "isa:Intel AVX2", 101),
        ("avx512", 1, "AVX512", "isa:Intel AVX-512 with AVX512BW, AVX512VL, and AVX512DQ extensions", 101),
        ("avx512_vnni", 1, "AVX512", "isa:Intel AVX-512 with Intel DL Boost", 200),
    ],
)
def test_a_level_reaches_torch_fbgemm_and_onednn(
    level: str, starts: int, torch_says: str, onednn_says: str, most: int
) -> None:
    variables = LEVELS[level].variables if starts == 1 else {}
    done = run(SATURATES.format(level=level), **variables)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    began = [line for line in lines if line.startswith("began")]
    assert len(began) == starts, "the command runs again, once, where the level is not in force"
    assert lines[-1] == f"ended {began[0].split()[1]} {level} {torch_says} ['an argument']"
    assert [line for line in lines if line.endswith(onednn_says)], "ONEDNN_VERBOSE names the level"
    assert f"fbgemm {most}" in lines and f"onednn {most}" in lines
