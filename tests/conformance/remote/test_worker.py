"""The backend's process, a worker: what it answers, what it is told, and how its end is told."""

from __future__ import annotations

import gc
import os
import re
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

from fx_quant_conformance.backends.base import Backend, Execution, QuantizerRequest, UnsupportedPattern
from fx_quant_conformance.conformance.machine import child, frames
from fx_quant_conformance.conformance.machine.child import Ending, StartError
from fx_quant_conformance.conformance.machine.fault import FaultFound
from fx_quant_conformance.conformance.machine.frames import Frame, NoAnswer, WireError
from fx_quant_conformance.conformance.machine.workplace import LostProcess
from fx_quant_conformance.conformance.pt2e.probe import Probe
from fx_quant_conformance.conformance.pt2e.stage import ask
from fx_quant_conformance.conformance.remote import client
from fx_quant_conformance.conformance.remote.client import RemoteModel, format_trace
from fx_quant_conformance.conformance.remote.description import DescriptionError, read_description
from fx_quant_conformance.conformance.remote.executor import HeldModel
from fx_quant_conformance.conformance.remote.worker import describe_backend, make_warm_workers, make_worker
from fx_quant_conformance.conformance.stages.bench import Bench
from fx_quant_conformance.conformance.stages.lower import lower, run_all
from fx_quant_conformance.refimpl.graph.tracer import trace
from fx_quant_conformance.reports.verdicts import Verdict
from tests.support.remote import WorkersBackend, remote_backend
from tests.support.torchao import needs_torchao

pytestmark = pytest.mark.slow
MODEL = torch.fx.symbolic_trace(nn.Sequential(nn.Linear(3, 3)))
INPUT = torch.ones(2, 3)
VENDOR = "tests.conformance.remote.vendor"
Make = Callable[..., WorkersBackend]


@pytest.fixture
def remote() -> Iterator[Make]:
    with ExitStack() as opened:
        yield lambda name, limit=20.0: opened.enter_context(remote_backend(f"{VENDOR}:{name}", limit))


def pid_of(lowered: HeldModel) -> int:
    """The process that a model of `vendor.Plain` runs in."""
    return int(lowered(INPUT)[1])


def ends(pid: int) -> bool:
    """Tell whether a process ends in a while."""
    deadline = time.monotonic() + 5
    while is_running(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not is_running(pid)


def is_running(pid: int) -> bool:
    """Tell whether a process is there, and no zombie that waits for its parent to look at it."""
    state = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True, check=False).stdout
    return bool(state) and not state.startswith("Z")


# -- what a worker answers --------------------------------------------------------------------------------------------


def test_a_lowered_model_runs_elsewhere(remote: Make) -> None:
    lowered = remote("Plain").lower(MODEL, (INPUT,))
    output, pid = lowered(INPUT)
    assert torch.equal(output, MODEL(INPUT)) and int(pid) not in (0, os.getpid())
    assert lowered.execution() == Execution(quantized_ops=("linear",), float_fallbacks=(), kernels=("k",))
    assert lowered.graph().startswith("input_1 = input")


def test_an_execution_that_is_none_is_an_error_of_the_backend(remote: Make) -> None:
    with pytest.raises(
        Exception, match=r"execution\(\) returned .*'all'.*; return a fx_quant_conformance.Execution"
    ) as caught:
        remote("Invents").lower(MODEL, (INPUT,)).execution()
    assert type(caught.value).__name__ == "TypeError"


