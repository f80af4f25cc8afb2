"""What backends on other people's runtimes share: their claims, and how a program's parts are traced back.

These backends take the reference model as an exported program (``Representation.EXPORTED``). A vendor's backend of that
form needs two things from here, if anything: `Compiled` calls a runtime with the model's inputs and gives its outputs
the model's structure; `owner_of` says from which op of the reference model a node of the program comes, so that
``Backend.execution`` can name it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any, TypeAlias
from unittest.mock import patch

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.export import ExportedProgram, decomp_utils, exported_program
from torch.fx import Graph, Node
from torch.utils._pytree import tree_flatten, tree_unflatten

from fx_quant_conformance.backends.base import Backend, Representation, Taken
from fx_quant_conformance.refimpl import BackendConfig
from fx_quant_conformance.refimpl.config.native import FAMILIES, Table, config_of
from fx_quant_conformance.refimpl.config.patterns import pattern_name
from fx_quant_conformance.refimpl.exported.exported import CALLED, OF_MODEL

Tensors: TypeAlias = Sequence[Tensor]
_DECOMPOSE: Callable[[ExportedProgram, Any], ExportedProgram] = ExportedProgram.run_decompositions
_COMPOSITE = "_collect_all_valid_cia_ops"
_composite_ops: Callable[[], set[Any]] = cache(getattr(exported_program, _COMPOSITE))
"""torch's ops that are made of others, for which it searches all of its libraries on each call."""


class Compiled:
    """A model of a runtime, called with tensors as the program is; its outputs have the program's structure.

    ``run`` takes the input tensors and returns the output tensors, in the program's order. ``ops``: the names of the
    reference model's nodes of which the program computes something.
    """

    def __init__(self, program: ExportedProgram, run: Callable[[Tensors], Iterable[Tensor]]) -> None:
        self.structure = program.call_spec.out_spec
        self.run = run
        calls = [node for node in program.graph.nodes if node.op == "call_function" and not _is_edge(node)]
        self.ops = tuple(dict.fromkeys(map(owner_of, calls)))

    def __call__(self, *inputs: Any) -> Any:
        """Return the outputs for inputs like the program's; what is no tensor among these is left out."""
        values = [value.detach() for value in tree_flatten(inputs)[0] if isinstance(value, Tensor)]
        return tree_unflatten(self.run(values), self.structure)


def _is_edge(node: Node) -> bool:
    """Tell whether a node of a program quantizes, dequantizes or chooses qparams."""
    return getattr(node.target, "namespace", "") == "quantized_decomposed"


def leave_nothing(ops: Iterable[str]) -> tuple[str, ...]:
    """Name ops as executed on integers that a runtime has removed: identities, such as needless views."""
    return tuple(f"{op}: nothing is left to be done between quantize and dequantize" for op in ops)


