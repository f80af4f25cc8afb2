"""The backend's process: it imports the vendor's code, says what the backend is, lowers models and runs them.

It answers what the judge asks for. Nothing here decides anything about a verdict.
"""

from __future__ import annotations

import contextlib
import sys
import traceback
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch

from fx_quant_conformance.backends.base import Backend, Execution, Lowered, UnsupportedPattern
from fx_quant_conformance.backends.discovery import find_backend, find_target
from fx_quant_conformance.backends.lowering import as_lowered, lower_reference
from fx_quant_conformance.backends.names import BackendNotFound
from fx_quant_conformance.conformance.machine.child import Answer, Parent, freeze_memory
from fx_quant_conformance.conformance.machine.frames import Frame, NoAnswer
from fx_quant_conformance.conformance.machine.memory import fill_memory
from fx_quant_conformance.conformance.machine.process import own_peak_mib
from fx_quant_conformance.conformance.machine.threads import run_with_threads
from fx_quant_conformance.conformance.remote.description import DescriptionError, describe
from fx_quant_conformance.conformance.remote.model_bytes import load_model, load_object
from fx_quant_conformance.conformance.remote.sources import SourcesError, list_sources
from fx_quant_conformance.conformance.remote.wire import HeldOutputs, memory_of, pack, unpack


def open_worker(parent: Parent, spec: str, needs_lower: bool) -> Answer:
    """Return what answers all requests to the backend that ``spec`` names, of which the first is "import"."""
    torch.set_num_threads(1)  # cases are tiny: threads cost more than they give, and processes share the cores
    return _Worker(spec, needs_lower=needs_lower).answer


class _Worker:
    """The backend, and the models that it has lowered, by number. ``needs_lower``: whether a config alone is none."""

    _backend: Backend

    def __init__(self, spec: str, *, needs_lower: bool) -> None:
        self._spec = spec
        self._needs_lower = needs_lower
        self._before = frozenset(sys.modules)
        self._models: dict[int, Lowered] = {}
        self._actions: dict[str, Callable[[Frame], Frame]] = {
            "import": self._import,
            "describe": self._describe,
            "warm up": self._warm_up,
            "lower": self._lower,
            "lower by": self._lower_by,
            "ask by": self._ask_by,
            "run": self._run,
            "execution": self._execution,
            "graph": self._graph,
        }

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

    def _import(self, request: Frame) -> Frame:
        try:
            self._backend = find_backend(self._spec, needs_lower=self._needs_lower)
        except BackendNotFound as error:
            return Frame(head={"error": str(error)})
        return Frame(head={})

    def _describe(self, request: Frame) -> Frame:
        try:
            said = describe(self._backend)
        except DescriptionError as error:
            return Frame(head={"error": f"backend {self._backend.name}: {error}"})
        module = find_target(self._spec)[0].partition(":")[0]
        with contextlib.suppress(SourcesError):  # they are then not among what it says: no file can be bound to them
            said["sources"] = list_sources(module, type(self._backend).__module__, self._before)
        return Frame(head={"said": said})

    def _warm_up(self, request: Frame) -> Frame:
        """Let the backend warm up; what it raises is to warn of: its claims show what is wrong."""
        try:
            self._backend.warm_up()
        except Exception as error:
            text = f"warm_up() raised {type(error).__name__}: {error}; the claims start cold"
            return Frame(head={"error": f"backend {self._backend.name}: {text}"})
        freeze_memory()
        return Frame(head={})

    def _lower(self, request: Frame) -> Frame:
        model, example_inputs = load_model(bytes(request.pieces[0]))
        torch.default_generator.manual_seed(request.head["seed"])
        return self._keep(request, lower_reference(self._backend, model, example_inputs))

    def _lower_by(self, request: Frame) -> Frame:
        """Lower a model by a function of the suite."""
        function, given = load_object(bytes(request.pieces[0]))
        torch.default_generator.manual_seed(request.head["seed"])
        return self._keep(request, function(self._backend, given))

    def _ask_by(self, request: Frame) -> Frame:
        """Return the data that a function of the suite makes, beside the backend's code."""
        function, given = load_object(bytes(request.pieces[0]))
        return Frame(head={"made": function(self._backend, given)})

    def _keep(self, request: Frame, lowered: Any) -> Frame:
        if not callable(lowered):
            return Frame(head={"not_callable": type(lowered).__name__})
        self._models[request.head["model"]] = as_lowered(self._backend, lowered)
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
        execution = self._models[request.head["model"]].execution()
        if not isinstance(execution, Execution | None):
            raise TypeError(f"execution() returned {execution!r}; return a fx_quant_conformance.Execution or None")
        return Frame(head={"execution": None if execution is None else asdict(execution)})

    def _graph(self, request: Frame) -> Frame:
        return Frame(head={"graph": self._models[request.head["model"]].graph()})


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
