"""Isolation: however work ends, the parent goes on, knows how it ended, and leaves nothing behind."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path

import pytest

from conformance.machine import isolation as module
from conformance.machine import process
from conformance.machine.isolation import Ending, Forked, InProcess, WorkResult, fault_of_lost_work
from conformance.machine.messages import Begin, to_line
from conformance.machine.process import own_peak_mib
from reports.schema import Measurement
from reports.verdicts import Verdict
from tests.conformance.support.endings import WAYS, message, said

pytestmark = pytest.mark.slow

LIMIT = 1.0
HOLDER = "the process that holds both the suite and a backend"
"""What the children are called in what is said of their end."""


def serve(name: str) -> Iterator[Measurement]:
    """A message before, the way that the name says, a message after."""
    yield message(pid=os.getpid(), parent=os.getppid())
    WAYS[name.strip()]()
    yield message(told="after")


@pytest.fixture(autouse=True)
def _large_children(monkeypatch: pytest.MonkeyPatch) -> None:
    """A child is as large as this process, which has run other tests: it is not replaced for that."""
    monkeypatch.setattr(module, "MOST_MIB", 1 << 20)


@pytest.fixture
def forked() -> Iterator[Callable[..., Forked[str]]]:
    """Makes isolations; afterwards no child of theirs is left, dead or alive."""
    made: list[Forked[str]] = []

    def make(share: int = 1, limit: float = LIMIT) -> Forked[str]:
        made.append(Forked(serve, limit=limit, share=share, holds="a backend"))
        return made[-1]

    yield make
    for isolation in made:
        isolation.close()
    table = subprocess.run(["ps", "-eo", "ppid=,stat="], capture_output=True, text=True, check=True).stdout
    assert [line for line in table.splitlines() if line.split()[0] == str(os.getpid()) and "Z" in line] == []


def pid_of(result: WorkResult) -> int:
    pid = said(result)[0]["pid"]
    assert isinstance(pid, int)
    return pid


def pids(results: Sequence[WorkResult]) -> list[int]:
    return [pid_of(result) for result in results]


def sleepers_of(group: int) -> list[str]:
    """The processes of a process group that still run a while after they were killed."""
    end = time.monotonic() + 5
    while (left := _running(group)) and time.monotonic() < end:
        time.sleep(0.05)
    return left


def _running(group: int) -> list[str]:
    table = subprocess.run(["ps", "-eo", "pgid=,stat=,args="], capture_output=True, text=True, check=True).stdout
    rows = [line.split(None, 2) for line in table.splitlines()]
    return [row[2] for row in rows if row[0] == str(group) and not row[1].startswith("Z")]


def test_work_that_ends_well_gives_its_messages(forked: Callable[..., Forked[str]]) -> None:
    result = forked().run("nothing")
    assert (result.ending, result.message, result.text) == (Ending.DONE, "", "")
    assert result.messages[1] == message(told="after") and len(result.messages) == 2
    assert said(result)[0]["pid"] != os.getpid() == said(result)[0]["parent"]
    assert 1 < result.peak_mib < 10_000 and 0 < result.seconds < LIMIT


def list_log_handlers() -> list[str]:
    """The modules of all handlers of all loggers."""
    named = (logger for logger in logging.root.manager.loggerDict.values() if isinstance(logger, logging.Logger))
    return [type(handler).__module__ for logger in (logging.root, *named) for handler in logger.handlers]


def serve_log_handlers(name: str) -> Iterator[Measurement]:
    yield message(handlers=" ".join(list_log_handlers()))


def test_a_child_has_no_handlers_of_pytest_that_keep_its_logs() -> None:
    logger = logging.getLogger("tests.isolation")
    kept = logging.NullHandler()
    logger.addHandler(kept)
    try:
        assert {"_pytest.logging", "logging"} <= set(list_log_handlers())
        with closing(Forked(serve_log_handlers, limit=LIMIT, share=1)) as isolation:
            handlers = str(said(isolation.run("handlers"))[0]["handlers"]).split()
    finally:
        logger.removeHandler(kept)
    assert "logging" in handlers and "_pytest.logging" not in handlers


@pytest.mark.parametrize(
    ("way", "message"),
    [
        ("segfault", f"{HOLDER} was killed by SIGSEGV (Segmentation fault)"),
        ("kill", f"{HOLDER} was killed by SIGKILL (Killed, as when memory runs out)"),
        ("real time", f"{HOLDER} was killed by signal 40 ({signal.strsignal(40)})"),
        ("sys.exit", f"{HOLDER} exited with status 3"),
        ("sys.exit text", f"{HOLDER} exited with status 1"),
        ("os._exit", f"{HOLDER} exited with status 0"),
        ("interrupt", f"{HOLDER} exited with status 1"),
        ("fork and die", f"{HOLDER} was killed by SIGABRT (Aborted)"),
    ],
)
def test_a_death_is_known_by_its_cause_and_keeps_earlier_messages(
    forked: Callable[..., Forked[str]], way: str, message: str
) -> None:
    isolation = forked()
    result = isolation.run(way)
    assert (result.ending, result.message) == (Ending.DIED, message)
    assert len(result.messages) == 1 and result.seconds < LIMIT and result.peak_mib > 1
    assert isolation.run("nothing").ending is Ending.DONE


def test_a_hang_ends_at_the_limit_with_all_that_it_started_and_tells_where(forked: Callable[..., Forked[str]]) -> None:
    isolation = forked(limit=0.4)
    result = isolation.run("hang with a process")
    assert (result.ending, result.message) == (Ending.TIMEOUT, f"{HOLDER} did not end within 0.4 s (--claim-timeout)")
    assert 0.4 <= result.seconds < 10
    assert sleepers_of(pid_of(result)) == []
    stack = result.text.partition("(most recent call first)")[2].splitlines()
    assert "in hang_with_a_process" in stack[1] and "in serve" in stack[-1]
    assert isolation.run("nothing").ending is Ending.DONE


def test_a_child_that_closes_its_channel_is_not_waited_for(
    forked: Callable[..., Forked[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PATIENCE", 0.1)
    result = forked().run("close")
    assert (result.ending, result.message) == (Ending.DIED, f"{HOLDER} closed its channel to the suite")


@pytest.mark.parametrize("way", ["stop", "close and ignore"])
def test_a_hang_that_ignores_the_question_where_is_killed(
    forked: Callable[..., Forked[str]], monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    monkeypatch.setattr(module, "PATIENCE", 0.1)
    result = forked(limit=0.4).run(way)
    assert (result.ending, result.text) == (Ending.TIMEOUT, "")
    assert result.seconds < 5


def test_an_exception_comes_back_with_its_traceback(forked: Callable[..., Forked[str]]) -> None:
    result = forked().run("error")
    assert (result.ending, result.message) == (Ending.ERROR, "ValueError: one two")
    assert "in raise_error" in result.text and len(result.messages) == 1


def test_what_was_printed_before_a_death_is_kept(
    forked: Callable[..., Forked[str]], capfd: pytest.CaptureFixture[str]
) -> None:
    isolation = forked()
    text = isolation.run("shout").text
    assert text.startswith("written by python\nwritten by C\nFatal Python error: Aborted")
    assert isolation.run("sys.exit text").text.endswith("SystemExit: no device\n")
    assert isolation.run("os._exit").text == ""
    assert capfd.readouterr() == ("", "")


def test_much_output_is_cut(forked: Callable[..., Forked[str]]) -> None:
    isolation = forked(limit=0.4)
    result = isolation.run("print")
    assert result.ending is Ending.TIMEOUT and len(result.text) <= process.TAIL
    assert os.fstat(isolation._output.fileno()).st_size < 1 << 30


def test_what_a_child_leaves_behind_ends_with_it(forked: Callable[..., Forked[str]]) -> None:
    result = forked().run("leave a process")
    assert result.ending is Ending.DONE
    assert sleepers_of(pid_of(result)) == []


@pytest.mark.parametrize(
    ("way", "why"),
    [
        ("garbage without text", "Expecting value: line 1 column 1"),
        ("garbage too deep to read", "maximum recursion depth exceeded"),
        ("a row of no kind", "unknown kind of row 'npu'; expected one of header, "),
    ],
)
def test_garbage_among_a_childs_messages_is_an_error_that_says_so(
    forked: Callable[..., Forked[str]], way: str, why: str
) -> None:
    isolation = forked(share=9)
    result = isolation.run(way)
    assert result.ending is Ending.ERROR
    assert result.message.startswith(f"the process sent a line that is no message: {why}")
    assert len(result.messages) == 1 and result.seconds < LIMIT and result.peak_mib > 1
    again = isolation.run("nothing")
    assert again.ending is Ending.DONE and pid_of(again) != pid_of(result)
    assert _running(pid_of(result)) == []


def test_a_backend_in_a_child_may_have_children_of_its_own(forked: Callable[..., Forked[str]]) -> None:
    result = forked(limit=60).run("start processes")
    assert (result.ending, result.message) == (Ending.DONE, "")
    assert sleepers_of(pid_of(result)) == []


def test_a_child_serves_its_share(forked: Callable[..., Forked[str]]) -> None:
    isolation = forked(share=3)
    first, *others = pids([isolation.run("nothing") for _ in range(7)])
    assert others[:2] == [first, first] and len({first, *others}) == 3


def test_a_child_that_has_grown_too_large_is_replaced(
    forked: Callable[..., Forked[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MOST_MIB", 1)
    isolation = forked(share=9)
    assert len(set(pids([isolation.run("nothing") for _ in range(3)]))) == 3


def test_what_is_not_done_after_others_is_tried_again_alone(forked: Callable[..., Forked[str]]) -> None:
    isolation = forked(share=9)
    before, found, after = [isolation.run(name) for name in ("nothing", "error", "nothing")]
    assert found.ending is Ending.ERROR
    assert len(set(pids([before, found, after]))) == 3


def serve_first(name: str) -> Iterator[Measurement | Begin]:
    """Begin, and end in the way that the name says as long as there is no file of the rest of the name."""
    way, _, path = name.partition(" ")
    yield Begin(stage="convert", case="a case")
    if not path or not Path(path).exists():
        if path:
            Path(path).touch()
        WAYS[way]()
    yield message(told="after")


@pytest.mark.parametrize(
    ("way", "told"),
    [
        ("abort", "the judge's process (in convert) was killed by SIGABRT (Aborted)"),
        ("stop", "the judge's process (in convert) did not end within 0.4 s (--claim-timeout)"),
    ],
)
def test_the_loss_of_a_judge_that_holds_no_other_code_is_the_suites_fault_once_it_came_twice(
    tmp_path: Path, way: str, told: str
) -> None:
    with closing(Forked(serve_first, limit=0.4, share=9)) as isolation:
        once, always = isolation.run(f"{way} {tmp_path / 'once'}"), isolation.run(way)
    assert once.ending is Ending.DONE and (tmp_path / "once").exists()
    assert (always.ending, always.message) == (Ending.LOST, told)
    fault = fault_of_lost_work(always)
    assert (fault.verdict, fault.message) == (Verdict.UNEXERCISED, f"internal error of the suite: {told}")


def test_no_work_is_blamed_for_what_earlier_work_left_behind() -> None:
    done: list[str] = []

    def poisoned(name: str) -> Iterator[Measurement]:
        if "poison" in done:
            os.abort()
        done.append(name)
        yield message(done=" ".join(done))

    isolation = Forked(poisoned, limit=LIMIT, share=9)
    results = [isolation.run(name) for name in ("poison", "victim", "other")]
    isolation.close()
    assert [result.ending for result in results] == [Ending.DONE] * 3
    assert [said(result) for result in results] == [[{"done": d}] for d in ("poison", "victim", "victim other")]


@pytest.mark.parametrize("way", ["nothing", "abort"])
def test_the_memory_of_a_process_is_known_however_it_ends(way: str) -> None:
    def grow(name: str) -> Iterator[Measurement]:
        held = bytearray(b"x") * (64 << 20)
        yield message(peak=own_peak_mib())
        WAYS[name]()
        del held

    isolation = Forked(grow, limit=LIMIT, share=1)
    result = isolation.run(way)
    isolation.close()
    peak = said(result)[0]["peak"]
    assert isinstance(peak, float) and 64 < peak <= result.peak_mib


def test_a_child_that_died_between_two_names_is_replaced(forked: Callable[..., Forked[str]]) -> None:
    isolation = forked(share=9)
    (pid,) = pids([isolation.run("nothing")])
    os.kill(pid, signal.SIGKILL)
    time.sleep(0.05)
    result = isolation.run("nothing")
    assert result.ending is Ending.DONE and pids([result]) != [pid]


@pytest.mark.timeout(30)
def test_work_that_a_stopped_child_does_not_take_ends_at_the_limit(forked: Callable[..., Forked[str]]) -> None:
    """It is more than a pipe holds."""
    isolation = forked(share=9)
    (pid,) = pids([isolation.run("nothing")])
    os.kill(pid, signal.SIGSTOP)
    result = isolation.run(f"nothing{' ' * (1 << 22)}")
    assert result.ending is Ending.DONE and pids([result]) != [pid]


def test_an_interrupt_of_the_parent_kills_the_child(forked: Callable[..., Forked[str]]) -> None:
    isolation = forked(limit=60)
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        isolation.run("hang with a process")
    assert time.monotonic() - started < 5 and isolation._child is None


def test_the_child_has_its_own_streams_and_signals() -> None:
    def look(name: str) -> Iterator[Measurement]:
        handlers = [signal.getsignal(number) is signal.SIG_DFL for number in (signal.SIGINT, signal.SIGALRM)]
        is_group = os.getpgrp() == os.getsid(0) == os.getpid()
        yield message(stdin=sys.stdin.read(), interrupt=handlers[0], alarm=handlers[1], group=is_group)

    isolation = Forked(look, limit=LIMIT, share=1)
    assert said(isolation.run("")) == [{"stdin": "", "interrupt": True, "alarm": True, "group": True}]
    isolation.close()


def test_without_fork_work_is_done_in_this_process() -> None:
    isolation = InProcess(serve)
    done, failed = isolation.run("nothing"), isolation.run("error")
    assert (done.ending, pid_of(done)) == (Ending.DONE, os.getpid())
    assert (failed.ending, failed.message, len(failed.messages)) == (Ending.ERROR, "ValueError: one two", 1)
    isolation.close()


def test_messages_of_any_size_come_whole() -> None:
    messages = [message(text="é" * size) for size in (1, 70_000, 1_000_000)]
    isolation: Forked[str] = Forked(lambda name: iter(messages), limit=10, share=1)
    assert list(isolation.run("").messages) == messages
    isolation.close()


FORGER = """
import contextlib, os, sys
pid, line, *others = sys.argv[1:]
for place in (f"/proc/{pid}/fd/{number}" for number in os.listdir(f"/proc/{pid}/fd")):
    if os.readlink(place).startswith(("pipe:", "socket:")) and os.readlink(place) not in others:
        with contextlib.suppress(OSError):
            os.write(os.open(place, os.O_WRONLY | os.O_NONBLOCK), line.encode())
