"""The process that has imported the vendor's code, as the judge sees it: it says what the backend is, makes workers.

A command is a line, the answer a frame; each answer repeats its command's mark. (server.py is the other end.)
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import tempfile
import time
import weakref
from typing import Any

from conformance.machine.isolation import Ending, LostProcess
from conformance.machine.process import PATIENCE, describe_exit, end_process, fork, read_output, wait_for
from conformance.remote.server import run_host
from conformance.remote.wire import WireError, receive_frame

ANSWERS_WITHIN = 5.0
"""Seconds in which a host makes a process: one that was stopped does not."""


class HostError(Exception):
    """The backend's process could not start, or is gone; the message says how, and is shown to the user."""


class Host:
    """The process that has imported the backend. ``limit``: seconds for the import, and for what it says of itself.

    It is started when it is first needed, and again if it is gone. ``needs_lower``: whether it is to lower models.
    """

    def __init__(self, spec: str, *, limit: float, needs_lower: bool = True) -> None:
        self.spec = spec
        self._needs_lower = needs_lower
        self.output = tempfile.TemporaryFile()  # noqa: SIM115  # lives as long as this object
        weakref.finalize(self, self.output.close)
        self._limit = limit
        self._control: socket.socket | None = None
        self._pid = 0
        self._asked = 0
        self._started = 0

    @property
    def files(self) -> tuple[int, ...]:
        """Descriptors by which a child of this process reaches it."""
        return () if self._control is None else (self._control.fileno(), self.output.fileno())

    def ensure(self) -> int:
        """Start the process if it is not there; return how often it was. Raises LostProcess if it does not start."""
        try:
            self.start()
        except HostError as error:
            raise LostProcess(Ending.DIED, str(error), is_alone=True) from error
        return self._started

    def start(self) -> None:
        """Start the process if it is not there. Raises HostError if it does not start."""
        if self._control is not None and self._is_alive():
            return
        self.close()
        ours, theirs = socket.socketpair()
        self.output.truncate(0)
        pid = fork()
        if pid == 0:
            ours.close()
            run_host(self.spec, theirs, self.output.fileno(), needs_lower=self._needs_lower)
        theirs.close()
        self._control, self._pid = ours, pid
        self._started += 1
        answer = self._receive("the backend could not be imported")
        if "error" in answer:
            raise HostError(str(answer["text"]))

    def describe(self) -> dict[str, Any]:
        """Return what the backend says of itself, as data (`read_description`). Raises HostError."""
        self.start()
        answer = self._ask("describe", during="the backend could not say what it is")
        if "error" in answer:
            raise HostError(str(answer["text"]))
        answer.pop("mark")  # which differs from process to process
        return answer

    def warm(self) -> str:
        """Have the backend warm up; return what there is to warn of, or "". Raises HostError."""
        self.start()
        return str(self._ask("warm", during="warm_up() did not return")["warning"])

    def fork(self, channel: socket.socket, limit: float) -> int:
        """Have a worker process made, which talks over the channel; return its process ID. Raises HostError."""
        command = f"fork {int(limit)} {os.getpgrp()}"
        answer = self._ask(command, channel.fileno(), during="no process could be made", limit=ANSWERS_WITHIN)
        return int(answer["pid"])

    def forget(self, group: int) -> None:
        """Have the workers ended that were made for a process group."""
        try:
            self._ask(f"forget {group}", during="", limit=ANSWERS_WITHIN)
        except HostError:
            self.close()  # it was stopped or killed; the next child gets a new one

    def wait_for(self, pid: int, patience: float) -> int | None:
        """Return how a worker exited; None: it has not, or nobody knows."""
        try:
            status = self._ask(f"wait {pid} {patience}", during="", limit=patience + PATIENCE).get("status")
        except HostError:
            return None
        return status if isinstance(status, int) else None

    def close(self) -> None:
        """Kill the process, and what it has started in its group."""
        control, self._control = self._control, None
        if control is None:
            return
        end_process(self._pid, is_guard=True)  # before the process sees that its control is closed, and leaves the rest
        control.close()

    def _is_alive(self) -> bool:
        try:
            self._ask("ping", during="", limit=ANSWERS_WITHIN)
        except HostError:
            return False
        return True

    def _ask(self, command: str, *descriptors: int, during: str, limit: float | None = None) -> dict[str, Any]:
        if self._control is None:
            raise HostError(f"backend {self.spec}: {during}: the process is gone")
        self._asked += 1
        mark = f"{os.getpid()}.{self._asked}"
        try:
            socket.send_fds(self._control, [f"{mark} {command}\n".encode()], list(descriptors))
        except OSError as error:
            raise HostError(f"backend {self.spec}: {during}: {self._describe_end()}") from error
        return self._receive(during, limit, mark)

    def _receive(self, during: str, limit: float | None = None, mark: str | None = None) -> dict[str, Any]:
        """Return the answer of this mark: others are to processes that were killed while they waited for them."""
        assert self._control is not None
        within = f"{self._limit:g} s (--claim-timeout)" if limit is None else f"{limit:g} s"
        deadline = time.monotonic() + (self._limit if limit is None else limit)
        try:
            while (frame := receive_frame(self._control, deadline)) is not None and frame.head.get("mark") != mark:
                pass
        except TimeoutError as error:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGSTOP)  # the guard stays, for what is left to fall to it
                os.killpg(self._pid, signal.SIGABRT)  # the process prints its stack
            time.sleep(PATIENCE)
            raise HostError(
                f"backend {self.spec}: {during}: the process did not answer within {within}{self._show_output()}"
            ) from error
        except (WireError, OSError) as error:
            raise HostError(f"backend {self.spec}: {during}: {error}") from error
        if frame is None:
            raise HostError(f"backend {self.spec}: {during}: {self._describe_end()}{self._show_output()}")
        return frame.head

    def _describe_end(self) -> str:
        """Say how the process ended; only the process that started it knows."""
        status = wait_for(self._pid, PATIENCE)
        return "the process is gone, or does not answer" if status is None else describe_exit(status)

    def _show_output(self) -> str:
        text = read_output(self.output).strip()
        return f"; it printed:\n{text}" if text else ""
