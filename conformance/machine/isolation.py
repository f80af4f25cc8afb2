"""Isolation: a backend's code runs in forked children, so that a crash or a hang costs its own claim and nothing else.

A child gets names of work over one pipe and streams what the work gives over another, a line of JSON for each row; the
parent waits for it with a limit. A child may serve several names, one after another, while all goes well: a fork costs
more than many a claim, mainly for the pages that parent and child no longer share. What is not done by a child that has
served before is tried again in a new one, and that counts: no claim is blamed for a death that another brought about.
(docs/architecture.md, "Isolation")
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import selectors
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import IO, NoReturn, Protocol

from backends.discovery import told
from reports.codec import PlainRow
from reports.results import Verdict

Serve = Callable[[str], Iterable[PlainRow]]
"""Does the work of a name: gives rows of plain builtins."""

CAN_FORK = hasattr(os, "fork")
PATIENCE = 1.0
"""Seconds in which a child that was told to end, or has closed its pipe, is expected to be gone."""
SPARE = 10
"""Seconds after the limit at which a child whose parent is gone ends by itself."""
MOST_MIB = 768
"""A child that has grown beyond this serves no further name."""
MOST_OUTPUT = 1 << 20
TAIL = 4000
_POLL = 0.05
_OWN_FRAME = f'  File "{__file__}"'


class Ending(StrEnum):
    """How a piece of work ended."""

    DONE = "done"
    ERROR = "error"
    DIED = "died"
    TIMEOUT = "timeout"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a piece of work gave until it ended, and how it ended.

    ``message`` says why it is not DONE. ``text`` is the traceback of an ERROR, or the tail of what a process printed
    that DIED or was killed at the limit. ``peak_mib`` is the largest resident size of a process that did the work.
    """

    rows: tuple[PlainRow, ...]
    ending: Ending
    seconds: float
    peak_mib: float
    message: str = ""
    text: str = ""


_VERDICTS = {Ending.DIED: Verdict.CRASHED, Ending.TIMEOUT: Verdict.TIMEOUT, Ending.ERROR: Verdict.UNEXERCISED}
_TEXTS = {Ending.DIED: "printed", Ending.TIMEOUT: "printed", Ending.ERROR: "traceback"}


def lost(outcome: Outcome) -> tuple[Verdict, str, PlainRow]:
    """Return the verdict, message and evidence of work that did not end well."""
    own = "internal error of the suite: " if outcome.ending is Ending.ERROR else ""
    evidence: PlainRow = {_TEXTS[outcome.ending]: outcome.text} if outcome.text else {}
    return _VERDICTS[outcome.ending], own + outcome.message, evidence


class Isolation(Protocol):
    """Does pieces of work by name, one at a time."""

    def run(self, name: str) -> Outcome:
        """Do the work of ``name``; raises nothing that the work raises."""

    def close(self) -> None:
        """End the process that is left."""


class InProcess:
    """No isolation, where ``os.fork`` is missing: a crash ends the run, and there is no limit."""

    def __init__(self, serve: Serve) -> None:
        self._serve = serve

    def run(self, name: str) -> Outcome:
        """Do the work here."""
        started = time.monotonic()
        rows: list[PlainRow] = []
        last = _served(self._serve, name, rows.append)
        return _outcome(rows, last, started)

    def close(self) -> None:
        """Nothing is left."""


class Forked:
    """Does work in forked children.

    ``limit``: seconds for one name. ``share``: how many names one child may serve.
    """

    def __init__(self, serve: Serve, *, limit: float, share: int) -> None:
        self._serve = serve
        self._limit = limit
        self._share = share
        self._output = tempfile.TemporaryFile()  # noqa: SIM115  # lives as long as this object
        self._child: _Child | None = None

    def run(self, name: str) -> Outcome:
        """Do the work in a child; once more in a new one if it is not done by a child that had served before."""
        used = self._child is not None
        outcome = self._once(name)
        return self._once(name) if used and outcome.ending is not Ending.DONE else outcome

    def close(self) -> None:
        """Kill the child that is left, if any."""
        child, self._child = self._child, None
        if child is not None:
            child.end()

    def _once(self, name: str) -> Outcome:
        """Do the work in the child that is there, or in a new one; what is not done leaves no child."""
        child = self._child = self._child or _Child(self._serve, self._limit, self._output)
        keep = False
        try:
            outcome = child.run(name)
            done = outcome.ending is Ending.DONE
            keep = done and child.served < self._share and outcome.peak_mib < MOST_MIB
        finally:
            if not keep:
                self.close()
        return outcome


