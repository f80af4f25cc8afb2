"""Isolation: a backend's code runs in forked children, so that a crash or a hang costs its own claim and nothing else.

A child receives pieces of work over a socket and streams their messages back, one line each; the parent waits with a
limit. A child may do several pieces of work, one after another, while all goes well: a fork costs more than many
a claim, mainly for the pages that parent and child no longer share. Work that a used child does not complete is done
again in a new one, and only that counts: no claim is blamed for a death that another caused.
(docs/architecture.md, "Isolation")
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import socket
import tempfile
import time
import traceback
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from typing import IO, Any, ClassVar, Generic, NoReturn, TypeAlias, TypeVar

from backends.discovery import describe_error
from conformance.machine.fault import Fault
from conformance.machine.guard import guard
from conformance.machine.messages import MESSAGES, Begin, from_line, to_line
from conformance.machine.process import (
    PATIENCE,
    SPARE,
    Helper,
    cut_flood,
    describe_exit,
    end_process,
    exit_status_of,
    fork,
    leave_files,
    own_peak_mib,
    read_output,
    settle,
    stand_guard,
    wait_for,
)
from reports.codec import Message, decode, line_of, loads
from reports.text_enum import TextEnum
from reports.verdicts import Verdict

Work = TypeVar("Work", contravariant=True)
"""A kind of work: any type that pickle can send."""

Serve: TypeAlias = Callable[[Work], Iterable[Message]]
"""Does a piece of work: yields its messages."""

CAN_FORK = hasattr(os, "fork")
MOST_MIB = 768
"""A child that has grown beyond this many MiB gets no further work."""
_POLL = 0.05


class Ending(TextEnum):
    """How a piece of work ended.

    ERROR: the suite's code raised. LOST: the judge's own process died or hung. DIED and TIMEOUT are of a process that
    runs code of others.
    """

    DONE = "done"
    ERROR = "error"
    LOST = "lost"
    DIED = "died"
    TIMEOUT = "timeout"


class LostProcess(BaseException):
    """Ends a piece of work whose backend's process died or hung: no fault of the code that waits for it.

    ``text``: its last output. ``is_alone``: the process had done no other work, so that another try shows no more.
    """

    def __init__(self, ending: Ending, message: str, *, text: str = "", is_alone: bool = False) -> None:
        super().__init__(message)
        self.ending = ending
        self.text = text
        self.is_alone = is_alone


_LOST = {
    Ending.DIED: (Verdict.CRASHED, "printed"),
    Ending.TIMEOUT: (Verdict.TIMEOUT, "printed"),
    Ending.LOST: (Verdict.UNEXERCISED, "printed"),
    Ending.ERROR: (Verdict.UNEXERCISED, "traceback"),
}
"""Verdict of lost work, and the name of its text in the evidence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkResult:
    """The messages of a piece of work, and how it ended.

    ``message`` says why it is not DONE. ``text`` is the traceback of an ERROR, or the last output of a process that
    died or was killed at the limit. ``peak_mib`` is the largest resident size of a process that did the work.
    ``is_final``: another try would show no more.
    """

    messages: tuple[Message, ...]
    ending: Ending
    seconds: float
    peak_mib: float
    message: str = ""
    text: str = ""
    is_final: bool = False


