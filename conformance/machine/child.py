"""A child process: what runs other people's code, and what judges it, so that a crash or a hang costs little.

The standard library's fork server makes them all, from a process that has imported the suite and has run nothing. A
child answers requests, one after the other; it may tell its parent something meanwhile, or call it.
(docs/architecture.md, "Processes")
"""

from __future__ import annotations

import contextlib
import gc
import math
import multiprocessing
import os
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from multiprocessing import forkserver, reduction, resource_tracker
from multiprocessing.connection import wait
from types import ModuleType
from typing import Any, NoReturn, TypeAlias

from fx_quant_conformance.conformance.machine.fork_server import HAS_CHILDREN, start_process
from fx_quant_conformance.conformance.machine.frames import Frame, NoAnswer, WireError, receive_frame, send_frame
from fx_quant_conformance.conformance.machine.process import (
    PATIENCE,
    SPARE,
    cut_flood,
    end_descendants,
    exit_status_of,
    format_exit,
    read_output,
    settle,
    stand_guard,
)
from fx_quant_conformance.conformance.machine.release import ROOT
from fx_quant_conformance.reports.text_enum import TextEnum

TELL, CALL = "tell", "call"
"""Keys of frames that are no answer yet: what a child tells its parent, and what it asks its parent for."""
MOST_GROWTH_MIB = 512
"""By how many MiB a child may have grown since its first answer before it is too large."""
_POLL = 0.5
"""Seconds between two looks at how much a child has printed."""


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


class StartError(Exception):
    """A child could not start, or is gone before it was of use; the message says how, and is shown to the user."""


class ChildLost(Exception):
    """A child died, hung or sent what cannot be read.

    ``message``: what it did, without a subject. ``ending``: DIED, TIMEOUT, or ERROR for what cannot be read. ``text``:
    its last output. ``status``: its exit status, negative for a signal; None: it was ended here.
    """

    def __init__(self, ending: Ending, message: str, text: str, status: int | None = None) -> None:
        super().__init__(message)
        self.ending = ending
        self.text = text
        self.status = status


class ParentGone(BaseException):
    """Ends a child whose parent is gone: no error of what the child does."""


class Parent:
    """A child's parent, as the child sees it. All methods raise ParentGone."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel

    def tell(self, line: str) -> None:
        """Send a line that is no answer yet."""
        self.send(Frame(head={TELL: line}))

    def call(self, request: Frame) -> Frame:
        """Ask the parent for something. Raises NoAnswer for what cannot be sent."""
        self.send(Frame(head={CALL: request.head}, pieces=request.pieces))
        return self.receive()

    def send(self, frame: Frame) -> None:
        """Send a frame. Raises NoAnswer for what cannot be sent."""
        try:
            send_frame(self._channel, frame)
        except (BrokenPipeError, ConnectionResetError):
            raise ParentGone from None

    def receive(self) -> Frame:
        """Return the next frame."""
        try:
            frame = receive_frame(self._channel)
        except ConnectionResetError:
            frame = None
        if frame is None:
            raise ParentGone
        return frame


Answer: TypeAlias = Callable[[Frame], Frame]
"""Answers a request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How a child is made.

    What is opened is found by name in the child, and the arguments are pickled.
    """

    open: Callable[..., Answer] | str
    """In the child it gets the parent and the arguments, and returns what answers. As text it is "module:function",
    imported in the child only."""
    arguments: tuple[Any, ...] = ()
    is_guarded: bool = False
    """Whether other people's code runs in it, so that a guard stands between it and all processes of the suite
    (`stand_guard`)."""
    shares_memory: bool = False
    """Whether it is a copy of this process, in which nothing has to be found by name: for tests of the suite."""


class Child:
    """A child, seen from its parent. Raises StartError if the platform, or the system now, makes no such process.

    The channel is a pair of sockets: another process could open a pipe through /proc, and write answers there. A
    process that the child has started may hold the child's end open, so that its exit is watched too.
    """

    def __init__(self, recipe: Recipe) -> None:
        if not HAS_CHILDREN:
            raise StartError("this platform makes no processes as the suite needs them: use Linux, macOS or WSL")
        self.served = 0
        """Number of pieces of work that have begun."""
        self.peak_mib = 0.0
        """Its largest resident size, as far as it has said that."""
        self._first_mib = 0.0
        self._is_guarded = recipe.is_guarded
        self._output = tempfile.TemporaryFile()  # noqa: SIM115  # lives as long as this object
        self._channel, theirs = socket.socketpair()
        context: Any = multiprocessing.get_context("fork" if recipe.shares_memory else "forkserver")
        given = (theirs, _File(self._output.fileno()), dict(os.environ), str(ROOT), recipe)
        try:
            with _hide_main():
                self._process = start_process(context, _live, given)
        except (OSError, EOFError) as error:
            raise StartError(f"no process could be made: {error}") from error
        finally:
            theirs.close()

    @property
    def pid(self) -> int:
        """Its process ID, or that of its guard; it is the number of its process group too."""
        return self._process.pid or 0

    @property
    def is_large(self) -> bool:
        """Whether it has grown too large to get further work."""
        return self.peak_mib - self._first_mib > MOST_GROWTH_MIB

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def begin(self) -> None:
        """Begin a piece of work: what was printed before is no part of it."""
        self.served += 1
        self._output.truncate(0)

    def ask(
        self, request: Frame, *, limit: float, take: Callable[[str], object] | None = None, answer: Answer | None = None
    ) -> Frame:
        """Return the answer to a request. Raises ChildLost; NoAnswer for a request that cannot be sent.

        ``limit``: seconds. ``take`` gets what the child tells, ``answer`` answers its calls.
        """
        deadline = time.monotonic() + limit
        try:
            if limit <= 0:
                raise TimeoutError  # for a socket it would mean not to wait
            self._channel.settimeout(limit)
            send_frame(self._channel, Frame(head={**request.head, "limit": limit}, pieces=request.pieces))
            while (frame := self._receive(deadline)) is not None:
                if take is not None and TELL in frame.head:
                    take(str(frame.head[TELL]))
                elif answer is not None and CALL in frame.head:
                    send_frame(self._channel, answer(Frame(head=frame.head[CALL], pieces=frame.pieces)))
                else:
                    self._note_peak(frame.head.get("peak_mib", self.peak_mib))
                    return frame
            raise ConnectionError
        except TimeoutError:
            self._dump_stack()
            raise self._lose(Ending.TIMEOUT, f"did not end within {limit:g} s") from None
        except WireError as error:
            raise self._lose(Ending.ERROR, f"sent an answer that cannot be read: {error}") from error
        except OSError:  # it died, perhaps before it has read the request
            status = self._find_status(PATIENCE)
            raise ChildLost(Ending.DIED, format_exit(status), read_output(self._output), status) from None

    def end(self) -> None:
        """Kill the child and all that it has started; a second call does nothing."""
        with contextlib.suppress(ValueError):  # it was closed
            if self._find_status(0) is None:
                if self._is_guarded:
                    end_descendants(self.pid)
                self._process.kill()
                self._find_status(PATIENCE)
            self._channel.close()
            self._output.close()
            self._process.close()

    def _note_peak(self, said: object) -> None:
        """Note its largest resident size. Raises WireError for what is none."""
        if not isinstance(said, (int, float)) or not 0 <= said < math.inf:
            raise WireError(f"its peak of memory is no number: {said!r}")
        self.peak_mib = float(said)
        self._first_mib = self._first_mib or self.peak_mib

    def _receive(self, deadline: float) -> Frame | None:
        """Return the next frame; None: the child is dead. Meanwhile a flood of output is cut. Raises TimeoutError."""
        while True:
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError
            ready = wait([self._channel, self._process.sentinel], min(left, _POLL))
            cut_flood(self._output)
            if self._channel in ready:
                return receive_frame(self._channel, deadline)
            if ready and not wait([self._channel], 0):
                return None

    def _find_status(self, patience: float) -> int | None:
        """Return how the child has exited, after a while; None: it has not. What it has left in its group is killed."""
        self._process.join(patience)
        status = self._process.exitcode
        if status is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)
        return status

    def _dump_stack(self) -> None:
        """Have the child print where it hangs, as far as it still can; this ends it."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGABRT)  # a guard in front of it ends as it does
        self._find_status(PATIENCE)

    def _lose(self, ending: Ending, message: str) -> ChildLost:
        return ChildLost(ending, message, read_output(self._output))


