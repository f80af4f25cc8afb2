"""Backends on other people's runtimes: their claims, and a reference model as an exported program.

A reference model computes the integers of its weights each time that it runs. Here they are folded once, with torch's
semantics (NUM-01), before a runtime sees them: what is under test is what the runtime does with integers.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from functools import cache, partial
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any, TypeAlias
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.export import Dim, ExportedProgram, decomp_utils, export, exported_program
from torch.fx import GraphModule, Node
from torch.fx.experimental import _config as symbolic
from torch.utils._pytree import tree_flatten, tree_unflatten

from backends.base import Backend, Representation, Taken
from refimpl import BackendConfig
from refimpl.decomposed import OPS, PLAIN_DTYPE
from refimpl.invariants import is_quantize
from refimpl.native import FAMILIES, Table, config_of
from refimpl.patterns import pattern_name
from refimpl.qparams import dtype_range
from refimpl.tracing import attribute_of

Tensors: TypeAlias = Sequence[Tensor]
NOTHING_LEFT = "nothing is left to be done between quantize and dequantize"
"""Name of what a lowered model executes if only identities, such as needless views, are left."""
_DECOMPOSE: Callable[[ExportedProgram, Any], ExportedProgram] = ExportedProgram.run_decompositions
_COMPOSITE = "_collect_all_valid_cia_ops"
_composite_ops: Callable[[], set[Any]] = cache(getattr(exported_program, _COMPOSITE))
"""torch's ops that are made of others, for which it searches all of its libraries on each call."""


class Compiled:
    """A model of a runtime, called with tensors as the reference model is; its outputs have the same structure.

    ``run`` takes the input tensors and returns the output tensors; ``modules``: the node that calls each of the
    reference model's modules, by the module's path.
    """

    def __init__(
        self, reference_model: GraphModule, example_inputs: tuple[Any, ...], run: Callable[[Tensors], Iterable[Tensor]]
    ) -> None:
        with torch.no_grad():
            self.structure = tree_flatten(reference_model(*example_inputs))[1]
        self.run = run
        self.modules = {str(node.target): node.name for node in reference_model.graph.nodes if node.op == "call_module"}

    def __call__(self, *inputs: Any) -> Any:
        values = [value.detach() for value in tree_flatten(inputs)[0] if isinstance(value, Tensor)]
        return tree_unflatten(self.run(values), self.structure)


def owner(paths: Iterable[str], modules: Mapping[str, str], name: str) -> str:
    """Return the reference model's node from which an exported node comes.

    That is the node that calls a module in whose path the exported node is, else its own name: functions keep theirs.
    ``modules``: the node that calls each module, by the module's path.
    """
    callers = (modules[target] for target in modules for path in paths if f"{path}.".startswith(f"model.{target}."))
    return next(callers, name)


def owner_of(node: Node, modules: Mapping[str, str]) -> str:
    """Return the reference model's node from which a node of an exported program comes."""
    return owner([path for path, _ in node.meta.get("nn_module_stack", {}).values()], modules, node.name)


class ExportingBackend(Backend):
    """A backend on a runtime that takes exported programs and is an optional extra.

    ``packages``: those of the extra of the backend's name. ``settings``: the runtime's settings that a result depends
    on, in words; reports show them with the versions. ``table`` and ``patterns``: the backend claims families of ops
    (refimpl.native) with these dtypes, for patterns whose name matches one of the globs.
    """

    representation = Representation.DECOMPOSED
    packages: tuple[str, ...]
    settings: str
    table: Table
    patterns: tuple[str, ...]

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


def export_model(reference_model: GraphModule, example_inputs: tuple[Any, ...]) -> ExportedProgram:
    """Export a decomposed reference model with integer weights; the batch, axis 0 of each input, is dynamic.

    Raises what torch.export raises.
    """
    sizes = [len(value) if isinstance(value, Tensor) and value.dim() else 0 for value in example_inputs]
    shapes = tuple({0: Dim.AUTO} if size and size == max(sizes) else None for size in sizes)  # others are broadcast
    with torch.no_grad(), symbolic.patch(backed_size_oblivious=True):  # type: ignore[attr-defined]
        return export(_Model(fold_weights(reference_model)).eval(), example_inputs, dynamic_shapes=(shapes,))


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


class _Model(nn.Module):
    """A model whose inputs have no names."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *inputs: Any) -> Any:
        return self.model(*inputs)


def fold_weights(reference_model: GraphModule) -> GraphModule:
    """Return a copy that holds its weights as integers and dequantizes them. (CVT-02, CVT-07)"""
    model = copy.deepcopy(reference_model)
    for module in model.modules():
        if hasattr(module, "get_quantized_weight"):
            _hold_integers(module)
    for node in model.graph.nodes:
        if is_quantize(node) and all(operand.op == "get_attr" for operand in node.all_input_nodes):
            _hold_result(model, node)
    model.graph.eliminate_dead_code()
    model.recompile()
    return model


def _hold_integers(module: Any) -> None:
    """Replace a reference module's weight by integers that are dequantized when it runs."""
    bounds = (module.weight_quant_min, module.weight_quant_max)
    bounds = dtype_range(module.weight_dtype) if None in bounds else bounds
    module.register_buffer("integers", module.get_quantized_weight())
    module.weight = None
    dequantize = _dequantize_per_channel if module.weight_scale.dim() else _dequantize_per_tensor
    module.get_weight = partial(dequantize, module, (*bounds, PLAIN_DTYPE[module.weight_dtype]))


def _dequantize_per_channel(module: Any, bounds: tuple[Any, ...]) -> Tensor:
    numbers = (module.weight_scale, module.weight_zero_point, module.weight_axis_int, *bounds)
    return OPS.dequantize_per_channel(module.integers, *numbers)  # type: ignore[no-any-return]


def _dequantize_per_tensor(module: Any, bounds: tuple[Any, ...]) -> Tensor:
    return OPS.dequantize_per_tensor.tensor(  # type: ignore[no-any-return]
        module.integers, module.weight_scale, module.weight_zero_point, *bounds
    )


def _hold_result(model: GraphModule, node: Node) -> None:
    """Replace the node that quantizes a function's weight by the integers."""
    target: Any = node.target
    operands = [attribute_of(model, str(arg.target)) if isinstance(arg, Node) else arg for arg in node.args]
    model.register_buffer(f"{node.name}_integers", target(*operands))
    with model.graph.inserting_before(node):
        node.replace_all_uses_with(model.graph.get_attr(f"{node.name}_integers"))