class _Child:
    """A forked child, seen from its parent."""

    def __init__(self, serve: Serve, limit: float, output: IO[bytes]) -> None:
        names_in, names_out = os.pipe()
        rows_in, rows_out = os.pipe()
        self.served = 0
        self._limit = limit
        self._output = output
        self._status: int | None = None
        self._peak_mib = 0.0
        self._pid = os.fork()
        if self._pid == 0:
            _live(serve, limit, (names_in, names_out), (rows_in, rows_out), output.fileno())
        os.close(names_in)
        os.close(rows_out)
        self._names = names_out
        self._rows = rows_in
        self._selector = selectors.DefaultSelector()
        self._selector.register(rows_in, selectors.EVENT_READ)

    def run(self, name: str) -> Outcome:
        """Have the work of ``name`` done; after any ending but DONE and ERROR the child is of no more use."""
        self.served += 1
        self._output.truncate(0)
        started = time.monotonic()
        rows: list[PlainRow] = []
        try:
            self._ask(name)
            for line in self._lines(started + self._limit):
                if "row" not in line:
                    return _outcome(rows, line, started)
                rows.append(line["row"])
            last = {"ending": Ending.DIED, "message": self._death()}
        except TimeoutError:
            self._dump_stack()
            last = {"ending": Ending.TIMEOUT, "message": f"did not end within {self._limit:g} s (--claim-timeout)"}
        return _outcome(rows, last | {"text": self._printed(), "peak_mib": self._peak_mib}, started)

    def end(self) -> None:
        """Kill the child and all that it started, and leave no zombie."""
        if not self._exited():
            os.kill(self._pid, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError, PermissionError):  # of the group nobody is left
            os.killpg(self._pid, signal.SIGKILL)
        self._exited(patience=None)
        self._selector.close()
        os.close(self._names)
        os.close(self._rows)

    def _ask(self, name: str) -> None:
        with contextlib.suppress(BrokenPipeError):  # it died since it last answered: it will not answer now
            os.write(self._names, json.dumps(name).encode() + b"\n")

    def _lines(self, deadline: float) -> Iterator[PlainRow]:
        """What the child sends, until it is dead. Raises TimeoutError at the deadline (``time.monotonic``)."""
        rest = b""
        while True:
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError
            if not self._selector.select(min(left, _POLL)):
                if self._exited() and not self._selector.select(0):  # what it started may hold the pipe open
                    return
            elif data := os.read(self._rows, 1 << 16):
                *lines, rest = (rest + data).split(b"\n")
                yield from map(json.loads, lines)
            else:
                return
            if os.fstat(self._output.fileno()).st_size > MOST_OUTPUT:
                self._output.truncate(0)

    def _exited(self, patience: float | None = 0.0) -> bool:
        """Tell whether the child has exited, and wait for it as long as ``patience`` says (None: for ever)."""
        until = time.monotonic() + (patience or 0.0)
        while self._status is None:
            pid, status, usage = os.wait4(self._pid, 0 if patience is None else os.WNOHANG)
            if pid:
                self._status = os.waitstatus_to_exitcode(status)
                self._peak_mib = _mib(usage.ru_maxrss)
            elif time.monotonic() >= until:
                return False
            else:
                time.sleep(_POLL / 10)
        return True

    def _death(self) -> str:
        """Say how the child left."""
        self._exited(PATIENCE)
        if self._status is None:
            return "the process closed its pipe to the suite"
        if self._status >= 0:
            return f"the process exited with status {self._status}"
        number = -self._status
        name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
        hint = ", as when memory runs out" if number == signal.SIGKILL else ""
        return f"the process was killed by {name} ({signal.strsignal(number)}{hint})"

    def _dump_stack(self) -> None:
        """Have the child print where it hangs, as far as it still can; this ends it."""
        if not self._exited():
            os.kill(self._pid, signal.SIGABRT)
            self._exited(PATIENCE)

    def _printed(self) -> str:
        """The end of what the child printed; of a dumped stack, the child's own frames."""
        self._output.seek(max(0, self._output.seek(0, os.SEEK_END) - MOST_OUTPUT))
        text = self._output.read().decode(errors="replace")
        before, mark, stack = text.rpartition("(most recent call first)")
        return f"{before}{mark}{stack.split(_OWN_FRAME)[0] if mark else stack}"[-TAIL:]


def _live(serve: Serve, limit: float, names: tuple[int, int], rows: tuple[int, int], output: int) -> NoReturn:
    """Be the child: answer names until there are no more, and never return into the parent's code."""
    status = 1
    try:
        os.close(names[1])
        os.close(rows[0])
        _settle(output)
        with open(names[0], encoding="utf-8") as asked, open(rows[1], "w", encoding="utf-8") as answers:
            for line in asked:
                signal.alarm(int(limit) + SPARE)
                _answer(serve, json.loads(line), answers)
                signal.alarm(0)
        status = 0
    except BaseException as leaving:
        traceback.print_exc()
        code = leaving.code if isinstance(leaving, SystemExit) else 1
        status = code if isinstance(code, int) else int(code is not None)
    finally:
        os._exit(status & 0xFF)


def _settle(output: int) -> None:
    """Leave the parent's terminal, signal handlers and streams; what is printed goes to the file ``output``."""
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


def _answer(serve: Serve, name: str, answers: IO[str]) -> None:
    """Send the rows of one name, and how its work ended."""

    def send(line: Mapping[str, object]) -> None:
        answers.write(json.dumps(line) + "\n")
        answers.flush()

    send(_served(serve, name, lambda row: send({"row": row})))


def _served(serve: Serve, name: str, take: Callable[[PlainRow], object]) -> PlainRow:
    """Do the work of a name; return how it ended. What it raises beside Exception goes through."""
    ending: PlainRow = {"ending": Ending.DONE}
    try:
        for row in serve(name):
            take(row)
    except Exception as error:
        ending = {"ending": Ending.ERROR, "message": told(error), "text": "".join(traceback.format_exception(error))}
    return ending | {"peak_mib": own_peak_mib()}


def _outcome(rows: Sequence[PlainRow], last: PlainRow, started: float) -> Outcome:
    return Outcome(
        rows=tuple(rows),
        ending=Ending(last["ending"]),
        seconds=time.monotonic() - started,
        peak_mib=last["peak_mib"],
        message=last.get("message", ""),
        text=last.get("text", ""),
    )


def own_peak_mib() -> float:
    """The largest resident size of this process or of one that it waited for; 0 where nobody counts it."""
    try:
        import resource
    except ImportError:
        return 0.0
    return max(_mib(resource.getrusage(who).ru_maxrss) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))


def _mib(maxrss: int) -> float:
    return maxrss / (1 << 20 if sys.platform == "darwin" else 1 << 10)
