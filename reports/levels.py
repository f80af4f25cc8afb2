"""The levels of x86 instruction sets, by which quantized kernels are chosen: the CPU flags that each needs."""

from __future__ import annotations

from collections.abc import Mapping

_SSE41 = frozenset({"sse4_1"})
_AVX2 = _SSE41 | {"avx2", "fma", "f16c"}
_AVX512 = _AVX2 | {"avx512f", "avx512bw", "avx512dq", "avx512vl"}
_VNNI = _AVX512 | {"avx512_vnni"}
FLAGS: Mapping[str, frozenset[str]] = {
    "sse41": _SSE41,
    "avx2": _AVX2,
    "avx2_vnni": _AVX2 | {"avx_vnni"},
    "avx512": _AVX512,
    "avx512_vnni": _VNNI,
    "amx": _VNNI | {"amx_tile", "amx_int8"},
}
"""Flags as Linux spells them, by level, from low to high; a CPU's own level is the last one whose flags it has."""


def may_run_at(level: str, flags: list[str], platform: str) -> bool:
    """Tell whether a machine may have run at a level (as `Header.isa` has it), by its CPU's flags and its platform.

    Elsewhere that is ""; on a machine of another kind its name, perhaps with a level of its own (``aarch64_sve256``);
    "custom" is one that its user has set; of ``avx2_on_avx512_vnni`` the CPU has both.
    """
    if level in ("", "custom") or any(f"{level}_".startswith(f"{name}_") for name in platform.split("-") if name):
        return True
    limited, _, own = level.partition("_on_")
    return limited in FLAGS and FLAGS[limited] | ({own} if own else set()) <= set(flags)
