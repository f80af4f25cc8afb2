"""What a run's results depend on, for the header of the results file (docs/architecture.md)."""

from __future__ import annotations

import json
import platform
import re
from pathlib import Path
from typing import Any

from fx_quant_conformance.conformance.machine.release import read_suite_commit, read_suite_version
from fx_quant_conformance.reports.numbers import Scalar

DETECTION = Path(__file__).resolve().parents[1] / "detection-power.json"
CPUINFO = Path("/proc/cpuinfo")
X86 = frozenset({"x86_64", "amd64", "i686", "i386"})
"""What `platform.machine` calls x86, in small letters."""
# The instruction sets by which quantized kernels are chosen, on x86 and on Arm.
_RELEVANT = re.compile(
    r"ssse3|sse4_[12]|f16c|fma|avx\w*|amx\w*|\w*vnni\w*|asimd\w*|neon|sve\w*|sme2?|i8mm|bf16|\w*dotprod"
)


def describe_environment(root: Path) -> dict[str, Any]:
    """Return the header's fields about the suite, whose packages lie in ``root``, torch, Python and the machine."""
    import torch  # which pytest's process does not need

    model, flags = read_cpu(CPUINFO)
    return {
        "suite_version": read_suite_version(root),
        "suite_commit": read_suite_commit(root),
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu": model,
        "cpu_flags": flags,
    }


def read_detection_power() -> dict[str, dict[str, Scalar]]:
    """Return the mutation gate's last result: class of faults → their number, and how many each profile finds."""
    try:
        power: dict[str, dict[str, Scalar]] = json.loads(DETECTION.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # python -m tests.mutation --write-doc writes it
        return {}
    return power


def read_cpu(cpuinfo: Path) -> tuple[str, list[str]]:
    """Return the processor's model and its instruction sets that matter to quantized kernels."""
    try:
        text = cpuinfo.read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    fields = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in text.splitlines())}
    model = fields.get("model name") or platform.processor() or platform.machine() or "unknown"
    key = "flags" if platform.machine().lower() in X86 else "Features"  # an emulator may show its host's
    words = fields.get(key, "").split()
    return model, sorted({word for word in words if _RELEVANT.fullmatch(word)})
