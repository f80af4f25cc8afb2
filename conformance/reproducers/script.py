"""Scripts: a failing reference model, its input and its fault, as a file that needs only torch and the backend.

A vendor can run and change such a file without the suite. Modules are written as constructors with their weights,
quantized ones as their integers, inputs as the integers of their grid, and exact results as numbers (NUM-03). A
vendor's own modules are imported from the vendor's package; those that a constructor does not make again are pickled.
"""

from __future__ import annotations

import base64
import pickle
import re
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from fx_quant_conformance.backends.base import Representation
from fx_quant_conformance.backends.lowering import in_form
from fx_quant_conformance.backends.names import format_error
from fx_quant_conformance.conformance.claims.inputs import Batch
from fx_quant_conformance.conformance.oracle.evaluate import Walk
from fx_quant_conformance.conformance.oracle.exact import Exact
from fx_quant_conformance.conformance.oracle.grids import Grid, placeholder_grids
from fx_quant_conformance.conformance.reproducers.python_text import WIDTH, compose
from fx_quant_conformance.conformance.reproducers.python_text import spell as spell_plain
from fx_quant_conformance.conformance.reproducers.spelling import (
    NoScriptError,
    check_importable,
    flatten,
    format_call,
    format_constructor,
    format_own_constructor,
    is_vendors,
    name_class,
    spell,
)
from fx_quant_conformance.conformance.stages.bench import Bench
from fx_quant_conformance.refimpl.graph.invariants import is_dequantize, is_quantize
from fx_quant_conformance.refimpl.graph.tracing import attribute_of
from fx_quant_conformance.refimpl.legacy import is_reference
from fx_quant_conformance.refimpl.legacy.weights import read_integers
from fx_quant_conformance.refimpl.observers.decomposed import REGISTRAR
from fx_quant_conformance.reports.schema import Check, Where
from fx_quant_conformance.reports.text import tame
from fx_quant_conformance.reports.verdicts import Verdict

