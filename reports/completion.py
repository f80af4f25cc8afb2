"""What all commands share: completion by the shell, where argcomplete asks for it, and what is gone."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence


def complete(parser: argparse.ArgumentParser) -> None:
    """Answer the shell and end the process, if argcomplete's script runs this one; otherwise do nothing."""
    if "_ARGCOMPLETE" not in os.environ:
        return
    try:
        import argcomplete
    except ImportError:
        return
    argcomplete.autocomplete(parser)


def find_removed(words: Sequence[str], removed: Mapping[str, str], prog: str) -> str:
    """Say which command or option of an earlier version a command line has, and what to do instead; "" if none.

    ``removed``: what to do, by ``command`` or ``command --option``. ``prog``: how the user calls the commands.
    """
    given = [*words[:1], *(f"{words[0]} {word.partition('=')[0]}" for word in words[1:])]
    name = next((name for name in given if name in removed), None)
    return f"{prog}: {name} is gone: {removed[name]}" if name else ""
