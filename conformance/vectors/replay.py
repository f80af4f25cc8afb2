"""Replaying: a backend whose models ran on a device, which handed in their outputs as files.

The judge takes the way that was recorded (recording.py). A model or an input that the bundle does not have is no fault
of the device: the claim is UNEXERCISED, with that reason.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.utils._pytree import tree_flatten, tree_unflatten

from fx_quant_conformance.backends.base import Execution, UnsupportedPattern
from fx_quant_conformance.conformance.claims.inputs import Batch
from fx_quant_conformance.conformance.machine.child import Ending
from fx_quant_conformance.conformance.machine.fault import Fault
from fx_quant_conformance.conformance.machine.frames import NoAnswer
from fx_quant_conformance.conformance.machine.workplace import LostProcess
from fx_quant_conformance.conformance.oracle.grids import Grid, placeholder_grids
from fx_quant_conformance.conformance.remote.client import RemoteBackend, RemoteError
from fx_quant_conformance.conformance.remote.executor import HeldModel
from fx_quant_conformance.conformance.vectors.bundle import Bundle, BundleError
from fx_quant_conformance.conformance.vectors.files import format_json, read_json, unpack_arrays
from fx_quant_conformance.conformance.vectors.formats import format_extents
from fx_quant_conformance.conformance.vectors.graph_data import describe_model
from fx_quant_conformance.conformance.vectors.outputs import NO_MODEL, HandedIn, Status
from fx_quant_conformance.conformance.vectors.recording import name_case
from fx_quant_conformance.conformance.vectors.runs import key_of, read_operand
from fx_quant_conformance.refimpl.graph.invariants import is_dequantize
from fx_quant_conformance.reports.reading import FileFault
from fx_quant_conformance.reports.verdicts import Verdict


class Source(Protocol):
    """Where the bundle and the outputs of a piece of work are found."""

    def find(self, work: str) -> tuple[Bundle, Path]:
        """Return the bundle that has the piece of work, and the folder of the outputs."""

    def format_script(self, work: str, case: str, heading: str) -> str:
        """Return a script that has the device run a case again; "" if the suite does not know how."""


class HandedInError(RemoteError):
    """What was handed in for a case is not what was asked for."""


class ReplayBackend(RemoteBackend):
    """A backend whose outputs are in files. ``imports``: where the vendor's own code is found."""

    runs_elsewhere = True

    def __init__(self, *described: Any, source: Source, imports: str, **more: Any) -> None:
        super().__init__(*described, **more)
        self.imports = imports
        self.source = source
        self._work = ""
        self._handed_in: dict[str, HandedIn] = {}
        self._declined = set[str]()

    def lower(self, reference_model: GraphModule, example_inputs: tuple[Any, ...]) -> ReplayedModel:
        """Find what was handed in for a model. Raises what the device answered in place of outputs."""
        bundle, outputs = self.source.find(self._work)
        name = name_case(self._work, describe_model(reference_model))
        if name not in bundle.cases:
            raise NoAnswer(_format_unknown(bundle, self._work))
        try:
            case = bundle.read_case(name)
            bundle.check_file(case["inputs"])
            arrays = unpack_arrays(bundle.device / case["inputs"])
        except (BundleError, FileFault) as error:
            raise NoAnswer(f"the bundle: {error}") from error
        handed_in = self._handed_in.setdefault(name, HandedIn(outputs / name, case))
        replayed = ReplayedCase(name=name, bundle=bundle, case=case, handed_in=handed_in)
        try:
            replayed.raise_unless_done()
        except UnsupportedPattern:
            self._declined.add(name)
            raise
        structure = _find_structure(reference_model, example_inputs)
        return ReplayedModel(replayed, _keys_of(case, arrays, placeholder_grids(reference_model)), structure)

    def own_arguments(self) -> dict[str, Any]:
        """Return the source, and where the vendor's own code is found."""
        return {"source": self.source, "imports": self.imports}

    def begin(self, work: str = "") -> None:
        """Begin a piece of work."""
        self._work = work
        self._handed_in.clear()
        self._declined.clear()

    def find_leftover(self) -> Fault | None:
        """Find a fault in the cases of this piece of work, also in those that no stage asked for.

        Each must be done and whole, and equal runs must have equal outputs. One that the device declined when it was
        asked for is judged by that already: a whole model, by its parts. What has ops that are not claimed, such as a
        float region of a model, it may decline. (LOW-01, NUM-07)
        """
        bundle, outputs = self.source.find(self._work)
        for name in (name for name, work in bundle.cases.items() if work == self._work and name not in self._declined):
            try:
                case = bundle.read_case(name)
            except (BundleError, FileFault) as error:
                return Fault(rule="LOW-01", verdict=Verdict.UNEXERCISED, message=f"the bundle: {error}")
            handed_in = self._handed_in.setdefault(name, HandedIn(outputs / name, case))
            try:
                fault = _find_fault(ReplayedCase(name=name, bundle=bundle, case=case, handed_in=handed_in))
            except NoAnswer as error:
                fault = Fault(rule="LOW-01", verdict=Verdict.UNEXERCISED, message=str(error))
            except (FileFault, HandedInError) as error:
                fault = Fault(rule="LOW-01", message=str(error))
            if fault is not None:
                return replace(fault, message=f"case {name}: {fault.message}")
        return None


