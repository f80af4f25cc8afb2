"""A child process: however it ends, its parent goes on, knows how it ended, and leaves nothing behind."""

from __future__ import annotations

import logging
import os
import resource
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pytest

from fx_quant_conformance.conformance.machine import child as module
from fx_quant_conformance.conformance.machine import frames, process
from fx_quant_conformance.conformance.machine.child import (
    Answer,
    Child,
    ChildLost,
    Ending,
    Parent,
    ParentGone,
    Recipe,
    StartError,
)
from fx_quant_conformance.conformance.machine.frames import Frame, NoAnswer
from tests.conformance.support.endings import is_gone, list_running, open_ways

pytestmark = pytest.mark.slow

LIMIT = 60.0
SHORT = 0.4
"""Seconds for what hangs, in a child that has answered before."""
REPO = Path(__file__).resolve().parents[3]
Make = Callable[..., Child]


@pytest.fixture
def make() -> Iterator[Make]:
    """Makes children; afterwards none of them is left, dead or alive, nor what they have started."""
    made: list[tuple[Child, int]] = []

    def make_child(
        opens: Callable[..., Answer] = open_ways,
        *arguments: object,
        is_guarded: bool = False,
        shares_memory: bool = False,
    ) -> Child:
        recipe = Recipe(open=opens, arguments=arguments, is_guarded=is_guarded, shares_memory=shares_memory)
        child = Child(recipe)
        made.append((child, child.pid))
        return child

    yield make_child
    for child, _ in made:
        child.end()
    assert [left for _, pid in made for left in list_running(pid)] == []
    assert all(is_gone(pid) for _, pid in made)


def do(child: Child, way: str = "nothing", *, limit: float = LIMIT) -> dict[str, Any]:
    """What a child answers once it has ended in a way."""
    return child.ask(Frame(head={"way": way}), limit=limit, take=str).head


def lose(child: Child, way: str, *, limit: float = LIMIT) -> ChildLost:
    """How a child is lost that ends in a way."""
    with pytest.raises(ChildLost) as caught:
        do(child, way, limit=limit)
    return caught.value


def lose_hanging(child: Child, way: str) -> ChildLost:
    """How a child is lost that hangs in a way after it has answered."""
    do(child)
    return lose(child, way, limit=SHORT)


def server() -> int:
    """The process that makes the children."""
    pid = vars(forkserver._forkserver)["_forkserver_pid"]
    assert isinstance(pid, int)
    return pid


# -- what it answers --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_guarded", [False, True])
def test_a_child_answers_one_request_after_the_other_and_tells_things_before(make: Make, is_guarded: bool) -> None:
    child = make(is_guarded=is_guarded)
    told: list[str] = []
    first, second = (child.ask(Frame(head={"way": "nothing"}), limit=LIMIT, take=told.append).head for _ in range(2))
    assert first["pid"] == second["pid"] and told == [str(first["pid"])] * 2
    assert os.getpid() not in (first["pid"], first["parent"])
    assert child.pid == (first["parent"] if is_guarded else first["pid"])
    assert 1 < child.peak_mib < 10_000


def open_caller(parent: Parent) -> Answer:
    def answer(request: Frame) -> Frame:
        answers = [parent.call(Frame(head={"number": number}, pieces=request.pieces)) for number in (1, 2)]
        return Frame(head={"answers": [each.head["is"] for each in answers]}, pieces=answers[1].pieces)

    return answer


def test_a_call_of_a_child_is_answered_by_its_parent(make: Make) -> None:
    def answer(call: Frame) -> Frame:
        return Frame(head={"is": call.head["number"] * 10}, pieces=[bytes(each)[::-1] for each in call.pieces])

    found = make(open_caller).ask(Frame(head={}, pieces=[b"one", b"", b"two"]), limit=LIMIT, answer=answer)
    assert found.head["answers"] == [10, 20]
    assert [bytes(each) for each in found.pieces] == [b"eno", b"", b"owt"]


def test_a_child_whose_parent_is_gone_is_told_so_in_all_that_it_does() -> None:
    """What it runs does not take it for an error of its own."""
    theirs, mine = socket.socketpair()
    with mine:
        parent = Parent(mine)
        parent.tell("what nobody reads")
        theirs.close()
        for act in (parent.receive, lambda: parent.tell("late"), lambda: parent.call(Frame(head={})), parent.receive):
            with pytest.raises(ParentGone):
                act()


def open_echo(parent: Parent) -> Answer:
    def answer(request: Frame) -> Frame:
        parent.tell(request.head["text"])
        return request

    return answer


