"""The backend's process and its workers: what they answer, and how their end is told."""

from __future__ import annotations

import os
import re
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

from backends.base import Execution, QuantizerRequest, UnsupportedPattern
from conformance.annotations.probe import Probe
from conformance.claims.case import Case
from conformance.claims.plan import REGIMES
from conformance.machine.fault import FaultFound
from conformance.machine.isolation import Ending, LostProcess
from conformance.machine.memory import fill_memory
from conformance.machine.threads import run_with_threads
from conformance.ops.op_model import Input
from conformance.remote import client, wire
from conformance.remote.client import RemoteBackend, RemoteModel, spell_trace
from conformance.remote.description import read_description
from conformance.remote.host import Host, HostError
from conformance.remote.server import _receive_commands
from conformance.remote.wire import NoAnswer
from conformance.stages.annotate import ask
from conformance.stages.bench import Bench
from conformance.stages.lower import lower, run_all
from conformance.stages.reruns import RepeatRun
from refimpl.tracer import trace
from reports.verdicts import Verdict
from tests.support.torchao import needs_torchao

pytestmark = pytest.mark.slow
MODEL = torch.fx.symbolic_trace(nn.Sequential(nn.Linear(3, 3)))
INPUT = torch.ones(2, 3)
CASE = Case(name="a case", build=nn.Identity, inputs=(Input(shape=(2, 3)),), regime=REGIMES[0])
Make = Callable[..., RemoteBackend]


@pytest.fixture
def remote() -> Iterator[Make]:
    hosts: list[Host] = []

    def make(name: str, limit: float = 20.0, share: int = 1) -> RemoteBackend:
        host = Host(f"tests.conformance.remote.vendor:{name}", limit=20)
        hosts.append(host)
        backend = RemoteBackend(read_description(host.describe()), host, share=share, limit=limit)
        backend.begin()
        return backend

    yield make
    for host in hosts:
        host.close()


def test_a_lowered_model_runs_elsewhere(remote: Make) -> None:
    backend = remote("Plain")
    lowered = backend.lower(MODEL, (INPUT,))
    output, pid = lowered(INPUT)
    assert torch.equal(output, MODEL(INPUT)) and int(pid) not in (0, os.getpid())
    assert backend.execution(lowered) == Execution(quantized_ops=("linear",), float_fallbacks=(), kernels=("k",))
    assert lowered.spell_graph().startswith("input_1 = input")  # type: ignore[attr-defined]


def test_what_the_backend_raises_is_raised_here(remote: Make) -> None:
    backend = remote("Raises")
    with pytest.raises(Exception, match=r"^no such kernel$") as caught:
        backend.lower(MODEL, (INPUT,))
    assert type(caught.value).__name__ == "DeviceError" and "vendor.py" in spell_trace(caught.value)
    with pytest.raises(UnsupportedPattern, match="two inputs"):
        backend.lower(MODEL, (INPUT, INPUT))


def hook(layer: nn.Module) -> nn.Module:
    layer.register_forward_hook(lambda *_: None)
    return layer


NAMELESS = "the model cannot be sent to the backend's process, which finds classes and functions by name: "
UNSENDABLE: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "hook": (lambda: hook(nn.Linear(3, 3)), f"{NAMELESS}.*<lambda>"),
    "class": (lambda: weight_norm(nn.Linear(3, 3)), f"{NAMELESS}.*ParametrizedLinear'> is made while running"),
    "size": (lambda: nn.Linear(300, 300), "a message of 3[0-9]* bytes, .* at most 100000 are sent"),
}


