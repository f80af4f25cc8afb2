"""Levels of instruction sets: which kernels the native engines run, and how a run is limited to a lower level.

Quantized kernels are chosen by CPU: without VNNI, fbgemm and oneDNN multiply bytes with ``vpmaddubsw``, which adds
two products in 16 bits with saturation. ``pytest conformance --isa=avx2`` certifies on a newer machine what users of
older ones get. It sets the engines' environment variables, which are read when the libraries load: ``apply`` sets them
and starts the same command again, in place; xdist's workers inherit them.

Code that asks the CPU itself ignores the variables: QNNPACK's kernels (SSE2 on x86 at any level), and the x86 engine's
choice between oneDNN (where the CPU has AVX-512 VNNI) and fbgemm for a convolution. Below that level, x86 on such a CPU
runs a mix that no user has, which ``find_current_level`` names so; ``--backend=fbgemm`` shows the convolutions that x86
would run. The levels sse41, avx2, avx512 and avx512_vnni were seen to take effect (in torch, fbgemm and oneDNN alike);
avx2_vnni and amx follow the engines' documents.

These are levels of x86. On another machine torch says what it runs (``aarch64``, ``aarch64_sve256``): the system's list
of flags may there be that of an emulator's host, and the variables are x86's.
"""

from __future__ import annotations

import os
import platform
import sys
from dataclasses import dataclass

from fx_quant_conformance.conformance.machine.environment import CPUINFO, X86, read_cpu
from fx_quant_conformance.reports.levels import FLAGS

VARIABLES = ("ATEN_CPU_CAPABILITY", "FBGEMM_ENABLE_INSTRUCTIONS", "ONEDNN_MAX_CPU_ISA")
MARK = "FX_CONFORMANCE_ISA_PROCESS"
"""The variable that holds the ID of a process which has started itself again."""


class IsaError(Exception):
    """A level that is not available; the message is one line for the user."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """One level: its value of each engine's variable."""

    aten: str
    fbgemm: str
    onednn: str

    @property
    def variables(self) -> dict[str, str]:
        """The environment that limits torch's own kernels, fbgemm and oneDNN to this level."""
        return dict(zip(VARIABLES, (self.aten, self.fbgemm, self.onednn), strict=True))


LEVELS = {
    "sse41": Level(aten="default", fbgemm="AVX2", onednn="SSE41"),
    "avx2": Level(aten="avx2", fbgemm="AVX2", onednn="AVX2"),
    "avx2_vnni": Level(aten="avx2", fbgemm="AVX2", onednn="AVX2_VNNI"),
    "avx512": Level(aten="avx512", fbgemm="AVX512", onednn="AVX512_CORE"),
    "avx512_vnni": Level(aten="avx512", fbgemm="AVX512_E1", onednn="AVX512_CORE_VNNI"),
    "amx": Level(aten="avx512", fbgemm="AVX512_E1", onednn="AVX512_CORE_AMX"),
}
"""From low to high, as in `reports.levels.FLAGS`."""

_WITHOUT = {("fbgemm", "sse41"), ("x86", "sse41")}
"""Engines that torch does not offer at a level: both need AVX2."""
_ASKS_THE_CPU = {"x86": "avx512_vnni"}
"""The CPU flag by which an engine chooses, whatever the variables say."""

NAMES = (
    *LEVELS,
    *(f"{name}_on_{flag}" for name in LEVELS for flag in _ASKS_THE_CPU.values() if flag not in FLAGS[name]),
)
"""Every name that `find_current_level` gives a level of x86, but "custom"."""


def apply(level: str, engine: str) -> None:
    """Limit this process, and those it starts, to ``level``: a name of ``LEVELS``.

    Where the variables say otherwise, they are set and the process runs its own command again from the start, under
    the same process ID; this function then does not return. Call it in the controlling process only, with output
    uncaptured. Raises IsaError when the CPU or the backend's torch ``engine`` ("" for none) does not have the level.
    """
    usable = _usable_levels(engine)
    if level not in usable:
        raise IsaError(_format_refusal(level, engine, usable))
    variables = LEVELS[level].variables
    if _read_variables() == variables:
        return
    if os.environ.get(MARK) == str(os.getpid()):
        changed = ", ".join(f"{name}={os.environ.get(name, '')}" for name in VARIABLES)
        raise IsaError(f"--isa={level}: something in this process changes the variables at its start; found {changed}")
    os.environ.update(variables, **{MARK: str(os.getpid())})
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def find_current_level(engine: str = "") -> str:
    """Name the level that this process's kernels run at.

    The CPU's own where nothing is forced; "custom" where the variables are set, but not as a level that the CPU has;
    ``avx2_on_avx512_vnni`` where the engine still chooses by the CPU itself.
    """
    forced = _read_variables()
    if not forced or not _is_x86():
        return find_own_level()
    name = next((name for name in _usable_levels("") if LEVELS[name].variables == forced), "custom")
    flag = _ASKS_THE_CPU.get(engine)
    if name == "custom" or flag not in _read_flags() or flag in FLAGS[name]:
        return name
    return f"{name}_on_{flag}"


def find_own_level() -> str:
    """Name the highest level that the CPU has; ``platform.machine()`` if it has none of x86, with what torch adds."""
    if not _is_x86():
        return _ask_torch()
    return next(reversed(_usable_levels("")), platform.machine())


def _is_x86() -> bool:
    return platform.machine().lower() in X86


def _ask_torch() -> str:
    """Return the machine's name, and the level of torch's kernels there if it is above the lowest."""
    import torch  # which pytest's process does not need

    level = torch.backends.cpu.get_cpu_capability().lower()
    return platform.machine() if level == "default" else f"{platform.machine()}_{level}"


def _read_flags() -> frozenset[str]:
    return frozenset(read_cpu(CPUINFO)[1])


def _usable_levels(engine: str) -> list[str]:
    """List the levels that the CPU and the engine have, from low to high."""
    flags = _read_flags()
    return [name for name in LEVELS if FLAGS[name] <= flags and (engine, name) not in _WITHOUT]


def _read_variables() -> dict[str, str]:
    return {name: os.environ[name] for name in VARIABLES if name in os.environ}


def _format_refusal(level: str, engine: str, usable: list[str]) -> str:
    lacking = sorted(FLAGS[level] - _read_flags())
    why = f"this CPU lacks {', '.join(lacking)}" if lacking else f"torch has no engine {engine} at this level"
    choice = f"choose one of {', '.join(usable)}" if usable else "run without --isa"
    return f"--isa={level}: {why}; the CPU's own level is {find_own_level()}; {choice}"
