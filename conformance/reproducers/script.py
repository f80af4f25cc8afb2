"""Scripts: a reference model that fails, its input and what was found wrong, as a file of torch and the backend alone.

A vendor can run and change such a file without the suite. Modules are written as constructors with their weights,
quantized ones by their integers; inputs by the integers of their grid; what the oracle says as numbers. (NUM-03)
"""

from __future__ import annotations

import base64
import inspect
import re
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.ao.nn.quantized.reference as nnqr
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.fx import GraphModule, Node

from conformance.claims.inputs import Batch
from conformance.oracle.dynamic import asked_dynamic_range
from conformance.oracle.evaluate import Exact, Walk
from conformance.oracle.grids import Grid, placeholder_grids
from conformance.stages.bench import Bench
from refimpl.invariants import is_dequantize, is_quantize
from refimpl.patterns import leaf_name
from refimpl.tracing import attribute_of
from reports.schema import Check, Where
from reports.verdicts import Verdict

WIDTH = 120
PACKED = 32
"""Tensors of more elements than this are written as text that is decoded."""
HANG = 20
_PACK = (
    "def packed(text: str, dtype: torch.dtype, *shape: int) -> torch.Tensor:",
    "    return torch.frombuffer(bytearray(base64.b85decode(text)), dtype=dtype).reshape(shape)",
    "",
)
_IMPORTS = {
    "base64.": "import base64",
    "faulthandler.": "import faulthandler",
    "operator.": "import operator",
    "nni.": "import torch.ao.nn.intrinsic as nni",
    "nnqr.": "import torch.ao.nn.quantized.reference as nnqr",
    "torch.ops.quantized_decomposed": "import torch.ao.quantization.fx._decomposed  # registers the ops",
    "F.": "import torch.nn.functional as F",
}
_MODULES = {nn: "nn", torch.ao.nn.intrinsic: "nni"}


class NoScriptError(Exception):
    """There is nothing to write a script of, or no way to write it; the message says which."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A reference model, the inputs on which it fails, and the check that says how."""

    model: GraphModule
    batch: Batch
    check: Check


def script_of(failure: Failure, bench: Bench, *, name: str, message: str) -> str:
    """Write the script of a failure. Raises NoScriptError for a module that has no plain constructor."""
    model = failure.model
    body = [
        "class Reference(nn.Module):",
        "    def __init__(self) -> None:",
        "        super().__init__()",
        *(f"        {line}" for line in _state(model)),
        "",
        *(f"    {line}" for line in _forward(model)),
        "",
        "",
        *_LEAVES,
        f"inputs = ({', '.join(_inputs(failure))},)",
        f"backend = find_backend({bench.spec!r})",
        "model = Reference().eval()",
        "lowered = backend.lower(torch.fx.GraphModule(model, Leaves().trace(model)), inputs)",
        *_verified(failure, bench),
    ]
    text = "\n".join(line for each in body for line in _wrapped(each))
    packing = "\n".join(_PACK) + "\n\n" if "packed(" in text else ""
    imports = [line for mark, line in _IMPORTS.items() if re.search(rf"(?<![\w.]){re.escape(mark)}", packing + text)]
    plain = "\n".join([*sorted(imports, key=lambda line: "torch" in line), "import torch", "from torch import nn"])
    return f"{_heading(bench, name, message)}\n{plain}\n\n{_DOOR}\n\n\n{packing}{text}\n"


_DOOR = "from backends.discovery import find_backend"
_LEAVES = (
    "class Leaves(torch.fx.Tracer):",
    "    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:",
    "        return True  # what is fused stays one module",
    "",
    "",
)


def _heading(bench: Bench, name: str, message: str) -> str:
    told = re.sub(r'[\\"]', "'", f"{bench.backend.name}: {message.partition(chr(10))[0]}")
    lines = textwrap.wrap(textwrap.shorten(told, 330), WIDTH - 3)
    found = textwrap.wrap(f"Found by {bench.repro(name)}", WIDTH, break_long_words=False, break_on_hyphens=False)
    return '"""' + "\n".join([*lines, "", *found, _ENDS]) + '\n"""\n'