@guard("isolation")
def fault_of_lost_work(result: WorkResult) -> Fault:
    """Return the fault of work that did not end well."""
    verdict, name = _LOST[result.ending]
    origin = "internal error of the suite: " if verdict is Verdict.UNEXERCISED else ""
    shown = {name: result.text} if result.text else {}
    return Fault(rule="", verdict=verdict, message=origin + result.message, evidence=shown)


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
    """Does work in forked children. ``limit``: seconds for one piece of work. ``share``: maximal number per child.

    ``grace``: further seconds, in which a child itself says that what it waits for did not end within the limit.
    ``helper`` makes processes for the children. ``holds``: whose code runs in the children beside the suite's; "":
    nobody's. ``is_guarded``: they stand behind a guard.
    """

    def __init__(
        self, serve: Serve[Work], *, limit: float, share: int, grace: float = 0.0, helper: Helper | None = None,
        holds: str = "", is_guarded: bool = False,
    ) -> None:  # fmt: skip
        self._serve = serve
        self._limit = limit
        self._share = share
        self._grace = grace
        self._helper = helper
        self._holds = holds
        self._is_guarded = is_guarded
        self._output = tempfile.TemporaryFile()  # noqa: SIM115  # lives as long as this object
        weakref.finalize(self, self._output.close)
        self._child: _Child[Work] | None = None
        self._helpers_start = 0

    def run(self, work: Work) -> WorkResult:
        """Do a piece of work in a child; once more in a new one if a used child does not complete it, or was lost."""
        is_used = self._child is not None
        result = self._run_once(work)
        is_complete, is_lost = result.ending is Ending.DONE or result.is_final, result.ending is Ending.LOST
        return self._run_once(work) if is_lost or (is_used and not is_complete) else result

    def close(self) -> None:
        """Kill the child that is left, if any."""
        child, self._child = self._child, None
        if child is not None:
            group = child.group
            child.end()
            if self._helper is not None:
                self._helper.forget(group)

    def _run_once(self, work: Work) -> WorkResult:
        """Do the work in the present child, or in a new one; work that is not done leaves no child."""
        if self._helper is not None:
            try:
                start = self._helper.ensure()
            except LostProcess as lost:
                return _make_result([], _end_of(lost), time.monotonic())
            if start != self._helpers_start:
                self.close()  # a child knows only the helper that was there when it was made
                self._helpers_start = start
        child = self._child = self._child or _Child(
            self._serve, self._limit, self._grace, self._output, self._holds, self._is_guarded,
            () if self._helper is None else self._helper.files,
        )  # fmt: skip
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
    is_final: bool = False


_KINDS = {**MESSAGES, _End.kind: _End}


class _Child(Generic[Work]):
    """A forked child, seen from its parent.

    The channel is a pair of sockets: another process could open a pipe through /proc, and write messages there. They
    come as lines. A process that it has started may hold its end open, so that this does not show its death; so its
    exit status is polled.
    """

    def __init__(
        self, serve: Serve[Work], limit: float, grace: float, output: IO[bytes], holds: str, is_guarded: bool,
        helper_files: Sequence[int],
    ) -> None:  # fmt: skip
        self._channel, theirs = socket.socketpair()
        self.served = 0
        self._limit = limit
        self._grace = grace
        self._output = output
        self._holds = holds
        self._is_guarded = is_guarded
        self._status: int | None = None
        self.group = fork()
        """The process group of the child: it is its leader."""
        if self.group == 0:
            _live(serve, limit + grace, theirs, self._channel, output.fileno(), is_guarded, helper_files)
        theirs.close()

    def run(self, work: Work) -> WorkResult:
        """Have a piece of work done; after any ending but DONE the child is of no more use."""
        self.served += 1
        self._output.truncate(0)
        started = time.monotonic()
        messages: list[Message] = []
        try:
            self._channel.settimeout(self._limit + self._grace)
            with contextlib.suppress(ConnectionError):  # it died before it has read the work: it will not answer now
                self._channel.sendall(pickle.dumps(work))
                for line in self._read_lines(started + self._limit + self._grace):
                    message = decode(loads(line), _KINDS)
                    if isinstance(message, _End):
                        return _make_result(messages, message, started)
                    messages.append(message)
            self._has_exited(PATIENCE)
            text = describe_exit(self._status, self._name_in(messages))
            end = self._make_end(Ending.DIED if self._holds else Ending.LOST, text)
        except TimeoutError:
            self._dump_stack()
            text = f"{self._name_in(messages)} did not end within {self._limit:g} s (--claim-timeout)"
            end = self._make_end(Ending.TIMEOUT if self._holds else Ending.LOST, text)
        except (ValueError, RecursionError) as error:
            end = self._make_end(Ending.ERROR, f"the process sent a line that is no message: {error}")
        return _make_result(messages, end, started)

    def end(self) -> None:
        """Kill the child and all that it started, and leave no zombie."""
        if self._status is None:
            end_process(self.group, is_guard=self._is_guarded)
        self._channel.close()

    def _read_lines(self, deadline: float) -> Iterator[str]:
        """Yield the lines that the child sends, until it is dead. Raises TimeoutError at the deadline."""
        incomplete = b""
        while True:
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError
            if not wait([self._channel], min(left, _POLL)):
                if self._has_exited() and not wait([self._channel], 0):
                    return
            elif data := os.read(self._channel.fileno(), 1 << 16):
                *lines, incomplete = (incomplete + data).split(b"\n")
                yield from (line.decode(errors="replace") for line in lines)
            else:
                return
            cut_flood(self._output)

    def _has_exited(self, patience: float = 0.0) -> bool:
        """Tell whether the child has exited, and wait for it up to ``patience`` seconds."""
        if self._status is None:
            self._status = wait_for(self.group, patience)
        return self._status is not None

    def _name_in(self, messages: Sequence[Message]) -> str:
        """Name the child in what is said of its end; with the step that it was at, as far as it has said so."""
        step = next((f" (in {each.stage})" for each in reversed(messages) if isinstance(each, Begin)), "")
        name = f"the process that holds both the suite and {self._holds}" if self._holds else "the judge's process"
        return f"{name}{step}"

    def _dump_stack(self) -> None:
        """Have the child print where it hangs, as far as it still can; this ends it."""
        if not self._has_exited():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.group, signal.SIGABRT)  # a guard in front of it ends as it does
            self._has_exited(PATIENCE)

    def _make_end(self, ending: Ending, message: str) -> _End:
        """Return an end that the child did not send, with its last output."""
        return _End(ending=ending, message=message, text=read_output(self._output), peak_mib=own_peak_mib())


