"""A place where work is done: however work ends, it is known how, and no other work is harmed or blamed."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from fx_quant_conformance.conformance.machine import child as child_module
from fx_quant_conformance.conformance.machine import frames
from fx_quant_conformance.conformance.machine import workplace as module
from fx_quant_conformance.conformance.machine.child import Answer, Child, Ending, Parent, Recipe, StartError
from fx_quant_conformance.conformance.machine.frames import Frame, NoAnswer
from fx_quant_conformance.conformance.machine.messages import Begin
from fx_quant_conformance.conformance.machine.process import own_peak_mib
from fx_quant_conformance.conformance.machine.workplace import (
    BEGINS,
    LOST,
    LostProcess,
    Workplace,
    WorkResult,
    ask_worker,
    fault_of_lost_work,
)
from fx_quant_conformance.conformance.machine.workplace import make_answer as make_answer_of
from fx_quant_conformance.reports.codec import Message
from fx_quant_conformance.reports.numbers import Scalar
from fx_quant_conformance.reports.schema import Measurement
from fx_quant_conformance.reports.verdicts import Verdict
from tests.conformance.support.endings import WAYS, is_gone, list_running, message, open_ways, said

pytestmark = pytest.mark.slow

LIMIT = 60.0
SHORT = 1.0
"""Seconds for what hangs; in a new process that includes its start."""
HOLDER = "the process that holds both the suite and a backend"
"""What a judge is called that holds other code, in what is said of its end."""
Open = Callable[..., Answer]
Make = Callable[..., Workplace]


# -- what judges and workers do ---------------------------------------------------------------------------------------


def open_judge(parent: Parent) -> Answer:
    """A message before, the way that the request names, a message after."""

    def serve(request: Frame) -> Iterator[Message]:
        yield message(pid=os.getpid())
        yield Begin(stage="convert", case="a case")
        WAYS[request.head["way"]]()
        yield message(told="after")

    return make_answer_of(parent, serve)


def open_judge_of_worker(parent: Parent) -> Answer:
    """Ask the worker for each of the ways that are named; say what it answers; give up what ``gives up`` says."""

    def serve(request: Frame) -> Iterator[Message]:
        yield message(pid=os.getpid())
        for number, way in enumerate(request.head["ways"]):
            asked = Frame(head={"way": way, BEGINS: number == 0}, pieces=request.pieces)
            answer = ask_worker(parent, asked, request.head.get("seconds", LIMIT))
            yield message(**{key: value for key, value in answer.head.items() if key not in ("text", "peak_mib")})
            if request.head.get("gives up") and LOST in answer.head:
                lost = answer.head
                raise LostProcess(Ending(lost[LOST]), lost["message"], text=lost["text"], is_alone=lost["is_alone"])

        if request.head.get("disbelieves"):
            raise LostProcess(Ending.DIED, "the process sent nonsense")

    return make_answer_of(parent, serve)


def start_worker(opens: Open = open_ways, *arguments: object) -> Child:
    return Child(Recipe(open=opens, arguments=arguments or (False,), is_guarded=True))


@pytest.fixture
def make() -> Iterator[Make]:
    """Makes places; afterwards no process of theirs is left."""
    made: list[Workplace] = []

    def make_place(opens: Open = open_judge, limit: float = LIMIT, holds: str = "a backend", **given: Any) -> Workplace:
        made.append(Workplace(Recipe(open=opens), limit=limit, holds=holds, **given))
        return made[-1]

    yield make_place
    for place in made:
        pids = pids_of(place)
        place.close()
        assert [list_running(pid) for pid in pids] == [[]] * len(pids) and all(map(is_gone, pids))


def make_with_worker(make: Make, workers: Callable[[], Child] = start_worker, **given: Any) -> Workplace:
    return make(open_judge_of_worker, make_worker=workers, **given)


def pids_of(place: Workplace) -> list[int]:
    return [child.pid for child in (place._judge, worker_of(place)) if child is not None]


def worker_of(place: Workplace) -> Child | None:
    return None if place._worker is None else place._worker.child


def run(place: Workplace, way: str = "nothing") -> WorkResult:
    return place.run(Frame(head={"way": way}))


def run_ways(place: Workplace, *ways: str, **head: object) -> WorkResult:
    return place.run(Frame(head={"ways": ways, **head}))


def pid_of(result: WorkResult) -> Scalar:
    return said(result)[0]["pid"]


# -- work that ends well ----------------------------------------------------------------------------------------------


def test_work_that_ends_well_gives_its_messages(make: Make) -> None:
    result = run(make())
    assert (result.ending, result.message, result.text, result.is_final) == (Ending.DONE, "", "", False)
    assert result.messages[1:] == (Begin(stage="convert", case="a case"), message(told="after"))
    assert pid_of(result) != os.getpid() and len(result.messages) == 3
    assert 1 < result.peak_mib < 10_000 and 0 < result.seconds < LIMIT


def test_a_process_is_kept_from_work_to_work(make: Make) -> None:
    place = make()
    assert len({pid_of(run(place)) for _ in range(5)}) == 1


def test_a_place_that_keeps_nothing_does_each_work_in_a_new_process(make: Make) -> None:
    place = make(keeps=False)
    pids = [pid_of(run(place)) for _ in range(3)]
    assert len(set(pids)) == 3 and all(isinstance(pid, int) and is_gone(pid) for pid in pids)


def open_large(parent: Parent) -> Answer:
    def serve(request: Frame) -> Iterator[Measurement]:
        for size in (1, 70_000, 1_000_000):
            yield message(text="é" * size)

    return make_answer_of(parent, serve)


def test_messages_of_any_size_come_whole(make: Make) -> None:
    result = make(open_large).run(Frame(head={}, pieces=[b"x" * 5_000_000]))
    assert list(result.messages) == [message(text="é" * size) for size in (1, 70_000, 1_000_000)]


def open_growing(parent: Parent) -> Answer:
    def serve(request: Frame) -> Iterator[Measurement]:
        yield message(pid=os.getpid())
        WAYS["grow"]()
        yield message(peak=own_peak_mib())

    return make_answer_of(parent, serve)


def test_the_memory_of_a_process_is_known_when_work_ends_well(make: Make) -> None:
    result = run(make(open_growing))
    peak = said(result)[1]["peak"]
    assert isinstance(peak, float) and 128 < peak <= result.peak_mib


def test_a_judge_that_has_grown_too_large_is_replaced(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child_module, "MOST_GROWTH_MIB", 64)
    place = make(open_growing)
    first, second, third = (pid_of(run(place)) for _ in range(3))
    assert first == second != third  # it was as large when it answered first


def test_work_is_done_after_the_processes_were_closed(make: Make) -> None:
    place = make()
    first = pid_of(run(place))
    place.close()
    place.close()
    assert isinstance(first, int) and is_gone(first)
    assert pid_of(run(place)) != first


# -- work that does not -----------------------------------------------------------------------------------------------


def test_an_exception_comes_back_with_its_traceback(make: Make) -> None:
    result = run(make(), "error")
    assert (result.ending, result.message) == (Ending.ERROR, "ValueError: one two")
    assert "in raise_error" in result.text and len(result.messages) == 2


def test_an_exception_of_a_channel_of_its_own_comes_back_too(make: Make) -> None:
    result = run(make(), "reset")
    assert (result.ending, result.message) == (Ending.ERROR, "ConnectionResetError: by a peer of its own")
    assert "in raise_reset" in result.text


@pytest.mark.parametrize(
    ("way", "told", "printed"),
    [
        ("segfault", "was killed by SIGSEGV (Segmentation fault)", "Fatal Python error: Segmentation fault"),
        ("sys.exit text", "exited with status 1", "SystemExit: no device"),
        ("fork and die", "was killed by SIGABRT (Aborted)", "Fatal Python error: Aborted"),
    ],
)
def test_a_death_is_known_by_its_cause_and_keeps_earlier_messages(
    make: Make, way: str, told: str, printed: str
) -> None:
    place = make()
    result = run(place, way)
    assert (result.ending, result.message) == (Ending.DIED, f"{HOLDER} (in convert) {told}")
    assert printed in result.text and len(result.messages) == 2
    assert run(place).ending is Ending.DONE


def test_a_hang_ends_at_the_limit_and_tells_where(make: Make) -> None:
    result = run(make(limit=SHORT), "hang with a process")
    told = f"{HOLDER} (in convert) did not end within 1 s (--claim-timeout)"
    assert (result.ending, result.message) == (Ending.TIMEOUT, told)
    assert "in hang_with_a_process" in result.text and SHORT <= result.seconds < SHORT + 10
    pid = pid_of(result)
    assert isinstance(pid, int) and list_running(pid) == []


@pytest.mark.parametrize(
    ("way", "why"),
    [
        ("garbage without text", "an answer that cannot be read: a message that cannot be read: JSONDecodeError"),
        ("garbage too deep to read", "an answer that cannot be read: a message that cannot be read: RecursionError"),
        ("a size that is none", "an answer that cannot be read: its peak of memory is no number: 'much'"),
        ("a row of no kind", "a line that is no message: unknown kind of row 'npu'; expected one of header, "),
        ("no end", "a line that is no message: 'ending'"),
        ("an end of no kind", "a line that is no message: 'won' is not a valid Ending"),
        ("an end of another type", "a line that is no message: ['done'] is not a valid Ending"),
    ],
)
def test_garbage_among_a_judges_messages_is_an_error_that_says_so(make: Make, way: str, why: str) -> None:
    place = make()
    result = run(place, way)
    assert result.ending is Ending.ERROR and result.message.startswith(f"the process sent {why}")
    assert len(result.messages) == 2
    pid, again = pid_of(result), run(place)
    assert again.ending is Ending.DONE and pid_of(again) != pid
    assert isinstance(pid, int) and is_gone(pid)


def test_work_that_cannot_be_sent_is_an_error_that_says_so(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    place = make()
    with monkeypatch.context() as patches:
        patches.setattr(frames, "MOST_BYTES", 1000)
        result = place.run(Frame(head={"way": "nothing"}, pieces=[b"x" * 1000]))
    assert result.ending is Ending.ERROR and "at most 1000 are sent" in result.message
    assert run(place).ending is Ending.DONE


def test_an_interrupt_of_the_parent_ends_the_processes(make: Make, tmp_path: Path) -> None:
    place = make(open_judge_until)

    def interrupt() -> None:
        while not (tmp_path / "hangs").exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # where pytest runs behind, it is ignored
    thread = threading.Thread(target=interrupt, daemon=True)
    thread.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            place.run(Frame(head={"way": "hang with a process", "path": str(tmp_path / "hangs")}))
    finally:
        signal.signal(signal.SIGINT, before)
    pid = int((tmp_path / "hangs").read_text())
    assert pids_of(place) == [] and is_gone(pid) and list_running(pid) == []


def open_judge_until(parent: Parent) -> Answer:
    """Begin, and end in the way that the request names as long as there is no file of its path."""

    def serve(request: Frame) -> Iterator[Message]:
        yield Begin(stage="convert", case="a case")
        path = Path(request.head["path"])
        if not path.is_file():
            if path.name:
                (path.parent / "new").write_text(str(os.getpid()))
                (path.parent / "new").rename(path)
            WAYS[request.head["way"]]()
        yield message(told="after")

    return make_answer_of(parent, serve)


# -- other tries ------------------------------------------------------------------------------------------------------


def test_what_is_not_done_after_others_is_tried_again_alone(make: Make) -> None:
    place = make()
    before, found, after = [run(place, way) for way in ("nothing", "error", "nothing")]
    assert found.ending is Ending.ERROR
    assert len({pid_of(result) for result in (before, found, after)}) == 3


@pytest.mark.parametrize("way", ["error", "abort"])
def test_what_a_new_process_does_not_do_is_not_tried_again(make: Make, tmp_path: Path, way: str) -> None:
    result = make(open_judge_until).run(Frame(head={"way": way, "path": str(tmp_path / "once")}))
    assert result.ending in (Ending.ERROR, Ending.DIED) and (tmp_path / "once").exists()


@pytest.mark.parametrize(
    ("way", "told"),
    [
        ("abort", "the judge's process (in convert) was killed by SIGABRT (Aborted)"),
        ("stop", "the judge's process (in convert) did not end within 1 s (--claim-timeout)"),
    ],
)
def test_the_loss_of_a_judge_that_holds_no_other_code_is_the_suites_fault_once_it_came_twice(
    make: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, way: str, told: str
) -> None:
    monkeypatch.setattr(child_module, "PATIENCE", 0.1)
    place = make(open_judge_until, SHORT, "")
    once, always = [place.run(Frame(head={"way": way, "path": path})) for path in (str(tmp_path / "once"), "/")]
    assert once.ending is Ending.DONE and (tmp_path / "once").exists()
    assert (always.ending, always.message) == (Ending.LOST, told)
    fault = fault_of_lost_work(always)
    assert (fault.verdict, fault.message) == (Verdict.UNEXERCISED, f"internal error of the suite: {told}")


_DONE: list[str] = []
"""What a poisoned judge has done."""


def open_poisoned(parent: Parent) -> Answer:
    def serve(request: Frame) -> Iterator[Measurement]:
        if "poison" in _DONE:
            os.abort()
        _DONE.append(request.head["name"])
        yield message(done=" ".join(_DONE))

    return make_answer_of(parent, serve)


def test_no_work_is_blamed_for_what_earlier_work_left_behind(make: Make) -> None:
    place = make(open_poisoned)
    results = [place.run(Frame(head={"name": name})) for name in ("poison", "victim", "other")]
    assert [result.ending for result in results] == [Ending.DONE] * 3
    assert [said(result) for result in results] == [[{"done": d}] for d in ("poison", "victim", "victim other")]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_judge_that_died_or_stopped_between_two_works_is_replaced(
    make: Make, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    """The second work is more than a socket holds."""
    monkeypatch.setattr(child_module, "PATIENCE", 0.1)
    place = make(limit=SHORT)
    pid = pid_of(run(place))
    assert isinstance(pid, int)
    os.kill(pid, number)
    result = place.run(Frame(head={"way": "nothing"}, pieces=[b" " * (1 << 22)]))
    assert result.ending is Ending.DONE and pid_of(result) != pid and is_gone(pid)


@pytest.mark.parametrize(
    ("ending", "verdict", "message", "shown"),
    [
        (Ending.DIED, Verdict.CRASHED, "why", "printed"),
        (Ending.TIMEOUT, Verdict.TIMEOUT, "why", "printed"),
        (Ending.LOST, Verdict.UNEXERCISED, "internal error of the suite: why", "printed"),
        (Ending.ERROR, Verdict.UNEXERCISED, "internal error of the suite: why", "traceback"),
    ],
)
def test_the_fault_of_lost_work_blames_whose_code_ran(
    ending: Ending, verdict: Verdict, message: str, shown: str
) -> None:
    faults = [fault_of_lost_work(WorkResult(ending=ending, message="why", text=text)) for text in ("", "last words")]
    assert [(fault.verdict, fault.message, fault.rule) for fault in faults] == [(verdict, message, "")] * 2
    assert [fault.evidence for fault in faults] == [{}, {shown: "last words"}]


# -- with a worker ----------------------------------------------------------------------------------------------------


def open_counting(parent: Parent, answered: int) -> Answer:
    """Answer which request it is, what its keys are, and its pieces."""

    def answer(request: Frame) -> Frame:
        nonlocal answered
        answered += 1
        said = {"number": answered, "way": request.head["way"], "keys": ",".join(sorted(request.head))}
        return Frame(head=said, pieces=request.pieces)

    return answer


def open_judge_of_pieces(parent: Parent) -> Answer:
    def serve(request: Frame) -> Iterator[Measurement]:
        for pieces in (request.pieces, request.pieces[::-1]):
            answer = ask_worker(parent, Frame(head={"way": "é", BEGINS: True}, pieces=pieces), 12.5)
            yield message(**answer.head, pieces=b"|".join(answer.pieces).decode())

    return make_answer_of(parent, serve)


def test_a_judges_call_reaches_the_worker_and_its_answer_comes_back(make: Make) -> None:
    place = make(open_judge_of_pieces, make_worker=partial(start_worker, open_counting, 0))
    result = place.run(Frame(head={}, pieces=[b"one", b"", b"x" * 1_000_000]))
    assert result.ending is Ending.DONE
    large, asked = "x" * 1_000_000, {"way": "é", "keys": "limit,way"}
    pieces = f"one||{large}", f"{large}||one"
    assert said(result) == [{"number": number, "pieces": each, **asked} for number, each in enumerate(pieces, 1)]


def test_judge_and_worker_are_kept_and_the_worker_is_another_process(make: Make) -> None:
    place = make_with_worker(make)
    results = [run_ways(place, "nothing", "nothing") for _ in range(3)]
    told = [(each[0]["pid"], each[1]["pid"], each[2]["pid"]) for each in map(said, results)]
    assert len(set(told)) == 1 and told[0][0] != told[0][1] == told[0][2] != os.getpid()
    assert {result.ending for result in results} == {Ending.DONE}


@pytest.mark.parametrize(
    ("way", "told"),
    [
        ("segfault", "the process was killed by SIGSEGV (Segmentation fault)"),
        ("sys.exit", "the process exited with status 3"),
        ("garbage without text", "the process sent an answer that cannot be read: "),
    ],
)
def test_a_lost_worker_is_told_to_the_judge_and_the_next_call_gets_a_new_one(make: Make, way: str, told: str) -> None:
    place = make_with_worker(make)
    result = run_ways(place, "nothing", way, "nothing")
    judge, before, lost, after = said(result)
    assert (lost[LOST], lost["is_alone"]) == ("error" if "garbage" in way else "died", True)
    assert str(lost["message"]).startswith(told) and result.ending is Ending.DONE
    assert before["pid"] != after["pid"] and judge["pid"] == pid_of(run_ways(place, "nothing"))


def test_a_worker_that_does_not_answer_in_time_is_told_to_the_judge(make: Make) -> None:
    place = make_with_worker(make)
    result = run_ways(place, "nothing")
    result = run_ways(place, "hang", seconds=0.4)
    assert said(result)[1] == {LOST: "timeout", "message": "the process did not end within 0.4 s", "is_alone": False}
    assert result.ending is Ending.DONE and pids_of(place) == [pid_of(result)]


def test_a_worker_that_had_done_other_work_is_not_alone_to_blame(make: Make) -> None:
    place = make_with_worker(make)
    alone = [said(run_ways(place, *ways))[-1].get("is_alone") for ways in (["nothing"], ["abort"], ["abort"])]
    assert alone == [None, False, True]


def test_work_whose_worker_was_lost_is_done_again_in_a_new_one_if_that_had_done_other_work(make: Make) -> None:
    place = make_with_worker(make)
    first = run_ways(place, "nothing", **{"gives up": True})
    lost = run_ways(place, "shout", **{"gives up": True})
    assert (lost.ending, lost.message) == (Ending.DIED, "the process was killed by SIGABRT (Aborted)")
    assert lost.is_final and lost.text.startswith("written by python\nwritten by C\n")
    assert said(lost)[1]["is_alone"] is True  # the second try's
    again = run_ways(place, "nothing", **{"gives up": True})
    assert pid_of(first) == pid_of(lost) == pid_of(again) and again.ending is Ending.DONE


def test_work_whose_new_worker_was_lost_is_not_done_again(make: Make) -> None:
    """Though its judge had done other work."""
    made: list[Child] = []

    def make_worker() -> Child:
        made.append(start_worker())
        return made[-1]

    place = make_with_worker(make, make_worker)
    first, second = (run_ways(place, "abort", **{"gives up": True}) for _ in range(2))
    assert {(each.ending, each.is_final) for each in (first, second)} == {(Ending.DIED, True)}
    assert len(made) == 2 and pid_of(first) == pid_of(second)


def test_a_worker_that_the_judge_gives_up_is_replaced(make: Make) -> None:
    """It answers, but what it says cannot be read."""
    place = make_with_worker(make)
    given_up, after = run_ways(place, "nothing", disbelieves=True), run_ways(place, "nothing")
    assert (given_up.ending, given_up.message, given_up.is_final) == (Ending.DIED, "the process sent nonsense", False)
    pid = said(given_up)[1]["pid"]
    assert after.ending is Ending.DONE and said(after)[1]["pid"] != pid and isinstance(pid, int) and is_gone(pid)


def test_what_cannot_be_sent_to_a_worker_or_read_there_is_no_loss_of_it(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = make_with_worker(make)
    first = said(run_ways(place, "nothing"))[1]

    def refuse(*given: object, **settings: object) -> Frame:
        raise NoAnswer("too large")

    with monkeypatch.context() as patches:
        patches.setattr(worker_of(place), "ask", refuse)
        assert said(run_ways(place, "nothing"))[1] == {"unread": "too large"}
    assert said(run_ways(place, "nothing"))[1] == first


def test_a_worker_that_has_grown_too_large_is_replaced_with_its_judge(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child_module, "MOST_GROWTH_MIB", 64)
    place = make_with_worker(make)
    first, large, new = run_ways(place, "nothing"), run_ways(place, "grow"), run_ways(place, "nothing")
    assert [pid_of(each) for each in (first, large)] == [pid_of(first)] * 2 and pid_of(new) != pid_of(first)
    assert said(first)[1]["pid"] == said(large)[1]["pid"] != said(new)[1]["pid"]
    assert large.peak_mib > first.peak_mib + 64


def test_the_loss_of_a_judge_ends_its_worker_too(make: Make) -> None:
    place = make(open_judge, make_worker=start_worker)
    run(place)
    child = worker_of(place)
    assert child is not None
    worker = child.pid
    assert run(place, "abort").ending is Ending.DIED
    assert is_gone(worker) and pids_of(place) == []


def test_a_judges_call_that_is_none_is_an_error_that_says_so(make: Make) -> None:
    place = make(open_judge, make_worker=start_worker)
    result = run(place, "a call of no kind")
    assert result.ending is Ending.ERROR and result.message.startswith("the process sent a line that is no message: ")
    assert run(place).ending is Ending.DONE


def test_a_judge_that_waits_for_a_worker_has_longer(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that it says itself that the worker has passed the limit."""
    monkeypatch.setattr(module, "GRACE", LIMIT)
    place = make_with_worker(make, limit=0.4)
    result = run_ways(place, "hang", seconds=0.4)
    assert result.ending is Ending.DONE and said(result)[1][LOST] == "timeout"