@pytest.mark.parametrize("what", UNSENDABLE)
def test_what_cannot_be_sent_is_no_fault_of_the_backend(
    remote: Make, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    build, told = UNSENDABLE[what]
    backend, layer = remote("Plain"), build()
    backend.lower(MODEL, (INPUT,))
    monkeypatch.setattr(wire, "MOST_BYTES", 100_000)
    bench, probe = Bench(backend, seed=0, profile="quick"), Probe(pattern=layer, inputs=(INPUT,), activations=(0,))
    for asked in (
        lambda: lower(bench, trace(nn.Sequential(layer)), (INPUT,)),
        lambda: ask(bench, QuantizerRequest(), {"a probe": probe}),
    ):
        with pytest.raises(FaultFound, match=told) as caught:
            asked()
        assert caught.value.fault.verdict is Verdict.UNEXERCISED
    backend.lower(MODEL, (INPUT,))  # the process still answers


def test_what_the_backends_process_cannot_read_is_no_fault_of_the_backend(
    remote: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = remote("Plain")
    backend.lower(MODEL, (INPUT,))
    monkeypatch.setitem(sys.modules, "only_here", module := ModuleType("only_here"))
    exec("def double(x): return x + x", vars(module))
    graph = torch.fx.Graph()
    graph.output(graph.call_function(module.double, (graph.placeholder("x"),)))
    with pytest.raises(NoAnswer, match=r"process cannot read the model: ModuleNotFoundError: .*'only_here'"):
        backend.lower(torch.fx.GraphModule(nn.Module(), graph), (INPUT,))
    backend.lower(MODEL, (INPUT,))


def test_an_answer_that_is_too_large_to_be_sent_is_no_fault_of_the_backend(remote: Make) -> None:
    large = torch.ones(1000, 3)
    lowered = remote("Overflows").lower(MODEL, (large,))
    with pytest.raises(FaultFound, match=r"a message of 48[0-9]* bytes, .* at most 48000 are sent") as caught:
        next(run_all(lowered, ["a run"], [(large,)]))
    assert caught.value.fault.verdict is Verdict.UNEXERCISED


def test_inputs_that_are_written_to_are_written_to_here_too(remote: Make) -> None:
    lowered = remote("Writes").lower(MODEL, (INPUT,))
    written = INPUT.clone()
    lowered(written)
    assert torch.equal(written, INPUT * 2)


def test_threads_layout_and_memory_are_those_of_the_caller(remote: Make) -> None:
    lowered = remote("Tells").lower(MODEL, (INPUT,))
    with fill_memory(0x5A):
        told = run_with_threads(2, lambda: lowered(INPUT.T))
    assert [int(each) for each in told] == [2, *INPUT.T.stride(), 0x5A]
    assert next(int(each) for each in lowered(INPUT)) == torch.get_num_threads()


def test_several_inputs_go_in_a_request_and_an_error_is_that_of_its_run(
    remote: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "MOST_TOGETHER", 2 * INPUT.nbytes)
    lowered = remote("Counts").lower(MODEL, (INPUT,))
    asked: list[int] = []
    ask = RemoteModel._ask

    def count(model: RemoteModel, action: str, pieces: list[bytes], **head: Any) -> Any:
        asked.append(len(head["runs"]))
        return ask(model, action, pieces, **head)

    monkeypatch.setattr(RemoteModel, "_ask", count)
    places = ["first", "second", "third", "fourth", "fifth"]
    outputs = run_all(lowered, places, [(INPUT,), (INPUT,), (INPUT * 0,), (INPUT,), (INPUT,)])
    assert [int(next(outputs)[0]) for _ in range(2)] == [1, 2]
    with pytest.raises(FaultFound, match="running third, raised DeviceError: run 3: division by zero"):
        next(outputs)
    assert asked == [2, 2]
    assert int(lowered(INPUT.clone())[0]) == 4, "the run after the error was not made"


def test_runs_that_are_foreseen_are_those_that_are_asked_for(remote: Make) -> None:
    """In turn, each with its error, and with memory full of another byte; others are made when they are asked for."""
    lowered = remote("Counts").lower(MODEL, (INPUT,))
    inputs, zeros = (INPUT,), (INPUT * 0,)
    repeat = RepeatRun(case=CASE, name="", inputs=inputs, lowered=lowered)
    repeat.foresee([inputs, inputs, zeros, inputs])
    made = [[int(each) for each in repeat.run(inputs)] for _ in range(2)]
    assert [number for number, _ in made] == [1, 2] and {byte for _, byte in made} == {0x5A, 0xA5}
    with pytest.raises(Exception, match="run 3: division by zero"):
        repeat.run(zeros)
    assert int(repeat.run(inputs)[0]) == 4
    repeat.foresee([inputs, inputs])
    assert int(repeat.run((INPUT,))[0]) == 7, "another input: what was foreseen does not count"
    assert int(repeat.run(inputs)[0]) == 8
    assert torch.equal(INPUT, torch.ones(2, 3)), "the model has written to copies"


@pytest.mark.parametrize(
    ("name", "ending", "message"),
    [("Dies", Ending.DIED, "the process was killed by SIGSEGV (Segmentation fault)"),
     ("Leaves", Ending.DIED, "the process exited with status 3"),
     ("Hangs", Ending.TIMEOUT, "lower did not end within 0.5 s (--claim-timeout)"),
     ("Babbles", Ending.DIED, "the process sent an answer that cannot be read: a message")],
)  # fmt: skip
def test_a_lost_worker_is_told_with_its_last_words(remote: Make, name: str, ending: Ending, message: str) -> None:
    backend = remote(name, limit=0.5)
    with pytest.raises(LostProcess) as caught:
        backend.lower(MODEL, (INPUT,))
    assert caught.value.ending is ending and str(caught.value).startswith(message) and caught.value.is_alone
    if name == "Hangs":
        assert "in lower" in caught.value.text.partition("(most recent call first)")[2].splitlines()[1]


def test_a_worker_does_its_share_and_no_more(remote: Make) -> None:
    backend = remote("Plain", share=2)
    pids: list[Any] = []
    for _ in range(3):
        backend.begin()
        pids.append(int(backend.lower(MODEL, (INPUT,))(INPUT)[1]))
    assert pids[0] != pids[1] == pids[2] or pids[0] == pids[1] != pids[2]


def test_a_host_that_is_gone_is_started_again(remote: Make) -> None:
    backend = remote("Plain")
    assert backend.host is not None
    first = backend.host.ensure()
    assert backend.host.ensure() == first
    backend.host.close()
    assert backend.host.ensure() != first
    assert torch.equal(backend.lower(MODEL, (INPUT,))(INPUT)[0], MODEL(INPUT))


def test_commands_of_a_judge_that_was_killed_disturb_no_other() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        socket.send_fds(ours, [b"7.1 fork 60 7\n7.2 "], [ours.fileno()])
        ours.send(b"ping\n")
        commands = _receive_commands(theirs)
        mark, command, arguments, descriptors = next(commands)
        assert (mark, command, arguments, len(descriptors)) == ("7.1", "fork", ["60", "7"], 1)
        os.close(descriptors.pop())
        assert next(commands) == ("7.2", "ping", [], [])


def test_warming_up_is_done_in_the_host_and_a_failure_is_told() -> None:
    with closing(Host("tests.conformance.remote.vendor:Cold", limit=20)) as host:
        assert host.warm().endswith("warm_up() raised ImportError: no driver; the claims start cold")
    with closing(Host("tests.conformance.remote.vendor:Plain", limit=20)) as host:
        assert host.warm() == ""


def test_a_warm_up_that_hangs_is_told_as_such() -> None:
    with closing(Host("tests.conformance.remote.vendor:Endless", limit=1)) as host:
        host.start()
        with pytest.raises(HostError, match=re.escape("did not answer within 1 s (--claim-timeout)")) as caught:
            host.warm()
    said = str(caught.value)
    assert "warm_up() did not return" in said and "in warm_up" in said
    assert ends(int(said.partition("started ")[2].split()[0]))


@needs_torchao
def test_a_quantizer_that_hangs_is_told_as_such(remote: Make) -> None:
    backend = remote("Endless", limit=5)
    with pytest.raises(LostProcess, match=r"^quantizer\(\) or annotate did not end within 5 s ") as caught:
        backend.annotate(QuantizerRequest(), {})
    assert caught.value.ending is Ending.TIMEOUT and "in quantizer" in caught.value.text


@pytest.mark.parametrize("name", ["Plain", "LeavesBehind"])
def test_nothing_is_left_when_a_host_is_closed(remote: Make, name: str) -> None:
    backend = remote(name)
    pid = int(backend.lower(MODEL, (INPUT,))(INPUT)[1])
    assert backend.host is not None
    backend.end()
    backend.host.close()
    assert ends(pid)


def ends(pid: int) -> bool:
    """Tell whether a process ends in a while."""
    deadline = time.monotonic() + 5
    while Path(f"/proc/{pid}").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    return not Path(f"/proc/{pid}").exists()
