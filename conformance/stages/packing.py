"""Packing: several cases of a claim are lowered as one model, and each is run and judged by itself. (LOW-01)

What a compiler takes for a model it takes once for a pack. Only a case that is right in every way counts as it was run
in a pack; any other one is lowered alone, and judged as if there had been no pack.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from backends.base import Execution, Representation
from backends.lowering import PART, Part, lower_pack
from conformance.claims.inputs import Batch
from conformance.machine.memory import current_filling, fill_memory
from conformance.remote.client import ElsewhereModel, RemoteBackend
from conformance.stages.bench import Bench
from conformance.stages.convert import ReferenceCase
from conformance.stages.layouts import clone_with_strides
from conformance.stages.lower import LoweredModel

MOST_PACKED = 12
"""Cases of a pack. Each run is one of the whole pack, and a pack that is not lowered has cost its time for nothing."""


class PackedPart(ElsewhereModel):
    """One model of a lowered pack. It runs with the pack, and the other models on their examples.

    ``number``: its place among the ``examples`` of all. ``report``: what the backend reports of this one.
    """

    def __init__(self, pack: LoweredModel, number: int, examples: Sequence[Batch], report: Execution) -> None:
        self._pack = pack
        self._number = number
        self._examples = examples
        self._report = report

    def __call__(self, *inputs: Tensor) -> Any:
        """Run it on inputs, in their layout; it may write to the inputs."""
        return self._choose(self._pack(*self._surround(inputs)))

    def run_all(self, batches: Sequence[Batch], fillings: Sequence[int] = ()) -> Iterator[Any]:
        """Run it on several inputs, one after the other; yield the outputs. Raises where it raised."""
        if isinstance(self._pack, ElsewhereModel):
            yield from map(self._choose, self._pack.run_all([self._surround(each) for each in batches], fillings))
            return
        for inputs, fill in zip(batches, fillings or [current_filling()] * len(batches), strict=True):
            with fill_memory(fill) if fill else contextlib.nullcontext():
                yield self(*map(clone_with_strides, inputs))

    def execution(self) -> Execution:
        """Return what the backend reports of it."""
        return self._report

    def spell_graph(self) -> str:
        """Return the pack's graph as text; "" if it has none."""
        return self._pack.spell_graph() if isinstance(self._pack, ElsewhereModel) else ""

    def _surround(self, inputs: Batch) -> Batch:
        """Return the inputs of the pack: these, and copies of the others' examples."""
        whole = list[Tensor]()
        for number, example in enumerate(self._examples):
            whole += inputs if number == self._number else (value.clone() for value in example)
        return tuple(whole)

    def _choose(self, outputs: Any) -> Any:
        """Return the part's own output. Raises TypeError for what is no tuple of all outputs."""
        if not isinstance(outputs, (tuple, list)) or len(outputs) != len(self._examples):
            raise TypeError(f"a model of {len(self._examples)} outputs returned {type(outputs).__name__}")
        return outputs[self._number]


def can_pack(bench: Bench) -> bool:
    """Tell whether the backend's cases are packed: it takes packs, and lowering may take the most of its time.

    torch's own lowering takes a twentieth. Files for a device hold a case each. The profile ``stress`` packs nothing: a
    fault that a pattern has only where it is alone would not show.
    """
    takes_graphs = bench.backend.representation is not Representation.QUANTIZED
    takes_packs = takes_graphs and bench.capabilities.packs and not bench.runs_elsewhere
    return takes_packs and bench.profile != "stress"


class Parts(NamedTuple):
    """Parts of a pack, by their place among the models. ``is_told``: the backend has said that a pack is quantized."""

    by_place: dict[int, PackedPart]
    is_told: bool


def lower_packed(bench: Bench, references: Sequence[ReferenceCase]) -> Parts:
    """Have reference models lowered as one; return the parts that the backend reports to be quantized.

    Where an op in float is of no part by its name, the others are lowered again without those that have one, and if it
    is still there, none is left. Raises what the backend's code raises.
    """
    places, is_told = list(range(len(references))), False
    while len(places) > 1:
        examples = [tuple(value.clone() for value in references[place].inputs[0].tensors) for place in places]
        models = [references[place].model for place in places]
        pack = _lower(bench, list(zip(models, examples, strict=True)))
        report = bench.backend.execution(pack)
        if report is None:
            break  # it may say more of a case alone
        is_told = is_told or bool(report.quantized_ops and not report.float_fallbacks)
        reports, is_clear = split_report(report, len(places))
        integer = [number for number, own in enumerate(reports) if not own.float_fallbacks]
        if is_clear:
            shown = [number for number in integer if reports[number].quantized_ops]
            parts = {places[number]: PackedPart(pack, number, examples, reports[number]) for number in shown}
            return Parts(parts, is_told)
        places = [places[number] for number in integer] if len(integer) < len(places) else []
    return Parts({}, is_told)


def _lower(bench: Bench, parts: Sequence[Part]) -> LoweredModel:
    """Have models lowered as one, here or in the backend's process. Raises what its code raises."""
    backend = bench.backend
    pack = backend.lower_pack(parts) if isinstance(backend, RemoteBackend) else lower_pack(backend, parts)
    if not callable(pack):
        raise TypeError(f"lower returned {type(pack).__name__}, which cannot be called")
    return pack


def split_report(report: Execution, count: int) -> tuple[list[Execution], bool]:
    """Share what a backend reports of a pack among its parts, by the names of their nodes. (LOW-04)

    An op that names no part says of none that it is quantized. Returned is also whether each op in float names a part.
    """
    quantized, floating = (_sort_by_part(names) for names in (report.quantized_ops, report.float_fallbacks))
    shares = [
        Execution(quantized_ops=tuple(quantized[number]), float_fallbacks=tuple(floating[number]))
        for number in range(count)
    ]
    return shares, None not in floating


def _sort_by_part(names: Sequence[str]) -> defaultdict[int | None, list[str]]:
    """Return names of ops by the number of the part with whose name they begin; None: they begin with none."""
    of_parts = defaultdict[int | None, list[str]](list)
    for name in map(str, names):
        rest = name.removeprefix(PART)
        number = "".join(itertools.takewhile(str.isdecimal, rest))
        is_of_part = name.startswith(PART) and number and rest[len(number) :].startswith(("_", "."))
        of_parts[int(number) if is_of_part else None].append(name)
    return of_parts