def test_what_the_backend_raises_is_raised_here(remote: Make) -> None:
    backend = remote("Raises")
    with pytest.raises(Exception, match=r"^no such kernel$") as caught:
        backend.lower(MODEL, (INPUT,))
    assert type(caught.value).__name__ == "DeviceError" and "vendor.py" in format_trace(caught.value)
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
    pid = pid_of(backend.lower(MODEL, (INPUT,)))
    monkeypatch.setattr(frames, "MOST_BYTES", 100_000)
    bench, probe = Bench(backend, seed=0, profile="quick"), Probe(pattern=layer, inputs=(INPUT,), activations=(0,))
    for asked in (
        lambda: lower(bench, trace(nn.Sequential(layer)), (INPUT,)),
        lambda: ask(bench, QuantizerRequest(), {"a probe": probe}),
    ):
        with pytest.raises(FaultFound, match=told) as caught:
            asked()
        assert caught.value.fault.verdict is Verdict.UNEXERCISED
    assert pid_of(backend.lower(MODEL, (INPUT,))) == pid, "the process still answers"


def test_what_the_backends_process_cannot_read_is_no_fault_of_the_backend(
    remote: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = remote("Plain")
    pid = pid_of(backend.lower(MODEL, (INPUT,)))
    monkeypatch.setitem(sys.modules, "only_here", module := ModuleType("only_here"))
    exec("def double(x): return x + x", vars(module))
    graph = torch.fx.Graph()
    graph.output(graph.call_function(module.double, (graph.placeholder("x"),)))
    with pytest.raises(NoAnswer, match=r"process cannot read the model: ModuleNotFoundError: .*'only_here'"):
        backend.lower(torch.fx.GraphModule(nn.Module(), graph), (INPUT,))
    assert pid_of(backend.lower(MODEL, (INPUT,))) == pid


def test_an_answer_that_is_too_large_to_be_sent_is_no_fault_of_the_backend(remote: Make) -> None:
    large = torch.ones(1000, 3)
    lowered = remote("Overflows").lower(MODEL, (large,))
    with pytest.raises(FaultFound, match=r"a message of 48[0-9]* bytes, .* at most 48000 are sent") as caught:
        next(run_all(lowered, ["a run"], [(large,)]))
    assert caught.value.fault.verdict is Verdict.UNEXERCISED


# -- runs -------------------------------------------------------------------------------------------------------------


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


def test_lowerings_and_runs_are_counted_for_each_piece_of_work(remote: Make) -> None:
    backend = remote("Counts")
    lowered = backend.lower(MODEL, (INPUT,))
    with pytest.raises(Exception, match="run 2"):
        list(lowered.run_all([(INPUT,), (INPUT * 0,), (INPUT,)]))
    assert (backend.tally.lowerings, backend.tally.runs) == (1, 2)
    backend.begin()
    assert (backend.tally.lowerings, backend.tally.runs) == (0, 0)


def test_a_model_that_the_judge_has_dropped_is_dropped_in_the_worker(remote: Make) -> None:
    backend = remote("Holds")
    first, second = (backend.lower(MODEL, (INPUT,)) for _ in range(2))
    assert int(first(INPUT)) == int(second(INPUT)) == 2
    del first
    gc.collect()
    assert int(second(INPUT)) == 1


# -- how a worker is lost ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "ending", "message"),
    [
        ("Dies", Ending.DIED, "the process was killed by SIGSEGV (Segmentation fault)"),
        ("Leaves", Ending.DIED, "the process exited with status 3"),
        ("KillsParent", Ending.DIED, "the process was killed by SIGKILL (Killed, as when memory runs out)"),
        ("Hangs", Ending.TIMEOUT, "lower did not end within 0.5 s (--claim-timeout)"),
        ("Babbles", Ending.DIED, "the process sent an answer that cannot be read: a message"),
        ("Forges", Ending.DIED, "the process sent an answer that cannot be read: its peak of memory is no number"),
    ],
)
def test_a_lost_worker_is_told_with_its_last_words_and_harms_no_other(
    remote: Make, name: str, ending: Ending, message: str
) -> None:
    other = remote("Plain").lower(MODEL, (INPUT,))
    pid, backend = pid_of(other), remote(name, limit=0.5 if name == "Hangs" else 20.0)
    for _ in range(2):
        backend.begin()
        with pytest.raises(LostProcess) as caught:
            backend.lower(MODEL, (INPUT,))
        assert caught.value.ending is ending and str(caught.value).startswith(message)
        assert caught.value.is_alone, "the second was in a new process"
    if name == "Hangs":
        assert "in lower" in caught.value.text.partition("(most recent call first)")[2].splitlines()[1]
    assert pid_of(other) == pid


