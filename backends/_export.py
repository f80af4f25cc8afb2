"""What backends on other people's runtimes share: their claims, and a reference model as an exported program.

A reference model computes the integers of its weights anew each time that it runs. Here they are folded once, with
torch's semantics (NUM-01), before a runtime sees them: what is under test is what the runtime does with integers.
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
"""What is executed of a view that is none: an identity."""


class Compiled:
    """A model of a runtime, called with tensors as the reference model is; its outputs have the same structure.

    ``run`` takes the input tensors and gives the output tensors; ``modules``: the reference model's modules, by the
    path of each the node that calls it.
    """

    def __init__(
        self, reference_model: GraphModule, example_inputs: tuple[Any, ...], run: Callable[[Tensors], Iterable[Tensor]]
    ) -> None:
        with torch.no_grad():
            self.structure = tree_flatten(reference_model(*example_inputs))[1]
        self.run = run
        self.modules = {str(node.target): node.name for node in reference_model.graph.nodes if node.op == "call_module"}

    def __call__(self, *inputs: Any) -> Any:
        given = [value.detach() for value in tree_flatten(inputs)[0] if isinstance(value, Tensor)]
        return tree_unflatten(self.run(given), self.structure)


def owner(paths: Iterable[str], modules: Mapping[str, str], name: str) -> str:
    """Return the reference model's node behind an exported one.

    That is the node which calls a module in whose path it is, else its own name, for functions keep theirs.
    ``modules``: of each module by its path, the node that calls it.
    """
    found = (modules[target] for target in modules for path in paths if f"{path}.".startswith(f"model.{target}."))
    return next(found, name)


def owner_of(node: Node, modules: Mapping[str, str]) -> str:
    """Return the reference model's node behind a node of an exported program."""
    return owner([path for path, _ in node.meta.get("nn_module_stack", {}).values()], modules, node.name)


class ExportingBackend(Backend):
    """A backend on a runtime that takes exported programs, and is an optional extra.

    ``packages``: what the extra of the backend's name brings. ``settings``: those of the runtime that a result depends
    on, in words; reports show them beside the versions. ``table`` and ``patterns``: it claims families of ops
    (refimpl.native) with these dtypes, of the patterns whose name matches one of the globs.
    """

    representation = Representation.DECOMPOSED
    packages: tuple[str, ...]
    settings: str
    table: Table
    patterns: tuple[str, ...]

    def backend_config(self) -> BackendConfig:
        """Return the claims by ``table`` and ``patterns``."""
        config = config_of(self.name, self.table, FAMILIES)
        names = {id(entry): pattern_name(entry.normal_pattern) for entry in config.configs}
        entries = [each for each in config.configs if any(fnmatchcase(names[id(each)], glob) for glob in self.patterns)]
        return BackendConfig(self.name).set_backend_pattern_configs(entries)

    def unavailable_reason(self) -> str | None:
        """Say what to install of the packages."""
        absent = [each for each in self.packages if find_spec(each) is None]
        how = f"pip install -c constraints.txt -e '.[{self.name}]'"
        return f"{', '.join(absent)} not installed: {how}" if absent else None

    def versions(self) -> dict[str, str]:
        """The runtime, the exporters before it, and the settings."""
        return {name: version(name) for name in (*self.packages, "torch")} | {"settings": self.settings}


_NO_BATCH: dict[str, Taken] = {"_unbatched": (False,)}
_TENSORS: dict[str, Taken] = {"other": ("tensor", "itself"), "alpha": (1,)}
LIMITS: dict[str, dict[str, Taken]] = {
    **dict.fromkeys(("nn.Conv1d", "nn.Conv2d", "nn.Conv3d"), _NO_BATCH | {"padding_mode": ("zeros",)}),
    **dict.fromkeys(("torch.conv1d", "torch.conv2d", "torch.conv3d"), _NO_BATCH),
    **dict.fromkeys(("operator.add", "operator.mul", "torch.add", "torch.mul"), _TENSORS),
}
"""What runs in float in any program: a padding other than by zeros is an op of its own; numbers are floats."""


