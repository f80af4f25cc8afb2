"""Completion of a command line by the shell, where argcomplete is installed and asks for it."""

from __future__ import annotations

import argparse
import os


def complete(parser: argparse.ArgumentParser) -> None:
    """Answer the shell and end the process, if argcomplete's script runs this one; otherwise do nothing."""
    if "_ARGCOMPLETE" not in os.environ:
        return
    try:
        import argcomplete
    except ImportError:
        return
    argcomplete.autocomplete(parser)
