"""Processes that run a vendor's code: how they settle, who stands guard over them, and how they ended."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import logging
import os
import signal
import sys
import time
from pathlib import Path
from typing import IO

PATIENCE = 1.0
"""Seconds in which a process that was asked to end, or has closed its channel, is expected to exit."""
SPARE = 10
"""Seconds after the limit at which a process that nobody waits for ends itself."""
MOST_OUTPUT = 1 << 20
"""Maximal number of bytes that are kept of a process's output."""
TAIL = 4000
"""Number of characters of that output that are shown."""
OWN_FRAMES = (
    f'  File "{os.path.dirname(os.path.dirname(__file__))}{os.sep}machine',
    f'  File "{os.path.dirname(os.path.dirname(__file__))}{os.sep}remote',
)
"""How the frames of the suite's own loops begin in a dumped stack: they, and what called them, are not shown."""
MOST_FILES = 4096
"""Descriptors from this number on are not looked at."""
_POLL = 0.005
_DIE_WITH_PARENT, _TAKE_ORPHANS = 1, 36
"""PR_SET_PDEATHSIG and PR_SET_CHILD_SUBREAPER of Linux's prctl."""


def settle(output: int) -> None:
    """Leave the parent's terminal, logs, signal handlers and streams; what is printed goes to the file ``output``."""
    import fcntl
    import resource

    os.setsid()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM):
        signal.signal(number, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    fcntl.fcntl(output, fcntl.F_SETFL, fcntl.fcntl(output, fcntl.F_GETFL) | os.O_APPEND)  # the parent may cut the file
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stdout, sys.stderr = (open(fd, "w", 1, "utf-8", "backslashreplace", closefd=False) for fd in (1, 2))  # noqa: SIM115
    faulthandler.enable(2, all_threads=False)
    _leave_logs()


def _leave_logs() -> None:
    """Take away the handlers of pytest, which keeps each record of every logger.

    torch makes records of each trace, with the stack, only where its logger has a handler.
    """
    named = (logger for logger in logging.root.manager.loggerDict.values() if isinstance(logger, logging.Logger))
    for logger in (logging.root, *named):
        for handler in list(logger.handlers):
            if type(handler).__module__ == "_pytest.logging":
                logger.removeHandler(handler)


def stand_guard() -> None:
    """Go on in a child of this process, while this process waits for it and ends as it ends.

    Code that harms its parent then harms the guard, and not the process that judges. What the child leaves running, in
    a session of its own too, falls to the guard (on Linux), which ends it.
    """
    guard = os.getpid()
    _control_process(_TAKE_ORPHANS, 1)
    child = os.fork()
    if child == 0:
        _die_with(guard)
        return
    signal.signal(signal.SIGABRT, signal.SIG_IGN)  # it asks the whole group for its stacks
    os.closerange(3, MOST_FILES)
    ended, code = os.wait()
    while ended != child:  # an orphan
        ended, code = os.wait()
    status = os.waitstatus_to_exitcode(code)
    end_descendants(guard)
    if status < 0:
        if -status not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status & 0xFF)


def _die_with(parent: int) -> None:
    """Have this process killed when its parent ends (on Linux), and now if that is no longer ``parent``."""
    _control_process(_DIE_WITH_PARENT, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _control_process(what: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(what, value)


def end_descendants(ancestor: int) -> None:
    """Kill all that a process has started, and what that has, as far as the system tells of them."""
    deadline, is_alive = time.monotonic() + PATIENCE, True
    while is_alive and time.monotonic() < deadline:
        found = _list_descendants(ancestor)
        for pid in found:  # a zombie may still have threads
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        is_alive = any(state != b"Z" for state in found.values())
        time.sleep(_POLL if is_alive else 0)


def _list_descendants(ancestor: int) -> dict[int, bytes]:
    """Return the processes below one, with their states; none where there is no ``/proc``."""
    states, parents = dict[int, bytes](), dict[int, int]()
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            state, parent = path.read_bytes().rpartition(b")")[2].split()[:2]
            states[int(path.parent.name)], parents[int(path.parent.name)] = state, int(parent)
    found, new = set[int](), {ancestor}
    while new:
        new = {pid for pid, parent in parents.items() if parent in new} - found
        found |= new
    return {pid: states[pid] for pid in found}


def exit_status_of(leaving: SystemExit) -> int:
    """Return the status with which Python would exit."""
    return leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)


def format_exit(status: int | None) -> str:
    """Say how a process ended. ``status``: its exit status; negative: the signal; None: it is not known to have."""
    if status is None:
        return "closed its channel to the suite"
    if status >= 0:
        return f"exited with status {status}"
    name = signal.Signals(-status).name if -status in set(signal.Signals) else f"signal {-status}"
    hint = ", as when memory runs out" if -status == signal.SIGKILL else ""
    return f"was killed by {name} ({signal.strsignal(-status)}{hint})"


def cut_flood(output: IO[bytes]) -> None:
    """Drop a process's output but for its end where it is more than is kept."""
    size = os.fstat(output.fileno()).st_size
    if size > MOST_OUTPUT:
        end = os.pread(output.fileno(), TAIL, size - TAIL)
        output.truncate(0)
        os.write(output.fileno(), end)  # it is appended, as all that the process writes


def read_output(output: IO[bytes]) -> str:
    """Return the end of a process's output; of a dumped stack the first frames of the code that it was running."""
    output.seek(max(0, output.seek(0, os.SEEK_END) - MOST_OUTPUT))
    text = output.read().decode(errors="replace")
    before, mark, stack = text.rpartition("(most recent call first)")
    if not mark:
        return text[-TAIL:]
    for frame in OWN_FRAMES:
        stack = stack.split(frame)[0]
    stack = stack[: TAIL - len(mark)]
    return f"{before}{mark}"[len(stack) - TAIL :] + stack


def own_peak_mib() -> float:
    """Return the largest resident size of this process or of one that it has waited for, in MiB."""
    import resource

    peaks = (resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return max(peaks) / (1 << 20 if sys.platform == "darwin" else 1 << 10)