def separate(layers: Mapping[str, Sequence[tuple[str, bool]]]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Name the ops whose parts are all quantized, and the others. ``layers``: op → text and whether, of each part."""
    lines = {
        f"{op} ({', '.join(text for text, _ in own)})": all(is_own for _, is_own in own) for op, own in layers.items()
    }
    quantized = tuple(line for line, is_quantized in lines.items() if is_quantized)
    return quantized, tuple(line for line, is_quantized in lines.items() if not is_quantized)


def owner(paths: Iterable[str], name: str) -> str:
    """Return the name of the reference model's node from which a node of an exported program comes.

    That is the node that calls the outermost module that the exported node is of, or the function that is one there;
    else the exported node's own ``name``, as of what quantizes. ``paths``: those of the modules that it is of, the
    outermost first, as ``nn_module_stack`` has them.
    """
    target = next((path.removeprefix(OF_MODEL) for path in paths if path.startswith(OF_MODEL)), None)
    if target is None or target.startswith(CALLED):
        return name if target is None else target.removeprefix(CALLED)
    return Graph().create_node("call_module", target).name


def owner_of(node: Node) -> str:
    """Return the name of the reference model's node from which a node of an exported program comes."""
    return owner([path for path, _ in node.meta.get("nn_module_stack", {}).values()], node.name)


class RuntimeBackend(Backend):
    """A backend on other people's runtime, which is an optional extra."""

    packages: tuple[str, ...]
    """The packages of the extra of the backend's name."""
    settings: str
    """The runtime's settings that a result depends on, in words; reports show them with the versions."""
    table: Table
    """The backend claims families of ops (refimpl.config.native) with these dtypes."""
    patterns: tuple[str, ...]
    """Globs of the names of the patterns that the backend claims."""

    def backend_config(self) -> BackendConfig:
        """Return the claims by ``table`` and ``patterns``."""
        config = config_of(self.name, self.table, FAMILIES)
        names = ((entry, pattern_name(entry.normal_pattern)) for entry in config.configs)
        entries = [entry for entry, name in names if any(fnmatchcase(name, glob) for glob in self.patterns)]
        return BackendConfig(self.name).set_backend_pattern_configs(entries)

    def unavailable_reason(self) -> str | None:
        """Name the packages that are not installed, and the command that installs them."""
        absent = ", ".join(package for package in self.packages if find_spec(package) is None)
        command = f"pip install -c constraints.txt 'fx-quant-conformance[{self.name}]'"
        return f"{absent} not installed: {command}" if absent else None

    def versions(self) -> dict[str, str]:
        """Return the versions of the runtime and its exporters, and the settings."""
        return {name: version(name) for name in (*self.packages, "torch")} | {"settings": self.settings}


class ExportingBackend(RuntimeBackend):
    """A backend on a runtime that takes exported programs."""

    representation = Representation.EXPORTED


_NO_BATCH: dict[str, Taken] = {"_unbatched": (False,)}
_TENSORS: dict[str, Taken] = {"other": ("tensor", "itself")}
LIMITS: dict[str, dict[str, Taken]] = {
    **dict.fromkeys(("nn.Conv1d", "nn.Conv2d", "nn.Conv3d"), _NO_BATCH | {"padding_mode": ("zeros",)}),
    **dict.fromkeys(("torch.conv1d", "torch.conv2d", "torch.conv3d"), _NO_BATCH),
    **dict.fromkeys(("operator.add", "operator.mul", "torch.mul"), _TENSORS),
    "torch.add": _TENSORS | {"alpha": (1,)},
}
"""Limits that keep out what runs in float in any program: padding other than by zeros is a separate op; numbers are
floats."""


@contextmanager
def decompose_sparingly() -> Iterator[None]:
    """Make programs use ``decompose``, and torch search for its composite ops once per process."""
    with (
        patch.object(ExportedProgram, "run_decompositions", decompose),
        patch.object(decomp_utils, _COMPOSITE, _composite_ops),
    ):
        yield


def decompose(program: ExportedProgram, table: Mapping[Any, Any]) -> ExportedProgram:
    """Decompose as ``run_decompositions`` does, if the program has something to decompose.

    Only the program's own ops are considered: torch prepares all ops each time, which takes half of an export's time.
    """
    targets = {node.target for node in program.graph.nodes if node.op == "call_function"} - {operator.getitem}
    if targets.isdisjoint(table) and all(isinstance(op, OpOverload) and _is_kept(op) for op in targets):
        return program
    own, absent = _composite_ops() & targets, _composite_ops() - targets
    with patch.object(exported_program, _COMPOSITE, lambda: own):
        return _DECOMPOSE(program, {op: how for op, how in table.items() if op not in absent})


def _is_kept(op: OpOverload) -> bool:
    """Tell whether torch keeps an op that no table names.

    It replaces ops that write to their inputs, and ops that are made of others and may be views (it counts a batch
    norm as one).
    """
    key = "CompositeImplicitAutograd"
    is_composite = torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), key)  # type: ignore[no-untyped-call]
    return not op._schema.is_mutable and (not is_composite or op in _composite_ops())
