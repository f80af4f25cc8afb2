# PYTHON_ARGCOMPLETE_OK
"""``fx-quant-conformance``: the one command of the suite, and its parser.

Exit status: that of a command (docs/options.md, docs/reports.md); 4 for a usage error, and for what is gone.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Mapping, Sequence

Command = tuple[str, Callable[[argparse.ArgumentParser], None]]
"""What help says of a command, and what adds its arguments, which imports no more than the command needs."""
NAME = "fx-quant-conformance"
SUITE = "fx_quant_conformance"
"""What pytest is asked to run: ``pytest --pyargs fx_quant_conformance``."""
USAGE = 4
_HELP = """\
Each command has a --help of its own. certify takes all options of pytest, writes results and a report, and ends with
pytest's status. The certificate of a run that passed is written by "report certify RESULTS.jsonl -o DIR"."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    asked = _read_completed() if "_ARGCOMPLETE" in os.environ else words
    if asked[:1] in (["certify"], ["judge"]):
        from fx_quant_conformance.conformance.machine.bytecode import compile_sources

        compile_sources()  # as in the two doors of pytest
    if asked[:1] == ["certify"] and (words or len(asked) > 1):
        return _certify(words[1:])
    from fx_quant_conformance.reports.completion import complete

    commands = _list_commands(asked)
    parser = make_parser(asked, commands)
    complete(parser)
    if gone := _find_removed(words):
        print(gone, file=sys.stderr)
        return USAGE
    try:
        options = parser.parse_args(words)
    except SystemExit as end:
        return USAGE if end.code else 0
    if options.version:
        print(_format_version())
        return 0
    if options.command is None:
        parser.print_usage(sys.stderr)
        print(f"{NAME}: error: give a command: {', '.join(commands)}", file=sys.stderr)
        return USAGE
    run: Callable[[argparse.Namespace], int] = options.run
    return run(options)


def make_parser(words: Sequence[str], added: Mapping[str, Command]) -> argparse.ArgumentParser:
    """Return the parser for a command line.

    It has the arguments of the command that the line begins with. Of the others it has name and help.
    """
    parser = argparse.ArgumentParser(
        prog=NAME,
        epilog=_HELP,
        description="Certifies the claims of a PyTorch FX BackendConfig against a backend's kernels.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="store_true", help="print version and commit of the suite, and exit")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", prog=NAME)
    for name, (text, add) in added.items():
        command = commands.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")
        if words[:1] == [name]:
            add(command)
    return parser


def _add_certify(parser: argparse.ArgumentParser) -> None:
    """Add nothing: what follows is pytest's."""


def _add_suites(name: str) -> Callable[[argparse.ArgumentParser], None]:
    def add(parser: argparse.ArgumentParser) -> None:
        from fx_quant_conformance.conformance.commands import ADD

        ADD[name](parser)

    return add


def _add_report(parser: argparse.ArgumentParser) -> None:
    from fx_quant_conformance.reports.commands import add_commands

    add_commands(parser)


def _list_commands(words: Sequence[str]) -> dict[str, Command]:
    """Return the commands, by name, of which a line about reports needs those of no room."""
    if words[:1] == ["report"]:
        return _COMMANDS
    from fx_quant_conformance.conformance.rooms import list_rooms

    return dict([*_COMMANDS.items(), *(command for room in list_rooms() for command in room.commands.items())])


_COMMANDS: dict[str, Command] = {
    "certify": (f"run the suite on a backend, as pytest --pyargs {SUITE} --backend=NAME does", _add_certify),
    "init": ("write the package of a backend that runs at once", _add_suites("init")),
    "export": ("write models and inputs as files, for a device that cannot run Python", _add_suites("export")),
    "run": ("run such files by a backend in Python, in a process of its own", _add_suites("run")),
    "judge": ("judge what a device handed in for them", _add_suites("judge")),
    "report": ("make reports, comparisons and certificates from results files", _add_report),
}
"""The commands that no room adds."""


def _find_removed(words: Sequence[str]) -> str:
    """Say what of a line is gone, and what to do instead; "" if nothing is."""
    from fx_quant_conformance.reports.completion import find_removed

    if words[:1] != ["report"]:
        return find_removed(words, _REMOVED, NAME)
    from fx_quant_conformance.reports.commands import REMOVED

    return find_removed(words[1:], REMOVED, f"{NAME} report")


_REMOVED = {
    "describe": f"{NAME} report verify DIR --rerun=N runs N claims of a certificate again",
    "expect": f"{NAME} report baseline writes what a run is known to give",
}
"""Commands of earlier versions, and what to do instead."""


def _certify(words: Sequence[str]) -> int:
    import pytest

    if "_ARGCOMPLETE" in os.environ:  # it says how many words name the program: pytest answers for one more
        os.environ["_ARGCOMPLETE"] = str(int(os.environ["_ARGCOMPLETE"]) + 1)
    return int(pytest.main(["--pyargs", SUITE, *words]))


def _format_version() -> str:
    from fx_quant_conformance.conformance.machine.release import (
        ROOT,
        find_change,
        read_suite_commit,
        read_suite_version,
    )

    change = find_change(ROOT)
    text = f"{NAME} {read_suite_version(ROOT)}, commit {read_suite_commit(ROOT)}"
    return f"{text} ({change})" if change else text


def _read_completed() -> list[str]:
    """Return the words after the command's name of the line that the shell asks about; "" stands for a new one."""
    start, before = int(os.environ["_ARGCOMPLETE"]), os.environ["COMP_LINE"][: int(os.environ["COMP_POINT"])]
    return [*before.split()[start:], *[""] * before[-1:].isspace()]
