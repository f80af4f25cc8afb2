"""Cases per second of ExecuTorch's own backend test suite and of this one, on the ops that both have, in one run.

Theirs: the flow ``xnnpack_static_int8_per_channel`` of the suite in executorch's wheel; ours: the claims of the backend
``executorch`` for the same ops, static, in profile quick. A case is a model that was quantized, lowered and run; theirs
that are skipped do not count. Each runs in one process, from its start to its end.

    python -m benchmarks.executorch_suite
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path

from tabulate import tabulate

from benchmarks.runtimes import measured

FLOW = "xnnpack_static_int8_per_channel"
OPS: dict[str, tuple[str, ...]] = {
    "add": ("operator.add/*", "torch.add/*"),
    "conv2d": ("nn.Conv2d/*", "torch.conv2d/*"),
    "linear": ("nn.Linear/*", "F.linear/*"),
    "maxpool2d": ("nn.MaxPool2d/*", "F.max_pool2d/*"),
    "mul": ("operator.mul/*", "torch.mul/*"),
}
"""Modules of their suite, and our claims on the same op."""


def theirs() -> tuple[int, float]:
    """Run their suite; return how many cases ran, and the seconds that it took."""
    found = find_spec("executorch.backends.test.suite")
    if found is None or found.origin is None:
        raise SystemExit("executorch is not installed: README.md says how, under Other people's runtimes")
    files = [str(Path(found.origin).with_name("operators") / f"test_{op}.py") for op in OPS]
    with tempfile.TemporaryDirectory() as folder:
        options = ("-m", f"flow_{FLOW}", "-q", "-p", "no:cacheprovider", f"--rootdir={Path(found.origin).parent}")
        started = time.perf_counter()
        done = subprocess.run(
            (sys.executable, "-m", "pytest", *files, *options), cwd=folder, capture_output=True, text=True, check=False
        )
        seconds = time.perf_counter() - started
    last = done.stdout.strip().splitlines()[-1]
    ran = sum(int(number) for number in re.findall(r"(\d+) (?:passed|failed)", last))
    if not ran:
        raise SystemExit(f"no case of theirs ran: {last}")
    return ran, seconds


def ours() -> tuple[int, float]:
    """Run our claims; return how many cases were lowered, and the seconds that it took."""
    results, seconds = measured("executorch", *(f"--claim={glob}" for globs in OPS.values() for glob in globs))
    lowered = [check for check in results.checks if check.stage == "lower" and "static" in check.claim]
    return sum(check.cases or 0 for check in lowered), seconds


def main() -> None:
    """Measure both and print a table."""
    found = {"executorch's own": theirs(), "this one": ours()}
    rates = {name: cases / seconds for name, (cases, seconds) in found.items()}
    first = next(iter(rates.values()))
    table = [[name, *found[name], rate, rate / first] for name, rate in rates.items()]
    print(tabulate(table, ["suite", "cases", "seconds", "cases per second", "ratio"], floatfmt=".3g"))


if __name__ == "__main__":
    main()