def test_a_worker_that_is_lost_is_alone_only_if_it_had_begun_no_other_work(remote: Make) -> None:
    backend, alone = remote("Plain"), list[bool]()
    ways: list[Callable[[], None]] = [lambda: None, backend.begin, lambda: backend.allow(20.0)]
    for begins in ways:
        lowered = backend.lower(MODEL, (INPUT,))
        os.kill(pid_of(lowered), signal.SIGKILL)
        begins()
        with pytest.raises(LostProcess, match=r"^the process was killed by SIGKILL") as caught:
            lowered(INPUT)
        alone.append(caught.value.is_alone)
        backend.begin()
    assert alone == [True, False, False]


def test_a_worker_that_was_stopped_is_told_at_the_limit_and_replaced(
    remote: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child, "PATIENCE", 0.1)
    backend = remote("Plain")
    lowered = backend.lower(MODEL, (INPUT,))
    os.kill(pid := pid_of(lowered), signal.SIGSTOP)
    backend.allow(0.3)
    with pytest.raises(LostProcess, match=r"^run did not end within 0\.3 s$") as caught:
        lowered(INPUT)
    assert (caught.value.ending, caught.value.text) == (Ending.TIMEOUT, "") and ends(pid)
    backend.begin()
    assert pid_of(backend.lower(MODEL, (INPUT,))) != pid


def test_a_limit_that_the_judge_gave_is_named_without_the_option(remote: Make) -> None:
    backend = remote("Hangs")
    backend.allow(0.3)
    with pytest.raises(LostProcess, match=r"^lower did not end within 0\.3 s$") as caught:
        backend.lower(MODEL, (INPUT,))
    assert caught.value.ending is Ending.TIMEOUT


def test_what_is_asked_after_the_limit_is_a_timeout_however_large_it_is(remote: Make) -> None:
    backend = remote("Plain")
    backend.allow(0.0)
    with pytest.raises(LostProcess, match=r"^lower did not end within 0 s$") as caught:
        backend.lower(MODEL, (torch.ones(1 << 20),))
    assert caught.value.ending is Ending.TIMEOUT


@needs_torchao
def test_a_quantizer_that_hangs_is_told_as_such(remote: Make) -> None:
    backend = remote("Endless")
    bench = Bench(backend, seed=0, profile="quick")
    with pytest.raises(FaultFound, match="gives no Quantizer"):
        ask(bench, QuantizerRequest(), {})  # torchao takes a second to import
    backend.allow(0.3)
    with pytest.raises(LostProcess, match=r"^quantizer\(\) or annotate did not end within 0\.3 s$") as caught:
        ask(bench, QuantizerRequest(is_qat=True), {})
    assert caught.value.ending is Ending.TIMEOUT and "in quantizer" in caught.value.text


def name_it(backend: Backend, given: None) -> str:
    return backend.name


def test_a_worker_whose_data_cannot_be_read_is_lost(remote: Make) -> None:
    def refuse(data: Any) -> None:
        raise WireError(f"no number: {data}")

    with pytest.raises(LostProcess, match="the process sent no number: good") as caught:
        remote("Plain").ask_by(name_it, None, refuse, step="naming")
    assert caught.value.ending is Ending.DIED


@pytest.mark.parametrize("name", ["Plain", "LeavesBehind", "StopsParent"])
def test_nothing_is_left_when_a_worker_is_ended(remote: Make, name: str) -> None:
    backend = remote(name)
    pid = pid_of(backend.lower(MODEL, (INPUT,)))
    assert is_running(pid)
    backend.close()
    assert ends(pid)