def _find_structure(model: GraphModule, example_inputs: tuple[Any, ...]) -> Any:
    """Return the structure of a reference model's output: a tensor where it ends in one that is dequantized."""
    if is_dequantize(model.graph.output_node().args[0]):
        return tree_flatten(example_inputs[0])[1]
    with torch.no_grad():
        return tree_flatten(model(*(value.clone() for value in example_inputs)))[1]


def _find_fault(replayed: ReplayedCase) -> Fault | None:
    """Find what is wrong with a case that was handed in, apart from its numbers.

    Raises FileFault, and NoAnswer where torch gives no model in the format that the device takes.
    """
    case, handed_in = replayed.case, replayed.handed_in
    first: dict[str, tuple[int, list[Tensor]]] = {}
    whole = handed_in.read_status()
    replayed.raise_without_model(whole)
    if whole.status == "refused" and replayed.has_unclaimed():
        return None
    if whole.status != "done":
        text = whole.reason or f"the device says {whole.status!r}"
        return Fault(rule="LOW-01", verdict=_VERDICTS[whole.status], message=text)
    for number, run in enumerate(case["runs"]):
        status = handed_in.read_status_of(number)
        replayed.raise_without_model(status, number)
        if status.status in _LOST:
            text = f"run {number}: {status.reason or status.status}"
            return Fault(rule="LOW-01", verdict=_VERDICTS[status.status], message=text)
        if status.status != "done":
            continue  # a device may decline an input that the float model does not take either
        values = handed_in.read_outputs(number)
        key = format_json([run["inputs"], run["threads"]])
        earlier, same = first.setdefault(key, (number, values))
        if not all(torch.equal(one.nan_to_num(), other.nan_to_num()) for one, other in zip(values, same, strict=True)):
            text = f"runs {earlier} and {number} have the same inputs and other outputs"
            return Fault(rule="NUM-07", message=text)
    return None


_VERDICTS = {
    "crashed": Verdict.CRASHED,
    "timeout": Verdict.TIMEOUT,
    "refused": Verdict.REFUTED,
    "raised": Verdict.REFUTED,
}
_SHOWN = 40
_LOST = {"crashed": Ending.DIED, "timeout": Ending.TIMEOUT}


def raise_unless_done(name: str, status: Status, shapes: Sequence[str] = ()) -> None:
    """Raise what a backend in Python would have raised, or the loss of its process.

    ``shapes``: those of a whole case, with any of which the process may have been lost.
    """
    reason = status.reason or f"the device says {status.status!r} of case {name}, and gave no reason"
    if status.status == "refused":
        raise UnsupportedPattern(reason)
    if status.status in _LOST:
        where = f" (with one of the shapes {', '.join(shapes)}, which are one case)" if shapes[1:] else ""
        raise LostProcess(_LOST[status.status], f"{reason}{where}", text=status.text, is_alone=True)
    if status.status == "raised":
        kind: type[RemoteError] = type(status.kind or "HandedInError", (RemoteError,), {})
        error = kind(reason)
        error.trace = status.text
        raise error