# -- what cannot start ------------------------------------------------------------------------------------------------


def fail_to_start() -> Child:
    raise StartError("backend npu: it is not plugged in")


def test_a_worker_that_cannot_start_ends_all_tries(make: Make) -> None:
    result = run_ways(make_with_worker(make, fail_to_start), "nothing")
    assert result == WorkResult(ending=Ending.DIED, message="backend npu: it is not plugged in", is_final=True)
    assert fault_of_lost_work(result).verdict is Verdict.CRASHED


def test_a_worker_that_cannot_start_again_is_told_to_the_judge(make: Make) -> None:
    starts = iter([start_worker, fail_to_start, start_worker])
    place = make_with_worker(make, lambda: next(starts)())
    judge, lost, again, after = said(run_ways(place, "abort", "nothing", "nothing"))
    assert lost["message"] == "the process was killed by SIGABRT (Aborted)"
    assert again == {LOST: "died", "message": "backend npu: it is not plugged in", "is_alone": True}
    assert after["pid"] not in (judge["pid"], None)


def test_a_judge_that_cannot_start_ends_all_tries(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    place = make()

    def refuse(plan: Recipe) -> Child:
        raise StartError("no process could be made: out of memory")

    with monkeypatch.context() as patches:
        patches.setattr(module, "Child", refuse)
        result = run(place)
    assert (result.ending, result.message) == (Ending.DIED, "no process could be made: out of memory")
    assert result.is_final and run(place).ending is Ending.DONE