@pytest.mark.parametrize("size", [1, 70_000, 1_000_000])
def test_messages_of_any_size_come_whole(make: Make, size: int) -> None:
    told: list[str] = []
    request = Frame(head={"text": "é" * size}, pieces=[b"x" * size, b"", b"y" * 3 * size])
    answer = make(open_echo).ask(request, limit=LIMIT, take=told.append)
    assert told == ["é" * size] and answer.head["text"] == "é" * size
    assert [bytes(each) for each in answer.pieces] == request.pieces


def open_narrow(parent: Parent) -> Answer:
    """Echo; the child itself sends only small messages."""
    frames.MOST_BYTES = 1000
    return lambda request: Frame(head={"text": request.head["text"] * 100})


def test_what_is_too_large_to_be_sent_is_told_and_the_child_goes_on(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    child = make(open_narrow)
    monkeypatch.setattr(frames, "MOST_BYTES", 500)
    with pytest.raises(NoAnswer, match=r"a message of \d+ bytes"):
        child.ask(Frame(head={"text": "x" * 500}), limit=LIMIT)
    assert "a message of 30" in child.ask(Frame(head={"text": "x" * 30}), limit=LIMIT).head["unread"]
    assert child.ask(Frame(head={"text": "x"}), limit=LIMIT).head["text"] == "x" * 100


# -- what it finds ----------------------------------------------------------------------------------------------------


def open_look(parent: Parent) -> Answer:
    def answer(request: Frame) -> Frame:
        signals = (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)
        return Frame(
            head={
                "stdin": sys.stdin.read(),
                "default": [signal.getsignal(number) is signal.SIG_DFL for number in signals],
                "group": [os.getpgrp(), os.getsid(0)],
                "core": resource.getrlimit(resource.RLIMIT_CORE)[0],
                "environment": dict(os.environ),
                "handlers": list_log_handlers(),
            }
        )

    return answer


def list_log_handlers() -> list[str]:
    """The modules of all handlers of all loggers."""
    named = (logger for logger in logging.root.manager.loggerDict.values() if isinstance(logger, logging.Logger))
    return [type(handler).__module__ for logger in (logging.root, *named) for handler in logger.handlers]


@pytest.mark.parametrize("is_guarded", [False, True])
def test_the_child_has_its_own_streams_and_signals(make: Make, is_guarded: bool) -> None:
    child = make(open_look, is_guarded=is_guarded)
    found = child.ask(Frame(head={}), limit=LIMIT).head
    assert (found["stdin"], found["default"], found["core"]) == ("", [True] * 3, 0)
    assert found["group"] == [child.pid, child.pid]


def test_the_environment_of_a_child_is_that_of_its_parent_now(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    make()  # the fork server has started by now
    monkeypatch.setenv("SET_LATER", "é=1")
    monkeypatch.delenv("PATH")
    found = make(open_look).ask(Frame(head={}), limit=LIMIT).head["environment"]
    assert found == dict(os.environ) and found["SET_LATER"] == "é=1" and "PATH" not in found


@pytest.mark.parametrize("shares_memory", [False, True])
def test_a_child_has_no_handlers_of_pytest_that_keep_its_logs(make: Make, shares_memory: bool) -> None:
    logger = logging.getLogger("tests.child")
    kept = logging.NullHandler()
    logger.addHandler(kept)
    try:
        assert {"_pytest.logging", "logging"} <= set(list_log_handlers())
        found = make(open_look, shares_memory=shares_memory).ask(Frame(head={}), limit=LIMIT).head["handlers"]
    finally:
        logger.removeHandler(kept)
    assert "_pytest.logging" not in found and shares_memory <= ("logging" in found)


def test_a_copy_of_this_process_runs_what_cannot_be_found_by_name(make: Make) -> None:
    found: list[int] = []

    def open_here(parent: Parent) -> Answer:
        def answer(request: Frame) -> Frame:
            found.append(1)
            return Frame(head={"found": found, "pid": os.getpid()})

        return answer

    child = make(open_here, shares_memory=True)
    answers = [child.ask(Frame(head={}), limit=LIMIT).head for _ in range(2)]
    assert [each["found"] for each in answers] == [[1], [1, 1]] and found == []
    assert answers[0]["pid"] == child.pid


def test_a_child_may_have_children_of_its_own(make: Make) -> None:
    child = make()
    do(child, "start processes")
    pid = child.pid
    child.end()
    assert list_running(pid) == []


FORGER = """
import contextlib, os, sys
pid, text = sys.argv[1:]
sockets = 0
for place in [f"/proc/{pid}/fd/{number}" for number in os.listdir(f"/proc/{pid}/fd")]:
    if os.readlink(place).startswith(("pipe:", "socket:")):
        sockets += os.readlink(place).startswith("socket:")
        with contextlib.suppress(OSError):
            os.write(os.open(place, os.O_WRONLY | os.O_NONBLOCK), bytes.fromhex(text))
sys.exit(sockets)
"""
"""Opens the pipes and sockets of a process anew, and writes to each; its exit status is the number of sockets."""


def open_beside_forger(parent: Parent) -> Answer:
    def answer(request: Frame) -> Frame:
        text = b'{"sockets": "forged", "sizes": []}'
        forged = (struct.pack(">IQ", len(text), 0) + text).hex()
        ran = subprocess.run([sys.executable, "-c", FORGER, str(os.getpid()), forged], check=False)
        return Frame(head={"sockets": ran.returncode})

    return answer


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere there is no /proc/PID/fd")
def test_no_other_process_opens_the_channel_of_a_child_and_answers_there(make: Make) -> None:
    """Nor does it reach the fork server, which goes on."""
    child, before = make(open_beside_forger), server()
    assert [child.ask(Frame(head={}), limit=LIMIT).head["sockets"] for _ in range(2)] == [1, 1]
    assert do(make())["parent"] == before == server()


def open_sockets(parent: Parent) -> Answer:
    def answer(request: Frame) -> Frame:
        places = [f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd")]
        links = [os.readlink(place) for place in places if os.path.islink(place)]
        return Frame(head={"sockets": [link for link in links if link.startswith("socket:")]})

    return answer


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere there is no /proc/PID/fd")
def test_a_child_holds_its_own_channel_and_no_other_socket(make: Make) -> None:
    found = [make(open_sockets).ask(Frame(head={}), limit=LIMIT).head["sockets"] for _ in range(2)]
    assert [len(sockets) for sockets in found] == [1, 1] and found[0] != found[1]


# -- how it is lost ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_guarded", [False, True])
@pytest.mark.parametrize(
    ("way", "message"),
    [
        ("segfault", "was killed by SIGSEGV (Segmentation fault)"),
        ("kill", "was killed by SIGKILL (Killed, as when memory runs out)"),
        ("real time", f"was killed by signal 40 ({signal.strsignal(40)})"),
        ("sys.exit", "exited with status 3"),
        ("sys.exit text", "exited with status 1"),
        ("os._exit", "exited with status 0"),
        ("interrupt", "exited with status 1"),
        ("fork and die", "was killed by SIGABRT (Aborted)"),
    ],
)
def test_a_death_is_known_by_its_cause(make: Make, way: str, message: str, is_guarded: bool) -> None:
    child = make(is_guarded=is_guarded)
    told: list[str] = []
    with pytest.raises(ChildLost) as caught:
        child.ask(Frame(head={"way": way}), limit=LIMIT, take=told.append)
    assert (caught.value.ending, str(caught.value)) == (Ending.DIED, message)
    assert len(told) == 1


@pytest.mark.parametrize("is_guarded", [False, True])
def test_a_hang_ends_at_the_limit_with_all_that_it_started_and_tells_where(make: Make, is_guarded: bool) -> None:
    child = make(is_guarded=is_guarded)
    do(child)
    started = time.monotonic()
    lost = lose(child, "hang with a process", limit=SHORT)
    assert (lost.ending, str(lost)) == (Ending.TIMEOUT, "did not end within 0.4 s")
    assert SHORT <= time.monotonic() - started < 10
    assert list_running(child.pid) == []
    stack = lost.text.partition("(most recent call first)")[2].splitlines()
    assert "in hang_with_a_process" in stack[1] and "in answer" in stack[-1]


def test_a_child_that_closes_its_channel_is_not_waited_for(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PATIENCE", 0.1)
    started = time.monotonic()
    lost = lose(make(), "close")
    assert (lost.ending, str(lost)) == (Ending.DIED, "closed its channel to the suite")
    assert time.monotonic() - started < LIMIT / 2


@pytest.mark.parametrize("way", ["stop", "close and ignore"])
@pytest.mark.parametrize("is_guarded", [False, True])
def test_a_hang_that_ignores_the_question_where_is_killed(
    make: Make, monkeypatch: pytest.MonkeyPatch, way: str, is_guarded: bool
) -> None:
    monkeypatch.setattr(module, "PATIENCE", 0.1)
    lost = lose_hanging(make(is_guarded=is_guarded), way)
    assert (lost.ending, lost.text) == (Ending.TIMEOUT, "")


def test_a_request_that_a_stopped_child_does_not_take_ends_at_the_limit(make: Make) -> None:
    """It is more than a socket holds."""
    child = make()
    do(child)
    os.kill(child.pid, signal.SIGSTOP)
    with pytest.raises(ChildLost) as caught:
        child.ask(Frame(head={"way": "nothing"}, pieces=[b" " * (1 << 22)]), limit=SHORT, take=str)
    assert caught.value.ending is Ending.TIMEOUT


@pytest.mark.parametrize("size", [0, 1 << 22])
def test_a_request_whose_time_is_over_ends_as_at_the_limit(make: Make, size: int) -> None:
    child = make()
    do(child)
    with pytest.raises(ChildLost, match=r"did not end within 0 s") as caught:
        child.ask(Frame(head={"way": "hang"}, pieces=[b" " * size]), limit=0.0, take=str)
    assert caught.value.ending is Ending.TIMEOUT


def test_a_child_that_died_between_two_requests_is_known_by_its_cause(make: Make) -> None:
    child = make()
    do(child)
    os.kill(child.pid, signal.SIGUSR1)
    lost = lose(child, "nothing")
    assert (lost.ending, str(lost)) == (Ending.DIED, f"was killed by SIGUSR1 ({signal.strsignal(signal.SIGUSR1)})")


@pytest.mark.parametrize(
    ("way", "why"),
    [
        ("garbage without length", "a message of "),
        ("garbage without text", "a message that cannot be read: JSONDecodeError: Expecting value: line 1 column 1"),
        ("garbage too deep to read", "a message that cannot be read: RecursionError: maximum recursion depth exceeded"),
        ("a frame of the wrong size", "a message that cannot be read: ValueError: its pieces are not as long as it"),
        ("a size that is none", "its peak of memory is no number: 'much'"),
        ("an infinite size", "its peak of memory is no number: inf"),
    ],
)
def test_garbage_instead_of_an_answer_is_told_as_such(make: Make, way: str, why: str) -> None:
    lost = lose(make(), way)
    assert lost.ending is Ending.ERROR and str(lost).startswith(f"sent an answer that cannot be read: {why}")


def open_broken(parent: Parent, said: str) -> Answer:
    raise ValueError(said)


def test_a_child_that_cannot_open_what_it_should_tells_why(make: Make) -> None:
    lost = lose(make(open_broken, "no such thing"), "nothing")
    assert (lost.ending, str(lost)) == (Ending.DIED, "exited with status 1")
    assert lost.text.endswith("ValueError: no such thing\n")


@pytest.mark.parametrize("way", ["error", "reset"])
def test_what_an_answer_raises_ends_the_child_and_is_told(make: Make, way: str) -> None:
    """An error of a channel of its own too."""
    lost = lose(make(), way)
    assert (lost.ending, str(lost)) == (Ending.DIED, "exited with status 1")
    assert f"in raise_{way}" in lost.text


# -- what it has printed ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_guarded", [False, True])
def test_what_was_printed_before_a_death_is_kept(
    make: Make, capfd: pytest.CaptureFixture[str], is_guarded: bool
) -> None:
    text = lose(make(is_guarded=is_guarded), "shout").text
    assert text.startswith("written by python\nwritten by C\nFatal Python error: Aborted")
    assert lose(make(is_guarded=is_guarded), "sys.exit text").text.endswith("SystemExit: no device\n")
    assert lose(make(is_guarded=is_guarded), "os._exit").text == ""
    assert capfd.readouterr() == ("", "")


def test_what_was_printed_before_a_piece_of_work_began_is_no_part_of_it(make: Make) -> None:
    child = make()
    child.begin()
    do(child, "say")
    child.begin()
    assert lose(child, "shout").text.startswith("written by python\n") and child.served == 2
    other = make()
    do(other, "say")
    assert lose(other, "shout").text.startswith("said before\nwritten by python\n")


def open_flood(parent: Parent) -> Answer:
    def answer(request: Frame) -> Frame:
        for number in range(4):
            os.write(1, b"x" * process.MOST_OUTPUT + f"the end of {number}".encode())
            parent.call(Frame(head={}))
        os.abort()

    return answer


def test_much_output_is_cut_while_it_comes(make: Make) -> None:
    child = make(open_flood)
    sizes: list[int] = []

    def look(call: Frame) -> Frame:
        sizes.append(os.fstat(child._output.fileno()).st_size)
        return call

    with pytest.raises(ChildLost) as caught:
        child.ask(Frame(head={}), limit=LIMIT, answer=look)
    assert sizes == [process.TAIL] * 4
    assert "xxthe end of 3" in caught.value.text and len(caught.value.text) <= process.TAIL


def test_of_a_flood_without_end_the_last_is_kept(make: Make) -> None:
    lost = lose_hanging(make(), "print")
    assert lost.ending is Ending.TIMEOUT and len(lost.text) <= process.TAIL
    assert "xxx" in lost.text and "in print_without_end" in lost.text


# -- how large it is --------------------------------------------------------------------------------------------------


def test_a_child_that_has_grown_since_its_first_answer_is_large(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_GROWTH_MIB", 64)
    child = make()
    assert not child.is_large
    do(child)
    first = child.peak_mib
    do(child)
    assert not child.is_large
    do(child, "grow")
    assert child.is_large and child.peak_mib > first + 64


# -- what is left -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_guarded", [False, True])
def test_what_a_child_leaves_behind_ends_with_it(make: Make, is_guarded: bool) -> None:
    child = make(is_guarded=is_guarded)
    do(child, "leave a process")
    pid = child.pid
    child.end()
    assert list_running(pid) == [] and is_gone(pid)


@pytest.mark.parametrize("is_guarded", [False, True])
def test_what_a_child_left_behind_that_died_unasked_ends_with_it(make: Make, is_guarded: bool) -> None:
    child = make(is_guarded=is_guarded)
    pid = child.pid
    os.kill(do(child, "leave a process")["pid"], signal.SIGKILL)
    assert is_gone(pid)
    child.end()
    assert list_running(pid) == []


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a guard does not know of them")
@pytest.mark.parametrize("ends_by", ["its parent", "itself"])
def test_what_a_guarded_child_leaves_in_another_session_ends_with_it(make: Make, ends_by: str) -> None:
    child = make(is_guarded=True)
    left = do(child, "leave a session")["left"]
    assert os.getsid(left) == left != child.pid
    if ends_by == "itself":
        lose(child, "sys.exit")
    else:
        child.end()
    assert list_running(left) == []


@pytest.mark.parametrize("shares_memory", [False, True])
@pytest.mark.parametrize("way", ["nothing", "abort"])
def test_a_child_that_has_ended_leaves_no_descriptor_and_ends_only_once(
    make: Make, way: str, shares_memory: bool
) -> None:
    make()  # what the fork server needs is open by now
    before = len(os.listdir("/dev/fd"))
    child = make(shares_memory=shares_memory)
    if way == "nothing":
        do(child)
    else:
        lose(child, way)
    child.end()
    assert len(os.listdir("/dev/fd")) == before
    child.end()


# -- those that made it -----------------------------------------------------------------------------------------------


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere it does not end with its guard")
def test_a_guarded_child_that_kills_its_parent_harms_nobody(make: Make) -> None:
    child, other = make(is_guarded=True), make()
    before, lost = server(), lose(child, "kill the parent")
    assert (lost.ending, str(lost)) == (Ending.DIED, "was killed by SIGKILL (Killed, as when memory runs out)")
    assert list_running(child.pid) == []
    assert do(other)["parent"] == do(make())["parent"] == before == server()


def test_a_child_that_the_system_does_not_make_is_told(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(process: object) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    with monkeypatch.context() as patches:
        patches.setattr("multiprocessing.context.ForkServerProcess._Popen", staticmethod(refuse))
        with pytest.raises(StartError, match=r"^no process could be made: .*Resource temporarily unavailable$"):
            make()
    do(make())


HEAD = """
import os, signal
from multiprocessing.forkserver import _forkserver as server
from fx_quant_conformance.conformance.machine.child import Child, ChildLost, Recipe
from fx_quant_conformance.conformance.machine.fork_server import start_server
from fx_quant_conformance.conformance.machine.frames import Frame
from tests.conformance.support.endings import open_ways

def make(is_guarded=False, opens=open_ways):
    return Child(Recipe(open=opens, is_guarded=is_guarded))

def do(child, way="nothing"):
    return child.ask(Frame(head={"way": way}), limit=60, take=str).head
"""
"""The beginning of a user's script, which is imported by no child."""


def run_script(folder: Path, text: str) -> list[str]:
    """Run a script by itself; return its output by lines."""
    script = folder / "script.py"
    script.write_text(f"print('begun', flush=True)\n{HEAD}{text}", encoding="utf-8")
    variables = os.environ | {"PYTHONPATH": os.pathsep.join([str(REPO), str(folder)])}
    words = [sys.executable, str(script)]
    ran = subprocess.run(words, env=variables, capture_output=True, text=True, timeout=120, cwd=folder, check=False)
    assert ran.stderr == "" and ran.returncode in (0, -signal.SIGKILL), ran
    first, *lines = ran.stdout.splitlines()
    assert first == "begun"
    return lines


def test_a_users_script_is_not_imported_again_in_a_child(tmp_path: Path) -> None:
    text = "child = make()\nprint(do(child, 'say')['pid'] == child.pid, __import__('__main__').child is child)"
    assert run_script(tmp_path, text) == ["True True"]


@pytest.mark.parametrize("end", ["", "os.kill(os.getpid(), signal.SIGKILL)"])
def test_children_end_when_their_parent_is_gone(tmp_path: Path, end: str) -> None:
    text = f"""
children = [make(), make(is_guarded=True)]
pids = [do(child)["pid"] for child in children]
print(*pids, *[child.pid for child in children], server._forkserver_pid, flush=True)
{end}
"""
    (line,) = run_script(tmp_path, text)
    assert len(set(line.split())) == 4
    assert [list_running(int(pid)) for pid in line.split()] == [[]] * 5


def test_a_fork_server_that_was_killed_is_replaced(tmp_path: Path) -> None:
    """Its children count as dead, and end. The new one passes over a suite in the folder where it starts."""
    (tmp_path / "other" / "fx_quant_conformance").mkdir(parents=True)
    (tmp_path / "other" / "fx_quant_conformance" / "__init__.py").write_text("raise SystemExit('another suite')")
    text = """
start_server(["fx_quant_conformance.conformance.machine.release"])
child, pid = make(is_guarded=True), server._forkserver_pid
group = child.pid
try:
    do(child, "kill the grandparent")
except ChildLost as lost:
    print(lost.ending)
os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
child.end()
os.chdir("other")
new = make()
print(group, do(new)["pid"] == new.pid, do(new)["parent"] == server._forkserver_pid != pid)
"""
    ending, line = run_script(tmp_path, text)
    group, *others = line.split()
    assert ending == "died" and others == ["True", "True"]
    assert list_running(int(group)) == []


MODULE = """
import os
from fx_quant_conformance.conformance.machine.frames import Frame
IMPORTED_BY = os.getpid()

def open_told(parent):
    return lambda request: Frame(head={"by": IMPORTED_BY})
"""


def test_what_is_preloaded_is_imported_once_for_all_children(tmp_path: Path) -> None:
    (tmp_path / "told_module.py").write_text(MODULE, encoding="utf-8")
    text = """
from told_module import open_told
start_server(["no_such_module", "told_module"])
children = [make(opens=open_told) for _ in range(2)]
print([do(child)["by"] == server._forkserver_pid for child in children])
"""
    assert run_script(tmp_path, text) == ["[True, True]"]


def test_another_process_makes_children_by_the_same_server_as_long_as_there_is_one(tmp_path: Path) -> None:
    (tmp_path / "joins.py").write_text(f"""{HEAD}
import sys
from fx_quant_conformance.conformance.machine.fork_server import join_server
join_server(sys.argv[1], [])
child = make()
print(do(child)["parent"], do(child)["pid"] == child.pid, server._forkserver_pid, flush=True)
os.kill(do(child)["parent"], signal.SIGKILL)
child._process.join()
child.end()
print(do(make())["parent"] == server._forkserver_pid != None)
""")
    text = """
import subprocess, sys
from fx_quant_conformance.conformance.machine.fork_server import join_server, name_server
print(repr(name_server()))
start_server([])
print(server._forkserver_pid, flush=True)
subprocess.run([sys.executable, "joins.py", name_server()], check=True)
join_server(os.path.join(os.getcwd(), "no such address"), [])
print(do(make())["parent"] == server._forkserver_pid)
"""
    name, pid, *others = run_script(tmp_path, text)
    assert (name, others) == ("''", [f"{pid} True None", "True", "True"])


def test_a_platform_without_such_processes_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fx_quant_conformance.conformance.machine.child.HAS_CHILDREN", False)
    with pytest.raises(StartError, match="use Linux, macOS or WSL"):
        Child(Recipe(open="no_module:nothing"))
