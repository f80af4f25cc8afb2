"""The cache: which answers are kept, when a process is asked after all, and what is counted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from backends.base import Execution, UnsupportedPattern
from conformance.machine.isolation import LostProcess
from conformance.machine.memory import fill_memory
from conformance.remote.answers import open_book, pack_answers, read_answers, write_sources
from conformance.remote.cached import CachingBackend
from conformance.remote.client import RemoteBackend
from conformance.remote.description import read_description
from conformance.remote.host import Host
from conformance.remote.wire import Frame

MODEL = torch.fx.symbolic_trace(nn.Sequential(nn.Linear(3, 3)))
INPUT = torch.ones(2, 3)
Begin = Callable[..., CachingBackend]


@pytest.fixture
def begin(tmp_path: Path) -> Iterator[Begin]:
    """Begin the same piece of work, by a new judge with a new host."""
    hosts: list[Host] = []

    def make(name: str, work: str = "work") -> CachingBackend:
        host = Host(f"tests.conformance.remote.vendor:{name}", limit=20)
        hosts.append(host)
        write_sources(tmp_path / "scope", host.list_sources())
        backend = CachingBackend(read_description(host.describe()), host, tmp_path / "scope", share=1, limit=20.0)
        backend.begin(work)
        return backend

    yield make
    for host in hosts:
        host.close()


def counts(backend: RemoteBackend) -> tuple[int, int, int]:
    return backend.tally.lowerings, backend.tally.runs, backend.tally.cached


def number_runs(backend: CachingBackend, *inputs: torch.Tensor) -> list[int]:
    """Run a new lowered model, which numbers its runs, and end the piece of work."""
    lowered = backend.lower(MODEL, (INPUT,))
    numbers = [int(lowered(each.clone())[0]) for each in inputs]
    backend.conclude()
    return numbers


def test_what_was_answered_once_is_not_asked_again(begin: Begin) -> None:
    first, second = begin("Plain"), begin("Plain")
    outputs = []
    for backend in (first, second):
        backend.begin("work")
        lowered: Any = backend.lower(MODEL, (INPUT,))
        outputs.append([*lowered(INPUT), *next(lowered.run_all([(INPUT * 2,)]))])
        assert backend.execution(lowered) == Execution(quantized_ops=("linear",), float_fallbacks=(), kernels=("k",))
        assert lowered.spell_graph().startswith("input_1 = input")
        backend.conclude()
    assert all(map(torch.equal, *outputs)), "the process ID among the outputs is that of the first process"
    assert (counts(first), counts(second)) == ((1, 2, 0), (0, 0, 2))


def test_each_repetition_has_an_answer_of_its_own(begin: Begin) -> None:
    assert number_runs(begin("Counts"), INPUT, INPUT) == [1, 2]
    second = begin("Counts")
    assert number_runs(second, INPUT, INPUT) == [1, 2] and counts(second) == (0, 0, 2)


def test_a_model_that_is_asked_for_more_gets_all_that_came_before(begin: Begin) -> None:
    number_runs(begin("Counts"), INPUT, INPUT)
    more = begin("Counts")
    assert number_runs(more, INPUT, INPUT, INPUT) == [1, 2, 3], "its process made the first two as well"
    assert counts(more) == (1, 3, 0)
    last = begin("Counts")
    assert number_runs(last, INPUT, INPUT, INPUT) == [1, 2, 3] and counts(last) == (0, 0, 3)


def test_an_answer_that_the_process_does_not_repeat_stays_a_cached_one(begin: Begin) -> None:
    first = begin("Plain")
    pid = first.lower(MODEL, (INPUT,))(INPUT)[1]
    first.conclude()
    backend = begin("Plain")
    lowered = backend.lower(MODEL, (INPUT,))
    assert torch.equal(lowered(INPUT)[1], pid) and not torch.equal(lowered(2 * INPUT)[1], pid)
    assert counts(backend) == (1, 2, 1)


def test_another_input_order_model_or_work_is_asked(begin: Begin) -> None:
    number_runs(begin("Counts"), INPUT, 2 * INPUT)
    other = begin("Counts")
    assert number_runs(other, 2 * INPUT, INPUT) == [1, 2] and counts(other) == (1, 2, 0)
    assert number_runs(other, INPUT) == [1] and counts(other) == (2, 3, 0), "an equal model, lowered a second time"
    work = begin("Counts", "other work")
    assert number_runs(work, INPUT, 2 * INPUT) == [1, 2] and counts(work) == (1, 2, 0)


@pytest.mark.parametrize("layout", ["threads", "strides", "filling"])
def test_how_a_model_is_run_is_part_of_the_question(begin: Begin, layout: str) -> None:
    first = begin("Tells")
    plain = first.lower(MODEL, (INPUT,))(INPUT)
    first.conclude()
    backend = begin("Tells")
    lowered = backend.lower(MODEL, (INPUT,))
    assert counts(backend) == (0, 0, 0)
    if layout == "threads":
        torch.set_num_threads(2)
        try:
            changed = lowered(INPUT)
        finally:
            torch.set_num_threads(1)
    elif layout == "strides":
        changed = lowered(torch.ones(3, 2).mT)
    else:
        with fill_memory(0x5A):
            changed = lowered(INPUT)
    assert counts(backend) == (1, 1, 0) and list(map(int, changed)) != list(map(int, plain))


def test_what_is_written_to_inputs_is_written_again(begin: Begin) -> None:
    for cached in (0, 1):
        backend, value = begin("Counts"), INPUT.clone()
        backend.lower(MODEL, (INPUT,))(value)
        backend.conclude()
        assert torch.equal(value, INPUT + 1) and backend.tally.cached == cached


def test_what_raises_is_asked_again_each_time(begin: Begin) -> None:
    for _ in range(2):
        backend = begin("Raises")
        with pytest.raises(Exception, match="no such kernel"):
            backend.lower(MODEL, (INPUT,))
        with pytest.raises(UnsupportedPattern, match="two inputs"):
            backend.lower(MODEL, (INPUT, INPUT))
        backend.conclude()
        assert counts(backend) == (2, 0, 0)
    for _ in range(2):
        backend = begin("Counts")
        lowered = backend.lower(MODEL, (INPUT,))
        assert int(lowered(INPUT.clone())[0]) == 1
        with pytest.raises(Exception, match="run 2: division by zero"):
            lowered(INPUT * 0)
        backend.conclude()
        assert counts(backend) == (1, 2, 0), "a run that raises is a run"


def test_nothing_is_kept_of_work_whose_process_died(begin: Begin) -> None:
    """What was answered before may be what it died of."""
    for _ in range(2):
        backend = begin("Dies")
        with pytest.raises(LostProcess):
            backend.lower(MODEL, (INPUT,))
        assert counts(backend) == (1, 0, 0)
    backend = begin("Counts")
    backend.lower(MODEL, (INPUT,))(INPUT.clone())
    again = begin("Counts")
    assert number_runs(again, INPUT) == [1] and counts(again) == (1, 1, 0), "the work before did not come to its end"


@pytest.mark.parametrize("damage", ["cut", "changed", "empty", "text"])
def test_a_damaged_file_is_asked_for_again_and_replaced(begin: Begin, tmp_path: Path, damage: str) -> None:
    number_runs(begin("Counts"), INPUT)
    (path,) = tmp_path.glob("scope/*.answers")
    data = path.read_bytes()
    changed = data[:-1] + bytes([data[-1] ^ 1])
    path.write_bytes({"cut": data[:-9], "changed": changed, "empty": b"", "text": b"{}\n\xff"}[damage])
    backend = begin("Counts")
    assert number_runs(backend, INPUT) == [1] and counts(backend) == (1, 1, 0)
    assert path.read_bytes() == data and [*tmp_path.glob("scope/*.answers")] == [path]


def test_a_file_gives_back_what_it_was_made_of(tmp_path: Path) -> None:
    answers = {"a": Frame(head={"done": [1.5, None]}, pieces=[b"\n\n", b""]), "b": Frame(head={}, pieces=[b"x" * 9])}
    path = tmp_path / "file"
    path.write_bytes(pack_answers(answers))
    read = read_answers(path)
    assert {key: (frame.head, list(frame.pieces)) for key, frame in read.items()} == {
        "a": ({"done": [1.5, None]}, [b"\n\n", b""]), "b": ({}, [b"x" * 9]),
    }  # fmt: skip
    assert read_answers(tmp_path / "none") == {}


def test_answers_of_another_profile_stay(tmp_path: Path) -> None:
    book = open_book(tmp_path, "work")
    book.keep("one", Frame(head={}))
    book.write()
    later = open_book(tmp_path, "work")
    later.keep("two", Frame(head={"peak_mib": 3.5, "execution": None}))
    later.write()
    assert {key: frame.head for key, frame in open_book(tmp_path, "work").answers.items()} == {
        "one": {}, "two": {"execution": None},
    }  # fmt: skip
