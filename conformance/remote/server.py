"""The backend's process: it imports the vendor's code, says what the backend is, and makes processes that run it.

``run_host`` is that process. It forks a worker process for a claim or several; a worker lowers models and runs them for
the judge, until the judge closes its end. Nothing here decides anything about a verdict.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any, NoReturn

import torch

from backends.base import Backend, Execution, QuantizerRequest, UnsupportedPattern
from backends.discovery import BackendNotFound, find_backend, find_target
from backends.lowering import lower_reference
from conformance.annotations.asking import annotate, lower_annotated
from conformance.annotations.probe import Probe
from conformance.annotations.programs import OtherGridError
from conformance.annotations.spelling import spell_places
from conformance.machine.memory import fill_memory
from conformance.machine.process import (
    PATIENCE,
    SPARE,
    die_with,
    exit_status_of,
    freeze_memory,
    leave_files,
    own_peak_mib,
    settle,
    stand_guard,
    wait_for,
)
from conformance.machine.threads import run_with_threads
from conformance.remote.description import DescriptionError, describe
from conformance.remote.graph_spelling import spell_graph
from conformance.remote.model_bytes import load_model, load_object
from conformance.remote.sources import SourcesError, list_sources
from conformance.remote.wire import Frame, HeldOutputs, NoAnswer, memory_of, pack, receive_frame, send_frame, unpack


def run_host(spec: str, control: socket.socket, output: int, *, needs_lower: bool = True) -> NoReturn:
    """Be the host: import the backend, then do what the judge asks for, and never return into the caller's code."""
    status = 1
    try:
        die_with(os.getppid())
        settle(output)
        leave_files(control.fileno(), output)
        stand_guard(ends_all=False)  # a worker may still do its work where its host has died
        before = frozenset(sys.modules)
        _serve(control, spec, _load(spec, control, needs_lower), output, before)
        status = 0
    except SystemExit as leaving:
        status = exit_status_of(leaving)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status & 0xFF)


def _load(spec: str, control: socket.socket, needs_lower: bool) -> Backend:
    torch.set_num_threads(1)  # cases are tiny: threads cost more than they give, and processes share the cores
    try:
        backend = find_backend(spec, needs_lower=needs_lower)
    except BackendNotFound as error:
        send_frame(control, Frame(head={"error": "not found", "text": str(error)}))
        raise SystemExit(0) from None
    send_frame(control, Frame(head={"name": backend.name}))
    return backend


def _serve(control: socket.socket, spec: str, backend: Backend, output: int, before: frozenset[str]) -> None:
    """Answer the judge's requests, one after the other: a mark that the answer repeats, a command, its arguments."""
    workers: dict[str, list[int]] = {}
    for mark, command, arguments, received in _receive_commands(control):
        answer: dict[str, Any] = {}
        if command == "describe":
            answer = _describe(spec, backend, before)
        elif command == "warm":
            answer = {"warning": _warm_up(backend)}
        elif command == "fork":
            limit, group = arguments
            answer = {"pid": _fork(control, received.pop(0), backend, output, int(limit))}
            workers.setdefault(group, []).append(answer["pid"])
        elif command == "wait":
            answer = {"status": wait_for(int(arguments[0]), float(arguments[1]))}
        elif command == "forget":
            _end_all(workers.pop(arguments[0], []))
        send_frame(control, Frame(head={**answer, "mark": mark}))


def _receive_commands(control: socket.socket) -> Iterator[tuple[str, str, list[str], list[int]]]:
    """Yield marks, commands, their arguments and the descriptors that have come, until the judge is gone.

    A judge that was killed may have left a command that nobody waits for, and the next one's comes right after it.
    """
    incomplete, descriptors = b"", list[int]()
    while True:
        data, received, _, _ = socket.recv_fds(control, 4096, 16)
        if not data:
            return
        descriptors += received
        *lines, incomplete = (incomplete + data).split(b"\n")
        for line in lines:
            mark, command, *arguments = line.decode().split()
            yield mark, command, arguments, descriptors


def _fork(control: socket.socket, channel: int, backend: Backend, output: int, limit: int) -> int:
    pid = os.fork()
    if pid == 0:
        control.close()
        _live(socket.socket(fileno=channel), backend, output, limit)
    os.close(channel)
    return pid


def _end_all(workers: list[int]) -> None:
    """Kill workers, and what they have started, and leave no zombie."""
    for pid in workers:
        with contextlib.suppress(ChildProcessError, ProcessLookupError):  # it was waited for
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            os.kill(pid, signal.SIGKILL)
            wait_for(pid, PATIENCE)


def _describe(spec: str, backend: Backend, before: frozenset[str]) -> dict[str, Any]:
    try:
        said = describe(backend)
    except DescriptionError as error:
        return {"error": "description", "text": f"backend {backend.name}: {error}"}
    module = find_target(spec)[0].partition(":")[0]
    with contextlib.suppress(SourcesError):  # they are then not among what it says: no file can be bound to them
        said["sources"] = list_sources(module, type(backend).__module__, before)
    return said


def _warm_up(backend: Backend) -> str:
    """Let the backend warm up; return what it raised, for the judge to warn of, or ""."""
    try:
        backend.warm_up()
    except Exception as error:  # its claims show what is wrong
        return f"backend {backend.name}: warm_up() raised {type(error).__name__}: {error}; the claims start cold"
    freeze_memory()
    return ""