def _format_unknown(bundle: Bundle, work: str) -> str:
    if work not in bundle.cases.values():
        reason = bundle.manifest["left_out"].get(work, "it was exported with another selection")
        return f"the bundle has no case of this claim: {reason}"
    made = f"suite {bundle.manifest.get('suite_version')}, torch {bundle.manifest.get('torch')}"
    return (
        f"the bundle does not have this model, though it has others of the claim: it was made by {made}, "
        f"here it is judged with torch {torch.__version__}; export again with the same suite, torch and kind of CPU"
    )


def _keys_of(case: Mapping[str, Any], arrays: Mapping[str, Any], grids: Sequence[Grid | None]) -> list[str]:
    """Return the keys of a case's runs, from the inputs in the bundle."""
    return [
        key_of(
            [read_operand(operand, arrays, grid) for operand, grid in zip(run["inputs"], grids, strict=True)],
            run["threads"],
        )
        for run in case["runs"]
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayedCase:
    """A case of a bundle, and what was handed in for it."""

    name: str
    bundle: Bundle
    case: Mapping[str, Any]
    handed_in: HandedIn

    def raise_unless_done(self, run: int | None = None) -> None:
        """Raise what a backend in Python would have raised of the case or of a run, or the loss of its process."""
        try:
            status = self.handed_in.read_status() if run is None else self.handed_in.read_status_of(run)
        except FileFault as error:
            raise HandedInError(f"case {self.name}: {error}") from error
        self.raise_without_model(status, run)
        programs = self.case["programs"] if run is None else []
        raise_unless_done(self.name, status, [format_extents(program["inputs"]) for program in programs])

    def has_unclaimed(self) -> bool:
        """Tell whether the model has ops that the config does not claim. Raises NoAnswer for a bundle that changed."""
        path = self.case["model"]["json"]
        try:
            self.bundle.check_file(path)
            graph = read_json(self.bundle.device / path)
        except (BundleError, FileFault) as error:
            raise NoAnswer(f"the bundle: {error}") from error
        return any("unclaimed" in node for node in graph["nodes"])

    def raise_without_model(self, status: Status, run: int | None = None) -> None:
        """Raise NoAnswer where a device has no model because torch exports none; HandedInError where it has one."""
        if status.status != NO_MODEL:
            return
        try:
            cause = self.bundle.find_cause(self.case, status.format, run)
        except (BundleError, FileFault) as error:
            raise NoAnswer(f"the bundle: {error}") from error
        if not cause:
            formats = self.bundle.manifest["formats"]
            has = "the bundle has one" if status.format in formats else f"the bundle is in {', '.join(formats)}"
            what = f"case {self.name}" if run is None else f"run {run} of case {self.name}"
            raise HandedInError(f"the device has no model of {what} in format {status.format[:_SHOWN]!r}: {has}")
        raise NoAnswer(f"there is no model in format {status.format} for the device: {cause}")


class ReplayedModel(HeldModel):
    """A model whose outputs were handed in. A run that is asked for again beyond the recorded ones gives its last."""

    def __init__(self, replayed: ReplayedCase, keys: Sequence[str], structure: Any) -> None:
        self._replayed = replayed
        self._name, self._handed_in = replayed.name, replayed.handed_in
        self._structure = structure
        self._left: dict[str, deque[int]] = defaultdict(deque)
        for number, key in enumerate(keys):
            self._left[key].append(number)

    def __call__(self, *inputs: Tensor) -> Any:
        """Return the outputs for inputs."""
        return next(self.run_all([inputs]))

    def run_all(self, batches: Sequence[Batch], fillings: Sequence[int] = ()) -> Iterator[Any]:
        """Yield the outputs for several inputs. Raises HandedInError for outputs that are none, NoAnswer."""
        for inputs in batches:
            left = self._left.get(key_of(inputs, torch.get_num_threads()))
            if not left:
                raise NoAnswer(f"the bundle's case {self._name} does not have this input")
            run = left.popleft() if len(left) > 1 else left[0]
            try:
                self._replayed.raise_unless_done(run)
                values = self._handed_in.read_outputs(run)
            except FileFault as error:
                raise HandedInError(f"case {self._name}: {error}") from error
            yield tree_unflatten(values, self._structure)

    def execution(self) -> Execution | None:
        """Return what the device executed, as it says. Raises HandedInError."""
        try:
            return self._handed_in.read_execution()
        except FileFault as error:
            raise HandedInError(f"case {self._name}: {error}") from error
