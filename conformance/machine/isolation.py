"""Isolation: a backend's code runs in forked children, so that a crash or a hang costs its own claim and nothing else.

A child receives pieces of work over one pipe and streams their messages over another, one line each; the parent waits
with a limit. A child may do several pieces of work, one after another, while all goes well: a fork costs more than many
a claim, mainly for the pages that parent and child no longer share. Work that a used child does not complete is done
again in a new one, and only that counts: no claim is blamed for a death that another caused.
(docs/architecture.md, "Isolation")
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
from typing import IO, Any, ClassVar, Generic, NoReturn, TypeAlias, TypeVar

from backends.discovery import describe_error
from conformance.machine.guard import Finds, guard
from conformance.machine.messages import MESSAGES, from_line, to_line
from reports.codec import Message, decode, line_of, loads
from reports.schema import Evidence, evidence
from reports.verdicts import Verdict

Work = TypeVar("Work", contravariant=True)
"""A kind of work: any type that pickle can send."""

Serve: TypeAlias = Callable[[Work], Iterable[Message]]
"""Does a piece of work: yields its messages."""

CAN_FORK = hasattr(os, "fork")
PATIENCE = 1.0
"""Seconds in which a child that was asked to end, or has closed its pipe, is expected to exit."""
SPARE = 10
"""Seconds after the limit at which a child whose parent is gone ends itself."""
MOST_MIB = 768
"""A child that has grown beyond this many MiB gets no further work."""
MOST_OUTPUT = 1 << 20
"""Maximal number of bytes that are kept of a child's output."""
TAIL = 4000
"""Number of characters of that output that are shown."""
_POLL = 0.05
_OWN_FRAME = f'  File "{__file__}"'


class Ending(StrEnum):
    """How a piece of work ended."""

    DONE = "done"
    ERROR = "error"
    DIED = "died"
    TIMEOUT = "timeout"


_LOST = {
    Ending.DIED: (Verdict.CRASHED, "printed"),
    Ending.TIMEOUT: (Verdict.TIMEOUT, "printed"),
    Ending.ERROR: (Verdict.UNEXERCISED, "traceback"),
}
"""Verdict of lost work, and the name of its text in the evidence."""


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


@guard("isolation", Finds.LOST)
def verdict_of_lost_work(result: WorkResult) -> tuple[Verdict, str, Evidence]:
    """Return the verdict, message and evidence of work that did not end well."""
    origin = "internal error of the suite: " if result.ending is Ending.ERROR else ""
    verdict, name = _LOST[result.ending]
    return verdict, origin + result.message, evidence({name: result.text} if result.text else {})


class InProcess(Generic[Work]):
    """No isolation, where ``os.fork`` is missing: a crash ends the run, and no limit applies."""

    def __init__(self, serve: Serve[Work]) -> None:
        self._serve = serve

    def run(self, work: Work) -> WorkResult:
        """Do a piece of work here; raises nothing that the work raises."""
        started = time.monotonic()
        messages: list[Message] = []
        end = _do(self._serve, work, lambda line: messages.append(from_line(line)))
        return _make_result(messages, end, started)

    def close(self) -> None:
        """Nothing is left."""


class Forked(Generic[Work]):
    """Does work in forked children. ``limit``: seconds for one piece of work. ``share``: maximal number per child."""

    def __init__(self, serve: Serve[Work], *, limit: float, share: int) -> None:
        self._serve = serve
        self._limit = limit
        self._share = share
        self._output = tempfile.TemporaryFile()  # noqa: SIM115  # lives as long as this object
        self._child: _Child[Work] | None = None

    def run(self, work: Work) -> WorkResult:
        """Do a piece of work in a child; once more in a new one if a used child does not complete it."""
        is_used = self._child is not None
        result = self._run_once(work)
        return self._run_once(work) if is_used and result.ending is not Ending.DONE else result

    def close(self) -> None:
        """Kill the child that is left, if any."""
        child, self._child = self._child, None
        if child is not None:
            child.end()

    def _run_once(self, work: Work) -> WorkResult:
        """Do the work in the present child, or in a new one; work that is not done leaves no child."""
        child = self._child = self._child or _Child(self._serve, self._limit, self._output)
        is_reusable = False
        try:
            result = child.run(work)
            is_reusable = result.ending is Ending.DONE and child.served < self._share and result.peak_mib < MOST_MIB
        finally:
            if not is_reusable:
                self.close()
        return result


Isolation: TypeAlias = Forked[Work] | InProcess[Work]
"""Does one piece of work at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _End:
    """A child's last message of a piece of work: how it ended."""

    kind: ClassVar[str] = "end"
    ending: Ending
    peak_mib: float
    message: str = ""
    text: str = ""


_KINDS = {**MESSAGES, _End.kind: _End}


