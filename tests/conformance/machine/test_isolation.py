"""Isolation: however work ends, the parent goes on, knows how it ended, and leaves nothing behind."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from conformance.machine import isolation as module
from conformance.machine.isolation import Ending, Forked, InProcess, Outcome

Row = dict[str, Any]
LIMIT = 1.0


def leave_a_process() -> None:
    subprocess.Popen(["sleep", "600"])


def hang_with_a_process() -> None:
    leave_a_process()
    ctypes.CDLL(None).pause()


def die_with_a_fork_that_holds_the_pipe() -> None:
    if os.fork() == 0:
        time.sleep(600)
    os.abort()


def print_without_end() -> None:
    while True:
        os.write(1, b"x" * 65536)


def close_everything() -> None:
    os.closerange(3, 256)
    time.sleep(600)


def ignore_and_sleep() -> None:
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
    "terminate": lambda: os.kill(os.getpid(), signal.SIGTERM),
    "sys.exit": lambda: sys.exit(3),
    "sys.exit text": lambda: sys.exit("no device"),
    "os._exit": lambda: os._exit(0),
    "interrupt": raise_interrupt,
    "error": raise_error,
    "sleep": lambda: time.sleep(600),
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "hang in C": lambda: ctypes.CDLL(None).pause(),
    "ignore": ignore_and_sleep,
    "hang with a process": hang_with_a_process,
    "leave a process": leave_a_process,
    "fork and die": die_with_a_fork_that_holds_the_pipe,
    "print": print_without_end,
    "close": close_everything,
    "shout": shout,
    "nothing": lambda: None,
}


def serve(name: str) -> Iterator[Row]:
    """A row before, the way that the name says, a row after."""
    yield {"pid": os.getpid(), "parent": os.getppid()}
    WAYS[name]()
    yield {"told": "after"}


@pytest.fixture
def forked() -> Iterator[Callable[..., Forked]]:
    """Makes isolations; afterwards no child of theirs is left, dead or alive."""
    made: list[Forked] = []

    def make(share: int = 1, limit: float = LIMIT) -> Forked:
        made.append(Forked(serve, limit=limit, share=share))
        return made[-1]

    yield make
    for isolation in made:
        isolation.close()
    table = subprocess.run(["ps", "-eo", "ppid=,stat="], capture_output=True, text=True, check=True).stdout
    assert [line for line in table.splitlines() if line.split()[0] == str(os.getpid()) and "Z" in line] == []


def pids(outcomes: Sequence[Outcome]) -> list[int]:
    return [outcome.rows[0]["pid"] for outcome in outcomes]


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


def test_work_that_ends_well_gives_its_rows(forked: Callable[..., Forked]) -> None:
    outcome = forked().run("nothing")
    assert (outcome.ending, outcome.message, outcome.text) == (Ending.DONE, "", "")
    assert outcome.rows[1] == {"told": "after"} and len(outcome.rows) == 2
    assert outcome.rows[0]["pid"] != os.getpid() == outcome.rows[0]["parent"]
    assert 1 < outcome.peak_mib < 10_000 and 0 < outcome.seconds < LIMIT


@pytest.mark.parametrize(
    ("way", "message"),
    [
        ("segfault", "the process was killed by SIGSEGV (Segmentation fault)"),
        ("abort", "the process was killed by SIGABRT (Aborted)"),
        ("kill", "the process was killed by SIGKILL (Killed, as when memory runs out)"),
        ("real time", f"the process was killed by signal 40 ({signal.strsignal(40)})"),
        ("terminate", "the process was killed by SIGTERM (Terminated)"),
        ("sys.exit", "the process exited with status 3"),
        ("sys.exit text", "the process exited with status 1"),
        ("os._exit", "the process exited with status 0"),
        ("interrupt", "the process exited with status 1"),
        ("fork and die", "the process was killed by SIGABRT (Aborted)"),
    ],
)
def test_a_death_is_known_by_its_cause_and_keeps_earlier_rows(
    forked: Callable[..., Forked], way: str, message: str
) -> None:
    isolation = forked()
    outcome = isolation.run(way)
    assert (outcome.ending, outcome.message) == (Ending.DIED, message)
    assert len(outcome.rows) == 1 and outcome.seconds < LIMIT and outcome.peak_mib > 1
    assert isolation.run("nothing").ending is Ending.DONE


@pytest.mark.parametrize("way", ["sleep", "stop", "hang in C", "hang with a process", "print"])
def test_a_hang_ends_at_the_limit_with_all_that_it_started(forked: Callable[..., Forked], way: str) -> None:
    isolation = forked(limit=0.4)
    outcome = isolation.run(way)
    assert (outcome.ending, outcome.message) == (Ending.TIMEOUT, "did not end within 0.4 s (--claim-timeout)")
    assert 0.4 <= outcome.seconds < 10
    assert sleepers_of(outcome.rows[0]["pid"]) == []
    assert isolation.run("nothing").ending is Ending.DONE


def test_a_child_that_closes_its_pipe_is_not_waited_for(
    forked: Callable[..., Forked], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PATIENCE", 0.1)
    outcome = forked().run("close")
    assert (outcome.ending, outcome.message) == (Ending.DIED, "the process closed its pipe to the suite")


def test_a_hang_tells_where(forked: Callable[..., Forked]) -> None:
    text = forked(limit=0.4).run("hang with a process").text
    stack = text.partition("(most recent call first)")[2].splitlines()
    assert "in hang_with_a_process" in stack[1] and "in serve" in stack[-1]


def test_a_hang_that_ignores_the_question_where_is_killed(
    forked: Callable[..., Forked], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PATIENCE", 0.1)
    outcome = forked(limit=0.4).run("ignore")
    assert (outcome.ending, outcome.text) == (Ending.TIMEOUT, "")


def test_an_exception_comes_back_with_its_traceback(forked: Callable[..., Forked]) -> None:
    outcome = forked().run("error")
    assert (outcome.ending, outcome.message) == (Ending.ERROR, "ValueError: one two")
    assert "in raise_error" in outcome.text and len(outcome.rows) == 1


def test_what_was_printed_before_a_death_is_kept(
    forked: Callable[..., Forked], capfd: pytest.CaptureFixture[str]
) -> None:
    isolation = forked()
    text = isolation.run("shout").text
    assert text.startswith("written by python\nwritten by C\nFatal Python error: Aborted")
    assert isolation.run("sys.exit text").text.endswith("SystemExit: no device\n")
    assert isolation.run("os._exit").text == ""
    assert capfd.readouterr() == ("", "")


def test_much_output_is_cut(forked: Callable[..., Forked]) -> None:
    isolation = forked(limit=0.4)
    outcome = isolation.run("print")
    assert len(outcome.text) <= module.TAIL
    assert os.fstat(isolation._output.fileno()).st_size < 1 << 30


def test_what_a_child_leaves_behind_ends_with_it(forked: Callable[..., Forked]) -> None:
    outcome = forked().run("leave a process")
    assert outcome.ending is Ending.DONE
    assert sleepers_of(outcome.rows[0]["pid"]) == []


def test_a_child_serves_its_share(forked: Callable[..., Forked]) -> None:
    isolation = forked(share=3)
    first, *others = pids([isolation.run("nothing") for _ in range(7)])
    assert others[:2] == [first, first] and len({first, *others}) == 3


def test_a_child_that_has_grown_too_large_is_replaced(
    forked: Callable[..., Forked], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MOST_MIB", 1)
    isolation = forked(share=9)
    assert len(set(pids([isolation.run("nothing") for _ in range(3)]))) == 3


@pytest.mark.parametrize(("bad", "ending"), [("abort", Ending.DIED), ("error", Ending.ERROR), ("stop", Ending.TIMEOUT)])
def test_what_is_not_done_after_others_is_tried_again_alone(
    forked: Callable[..., Forked], bad: str, ending: Ending
) -> None:
    isolation = forked(share=9, limit=0.4)
    before, found, after = [isolation.run(name) for name in ("nothing", bad, "nothing")]
    assert found.ending is ending
    assert len(set(pids([before, found, after]))) == 3


def test_no_work_is_blamed_for_what_earlier_work_left_behind() -> None:
    done: list[str] = []

    def poisoned(name: str) -> Iterator[Row]:
        if "poison" in done:
            os.abort()
        done.append(name)
        yield {"name": name, "done": list(done)}

    isolation = Forked(poisoned, limit=LIMIT, share=9)
    outcomes = [isolation.run(name) for name in ("poison", "victim", "other")]
    isolation.close()
    assert [outcome.ending for outcome in outcomes] == [Ending.DONE] * 3
    assert [outcome.rows[0]["done"] for outcome in outcomes] == [["poison"], ["victim"], ["victim", "other"]]


def test_a_child_that_died_between_two_names_is_replaced(forked: Callable[..., Forked]) -> None:
    isolation = forked(share=9)
    (pid,) = pids([isolation.run("nothing")])
    os.kill(pid, signal.SIGKILL)
    time.sleep(0.05)
    outcome = isolation.run("nothing")
    assert outcome.ending is Ending.DONE and pids([outcome]) != [pid]


def test_an_interrupt_of_the_parent_kills_the_child(forked: Callable[..., Forked]) -> None:
    isolation = forked(limit=60)
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        isolation.run("hang with a process")
    assert time.monotonic() - started < 5 and isolation._child is None


def test_the_child_has_its_own_streams_and_signals() -> None:
    def look(name: str) -> Iterator[Row]:
        handlers = [signal.getsignal(number) is signal.SIG_DFL for number in (signal.SIGINT, signal.SIGALRM)]
        yield {"stdin": sys.stdin.read(), "handlers": handlers, "group": os.getpgrp() == os.getsid(0) == os.getpid()}

    isolation = Forked(look, limit=LIMIT, share=1)
    assert isolation.run("").rows == ({"stdin": "", "handlers": [True, True], "group": True},)
    isolation.close()


def test_without_fork_work_is_done_in_this_process() -> None:
    isolation = InProcess(serve)
    done, failed = isolation.run("nothing"), isolation.run("error")
    assert (done.ending, done.rows[0]["pid"]) == (Ending.DONE, os.getpid())
    assert (failed.ending, failed.message, len(failed.rows)) == (Ending.ERROR, "ValueError: one two", 1)
    isolation.close()


def test_names_may_be_any_text() -> None:
    isolation = Forked(lambda name: iter([{"name": name}]), limit=LIMIT, share=9)
    names = ["a[0..1]/x", "größe", "two\nlines", "", "x" * 5000]
    assert [isolation.run(name).rows[0]["name"] for name in names] == names
    isolation.close()


def test_rows_of_any_size_come_whole() -> None:
    rows = [{"text": "é" * size} for size in (1, 70_000, 1_000_000)]
    isolation = Forked(lambda name: iter(rows), limit=10, share=1)
    assert list(isolation.run("").rows) == rows
    isolation.close()
