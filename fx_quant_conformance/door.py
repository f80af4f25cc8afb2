# PYTHON_ARGCOMPLETE_OK
"""``fx-quant-conformance``: one command for all that the suite does. It passes its arguments on, and parses none.

Exit status: that of what it calls (docs/options.md, docs/reports.md); 4 for a command that there is not.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

NAME = "fx-quant-conformance"
USAGE = 4
_HELP = """\
commands:
  certify --backend=NAME [OPTION...]
                        run the suite on a backend: pytest --pyargs conformance, with all options of pytest;
                        writes results and a report, and ends with pytest's status (no certificate: see below)
  init NAME             write the package of a backend that runs at once
  expect RESULTS.jsonl  write the verdicts of a run as those to expect of a shipped backend
  claims-of MODULE:QUANTIZER
                        write the BackendConfig that a torchao Quantizer amounts to
  export --backend=NAME -o DIR
                        write models and inputs as files, for a device that cannot run Python, and what is right
  run DEVICE OUT --backend=NAME
                        run such files by a backend in Python, in a process of its own
  judge DIR OUT         judge what a device handed in for them
  report COMMAND        make reports and comparisons from results files: render, markdown, compare, diff,
                        merge; "report certify RESULTS.jsonl -o DIR" writes the certificate of a run that passed,
                        and "report verify DIR" checks one

Each command has a --help of its own."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    parser = _make_parser()
    if "_ARGCOMPLETE" in os.environ:
        words = _complete(parser)
    try:
        options = parser.parse_args(words[:1])
        if options.version:
            print(_format_version())
            return 0
        if options.command is None:
            parser.error(f"give a command: {', '.join(_COMMANDS)}")
    except SystemExit as end:
        return USAGE if end.code else 0
    return _COMMANDS[options.command](words)


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=NAME,
        usage=f"{NAME} [-h | --version] COMMAND ...",
        epilog=_HELP,
        description="Certifies the claims of a PyTorch FX BackendConfig against a backend's kernels.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="store_true", help="print version and commit of the suite, and exit")
    parser.add_argument("command", nargs="?", choices=tuple(_COMMANDS), metavar="COMMAND", help="one of those below")
    return parser


def _certify(words: Sequence[str]) -> int:
    import pytest

    return int(pytest.main(["--pyargs", "conformance", *words[1:]]))


def _ask_suite(words: Sequence[str]) -> int:
    from conformance.__main__ import main as ask

    return ask(words, prog=NAME)


def _report(words: Sequence[str]) -> int:
    from reports.__main__ import main as report

    return report(words[1:], prog=f"{NAME} report")


_COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {
    "certify": _certify,
    "init": _ask_suite,
    "expect": _ask_suite,
    "describe": _ask_suite,
    "export": _ask_suite,
    "run": _ask_suite,
    "judge": _ask_suite,
    "claims-of": _ask_suite,
    "report": _report,
}
"""What answers each command; the suite says what stands for ``describe``, which is gone."""


def _format_version() -> str:
    from conformance.machine.release import find_change, read_suite_commit, read_suite_version

    root = Path(__file__).resolve().parents[1]
    change = find_change(root)
    text = f"{NAME} {read_suite_version(root)}, commit {read_suite_commit(root)}"
    return f"{text} ({change})" if change else text


def _complete(parser: argparse.ArgumentParser) -> list[str]:
    """Answer the shell's question for a command, and end the process; return the command that answers any other.

    The variable says how many words of the line name the program: a command that asks another program is one more.
    """
    start, line = int(os.environ["_ARGCOMPLETE"]), os.environ["COMP_LINE"]
    before = line[: int(os.environ["COMP_POINT"])]
    given = before.split()[start:]
    if given[:1] and given[0] in _COMMANDS and (given[1:] or before[-1:].isspace()):
        if given[0] in ("certify", "report"):
            os.environ["_ARGCOMPLETE"] = str(start + 1)
        return given[:1]
    from reports.completion import complete

    complete(parser)
    return []
