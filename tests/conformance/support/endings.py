"""The ways in which work in a child of the suite can end.

What is here is found by name in children: it imports no torch.
"""

from __future__ import annotations

import ctypes
import os
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from multiprocessing import get_context
from typing import TYPE_CHECKING

from fx_quant_conformance.conformance.machine.child import Answer, Parent
from fx_quant_conformance.conformance.machine.frames import Frame
from fx_quant_conformance.conformance.machine.process import own_peak_mib
from fx_quant_conformance.reports.numbers import Scalar
from fx_quant_conformance.reports.schema import Measurement

if TYPE_CHECKING:
    from fx_quant_conformance.conformance.machine.workplace import WorkResult

_KEPT: list[object] = []
"""What a child keeps from work to work."""


def open_ways(parent: Parent, tells: bool = True) -> Answer:
    """Tell the process's ID, go the way that the request names, and answer by the ID."""

    def answer(request: Frame) -> Frame:
        if tells:
            parent.tell(str(os.getpid()))
        left = WAYS[request.head["way"]]()
        said = {"pid": os.getpid(), "parent": os.getppid(), "left": left if isinstance(left, int) else 0}
        return Frame(head={**said, "peak_mib": own_peak_mib()})

    return answer


def message(**values: Scalar) -> Measurement:
    """A message that says something."""
    return Measurement(topic="ending", subject="test", values=values)


def said(result: WorkResult) -> list[dict[str, Scalar]]:
    """What the messages of a piece of work say."""
    return [each.values for each in result.messages if isinstance(each, Measurement)]


def list_running(group: int) -> list[str]:
    """The processes of a group that still run a while after they were killed."""
    end = time.monotonic() + 5
    while (left := _list_now(group)) and time.monotonic() < end:
        time.sleep(0.02)
    return left


def _list_now(group: int) -> list[str]:
    table = subprocess.run(["ps", "-eo", "pgid=,stat=,args="], capture_output=True, text=True, check=True).stdout
    rows = [line.split(None, 2) for line in table.splitlines()]
    return [row[2] for row in rows if row[0] == str(group) and not row[1].startswith("Z")]


def is_gone(pid: int) -> bool:
    """Whether there is no process of that ID, not even a dead one, after a while."""
    end = time.monotonic() + 5
    while time.monotonic() < end:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.01)
    return False


def message_channel() -> int:
    """The descriptor that this child's messages go to, as a stray write of a backend might hit it."""
    frame = sys._getframe()
    while frame.f_code.co_name != "_live":
        assert frame.f_back is not None, "called in a child"
        frame = frame.f_back
    return int(frame.f_locals["channel"].fileno())


def write_frame(text: str) -> None:
    """Write a frame without pieces, of any text, to the channel."""
    os.write(message_channel(), struct.pack(">IQ", len(text), 0) + text.encode())


def leave_a_process() -> None:
    subprocess.Popen(["sleep", "600"])


def leave_a_session() -> int:
    """Leave a process that no signal to this one's group reaches."""
    return subprocess.Popen(["sleep", "600"], start_new_session=True).pid


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
    served = get_context("forkserver").Process(target=time.sleep, args=(0,))
    served.start()
    served.join(30)
    assert served.exitcode == 0


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


def raise_reset() -> None:
    raise ConnectionResetError("by a peer of its own")


def shout() -> None:
    print("written by python")
    os.write(2, b"written by C\n")
    os.abort()


def kill_the_parent() -> None:
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(600)


def kill_the_grandparent() -> None:
    asked = ["ps", "-o", "ppid=", "-p", str(os.getppid())]
    os.kill(int(subprocess.run(asked, capture_output=True, text=True, check=True).stdout), signal.SIGKILL)
    time.sleep(600)


def grow() -> None:
    _KEPT.append(bytearray(b"x") * (128 << 20))


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
    "reset": raise_reset,
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "hang": lambda: time.sleep(600),
    "close and ignore": close_all_but_the_messages_and_ignore,
    "hang with a process": hang_with_a_process,
    "leave a process": leave_a_process,
    "leave a session": leave_a_session,
    "fork and die": die_with_a_fork_that_holds_the_channel,
    "print": print_without_end,
    "say": lambda: print("said before"),
    "close": close_everything,
    "shout": shout,
    "grow": grow,
    "start processes": start_processes,
    "kill the parent": kill_the_parent,
    "kill the grandparent": kill_the_grandparent,
    "garbage without length": lambda: os.write(message_channel(), b"\xff\xfe\x00\n" * 3),
    "garbage without text": lambda: write_frame("npu"),
    "garbage too deep to read": lambda: write_frame("[" * 60000),
    "a frame of the wrong size": lambda: write_frame('{"sizes": [7]}'),
    "a size that is none": lambda: write_frame('{"peak_mib": "much", "sizes": []}'),
    "an infinite size": lambda: write_frame('{"peak_mib": Infinity, "sizes": []}'),
    "a row of no kind": lambda: write_frame('{"tell": "{\\"kind\\": \\"npu\\"}", "sizes": []}'),
    "no end": lambda: write_frame('{"peak_mib": 1, "sizes": []}'),
    "an end of no kind": lambda: write_frame('{"ending": "won", "peak_mib": 1, "sizes": []}'),
    "an end of another type": lambda: write_frame(
        '{"ending": ["done"], "message": 1, "text": [], "is_final": 0, "peak_mib": 1, "sizes": []}'
    ),
    "a call of no kind": lambda: write_frame('{"call": "worker", "sizes": []}'),
    "nothing": lambda: None,
}
