"""How long functions and files are: python benchmarks/sizes.py

Lines from `def` to the last one of the body, docstring included, decorators not. (design: median 12 at most, 90th
percentile 30, files 400)
"""

from __future__ import annotations

import ast
import statistics
from collections.abc import Iterator
from pathlib import Path

from tabulate import tabulate

ROOT = Path(__file__).parents[1]
PACKAGES = ("refimpl", "conformance", "backends", "reports")
LONGEST = 5


def functions(package: str) -> Iterator[tuple[int, str]]:
    """Yield the length of each function and method of a package, and where it is."""
    for path in files(package):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield (node.end_lineno or node.lineno) - node.lineno + 1, f"{path.relative_to(ROOT)}: {node.name}"


def files(package: str) -> list[Path]:
    """List the modules of a package."""
    return sorted((ROOT / package).rglob("*.py"))


def summary(lengths: list[int]) -> tuple[int, float, int, int]:
    """Return how many there are, the median, the 90th percentile, and the longest."""
    return len(lengths), statistics.median(lengths), sorted(lengths)[int(0.9 * len(lengths))], max(lengths)


def main() -> None:
    """Print a row for each package, and the longest functions of all."""
    found = {package: sorted(functions(package), reverse=True) for package in PACKAGES}
    found["all"] = sorted((each for package in PACKAGES for each in found[package]), reverse=True)
    rows = []
    for package, lengths in found.items():
        paths = [path for name in PACKAGES if package in (name, "all") for path in files(name)]
        lines = [len(path.read_text(encoding="utf-8").splitlines()) for path in paths]
        rows.append([package, *summary([length for length, _ in lengths]), len(lines), sum(lines), max(lines)])
    headers = ["package", "functions", "median", "90 %", "longest", "files", "lines", "longest file"]
    print(tabulate(rows, headers=headers))
    print("\nlongest:\n" + tabulate(found["all"][:LONGEST], tablefmt="plain"))


if __name__ == "__main__":
    main()
