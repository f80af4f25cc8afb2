"""The suite's own commands; certifying is ``pytest conformance --backend=NAME``.

``python -m conformance init NAME`` writes the skeleton of a vendor's package; ``python -m conformance expect
RESULTS.jsonl`` writes a run's verdicts as the expected ones. Exit status: 0 success, 2 the run does not allow it,
4 usage error.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from conformance.run.expected import FOLDER, ExpectedError, write_expected
from reports.results import ResultsError

REFUSED = 2
USAGE = 4


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    try:
        options = _make_parser().parse_args(arguments)
    except SystemExit as end:
        return USAGE if end.code else 0
    return _expect(options) if options.command == "expect" else _init(options)


def _expect(options: argparse.Namespace) -> int:
    try:
        print(write_expected(options.files, options.folder))
    except (ResultsError, ExpectedError, OSError) as error:
        print(f"ERROR: {error}", file=sys.stderr)
        return REFUSED
    return 0


def _init(options: argparse.Namespace) -> int:
    from conformance.scaffold.skeleton import FILES, SkeletonError, class_of, write_skeleton  # needs torch

    try:
        folder = write_skeleton(options.name, Path.cwd())
    except SkeletonError as error:
        print(f"ERROR: {error}", file=sys.stderr)
        return USAGE
    suite = Path(__file__).parent
    print(
        f"wrote {folder.name}/: {', '.join(path.format(name=folder.name) for path in FILES)}\n"
        f"run it: cd {folder.name} && pytest {suite} --backend={folder.name}.backend:{class_of(folder.name)}\n"
        f"or, once it is installed (README.md): pytest {suite} --backend={folder.name}"
    )
    return 0


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m conformance", description="The conformance suite's own command.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="init|expect")
    init = commands.add_parser(
        "init", help="write a backend's package", description="Write a package with a backend that runs at once."
    )
    init.add_argument("name", metavar="NAME", help="of the backend and its package, such as my_npu: a folder made here")
    expect = commands.add_parser(
        "expect", help="write the verdicts to expect", description="Write the verdicts of a run as those to expect."
    )
    expect.add_argument("files", nargs="+", type=Path, metavar="RESULTS.jsonl", help="of full runs of all claims")
    expect.add_argument("--folder", type=Path, default=FOLDER, metavar="DIR", help=f"default: {FOLDER}")
    return parser


if __name__ == "__main__":
    sys.exit(main())