# -- workers ----------------------------------------------------------------------------------------------------------


def _live(channel: socket.socket, backend: Backend, output: int, limit: int) -> NoReturn:
    """Be a worker: do all that the judge asks for, and never return into the host's code."""
    status = 1
    try:
        settle(output)
        worker = _Worker(backend)
        while (request := receive_frame(channel)) is not None:
            signal.alarm(limit + SPARE)
            try:
                send_frame(channel, worker.answer(request))
            except NoAnswer as error:
                send_frame(channel, Frame(head={"unread": str(error)}))
            signal.alarm(0)
        status = 0
    except SystemExit as leaving:
        traceback.print_exc()
        status = exit_status_of(leaving)
    except (BrokenPipeError, ConnectionResetError):
        status = 0  # the judge has gone
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status & 0xFF)


class _Worker:
    """The backend, and the models that it has lowered, by number."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._models: dict[int, Callable[..., Any]] = {}
        self._actions: dict[str, Callable[[Frame], Frame]] = {
            "lower": self._lower, "run": self._run, "execution": self._execution, "graph": self._graph,
            "annotate": self._annotate, "lower annotated": self._lower_annotated,
        }  # fmt: skip

    def answer(self, request: Frame) -> Frame:
        """Do what is asked for; what the backend's code raises is the answer."""
        for number in request.head.get("drop", ()):
            self._models.pop(number, None)
        try:
            answer = self._actions[request.head["do"]](request)
        except NoAnswer as error:
            answer = Frame(head={"unread": str(error)})
        except Exception as error:
            answer = Frame(head={"raised": _describe_raised(error)})
        answer.head["peak_mib"] = own_peak_mib()
        return answer

    def _lower(self, request: Frame) -> Frame:
        model, example_inputs = load_model(bytes(request.pieces[0]))
        torch.default_generator.manual_seed(request.head["seed"])
        return self._keep(request, lower_reference(self._backend, model, example_inputs))

    def _lower_annotated(self, request: Frame) -> Frame:
        """Lower a float model's program as the vendor's Quantizer has it quantized, on its reference model's grids."""
        given = QuantizerRequest(**request.head["request"])
        model, reference, inputs = load_object(bytes(request.pieces[0]))
        torch.default_generator.manual_seed(request.head["seed"])
        try:
            return self._keep(request, lower_annotated(self._backend, given, model, reference, inputs))
        except OtherGridError as error:
            return Frame(head={"other_grid": str(error)})

    def _keep(self, request: Frame, lowered: Any) -> Frame:
        if not callable(lowered):
            return Frame(head={"not_callable": type(lowered).__name__})
        self._models[request.head["model"]] = lowered
        return Frame(head={})

    def _run(self, request: Frame) -> Frame:
        """Run a model on inputs, one after the other, until it raises; hold the outputs to their bytes meanwhile."""
        head, model = request.head, self._models[request.head["model"]]
        done, failed, pieces = list[dict[str, Any]](), dict[str, Any](), list[bytes]()
        outputs = HeldOutputs()
        for run in head["runs"]:
            try:
                output, written = _run_once(model, run, request)
            except Exception as error:
                failed = {"failed": _describe_raised(error)}
                break
            kept = outputs.pack(output, pieces)
            done.append({"output": kept, "written": {place: pack(each, pieces) for place, each in written.items()}})
        for number, later in outputs.find_overwritten():
            done[number]["overwritten"] = later
        return Frame(head={"done": done, **failed}, pieces=pieces)

    def _execution(self, request: Frame) -> Frame:
        execution = self._backend.execution(self._models[request.head["model"]])
        if execution is None:
            return Frame(head={"execution": None})
        if not isinstance(execution, Execution):
            raise TypeError(f"execution() returned {execution!r}; return a backends.base.Execution or None")
        return Frame(head={"execution": asdict(execution)})

    def _graph(self, request: Frame) -> Frame:
        model = self._models[request.head["model"]]
        return Frame(head={"graph": spell_graph(getattr(model, "graph_module", model))})

    def _annotate(self, request: Frame) -> Frame:
        """Have the vendor's Quantizer annotate models, and read what it did; None: there is no Quantizer for these."""
        given = QuantizerRequest(**request.head["request"])
        probes: dict[str, Probe] = load_object(bytes(request.pieces[0]))
        found = annotate(self._backend, given, probes)
        return Frame(head={"found": None if found is None else spell_places(found)})


def _run_once(model: Callable[..., Any], how: Any, request: Frame) -> tuple[Any, dict[str, Any]]:
    """Run a model once; return its output and, if they are watched, the inputs that it has written to, by place."""
    threads, is_watched = request.head["threads"], request.head["watched"]
    inputs: tuple[Any, ...] = unpack(how["inputs"], request.pieces)
    watched = dict(enumerate(inputs)) if is_watched else {}
    before = {number: memory_of(each) for number, each in watched.items()}

    def run() -> Any:
        with fill_memory(how["fill"]) if how["fill"] else contextlib.nullcontext():
            return model(*inputs)

    output = run() if threads == 1 else run_with_threads(threads, run)
    return output, {str(number): each for number, each in watched.items() if memory_of(each) != before[number]}


def _describe_raised(error: Exception) -> dict[str, Any]:
    trace = "".join(traceback.format_exception(error, limit=-6))
    declined = isinstance(error, UnsupportedPattern)
    return {"type": type(error).__name__, "text": str(error), "trace": trace, "declined": declined}