_ENDS = "Needs torch and the backend alone; ends with status 0 once the fault is gone."


def _wrapped(line: str) -> Iterator[str]:
    """Break a line behind commas and between strings, all of which are in brackets."""
    indent = re.match(" *", line).group() + "    "  # type: ignore[union-attr]
    rest = line
    while len(rest) > WIDTH:
        at = max(rest.rfind(", ", 0, WIDTH) + 1, rest.rfind('" "', 0, WIDTH - 1) + 1)
        if at <= len(indent):
            break
        yield rest[:at]
        rest = indent + rest[at:].lstrip()
    yield rest


# -- state ------------------------------------------------------------------------------------------------------------


def _state(model: GraphModule) -> Iterator[str]:
    """Lines that make the modules and tensors that the graph names; qparams two by two."""
    targets = {op: list(dict.fromkeys(node.target for node in model.graph.nodes if node.op == op)) for op in _STATEFUL}
    tensors = {f"self.{_flat(target)}": attribute_of(model, target) for target in targets["get_attr"]}
    if strange := [name for name, value in tensors.items() if not isinstance(value, Tensor)]:
        raise NoScriptError(f"the attribute {strange[0]} is a {type(tensors[strange[0]]).__name__}")
    qparams = [name for name, value in tensors.items() if not value.dim()]
    for start in range(0, len(qparams), 2):
        names = qparams[start : start + 2]
        yield f"{', '.join(names)} = {', '.join(_tensor(tensors[name]) for name in names)}"
    for name, value in tensors.items():
        if value.dim() > 1:  # a weight is a parameter: tracing computes at once with tensors that are none
            yield f"{name} = nn.Parameter({_tensor(value)})"
        elif value.dim():
            yield f"{name} = {_tensor(value)}"
    for target in targets["call_module"]:
        yield from _module(f"self.{_flat(target)}", model.get_submodule(target))


_STATEFUL = ("get_attr", "call_module")


def _flat(target: str) -> str:
    return target.replace(".", "_")


def _module(target: str, module: nn.Module) -> Iterator[str]:
    """Lines that make one module, with its state."""
    if isinstance(module, nn.Sequential):
        parts = list(module.children())
        yield f"{target} = {_class(type(module))}({', '.join(_constructed(part) for part in parts)})"
        for number, part in enumerate(parts):
            if _is_reference(part):
                yield from _quantized(f"{target}[{number}]", part, f"{target}[{number}]")
    elif _is_reference(module):
        yield from _quantized(target, module, _constructed(module))
    else:
        yield f"{target} = {_constructed(module)}"
        for name, value in module.state_dict().items():
            if value.is_floating_point():
                yield f"{target}.{name}.data = {_tensor(value)}"


def _is_reference(module: nn.Module) -> bool:
    return type(module).__module__.startswith(nnqr.__name__)


def _class(kind: type) -> str:
    space = next((name for space, name in _MODULES.items() if hasattr(space, kind.__name__)), None)
    if space is None:
        raise NoScriptError(f"{kind.__name__} is no module of torch.nn")
    return f"{space}.{kind.__name__}"


def _constructed(module: nn.Module) -> str:
    """The call of a module's constructor; of a reference module, that of its float class."""
    kind = getattr(nn, type(module).__name__, type(module))
    words = []
    for name, parameter in list(inspect.signature(kind.__init__).parameters.items())[1:]:
        default, value = parameter.default, _argument(module, name)
        if value is inspect.Parameter.empty or parameter.kind not in _NAMED or _same(value, default):
            continue
        words.append(repr(value) if default is inspect.Parameter.empty else f"{name}={value!r}")
    return f"{_class(kind)}({', '.join(words)})"


_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def _argument(module: nn.Module, name: str) -> Any:
    """What a module says it was constructed with; a bias is there or not."""
    value = getattr(module, name, inspect.Parameter.empty)
    if name == "bias":
        return value is not None or getattr(module, "weight", None) is None
    return tuple(value) if isinstance(value, (tuple, list)) else value


def _same(value: Any, default: Any) -> bool:
    return bool(value == default or (isinstance(value, tuple) and value == (default,) * len(value)))