"""
"""Opens the pipes and sockets of a process anew, but for ``others``, and writes a line to each."""


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere there is no /proc/PID/fd")
def test_no_other_process_opens_the_channel_of_a_child_and_writes_messages_there() -> None:
    numbers = [f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd")]
    inherited = [os.readlink(number) for number in numbers if os.path.islink(number)]

    def serve_beside_forger(name: str) -> Iterator[Measurement]:
        line = to_line(message(told="forged")) + "\n"
        subprocess.run([sys.executable, "-c", FORGER, str(os.getpid()), line, *inherited], check=True)
        yield message(told="its own")

    with closing(Forked(serve_beside_forger, limit=60, share=1)) as isolation:
        assert said(isolation.run("")) == [{"told": "its own"}]


class Restarted:
    """A helper that is started anew before the third piece of work."""

    files = ()

    def __init__(self) -> None:
        self.asked = 0

    def ensure(self) -> int:
        self.asked += 1
        return 1 if self.asked < 3 else 2

    def forget(self, group: int) -> None:
        assert group


def test_no_child_outlives_the_helper_that_it_knows() -> None:
    isolation = Forked(serve, limit=LIMIT, share=9, helper=Restarted())
    with closing(isolation):
        first, second, third, fourth = pids([isolation.run("nothing") for _ in range(4)])
    assert first == second != third == fourth
