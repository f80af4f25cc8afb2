"""Isolation: a backend's code runs in forked children, so that a crash or a hang costs its own claim and nothing else.

A child gets names of work over one pipe and streams the messages of that work over another, a line for each; the parent
waits for it with a limit. A child may serve several names, one after another, while all goes well: a fork costs more
than many a claim, mainly for the pages that parent and child no longer share. Work that is not done by a child that has
served before is tried again in a new one, and only that counts: no claim is blamed for a death that another brought
about. (docs/architecture.md, "Isolation")
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from multiprocessing import current_process, get_context
from multiprocessing.connection import Connection, wait
from typing import IO, ClassVar, Literal, NoReturn, Protocol

from backends.discovery import describe_error
from conformance.machine.guard import Finds, guard
from conformance.machine.messages import MESSAGES, from_line, to_line
from reports.codec import Message, decode, line_of, loads
from reports.schema import Evidence, evidence
from reports.verdicts import Verdict

Serve = Callable[[str], Iterable[Message]]
"""Does the work of a name: yields its messages."""

CAN_FORK = hasattr(os, "fork")
PATIENCE = 1.0
"""Seconds in which a child that was asked to end, or has closed its pipe, is expected to be gone."""
SPARE = 10
"""Seconds after the limit at which a child whose parent is gone ends by itself."""
MOST_MIB = 768
"""A child that has grown beyond this many MiB serves no further name."""
MOST_OUTPUT = 1 << 20
"""Bytes of a child's output that are kept at most."""
TAIL = 4000
"""Characters of that output that are shown."""
_POLL = 0.05
_OWN_FRAME = f'  File "{__file__}"'


class Ending(StrEnum):
    """How a piece of work ended."""

    DONE = "done"
    ERROR = "error"
    DIED = "died"
    TIMEOUT = "timeout"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkResult:
    """The messages of a piece of work, and how it ended.

    ``message`` says why it is not DONE. ``text`` is the traceback of an ERROR, or the last output of a process that
    DIED or was killed at the limit. ``peak_mib`` is the largest resident size of a process that did the work.
    """

    messages: tuple[Message, ...]
    ending: Ending
    seconds: float
    peak_mib: float
    message: str = ""
    text: str = ""


_VERDICTS = {Ending.DIED: Verdict.CRASHED, Ending.TIMEOUT: Verdict.TIMEOUT, Ending.ERROR: Verdict.UNEXERCISED}
_TEXTS = {Ending.DIED: "printed", Ending.TIMEOUT: "printed", Ending.ERROR: "traceback"}


@guard("isolation", Finds.LOST)
def verdict_of_lost_work(result: WorkResult) -> tuple[Verdict, str, Evidence]:
    """Return the verdict, message and evidence of work that did not end well."""
    own = "internal error of the suite: " if result.ending is Ending.ERROR else ""
    values = {_TEXTS[result.ending]: result.text} if result.text else {}
    return _VERDICTS[result.ending], own + result.message, evidence(values)


class Isolation(Protocol):
    """Does pieces of work by name, one at a time."""

    def run(self, name: str) -> WorkResult:
        """Do the work of ``name``; raises nothing that the work raises."""

    def close(self) -> None:
        """End the process that is left."""


class InProcess:
    """No isolation, where ``os.fork`` is missing: a crash ends the run, and there is no limit."""

    def __init__(self, serve: Serve) -> None:
        self._serve = serve

    def run(self, name: str) -> WorkResult:
        """Do the work here."""
        started = time.monotonic()
        messages: list[Message] = []
        last = _do(self._serve, name, lambda line: messages.append(from_line(line)))
        return _result(messages, last, started)

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

    def run(self, name: str) -> WorkResult:
        """Do the work in a child; once more in a new one if it is not done by a child that had served before."""
        is_used = self._child is not None
        result = self._run_once(name)
        return self._run_once(name) if is_used and result.ending is not Ending.DONE else result

    def close(self) -> None:
        """Kill the child that is left, if any."""
        child, self._child = self._child, None
        if child is not None:
            child.end()

    def _run_once(self, name: str) -> WorkResult:
        """Do the work in the present child, or in a new one; work that is not done leaves no child."""
        child = self._child = self._child or _Child(self._serve, self._limit, self._output)
        is_reusable = False
        try:
            result = child.run(name)
            is_done = result.ending is Ending.DONE
            is_reusable = is_done and child.served < self._share and result.peak_mib < MOST_MIB
        finally:
            if not is_reusable:
                self.close()
        return result