def _quantized(target: str, module: Any, made: str) -> Iterator[str]:
    """A reference module of a float one with the weight's integers; its name is free again after each."""
    if not hasattr(module, "weight_scale"):
        raise NoScriptError(f"{type(module).__name__} has several weights")
    yield f"made = {made}"
    scale, zero_point = module.weight_scale, module.weight_zero_point
    is_per_channel = scale.dim() > 0
    along = [-1 if axis == module.weight_axis_int else 1 for axis in range(module.weight.dim())]
    integers = module.get_quantized_weight()
    integers = integers.int_repr() if integers.is_quantized else integers
    shift, factor = (each.reshape(along) if is_per_channel else each for each in (zero_point, scale))
    yield f"scale = {_tensor(scale)}"
    yield f"zero_point = {_tensor(zero_point)}"
    if torch.equal((integers.long() - shift) * factor, module.get_weight()):
        view = f".reshape({', '.join(map(str, along))})" if is_per_channel else ""
        less = f" - zero_point{view}" if bool((zero_point != 0).any()) else ""
        yield f"made.weight.data = ({_tensor(integers, torch.int64)}{less}) * scale{view}"
    else:
        yield f"made.weight.data = {_tensor(module.weight)}"
    if getattr(module, "bias", None) is not None:  # an embedding has none
        yield f"made.bias.data = {_tensor(module.bias)}"
    qparams = {"qscheme": module.weight_qscheme, "dtype": module.weight_dtype, "axis": module.weight_axis_int}
    more = {"quant_min": module.weight_quant_min, "quant_max": module.weight_quant_max}
    more |= {"is_decomposed": True} if module.is_decomposed else {}
    qparams |= {key: value for key, value in more.items() if value is not None}
    words = [f'"{key}": {value!r}' for key, value in qparams.items()]
    kind = f"nnqr.{type(module).__name__}"
    yield f'{target} = {kind}.from_float(made, {{"scale": scale, "zero_point": zero_point, {", ".join(words)}}})'


def _tensor(value: Tensor, dtype: torch.dtype | None = None) -> str:
    """A tensor as an expression of its own dtype, or of `dtype`, int64: nested lists, or packed."""
    value = value.detach()
    told = {torch.float32: "", torch.int64: ""}.get(dtype or value.dtype, f", dtype={dtype or value.dtype}")
    if value.numel() <= PACKED:
        return f"torch.tensor({_nested(value)}{told})"
    text = base64.b85encode(bytes(value.contiguous().flatten().view(torch.uint8).tolist())).decode()
    chunks = " ".join(f'"{text[start : start + 90]}"' for start in range(0, len(text), 90))
    sizes = "".join(f", {size}" for size in value.shape)
    return f"packed({chunks}, {value.dtype}{sizes}){'.long()' if dtype is torch.int64 else ''}"


def _nested(value: Tensor) -> str:
    if value.dim():
        return f"[{', '.join(map(_nested, value))}]"
    return f"{value.item():.9g}" if value.is_floating_point() else str(int(value))


# -- the graph --------------------------------------------------------------------------------------------------------


def _forward(model: GraphModule) -> Iterator[str]:
    """The forward method: a line for each op; get_attr stands where it is read."""
    names = _names(model)
    inputs = [names[node] for node in model.graph.nodes if node.op == "placeholder"]
    yield f"def forward(self, {', '.join(inputs)}):"
    for node in model.graph.nodes:
        if node.op == "output":
            yield f"    return {_written(node.args[0], names)}"
        elif is_quantize(node) and [user.target for user in node.users] == ["dequantize"]:
            names[node] = _call(node, names)  # where the method is called
        elif node.op not in ("placeholder", "get_attr"):
            yield f"    {names[node]} = {_call(node, names)}"


def _names(model: GraphModule) -> dict[Node, str]:
    """Short names for what quantizes and dequantizes, of which there is most; its own for every other node."""
    names: dict[Node, str] = {}
    for node in model.graph.nodes:
        short = "q" if is_quantize(node) else "d" if is_dequantize(node) else ""
        count = sum(name.startswith(f"_{short}") for name in names.values())
        own = f"self.{_flat(node.target)}" if node.op == "get_attr" else node.name
        names[node] = f"_{short}{count}" if short else own
    return names