def test_what_a_worker_leaves_running_ends_with_it(remote: Make) -> None:
    backend = remote("LeavesBehind")
    lowered = backend.lower(MODEL, (INPUT,))
    left = pid_of(lowered)
    with pytest.raises(LostProcess, match="exited with status 7"):
        lowered(INPUT * 7)
    assert ends(left)


# -- how a worker starts ----------------------------------------------------------------------------------------------

BEGINNINGS = {
    "raises": ("raise ImportError('no driver')", r"module '{0}' does not import: ImportError: no driver \(working"),
    "leaves": ("import sys; sys.exit('no license')", r"module '{0}' does not import: SystemExit: no license \(working"),
    "dies": (
        "import os; print('so far', flush=True); os._exit(3)",
        r"^backend {0}:B: the backend could not be imported: the process exited with status 3; it printed:\nso far$",
    ),
    "hangs": (
        "import time; time.sleep(1000)",
        r"^backend {0}:B: the backend could not be imported: the process did not answer within 1 s "
        r"\(--claim-timeout\); it printed:\n(.*\n)*.*\(most recent call first\):\n.*{0}\.py",
    ),
}


@pytest.mark.parametrize("way", BEGINNINGS)
def test_a_backend_that_cannot_be_imported_is_told_as_such(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    code, told = BEGINNINGS[way]
    name = f"made_up_that_{way}"
    (tmp_path / f"{name}.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(StartError, match=told.format(name)):
        make_worker(f"{name}:B", limit=1 if way == "hangs" else 20)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("Babel", "^backend good: .*DeviceError: no config"),
        ("Quits", f"^backend {VENDOR}:Quits: the backend could not say what it is: the process exited with status 5$"),
        ("Mute", r"could not say what it is: the process did not answer within 1 s (.*\n)*.*in backend_config"),
    ],
)
def test_a_backend_that_cannot_say_what_it_is_is_told_as_such(name: str, told: str) -> None:
    with pytest.raises(StartError, match=told):
        describe_backend(f"{VENDOR}:{name}", limit=1 if name == "Mute" else 20)


def test_what_is_no_description_is_told_as_such() -> None:
    with pytest.raises(DescriptionError, match="what the backend says of itself cannot be read"):
        read_description(describe_backend(f"{VENDOR}:Mumbles", limit=20))


WARM_UPS = {
    "Warm": ("", ["1", "1", "1"]),
    "Cold": (r"^backend good: warm_up\(\) raised ImportError: no driver; the claims start cold$", ["1", "0", "0"]),
    "DiesCold": (
        rf"^backend {VENDOR}:DiesCold: warm_up\(\) did not return: the process exited with status 1; it printed:\n"
        r"(.*\n)*SystemExit: no device; the claims start cold$",
        ["0", "0", "0"],
    ),
    "Endless": (
        rf"^backend {VENDOR}:Endless: warm_up\(\) did not return: the process did not answer within 1 s "
        r"\(--claim-timeout\); it printed:\nstarted [0-9]+\n(.*\n)*.*in warm_up; the claims start cold$",
        ["0", "0", "0"],
    ),
}
"""What is warned of, once, and how often each of the workers was warmed up, by the backend."""


@pytest.mark.parametrize("name", WARM_UPS)
def test_each_worker_is_warmed_up_until_that_fails_which_is_warned_of_once(name: str) -> None:
    told, expected = WARM_UPS[name]
    make = make_warm_workers(f"{VENDOR}:{name}", limit=1 if name == "Endless" else 20)
    warmed = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            worker = make()
            said = worker.ask(Frame(head={"do": "describe"}), limit=20).head["said"]
            worker.end()
            warmed.append(said["versions"]["warmed"])
    assert warmed == expected
    texts = [str(each.message) for each in caught]
    assert len(texts) == bool(told) and all(re.search(told, text) for text in texts)
    if name == "Endless":
        assert ends(int(texts[0].partition("started ")[2].split()[0])), "what it had started"