@dataclass(frozen=True, slots=True, kw_only=True)
class _End:
    """A child's last message of a piece of work: how it ended."""

    kind: ClassVar[str] = "end"
    ending: Literal["done", "error", "died", "timeout"]
    peak_mib: float
    message: str = ""
    text: str = ""


_KINDS = {**MESSAGES, _End.kind: _End}


class _Child:
    """A forked child, seen from its parent.

    It is a `multiprocessing` process. Its messages come as lines over a plain pipe, as a `Connection` would wait for
    the rest of a message that a death or a hang has cut. A process that it has started may hold its pipes open, so
    that neither these nor the sentinel tell of its death; so its exit status is asked for again and again.
    """

    def __init__(self, serve: Serve, limit: float, output: IO[bytes]) -> None:
        context = get_context("fork")
        names_in, self._names = context.Pipe(duplex=False)
        self._lines_in, lines_out = os.pipe()
        self.served = 0
        self._limit = limit
        self._output = output
        ours = (self._names, self._lines_in)
        arguments = (serve, limit, names_in, lines_out, ours, output.fileno())
        self._process = context.Process(target=_live, args=arguments, daemon=True)
        self._process.start()
        names_in.close()
        os.close(lines_out)

    def run(self, name: str) -> WorkResult:
        """Have the work of ``name`` done; after any ending but DONE the child is of no more use."""
        self.served += 1
        self._output.truncate(0)
        started = time.monotonic()
        messages: list[Message] = []
        last = None
        try:
            with contextlib.suppress(BrokenPipeError):  # it died since its last answer: it will not answer now
                self._names.send(name)
            for line in self._lines(started + self._limit):
                message = decode(loads(line), _KINDS)
                if isinstance(message, _End):
                    return _result(messages, message, started)
                messages.append(message)
            last = self._lost(Ending.DIED, self._death())
        except TimeoutError:
            self._dump_stack()
            last = self._lost(Ending.TIMEOUT, f"did not end within {self._limit:g} s (--claim-timeout)")
        except (ValueError, RecursionError) as error:
            last = self._lost(Ending.ERROR, f"the process sent a line that is no message: {error}")
        return _result(messages, last, started)

    def end(self) -> None:
        """Kill the child and all that it started, and leave no zombie."""
        self._process.kill()
        with contextlib.suppress(ProcessLookupError, PermissionError):  # nobody is left of the group
            os.killpg(self._pid, signal.SIGKILL)
        self._process.join()
        self._process.close()
        self._names.close()
        os.close(self._lines_in)

    @property
    def _pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def _lines(self, deadline: float) -> Iterator[str]:
        """Yield the lines that the child sends, until it is dead. Raises TimeoutError at the deadline."""
        rest = b""
        while True:
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError
            if not wait([self._lines_in], min(left, _POLL)):
                if self._has_exited() and not wait([self._lines_in], 0):
                    return
            elif data := os.read(self._lines_in, 1 << 16):
                *lines, rest = (rest + data).split(b"\n")
                yield from (line.decode(errors="replace") for line in lines)
            else:
                return
            if os.fstat(self._output.fileno()).st_size > MOST_OUTPUT:
                self._output.truncate(0)

    def _has_exited(self, patience: float = 0.0) -> bool:
        """Tell whether the child has exited, and wait for it up to ``patience`` seconds.

        Not by ``join``: a child that closes all its descriptors makes its sentinel ready, and it then waits for ever.
        """
        deadline = time.monotonic() + patience
        while self._process.exitcode is None:
            if time.monotonic() >= deadline:
                return False
            time.sleep(_POLL / 10)
        return True

    def _death(self) -> str:
        """Say how the child left."""
        self._has_exited(PATIENCE)
        status = self._process.exitcode
        if status is None:
            return "the process closed its pipe to the suite"
        if status >= 0:
            return f"the process exited with status {status}"
        name = signal.Signals(-status).name if -status in set(signal.Signals) else f"signal {-status}"
        hint = ", as when memory runs out" if -status == signal.SIGKILL else ""
        return f"the process was killed by {name} ({signal.strsignal(-status)}{hint})"

    def _dump_stack(self) -> None:
        """Have the child print where it hangs, as far as it still can; this ends it."""
        if not self._has_exited():
            os.kill(self._pid, signal.SIGABRT)
            self._has_exited(PATIENCE)

    def _lost(self, ending: Ending, message: str) -> _End:
        return _End(ending=ending.value, message=message, text=self._printed(), peak_mib=own_peak_mib())

    def _printed(self) -> str:
        """Return the last output of the child; of a dumped stack, only the child's own frames."""
        self._output.seek(max(0, self._output.seek(0, os.SEEK_END) - MOST_OUTPUT))
        text = self._output.read().decode(errors="replace")
        before, mark, stack = text.rpartition("(most recent call first)")
        return f"{before}{mark}{stack.split(_OWN_FRAME)[0] if mark else stack}"[-TAIL:]