@contextlib.contextmanager
def _hide_main() -> Iterator[None]:
    """Have no main module while a process is made: the child would import it, which may be a user's script."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


class _File:
    """A descriptor; where a child unpickles it, the child's own."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    def __reduce__(self) -> tuple[Callable[[Any], _File], tuple[Any]]:
        return _detach, (reduction.DupFd(self.descriptor),)


def _detach(passed: Any) -> _File:
    return _File(passed.detach())


def _live(channel: socket.socket, output: _File, environment: Mapping[str, str], root: str, recipe: Recipe) -> NoReturn:
    """Be the child: answer all requests that come, and never return into the code that has made it.

    ``root``: where the parent's suite is, which must be this process's.
    """
    status = 1
    try:
        settle(output.descriptor)
        if root != str(ROOT):
            raise SystemExit(
                f"the suite of {ROOT} was imported in the place of that of {root}: run it from another folder"
            )
        _leave_server()
        multiprocessing.current_process().daemon = False  # it may have children of its own
        os.environ.clear()
        os.environ.update(environment)
        freeze_memory()
        if recipe.is_guarded:
            stand_guard()
        parent = Parent(channel)
        answer = _find_open(recipe.open)(parent, *recipe.arguments)
        while True:
            request = parent.receive()
            signal.alarm(int(request.head["limit"]) + SPARE)
            try:
                parent.send(answer(request))
            except NoAnswer as error:
                parent.send(Frame(head={"unread": str(error)}))
            signal.alarm(0)
    except SystemExit as leaving:
        traceback.print_exc()
        status = exit_status_of(leaving)
    except ParentGone:
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status & 0xFF)


def _leave_server() -> None:
    """Close what leads to the fork server: a stray write there would end it, and all children would count as dead."""
    server: Any = forkserver._forkserver
    tracker: Any = resource_tracker._resource_tracker
    for holder, name in ((server, "_forkserver_alive_fd"), (tracker, "_fd")):
        descriptor = getattr(holder, name)
        if descriptor is not None:
            os.close(descriptor)
            setattr(holder, name, None)  # whoever needs it here starts another


def _find_open(named: Callable[..., Answer] | str) -> Callable[..., Answer]:
    if not isinstance(named, str):
        return named
    module, _, name = named.partition(":")
    found: Callable[..., Answer] = getattr(import_module(module), name)
    return found


def freeze_memory() -> None:
    """Leave alone what is in memory, which this process shares with others, when garbage is looked for."""
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)  # or it is looked for all the time: an export makes millions of objects