def _call(node: Node, names: dict[Node, str]) -> str:
    words = [_written(each, names) for each in node.args]
    words += [f"{key}={_written(each, names)}" for key, each in node.kwargs.items()]
    if node.op == "call_method":
        return f"{words[0]}.{node.target}({', '.join(words[1:])})"
    if node.op == "call_module":
        return f"self.{_flat(str(node.target))}({', '.join(words)})"
    target: Any = node.target
    name = f"torch.ops.{target}" if isinstance(target, OpOverload) else leaf_name(target)
    return f"{name.removeprefix('builtins.')}({', '.join(words)})"


def _written(value: Any, names: dict[Node, str]) -> str:
    if isinstance(value, Node):
        return names[value]
    if isinstance(value, (tuple, list)):
        inner = ", ".join(_written(each, names) for each in value)
        return f"[{inner}]" if isinstance(value, list) else f"({inner},)" if len(value) == 1 else f"({inner})"
    if isinstance(value, slice):
        return f"slice({', '.join(_written(each, names) for each in (value.start, value.stop, value.step))})"
    return f'float("{value}")' if isinstance(value, float) and value in (float("inf"), float("-inf")) else repr(value)


def _inputs(failure: Failure) -> Iterator[str]:
    """The inputs: integers on their grids, where they have one that they are on."""
    for value, grid in zip(failure.batch, placeholder_grids(failure.model), strict=True):
        integers = None if grid is None else grid.integers(value).round()
        if grid is None or integers is None or not torch.equal(grid.values(integers), value):
            yield _tensor(value)
            continue
        listed = _tensor(integers.to(getattr(torch, grid.dtype.replace("q", ""))), torch.int64)
        yield f"(({listed}.double() - {grid.zero_point}) * {grid.scale!r}).float()"


# -- what is wrong ----------------------------------------------------------------------------------------------------


def _verified(failure: Failure, bench: Bench) -> Iterator[str]:
    """Lines that run the lowered model and assert what does not hold; where it raises or dies, running it will do."""
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
    elif "change" in evidence:
        yield from _REPEATED
    elif check.verdict is not Verdict.CRASHED:
        walk = Walk(failure.model, bench.capabilities, dynamic_range=asked_dynamic_range(failure.model))
        yield from _numbers(check, walk.exact(failure.batch), evidence.get("where", Where()).output or 0)


_REPEATED = (
    "for _ in range(100):",
    "    again = lowered(*(value.clone() for value in inputs))",
    "    repeated = [again] if isinstance(again, torch.Tensor) else list(again)",
    '    assert all(map(torch.equal, outputs, repeated)), f"{outputs}, and then {repeated}"',
)


def _numbers(check: Check, exacts: Sequence[Exact], number: int) -> Iterator[str]:
    """Lines about the form of the outputs, and then about the worst places of one."""
    indexes: Any = check.evidence.get("index")
    exact = exacts[number]
    position = f"position = outputs[{number}].double(){_on_grid(exact.grid)}"
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
    places = ", ".join(_place(exact, tuple(index)) for index in indexes[:4])
    yield f"for index, exact, bound in [{places}]:"
    yield "    found = position[index].item()"
    yield '    assert abs(found - exact) <= bound, f"at {index}: {found}, exactly {exact}, allowed {bound} beside it"'


def _on_grid(grid: Grid | None) -> str:
    return "" if grid is None else f" / {grid.scale!r} + {grid.zero_point}"


def _place(exact: Exact, index: tuple[int, ...]) -> str:
    """An index, the value there and the bound. What dequantize rounds off is some 2⁻²³ of the integer."""
    slack = float(exact.slack.expand_as(exact.real)[index])
    if exact.grid is None:
        step = float(exact.step.expand_as(exact.real)[index])
        return f"({index}, {float(exact.real[index])!r}, {slack * step!r})"
    return f"({index}, {float(exact.integers[index]):.9g}, {0.5 + slack + 2.0**-14:.9g})"