def _live(
    serve: Serve, limit: float, names: Connection, lines: int, parents: tuple[Connection, int], output: int
) -> NoReturn:
    """Be the child: answer names until there are no more, and never return into the parent's code."""
    status = 1
    try:
        current_process().daemon = False  # the backend may have children of its own
        parents[0].close()
        os.close(parents[1])
        _settle(output)
        with open(lines, "w", encoding="utf-8") as answers:
            while (name := _next_name(names)) is not None:
                signal.alarm(int(limit) + SPARE)
                _answer(serve, name, answers)
                signal.alarm(0)
        status = 0
    except BaseException as leaving:
        traceback.print_exc()
        code = leaving.code if isinstance(leaving, SystemExit) else 1
        status = code if isinstance(code, int) else int(code is not None)
    finally:
        os._exit(status & 0xFF)


def _next_name(names: Connection) -> str | None:
    """Return the next name; None when the parent has closed its end."""
    try:
        return str(names.recv())
    except EOFError:
        return None


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
    """Send the messages of one name, and how its work ended."""

    def send(line: str) -> None:
        answers.write(line + "\n")
        answers.flush()

    send(line_of(_do(serve, name, send)))


def _do(serve: Serve, name: str, take: Callable[[str], object]) -> _End:
    """Do the work of a name; return how it ended. Any exception beside Exception goes through."""
    try:
        for message in serve(name):
            take(to_line(message))
    except Exception as error:
        text = "".join(traceback.format_exception(error))
        message_text = describe_error(error)
        return _End(ending="error", message=message_text, text=text, peak_mib=own_peak_mib())
    return _End(ending="done", peak_mib=own_peak_mib())


def _result(messages: Sequence[Message], last: _End, started: float) -> WorkResult:
    return WorkResult(
        messages=tuple(messages),
        ending=Ending(last.ending),
        seconds=time.monotonic() - started,
        peak_mib=last.peak_mib,
        message=last.message,
        text=last.text,
    )


def own_peak_mib() -> float:
    """Return the largest resident size of this process or of one that it waited for, in MiB; 0 where nobody counts."""
    try:
        import resource
    except ImportError:
        return 0.0
    return max(_mib(resource.getrusage(who).ru_maxrss) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))


def _mib(maxrss: int) -> float:
    return maxrss / (1 << 20 if sys.platform == "darwin" else 1 << 10)
