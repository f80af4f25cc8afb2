# PYTHON_ARGCOMPLETE_OK
"""The suite's own commands; certifying is ``pytest --pyargs conformance --backend=NAME``.

``python -m conformance init NAME`` writes the skeleton of a vendor's package; ``python -m conformance expect
RESULTS.jsonl`` writes a run's verdicts as the expected ones; ``python -m conformance describe RESULTS.jsonl`` says what
the suite here knows of a run, for ``python -m reports verify``. Exit status: 0 success, 2 the run does not allow it, 4
usage error.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib.metadata import entry_points
from pathlib import Path

from conformance.machine.release import DISTRIBUTION
from conformance.run.expected import FOLDER, ExpectedError, write_expected
from reports.codec import line_of
from reports.completion import complete
from reports.results import ResultsError, read_results

REFUSED = 2
USAGE = 4


def main(arguments: Sequence[str] | None = None, prog: str = "python -m conformance") -> int:
    """Run the command line; return the exit status. ``prog``: how the user calls it."""
    parser = _make_parser(prog)
    complete(parser)
    try:
        options = parser.parse_args(arguments)
    except SystemExit as end:
        return USAGE if end.code else 0
    commands = {"init": _init, "expect": _expect, "describe": _describe}
    return commands[options.command](options)


def _expect(options: argparse.Namespace) -> int:
    try:
        print(write_expected(options.files, options.folder))
    except (ResultsError, ExpectedError, OSError) as error:
        print(f"ERROR: {error}", file=sys.stderr)
        return REFUSED
    return 0


def _describe(options: argparse.Namespace) -> int:
    from conformance.run.description import describe  # needs torch

    try:
        text = line_of(describe(read_results(options.file), options.waivers))
        options.output.write_text(f"{text}\n", encoding="utf-8")
    except (ResultsError, OSError) as error:
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
    is_installed = bool(entry_points(group="pytest11", name=DISTRIBUTION))
    command = f"pytest {'--pyargs conformance' if is_installed else Path(__file__).parent}"
    print(
        f"wrote {folder.name}/: {', '.join(path.format(name=folder.name) for path in FILES)}\n"
        f"run it: cd {folder.name} && {command} --backend={folder.name}.backend:{class_of(folder.name)} "
        "--without-execution-evidence\n"
        "that passes; without the option no claim does until execution() says what runs on integers\n"
        f"or, once it is installed (README.md): {command} --backend={folder.name}"
    )
    return 0


def _make_parser(prog: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=prog, description="The conformance suite's own command.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="init|expect|describe")
    init = commands.add_parser(
        "init", help="write a backend's package", description="Write a package with a backend that runs at once."
    )
    init.add_argument("name", metavar="NAME", help="of the backend and its package, such as my_npu: a folder made here")
    expect = commands.add_parser(
        "expect", help="write the verdicts to expect", description="Write the verdicts of a run as those to expect."
    )
    expect.add_argument("files", nargs="+", type=Path, metavar="RESULTS.jsonl", help="of full runs of all claims")
    expect.add_argument("--folder", type=Path, default=FOLDER, metavar="DIR", help=f"default: {FOLDER}")
    describe = commands.add_parser(
        "describe", help="write what the suite knows of a run", description="Write, as JSON, what the suite and the "
        "backend here say of the run of a results file: its claims, jobs, limits and waivers. Nothing is run.",
    )  # fmt: skip
    describe.add_argument("file", type=Path, metavar="RESULTS.jsonl")
    describe.add_argument("--waivers", type=Path, metavar="FILE", help="the waivers that the run used; default: none")
    describe.add_argument("-o", dest="output", type=Path, metavar="OUT.json", default=Path("description.json"))
    return parser


if __name__ == "__main__":
    sys.exit(main())