class _Child(Generic[Work]):
    """A forked child, seen from its parent.

    It is a `multiprocessing` process. Its messages come as lines over a plain pipe, as a `Connection` would wait for
    the rest of a message that a death or a hang has cut. A process that it has started may hold its pipes open, so that
    neither these nor the sentinel show its death; so its exit status is polled.
    """

    def __init__(self, serve: Serve[Work], limit: float, output: IO[bytes]) -> None:
        context = get_context("fork")
        work_in, self._work_out = context.Pipe(duplex=False)
        self._lines_in, lines_out = os.pipe()
        self.served = 0
        self._limit = limit
        self._output = output
        parents = (self._work_out, self._lines_in)
        arguments = (serve, limit, work_in, lines_out, parents, output.fileno())
        self._process = context.Process(target=_live, args=arguments, daemon=True)
        self._process.start()
        work_in.close()
        os.close(lines_out)

    def run(self, work: Work) -> WorkResult:
        """Have a piece of work done; after any ending but DONE the child is of no more use."""
        self.served += 1
        self._output.truncate(0)
        started = time.monotonic()
        messages: list[Message] = []
        try:
            with contextlib.suppress(BrokenPipeError):  # it died since its last answer: it will not answer now
                self._work_out.send(work)
            for line in self._read_lines(started + self._limit):
                message = decode(loads(line), _KINDS)
                if isinstance(message, _End):
                    return _make_result(messages, message, started)
                messages.append(message)
            end = self._make_end(Ending.DIED, self._describe_death())
        except TimeoutError:
            self._dump_stack()
            end = self._make_end(Ending.TIMEOUT, f"did not end within {self._limit:g} s (--claim-timeout)")
        except (ValueError, RecursionError) as error:
            end = self._make_end(Ending.ERROR, f"the process sent a line that is no message: {error}")
        return _make_result(messages, end, started)

    def end(self) -> None:
        """Kill the child and all that it started, and leave no zombie."""
        self._process.kill()
        with contextlib.suppress(ProcessLookupError, PermissionError):  # the group is empty
            os.killpg(self._pid, signal.SIGKILL)
        self._process.join()
        self._process.close()
        self._work_out.close()
        os.close(self._lines_in)

    @property
    def _pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def _read_lines(self, deadline: float) -> Iterator[str]:
        """Yield the lines that the child sends, until it is dead. Raises TimeoutError at the deadline."""
        incomplete = b""
        while True:
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError
            if not wait([self._lines_in], min(left, _POLL)):
                if self._has_exited() and not wait([self._lines_in], 0):
                    return
            elif data := os.read(self._lines_in, 1 << 16):
                *lines, incomplete = (incomplete + data).split(b"\n")
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

    def _describe_death(self) -> str:
        """Say how the child ended."""
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

    def _make_end(self, ending: Ending, message: str) -> _End:
        """Return an end that the child did not send, with its last output; of a dumped stack only its own frames."""
        self._output.seek(max(0, self._output.seek(0, os.SEEK_END) - MOST_OUTPUT))
        text = self._output.read().decode(errors="replace")
        before, mark, stack = text.rpartition("(most recent call first)")
        shown = f"{before}{mark}{stack.split(_OWN_FRAME)[0] if mark else stack}"[-TAIL:]
        return _End(ending=ending, message=message, text=shown, peak_mib=own_peak_mib())


def _live(
    serve: Serve[Work], limit: float, work_in: Connection, lines: int, parents: tuple[Connection, int], output: int
) -> NoReturn:
    """Be the child: do all work that comes, and never return into the parent's code."""
    status = 1
    try:
        current_process().daemon = False  # the backend may have children
        parents[0].close()
        os.close(parents[1])
        _settle(output)
        with open(lines, "w", buffering=1, encoding="utf-8") as answers:

            def send(line: str) -> None:
                answers.write(f"{line}\n")

            for work in _receive(work_in):
                signal.alarm(int(limit) + SPARE)
                send(line_of(_do(serve, work, send)))
                signal.alarm(0)
        status = 0
    except BaseException as leaving:
        traceback.print_exc()
        code = leaving.code if isinstance(leaving, SystemExit) else 1
        status = code if isinstance(code, int) else int(code is not None)
    finally:
        os._exit(status & 0xFF)


def _receive(work_in: Connection) -> Iterator[Any]:
    """Yield pieces of work until the parent closes its end."""
    with contextlib.suppress(EOFError):
        while True:
            yield work_in.recv()


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


def _do(serve: Serve[Work], work: Work, send: Callable[[str], object]) -> _End:
    """Do a piece of work and send its messages; return how it ended. What is no Exception goes through."""
    try:
        for message in serve(work):
            send(to_line(message))
    except Exception as error:
        text = "".join(traceback.format_exception(error))
        return _End(ending=Ending.ERROR, message=describe_error(error), text=text, peak_mib=own_peak_mib())
    return _End(ending=Ending.DONE, peak_mib=own_peak_mib())


def _make_result(messages: Sequence[Message], end: _End, started: float) -> WorkResult:
    return WorkResult(
        messages=tuple(messages),
        ending=end.ending,
        seconds=time.monotonic() - started,
        peak_mib=end.peak_mib,
        message=end.message,
        text=end.text,
    )


def own_peak_mib() -> float:
    """Return the largest resident size of this process or of one that it waited for, in MiB; 0 if unknown."""
    try:
        import resource
    except ImportError:
        return 0.0
    peaks = (resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return max(peaks) / (1 << 20 if sys.platform == "darwin" else 1 << 10)