def exported(reference_model: GraphModule, example_inputs: tuple[Any, ...]) -> ExportedProgram:
    """Export a decomposed reference model whose weights are integers; the batch, axis 0 of each input, is dynamic.

    Raises what torch.export raises.
    """
    rows = [len(value) if isinstance(value, Tensor) and value.dim() else 0 for value in example_inputs]
    shapes = tuple({0: Dim.AUTO} if each and each == max(rows) else None for each in rows)  # others are broadcast
    with torch.no_grad(), symbolic.patch(backed_size_oblivious=True):  # type: ignore[attr-defined]
        return export(_Model(folded(reference_model)).eval(), example_inputs, dynamic_shapes=(shapes,))


@contextmanager
def sparing() -> Iterator[None]:
    """Let programs be ``decomposed``, and torch's composite ops be sought once in a process."""
    with (
        patch.object(ExportedProgram, "run_decompositions", decomposed),
        patch.object(decomp_utils, _COMPOSITE, _composite_ops),
    ):
        yield


def decomposed(program: ExportedProgram, table: Mapping[Any, Any]) -> ExportedProgram:
    """Decompose as ``run_decompositions`` does, if there is something to decompose.

    With an eye to the program's own ops alone: torch prepares all that it has, each time, which takes as long as all
    else in an export.
    """
    targets = {node.target for node in program.graph.nodes if node.op == "call_function"} - {operator.getitem}
    if targets.isdisjoint(table) and all(isinstance(each, OpOverload) and _stays(each) for each in targets):
        return program
    own, absent = _composite_ops() & targets, _composite_ops() - targets
    with patch.object(exported_program, _COMPOSITE, lambda: own):
        return _DECOMPOSE(program, {op: how for op, how in table.items() if op not in absent})


def _stays(op: OpOverload) -> bool:
    """Whether torch leaves an op that no table names.

    It does not leave one that writes to its inputs, nor one that is made of others and may be a view (a batch norm
    counts as such).
    """
    key = "CompositeImplicitAutograd"
    is_composite = torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), key)  # type: ignore[no-untyped-call]
    return not op._schema.is_mutable and (not is_composite or op in _composite_ops())


_DECOMPOSE: Callable[[ExportedProgram, Any], ExportedProgram] = ExportedProgram.run_decompositions
_COMPOSITE = "_collect_all_valid_cia_ops"
_composite_ops: Callable[[], set[Any]] = cache(getattr(exported_program, _COMPOSITE))
"""torch's ops that are made of others, which it seeks in all of its libraries each time."""


class _Model(nn.Module):
    """A model whose inputs have no names."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *inputs: Any) -> Any:
        return self.model(*inputs)


def folded(reference_model: GraphModule) -> GraphModule:
    """Return a copy that holds its weights as integers, and dequantizes them. (CVT-02, CVT-07)"""
    model = copy.deepcopy(reference_model)
    for module in model.modules():
        if hasattr(module, "get_quantized_weight"):
            _hold_integers(module)
    for node in model.graph.nodes:
        if is_quantize(node) and all(each.op == "get_attr" for each in node.all_input_nodes):
            _hold_result(model, node)
    model.graph.eliminate_dead_code()
    model.recompile()
    return model


def _hold_integers(module: Any) -> None:
    """Let a reference module's weight be integers that are dequantized when it runs."""
    asked = (module.weight_quant_min, module.weight_quant_max)
    ends = dtype_range(module.weight_dtype) if None in asked else asked
    bounds = (*ends, PLAIN_DTYPE[module.weight_dtype])
    module.register_buffer("integers", module.get_quantized_weight())
    module.weight = None
    module.get_weight = partial(_per_channel if module.weight_scale.dim() else _per_tensor, module, bounds)


def _per_channel(module: Any, bounds: tuple[Any, ...]) -> Tensor:
    numbers = (module.weight_scale, module.weight_zero_point, module.weight_axis_int, *bounds)
    return OPS.dequantize_per_channel(module.integers, *numbers)  # type: ignore[no-any-return]


def _per_tensor(module: Any, bounds: tuple[Any, ...]) -> Tensor:
    return OPS.dequantize_per_tensor.tensor(  # type: ignore[no-any-return]
        module.integers, module.weight_scale, module.weight_zero_point, *bounds
    )


def _hold_result(model: GraphModule, node: Node) -> None:
    """Put the integers of a weight that a function takes in the place of what computes them."""
    target: Any = node.target
    operands = [attribute_of(model, str(each.target)) if isinstance(each, Node) else each for each in node.args]
    model.register_buffer(f"{node.name}_integers", target(*operands))
    with model.graph.inserting_before(node):
        node.replace_all_uses_with(model.graph.get_attr(f"{node.name}_integers"))
