"""Claims per second of backends, each in profile quick and one process, one after the other in one run.

The whole run counts, from pytest's start to its end; the last column is the ratio to the first backend.

    python benchmarks/runtimes.py qnnpack onnxruntime
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tabulate import tabulate

from fx_quant_conformance.reports.results import Results, read_results

ROOT = Path(__file__).resolve().parents[1]


def measured(backend: str, *options: str) -> tuple[Results, float]:
    """Run a backend's claims; return what was found, and the seconds that it took."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            "-m",
            "pytest",
            str(ROOT / "conformance"),
            f"--backend={backend}",
            "-n",
            "0",
            "-q",
            "--profile=quick",
            "--no-waivers",
            f"--report-dir={folder}",
            *options,
        ]
        started = time.perf_counter()
        subprocess.run(command, cwd=ROOT, stdout=subprocess.DEVNULL, check=False)  # what is refuted is none of ours
        seconds = time.perf_counter() - started
        return read_results(Path(folder) / "results.jsonl"), seconds


def main(backends: list[str]) -> None:
    """Measure the backends and print a table."""
    runs = {backend: measured(backend) for backend in backends}
    found = {backend: (len(results.claims), seconds) for backend, (results, seconds) in runs.items()}
    rates = {backend: claims / seconds for backend, (claims, seconds) in found.items()}
    first = next(iter(rates.values()))
    table = [[backend, *found[backend], rate, rate / first] for backend, rate in rates.items()]
    print(tabulate(table, ["backend", "claims", "seconds", "claims per second", "ratio"], floatfmt=".3g"))


if __name__ == "__main__":
    main(sys.argv[1:] or ["qnnpack", "onnxruntime"])