PACKED = 32
"""Tensors of more elements than this are written as encoded text."""
HANG = 20
"""Seconds after which the script of a timeout gives up."""
_UNPACKERS = {
    "packed(": "def packed(text: str, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:\n"
    "    return torch.frombuffer(bytearray(base64.b85decode(text)), dtype=dtype).reshape(shape)",
    "unpickled(": "def unpickled(text: str) -> nn.Module:\n    return pickle.loads(base64.b85decode(text))",
}
_HOMES = {
    "find_backend": "fx_quant_conformance.backends.discovery",
    "lower_reference": "fx_quant_conformance.backends.lowering",
}
_LEAVES = (
    "class Leaves(torch.fx.Tracer):",
    "    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:",
    "        return True  # what is fused stays one module",
)
_ENDS = "Needs torch and the backend alone; ends with status 0 once the fault is gone."
_STATEFUL = ("get_attr", "call_module")
_REPEATED = (
    "for _ in range(100):",
    "    again = lowered(*(value.clone() for value in inputs))",
    "    repeated = [again] if isinstance(again, torch.Tensor) else list(again)",
    '    assert all(map(torch.equal, outputs, repeated)), f"{outputs}, and then {repeated}"',
)
_KEPT = (
    "kept = [each.clone() for each in outputs]",
    "for _ in range(8):",
    "    lowered(*(torch.zeros_like(value) for value in inputs))",
    'assert all(map(torch.equal, outputs, kept)), f"{kept}, and after further runs {outputs}"',
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A reference model, the inputs on which it fails, and the check that says how."""

    model: GraphModule
    batch: Batch
    check: Check


def script_of(failure: Failure, bench: Bench, *, name: str, message: str) -> str:
    """Write the script of a failure. Raises NoScriptError for a module that can be neither constructed nor pickled."""
    model = in_form(bench.backend.representation, failure.model)
    body = [
        "class Reference(nn.Module):",
        "    def __init__(self) -> None:",
        "        super().__init__()",
        *(f"        {line}" for line in _write_state(model)),
        *(f"    {line}" for line in _write_forward(model)),
        *_LEAVES,
        f"inputs = ({', '.join(_format_inputs(failure))},)",
        f"backend = find_backend({bench.spec!r})",
        *(f"import {home}  # find_backend has made it importable" for home in _find_homes(model)),
        "model = Reference().eval()",
        f"lowered = {_format_lower(bench)}torch.fx.GraphModule(model, Leaves().trace(model)), inputs)",
        *_write_assertions(failure, bench),
    ]
    text = "\n".join(body)
    text = "\n".join([*(code for mark, code in _UNPACKERS.items() if mark in text), text])
    registrar = REGISTRAR if "torch.ops.quantized_decomposed" in text else ""
    return compose(format_heading(bench, name, message), text, _HOMES, registrar=registrar)


def _format_lower(bench: Bench) -> str:
    """Spell the call that lowers a model, up to its argument: a backend that takes programs has the model exported."""
    return "lower_reference(backend, " if bench.backend.representation is Representation.EXPORTED else "backend.lower("


def format_heading(bench: Bench, name: str, message: str, ends: str = _ENDS) -> str:
    """Return the docstring of a script: what is wrong, which run has found it, and how the script ends."""
    fault = re.sub(r'[\\"]', "'", tame(f"{bench.backend.name}: {message.partition(chr(10))[0]}"))
    lines = textwrap.wrap(textwrap.shorten(fault, 330), WIDTH - 3)
    command = textwrap.wrap(f"Found by {bench.repro(name)}", WIDTH, break_long_words=False, break_on_hyphens=False)
    return "\n".join([*lines, "", *command, f"{ends}\n"])


# -- state ------------------------------------------------------------------------------------------------------------


def _write_state(model: GraphModule) -> Iterator[str]:
    """Yield lines that make the modules and tensors that the graph names; qparams two by two."""
    targets = {op: list(dict.fromkeys(node.target for node in model.graph.nodes if node.op == op)) for op in _STATEFUL}
    tensors = {f"self.{flatten(target)}": attribute_of(model, target) for target in targets["get_attr"]}
    if strange := [name for name, value in tensors.items() if not isinstance(value, Tensor)]:
        raise NoScriptError(f"the attribute {strange[0]} is a {type(tensors[strange[0]]).__name__}")
    qparams = [name for name, value in tensors.items() if not value.dim()]
    for start in range(0, len(qparams), 2):
        names = qparams[start : start + 2]
        yield f"{', '.join(names)} = {', '.join(_format_tensor(tensors[name]) for name in names)}"
    for name, value in tensors.items():
        if value.dim() > 1:  # a weight is a parameter: tracing computes at once with other tensors
            yield f"{name} = nn.Parameter({_format_tensor(value)})"
        elif value.dim():
            yield f"{name} = {_format_tensor(value)}"
    for target in targets["call_module"]:
        yield from _write_module(f"self.{flatten(target)}", model.get_submodule(target))


def _write_module(target: str, module: nn.Module) -> Iterator[str]:
    """Yield lines that make one module, with its state."""
    if is_vendors(type(module)):
        yield from _write_own(target, module)
    elif isinstance(module, nn.Sequential) and not any(is_vendors(type(part)) for part in module.children()):
        parts = list(module.children())
        yield f"{target} = {name_class(module)}({', '.join(format_constructor(part) for part in parts)})"
        for number, part in enumerate(parts):
            if is_reference(part):
                yield from _write_quantized(f"{target}[{number}]", part, f"{target}[{number}]")
            else:
                yield from _write_values(f"{target}[{number}]", part)
    elif is_reference(module):
        yield from _write_quantized(target, module, format_constructor(module))
    elif isinstance(module, nn.Sequential):
        yield from _write_pickled(target, module)
    else:
        yield f"{target} = {format_constructor(module)}"
        yield from _write_values(target, module)


def _write_values(target: str, module: nn.Module) -> Iterator[str]:
    """Yield lines that set a module's floating-point parameters and buffers."""
    for name, value in module.state_dict().items():
        if value.is_floating_point():
            yield f"{target}.{name}.data = {_format_tensor(value)}"


def _write_own(target: str, module: nn.Module) -> Iterator[str]:
    """Yield lines that make a vendor's own module: by its constructor where that shows how, else unpickled."""
    check_importable(type(module))
    constructor = format_own_constructor(module)
    if constructor is None or not all(name.replace(".", "").isidentifier() for name in _state_names(module)):
        yield from _write_pickled(target, module)
    else:
        yield f"{target} = {constructor}"
        yield from _write_values(target, module)


def _state_names(module: nn.Module) -> Iterator[str]:
    for name in module.state_dict():
        yield from name.split(".")


def _write_pickled(target: str, module: nn.Module) -> Iterator[str]:
    try:
        content = pickle.dumps(module)
    except Exception as error:  # whatever a vendor's own class raises
        raise NoScriptError(f"{name_class(module)} cannot be pickled: {format_error(error)}") from error
    yield f"{target} = unpickled({_format_bytes(content)})"


def _find_homes(model: GraphModule) -> list[str]:
    """Return the modules that a script imports for a vendor's own classes and functions. Raises NoScriptError."""
    called = {node.target for node in model.graph.nodes if node.op == "call_function"}
    own = [value for value in (*called, *map(type, model.modules())) if is_vendors(value) and value is not type(model)]
    for value in own:
        check_importable(value)
    return sorted({value.__module__ for value in own})


def _write_quantized(target: str, module: Any, constructor: str) -> Iterator[str]:
    """Yield lines that make a reference module of a float one, named ``made``, with the weight's integers."""
    if not hasattr(module, "weight_scale"):
        raise NoScriptError(f"{type(module).__name__} has several weights")
    yield f"made = {constructor}"
    scale, zero_point = module.weight_scale, module.weight_zero_point
    is_per_channel = scale.dim() > 0
    along = [-1 if axis == module.weight_axis_int else 1 for axis in range(module.weight.dim())]
    integers = read_integers(module)
    shift, factor = (value.reshape(along) if is_per_channel else value for value in (zero_point, scale))
    yield f"scale = {_format_tensor(scale)}"
    yield f"zero_point = {_format_tensor(zero_point)}"
    if torch.equal((integers.long() - shift) * factor, module.get_weight()):
        view = f".reshape({', '.join(map(str, along))})" if is_per_channel else ""
        shifted = f" - zero_point{view}" if bool((zero_point != 0).any()) else ""
        yield f"made.weight.data = ({_format_tensor(integers, torch.int64)}{shifted}) * scale{view}"
    else:
        yield f"made.weight.data = {_format_tensor(module.weight)}"
    if getattr(module, "bias", None) is not None:  # an embedding has none
        yield f"made.bias.data = {_format_tensor(module.bias)}"
    qparams = {"qscheme": module.weight_qscheme, "dtype": module.weight_dtype, "axis": module.weight_axis_int}
    optional = {"quant_min": module.weight_quant_min, "quant_max": module.weight_quant_max}
    optional |= {"is_decomposed": True} if module.is_decomposed else {}
    qparams |= {key: value for key, value in optional.items() if value is not None}
    words = [f'"{key}": {spell_plain(value, repr)}' for key, value in qparams.items()]
    kind = f"nnqr.{type(module).__name__}"
    yield f'{target} = {kind}.from_float(made, {{"scale": scale, "zero_point": zero_point, {", ".join(words)}}})'


def _format_tensor(value: Tensor, dtype: torch.dtype | None = None) -> str:
    """Spell a tensor in its own dtype, or in ``dtype``, int64: as nested lists, or packed."""
    value = value.detach()
    suffix = {torch.float32: "", torch.int64: ""}.get(dtype or value.dtype, f", dtype={dtype or value.dtype}")
    if value.numel() <= PACKED:
        return f"torch.tensor({_format_nested(value)}{suffix})"
    chunks = _format_bytes(bytes(value.contiguous().flatten().view(torch.uint8).tolist()))
    return f"packed({chunks}, {value.dtype}, {tuple(value.shape)}){'.long()' if dtype is torch.int64 else ''}"


def _format_bytes(value: bytes) -> str:
    text = base64.b85encode(value).decode()
    return " ".join(f'"{text[start : start + 80]}"' for start in range(0, len(text), 80))


def _format_nested(value: Tensor) -> str:
    if value.dim():
        return f"[{', '.join(map(_format_nested, value))}]"
    return f"{value.item():.9g}" if value.is_floating_point() else str(int(value))


# -- the graph --------------------------------------------------------------------------------------------------------


def _write_forward(model: GraphModule) -> Iterator[str]:
    """Yield the forward method: a line for each op; get_attr stands where it is read."""
    names = _name_nodes(model)
    inputs = [names[node] for node in model.graph.nodes if node.op == "placeholder"]
    yield f"def forward(self, {', '.join(inputs)}):"
    for node in model.graph.nodes:
        if node.op == "output":
            yield f"    return {spell(node.args[0], names)}"
        elif is_quantize(node) and [user.target for user in node.users] == ["dequantize"]:
            names[node] = format_call(node, names)  # where the method is called
        elif node.op not in ("placeholder", "get_attr"):
            yield f"    {names[node]} = {format_call(node, names)}"


def _name_nodes(model: GraphModule) -> dict[Node, str]:
    """Give short names to nodes that quantize and dequantize, the most frequent ones; others keep their own."""
    names: dict[Node, str] = {}
    for node in model.graph.nodes:
        short = "q" if is_quantize(node) else "d" if is_dequantize(node) else ""
        count = sum(name.startswith(f"_{short}") for name in names.values())
        own = f"self.{flatten(node.target)}" if node.op == "get_attr" else node.name
        names[node] = f"_{short}{count}" if short else own
    return names


def _format_inputs(failure: Failure) -> Iterator[str]:
    """Yield the inputs: as integers of their grids where they lie on one."""
    for value, grid in zip(failure.batch, placeholder_grids(failure.model), strict=True):
        integers = None if grid is None else grid.integers(value).round()
        if grid is None or integers is None or not torch.equal(grid.values(integers), value):
            yield _format_tensor(value)
            continue
        levels = _format_tensor(integers.to(getattr(torch, grid.dtype.replace("q", ""))), torch.int64)
        yield f"(({levels}.double() - {grid.zero_point}) * {grid.scale!r}).float()"


# -- what is wrong ----------------------------------------------------------------------------------------------------


def _write_assertions(failure: Failure, bench: Bench) -> Iterator[str]:
    """Yield lines that run the lowered model and assert what fails; where it raises or dies, running it is enough."""
    check, evidence = failure.check, failure.check.evidence
    if check.verdict is Verdict.TIMEOUT:
        yield f"faulthandler.dump_traceback_later({HANG}, exit=True)"
    yield "output = lowered(*(value.clone() for value in inputs))"
    yield "outputs = [output] if isinstance(output, torch.Tensor) else list(output)"
    if "float_ops" in evidence or check.stage == "execution":
        yield "execution = backend.execution(lowered)"
        yield "assert execution is None or (execution.quantized_ops and not execution.float_fallbacks), execution"
    elif check.rule == "LOW-01":
        yield "backend.execution(lowered)"
    elif check.rule == "NUM-07":
        yield from _REPEATED if "change" in evidence else _KEPT
    elif check.verdict is not Verdict.CRASHED:
        walk = Walk(failure.model, bench.capabilities)
        yield from _write_comparison(check, walk.exact(failure.batch), evidence.get("where", Where()).output or 0)


def _write_comparison(check: Check, exacts: Sequence[Exact], number: int) -> Iterator[str]:
    """Yield lines that compare an output's worst places; without any, lines that check the form of all outputs."""
    indexes: Any = check.evidence.get("index")
    exact = exacts[number]
    position = f"position = outputs[{number}].double(){_format_steps(exact.grid)}"
    if check.verdict is Verdict.FALLBACK and exact.grid is not None:
        zero = exact.grid.zero_point
        yield position
        yield f"near = ((position - {zero}).abs() + {abs(zero)}) * 2.0**-22 + 2.0**-20"
        yield 'assert bool(((position - position.round()).abs() <= near).all()), f"between the integers: {position}"'
        return
    if indexes is None:
        shapes = ", ".join(repr(tuple(exact.real.shape)) for exact in exacts)
        yield f"for found, shape in zip(outputs, [{shapes}], strict=True):"
        yield '    assert found.shape == shape and found.dtype is torch.float32, f"{found.dtype}, {found.shape}"'
        yield '    assert bool(torch.isfinite(found).all()), f"not finite: {found}"'
        return
    yield position
    yield "# Where, the exact real result in steps of the output's grid, how far from it a right integer is at most."
    places = ", ".join(_format_bound(exact, tuple(index)) for index in indexes[:4])
    yield f"for index, exact, bound in [{places}]:"
    yield "    found = position[index].item()"
    yield '    assert abs(found - exact) <= bound, f"at {index}: {found}, exactly {exact}, allowed {bound} beside it"'


def _format_steps(grid: Grid | None) -> str:
    return "" if grid is None else f" / {grid.scale!r} + {grid.zero_point}"


def _format_bound(exact: Exact, index: tuple[int, ...]) -> str:
    """Spell an index, the exact value there and the bound; dequantize rounds off some 2⁻²³ of the integer."""
    slack = float(exact.slack.expand_as(exact.real)[index])
    if exact.grid is None:
        step = float(exact.step.expand_as(exact.real)[index])
        return f"({index}, {float(exact.real[index])!r}, {slack * step!r})"
    centre, half = exact.target.centre[index], torch.as_tensor(exact.target.half).expand_as(exact.real)[index]
    return f"({index}, {float(centre):.9g}, {float(half) + slack + 2.0**-14:.9g})"
