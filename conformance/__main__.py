"""The suite's own command: ``python -m conformance init NAME`` writes the skeleton of a vendor's package.

Certifying is ``pytest conformance --backend=NAME``. Exit status: 0 it is written, 4 usage error.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from conformance.skeleton import FILES, SkeletonError, class_of, write_skeleton

USAGE = 4


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    try:
        options = _parser().parse_args(arguments)
    except SystemExit as end:
        return USAGE if end.code else 0
    try:
        folder = write_skeleton(options.name, Path.cwd())
    except SkeletonError as error:
        print(f"ERROR: {error}", file=sys.stderr)
        return USAGE
    suite = Path(__file__).parent
    print(
        f"wrote {folder.name}/: {', '.join(path.format(name=folder.name) for path in FILES)}\n"
        f"certify it: cd {folder.name} && pytest {suite} --backend={folder.name}.backend:{class_of(folder.name)}\n"
        f"or, once it is installed (README.md): pytest {suite} --backend={folder.name}"
    )
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m conformance", description="The conformance suite's own command.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="init")
    init = commands.add_parser(
        "init", help="write a backend's package", description="Write a package with a backend that certifies at once."
    )
    init.add_argument("name", metavar="NAME", help="of the backend and its package, such as my_npu: a folder made here")
    return parser


if __name__ == "__main__":
    sys.exit(main())
