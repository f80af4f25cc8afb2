"""Which releases of torch show the findings about torch's own engines: the table behind docs/backends.md.

``python benchmarks/findings_by_release.py PYTHON…`` runs each finding's script in each interpreter, one for each
release of torch, and prints the table; ``-o FILE`` keeps what was run, so that a later call adds interpreters to it.
The scripts need torch alone.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from tabulate import tabulate

ROOT = Path(__file__).resolve().parents[1]
FINDINGS = ROOT / "docs" / "findings"
OWNERS = ("qnnpack", "fbgemm", "onednn", "torch")
SECONDS = 300
NEEDS_ANOTHER_MACHINE = 77
SHOWS, MENDED, ELSEWHERE, FAILS = "shows", "does not show", "needs another CPU or build", "cannot run"
SYMBOLS = {SHOWS: "●", MENDED: "–", ELSEWHERE: "other", FAILS: "?"}
Outcomes = dict[str, dict[str, str]]
"""Release → script's name without suffix → outcome."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the scripts, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("interpreters", nargs="*", metavar="PYTHON", help="an interpreter with a release of torch")
    parser.add_argument("-o", dest="file", type=Path, metavar="FILE", help="JSON of all runs, read and written")
    options = parser.parse_args(arguments)
    outcomes: Outcomes = {}
    if options.file is not None and options.file.is_file():
        outcomes = json.loads(options.file.read_text(encoding="utf-8"))
    for interpreter in options.interpreters:
        release = run(interpreter, "-c", "import torch; print(torch.__version__)").stdout.strip().partition("+")[0]
        outcomes[release] = {path.stem: find_outcome(interpreter, path) for path in list_scripts()}
        print(f"torch {release}: {len(outcomes[release])} scripts", file=sys.stderr)
        if options.file is not None:
            options.file.write_text(json.dumps(outcomes, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    print(table_of(outcomes))
    return 0


def list_scripts() -> list[Path]:
    """Return the scripts about torch's own engines."""
    return [path for path in sorted(FINDINGS.glob("*.py")) if path.stem.partition("_")[0] in OWNERS]


def run(interpreter: str, *words: str) -> subprocess.CompletedProcess[str]:
    """Run Python without warnings; a script without an end is killed."""
    command = [interpreter, "-W", "ignore", *words]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, cwd=FINDINGS)
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, -1, "", f"no end in {SECONDS} seconds")


def find_outcome(interpreter: str, script: Path) -> str:
    """Run a script; say whether its fault shows. A script that cannot run says why on standard error."""
    done = run(interpreter, str(script))
    if done.returncode == 0 and done.stdout.endswith("the fault shows\n"):
        return SHOWS
    if done.returncode == NEEDS_ANOTHER_MACHINE:
        return ELSEWHERE
    if done.returncode == 1 and "the fault does not show" in done.stdout:
        return MENDED
    print(f"{script.stem}: {(done.stderr.strip() or '?').splitlines()[-1]}", file=sys.stderr)
    return FAILS


def table_of(outcomes: Mapping[str, Mapping[str, str]]) -> str:
    """Return the table in Markdown: a row for each finding, a column for each release."""
    releases = sorted(outcomes, key=lambda release: [int(part) for part in release.split(".")])
    text = (ROOT / "docs" / "findings.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d+) \| ([^|]+) \| ([^|]+) \|.*\(findings/(\w+)\.py\) \|$", text, re.MULTILINE)
    scripts = {path.stem for path in list_scripts()}
    lines = [
        [number, engine, claimed, *(SYMBOLS[outcomes[release][script]] for release in releases)]
        for number, engine, claimed, script in rows
        if script in scripts
    ]
    return tabulate(lines, ["#", "engine", "what does not hold", *releases], tablefmt="github", disable_numparse=True)


if __name__ == "__main__":
    sys.exit(main())
