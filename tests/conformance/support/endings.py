"""The ways in which work in a child of the suite can end."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from multiprocessing import get_context

from conformance.machine.isolation import WorkResult
from reports.numbers import Scalar
from reports.schema import Measurement


def message(**values: Scalar) -> Measurement:
    """A message that says something."""
    return Measurement(topic="isolation", subject="test", values=values)


def said(result: WorkResult) -> list[dict[str, Scalar]]:
    """What the messages of a piece of work say."""
    return [each.values for each in result.messages if isinstance(each, Measurement)]


def message_channel() -> int:
    """The descriptor that this child's messages go to, as a stray write of a backend might hit it."""
    frame = sys._getframe()
    while frame.f_code.co_name != "_live":
        assert frame.f_back is not None, "called in a child"
        frame = frame.f_back
    return int(frame.f_locals["channel"].fileno())


def leave_a_process() -> None:
    subprocess.Popen(["sleep", "600"])


def hang_with_a_process() -> None:
    leave_a_process()
    ctypes.CDLL(None).pause()


def die_with_a_fork_that_holds_the_channel() -> None:
    if os.fork() == 0:
        time.sleep(600)
    os.abort()


def start_processes() -> None:
    """Let children of its own compute something; one of them goes on."""
    context = get_context("fork")
    with context.Pool(2) as pool:
        assert pool.map(abs, [-1, -2]) == [1, 2]
    context.Process(target=time.sleep, args=(600,), daemon=True).start()


def print_without_end() -> None:
    while True:
        os.write(1, b"x" * 65536)


def close_everything() -> None:
    os.closerange(3, 256)
    time.sleep(600)


def close_all_but_the_messages_and_ignore() -> None:
    messages = message_channel()
    os.closerange(3, messages)
    os.closerange(messages + 1, 256)
    signal.signal(signal.SIGABRT, signal.SIG_IGN)
    time.sleep(600)


def raise_interrupt() -> None:
    raise KeyboardInterrupt


def raise_error() -> None:
    raise ValueError("one\ntwo")


def shout() -> None:
    print("written by python")
    os.write(2, b"written by C\n")
    os.abort()


WAYS: dict[str, Callable[[], object]] = {
    "segfault": lambda: ctypes.string_at(0),
    "abort": os.abort,
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "real time": lambda: os.kill(os.getpid(), 40),
    "sys.exit": lambda: sys.exit(3),
    "sys.exit text": lambda: sys.exit("no device"),
    "os._exit": lambda: os._exit(0),
    "interrupt": raise_interrupt,
    "error": raise_error,
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "close and ignore": close_all_but_the_messages_and_ignore,
    "hang with a process": hang_with_a_process,
    "leave a process": leave_a_process,
    "fork and die": die_with_a_fork_that_holds_the_channel,
    "print": print_without_end,
    "close": close_everything,
    "shout": shout,
    "start processes": start_processes,
    "garbage without text": lambda: os.write(message_channel(), b"\xff\xfe\x00\n"),
    "garbage too deep to read": lambda: os.write(message_channel(), b"[" * 60000 + b"\n"),
    "a row of no kind": lambda: os.write(message_channel(), b'{"kind": "npu"}\n'),
    "nothing": lambda: None,
}
