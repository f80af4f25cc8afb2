"""One process that runs the backend, seen from the judge: what it is asked, how long it may take, how it is lost."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import time
import weakref
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, NoReturn

from backends.base import QuantizerRequest, UnsupportedPattern
from conformance.annotations.probe import BothPlaces, Probe
from conformance.annotations.spelling import SpellingError, read_places
from conformance.machine.isolation import Ending, LostProcess
from conformance.machine.messages import Tally
from conformance.machine.process import PATIENCE, cut_flood, describe_exit, note_peak_mib, read_output
from conformance.remote.host import Host, HostError
from conformance.remote.model_bytes import dump_object
from conformance.remote.wire import Frame, NoAnswer, WireError, receive_frame, send_frame

_POLL = 0.5
"""Seconds between two looks at how much a process has printed."""
LOWERS = frozenset({"lower", "lower annotated"})
"""The requests that have a model lowered."""
STEPS = {"annotate": "quantizer() or annotate", "lower annotated": "quantizer() or lower"}
"""What a backend is asked for, where the request has another name."""


class RemoteError(Exception):
    """What the backend's code raised, in its own process; ``trace`` is the traceback there."""

    trace = ""


class RemoteWorker:
    """A process that runs the backend, seen from the judge."""

    def __init__(self, host: Host, limit: float) -> None:
        self.served = 0
        self.dropped: list[int] = []
        self._host = host
        self._limit = limit
        self._deadline = 0.0
        self._tally = Tally()
        self._numbered = 0
        self._channel, theirs = socket.socketpair()
        host.output.truncate(0)
        try:
            self._pid = host.fork(theirs, limit)
        except HostError as error:
            raise LostProcess(Ending.DIED, str(error), is_alone=True) from error
        finally:
            theirs.close()

    def begin(self, deadline: float, tally: Tally) -> None:
        """Begin a piece of work, whose lowerings and runs are counted in the tally."""
        self.served += 1
        self._deadline = deadline
        self._tally = tally
        self._host.output.truncate(0)

    def number_model(self) -> int:
        """Return a number for a further model."""
        self._numbered += 1
        return self._numbered

    def annotate(self, request: QuantizerRequest, probes: Mapping[str, Probe]) -> dict[str, BothPlaces] | None:
        """Have models annotated, and return the readings."""
        head = {"do": "annotate", "request": asdict(request)}
        found = self.ask(Frame(head=head, pieces=[dump_object(dict(probes))])).head.get("found")
        try:
            return None if found is None else read_places(found)
        except SpellingError as error:
            self.lose(f"the process sent no readings of annotations: {error}")

    def ask(self, request: Frame) -> Frame:
        """Send a request and return the answer. Raises what the backend's code raised, NoAnswer, or LostProcess."""
        request.head["drop"], self.dropped[:] = list(self.dropped), []
        self._tally.lowerings += request.head["do"] in LOWERS
        try:
            self._channel.settimeout(self._left())
            send_frame(self._channel, request)
            answer = self._receive()
        except TimeoutError:
            self._dump_stack()
            step = STEPS.get(request.head["do"], request.head["do"])
            self._lose(Ending.TIMEOUT, f"{step} did not end within {self._limit:g} s (--claim-timeout)")
        except (WireError, OSError) as error:
            if isinstance(error, WireError):
                self.lose(f"the process sent an answer that cannot be read: {error}")
            self._lose(Ending.DIED, describe_exit(self._host.wait_for(self._pid, PATIENCE)))
        if answer is None:
            self._lose(Ending.DIED, describe_exit(self._host.wait_for(self._pid, PATIENCE)))
        note_peak_mib(float(answer.head.get("peak_mib", 0.0)))
        self._tally.runs += count_runs(request, answer)
        if "unread" in answer.head:
            raise NoAnswer(str(answer.head["unread"]))
        if "raised" in answer.head:
            raise make_error(answer.head["raised"])
        return answer

    def lose(self, message: str) -> NoReturn:
        """Give up a process that does not answer as it should. Raises LostProcess."""
        self._lose(Ending.DIED, message)

    def close(self) -> None:
        """Kill the process, and what it has started."""
        self._channel.close()
        for kill in (os.killpg, os.kill):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                kill(self._pid, signal.SIGKILL)

    def _receive(self) -> Frame | None:
        """Return the answer; meanwhile a flood of output is cut. Raises TimeoutError at the deadline."""
        while not select.select([self._channel], [], [], min(_POLL, self._left()))[0]:
            cut_flood(self._host.output)
        return receive_frame(self._channel, self._deadline)

    def _left(self) -> float:
        """Return how many seconds are left. Raises TimeoutError if none are."""
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        return left

    def _dump_stack(self) -> None:
        """Have the process print where it hangs, as far as it still can; this ends it."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(self._pid, signal.SIGABRT)
        self._host.wait_for(self._pid, PATIENCE)

    def _lose(self, ending: Ending, message: str) -> NoReturn:
        text = read_output(self._host.output)
        raise LostProcess(ending, message, text=text, is_alone=self.served == 1)


class Dialogue:
    """What is asked of one lowered model, and answered: first that it be lowered."""

    def __init__(self, worker: RemoteWorker) -> None:
        self._worker = worker
        self._number = worker.number_model()
        weakref.finalize(self, worker.dropped.append, self._number)

    def ask(self, request: Frame) -> Frame:
        """Send a request and return the answer. Raises what the backend's code raised, or LostProcess."""
        return self._worker.ask(Frame(head={**request.head, "model": self._number}, pieces=request.pieces))

    def lose(self, message: str) -> NoReturn:
        """Give up the process. Raises LostProcess."""
        self._worker.lose(message)


def count_runs(request: Frame, answer: Frame) -> int:
    """Return how many runs an answer is of, with one that raised; at most as many as were asked for."""
    done = answer.head.get("done")
    made = len(done) + ("failed" in answer.head) if isinstance(done, list) else 0
    return min(made, len(request.head.get("runs", ())))


def make_error(raised: dict[str, Any]) -> Exception:
    """Return an error of the type's name and with the text of what was raised there."""
    text = str(raised.get("text", ""))
    if raised.get("declined"):
        return UnsupportedPattern(text)
    error: RemoteError = type(str(raised.get("type", "Exception")), (RemoteError,), {})(text)
    error.trace = str(raised.get("trace", ""))
    return error
