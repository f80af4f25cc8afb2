"""Python commands in processes of their own that need not import torch first.

`multiprocessing`'s fork server imports torch, pytest and the suite once in a new interpreter (`preloaded`); each
command runs in a fork of it. A command finds what it would find in a new interpreter (arguments, folder, environment,
streams, exit status), but for modules that are imported already: those of the tests are taken away.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from multiprocessing import forkserver
from pathlib import Path

from fx_quant_conformance.conformance.machine.fork_server import start_server

NEW_CHILDREN = {"NEW_CHILDREN": "1"}
"""In a command's environment: it makes its processes from a new interpreter too, as a command by itself does."""
_CONTEXT = multiprocessing.get_context("forkserver")


def run_python(
    *words: str, cwd: Path, environment: Mapping[str, str] | None = None, timeout: float = 300
) -> subprocess.CompletedProcess[str]:
    """Run ``python WORDS``: ``[-W ignore] (-m MODULE | -c CODE | SCRIPT) ARGUMENTS``.

    ``environment``: the process's whole environment; None: this process's. Raises TimeoutExpired after ``timeout``
    seconds, when the process is killed.
    """
    environment = dict(os.environ if environment is None else environment)
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder) / "out", Path(folder) / "err"
        start_server(["tests.support.preloaded"])
        process = _CONTEXT.Process(target=_be_python, args=(words, cwd, environment, out, err))
        process.start()
        process.join(timeout)
        if process.exitcode is None:
            process.kill()
            process.join()
            raise subprocess.TimeoutExpired(words, timeout, *(_text(path) for path in (out, err)))
        return subprocess.CompletedProcess(words, process.exitcode, *(_text(path) for path in (out, err)))


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace")


def _be_python(words: Sequence[str], cwd: Path, environment: Mapping[str, str], out: Path, err: Path) -> None:
    """Become the command: in its folder, with its environment, streams, arguments and path of modules."""
    for descriptor, path in ((1, out), (2, err)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), descriptor)
    sys.stdout, sys.stderr = (open(fd, "w", 1, "utf-8", "backslashreplace", closefd=False) for fd in (1, 2))  # noqa: SIM115
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    installed = [path for path in sys.path if Path(path).is_relative_to(sys.base_prefix) or "site-packages" in path]
    sys.path[:] = [*filter(None, environment.get("PYTHONPATH", "").split(os.pathsep)), *installed]
    sys.orig_argv[:] = [sys.executable, *words]
    if "NEW_CHILDREN" not in environment:  # a command's processes come from the server that has made the command
        forkserver._forkserver.ensure_running = lambda: None  # type: ignore[method-assign]
        forkserver.ensure_running = lambda: None
    for name in [name for name in sys.modules if name.partition(".")[0] == "tests"]:
        del sys.modules[name]
    if words[:2] == ("-W", "ignore"):
        warnings.simplefilter("ignore")
        words = words[2:]
    kind, *arguments = words
    if kind == "-m":
        sys.path.insert(0, str(cwd))
        sys.argv[:] = arguments
        runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
    elif kind == "-c":
        sys.path.insert(0, "")
        sys.argv[:] = ["-c", *arguments[1:]]
        exec(compile(arguments[0], "<string>", "exec"), {"__name__": "__main__"})
    else:
        sys.path.insert(0, str(Path(kind).parent))
        sys.argv[:] = words
        runpy.run_path(kind, run_name="__main__")