def _live(
    serve: Serve[Work], limit: float, channel: socket.socket, parents: socket.socket, output: int, is_guarded: bool,
    helper_files: Sequence[int],
) -> NoReturn:  # fmt: skip
    """Be the child: do all work that comes, and never return into the parent's code."""
    status = 1
    try:
        parents.close()
        settle(output)
        if is_guarded:
            leave_files(channel.fileno(), output, *helper_files)
            stand_guard()
        with open(channel.fileno(), "w", buffering=1, encoding="utf-8", closefd=False) as answers:

            def send(line: str) -> None:
                answers.write(f"{line}\n")

            for work in _receive(channel):
                signal.alarm(int(limit) + SPARE)
                send(line_of(_do(serve, work, send)))
                signal.alarm(0)
        status = 0
    except BaseException as leaving:
        traceback.print_exc()
        status = exit_status_of(leaving) if isinstance(leaving, SystemExit) else 1
    finally:
        os._exit(status & 0xFF)


def _receive(channel: socket.socket) -> Iterator[Any]:
    """Yield pieces of work until the parent closes its end."""
    with channel.makefile("rb") as stream, contextlib.suppress(EOFError, ConnectionError):
        while True:
            yield pickle.load(stream)


def _do(serve: Serve[Work], work: Work, send: Callable[[str], object]) -> _End:
    """Do a piece of work and send its messages; return how it ended. What is no Exception goes through."""
    try:
        for message in serve(work):
            send(to_line(message))
    except LostProcess as lost:
        return _end_of(lost)
    except Exception as error:
        text = "".join(traceback.format_exception(error))
        return _End(ending=Ending.ERROR, message=describe_error(error), text=text, peak_mib=own_peak_mib())
    return _End(ending=Ending.DONE, peak_mib=own_peak_mib())


def _end_of(lost: LostProcess) -> _End:
    return _End(
        ending=lost.ending, message=str(lost), text=lost.text, peak_mib=own_peak_mib(), is_final=lost.is_alone
    )  # fmt: skip


def _make_result(messages: Sequence[Message], end: _End, started: float) -> WorkResult:
    return WorkResult(
        messages=tuple(messages),
        ending=end.ending,
        seconds=time.monotonic() - started,
        peak_mib=end.peak_mib,
        message=end.message,
        text=end.text,
        is_final=end.is_final,
    )
