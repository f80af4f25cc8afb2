"""TorchInductor on the CPU: torch.compile of the exported reference model, with freezing.

Inductor replaces convolutions and linear layers between dequantize and quantize by oneDNN's integer kernels, and max
pools by torch's kernel. Everything else becomes C++ loops, which load integers, compute in float32 in registers, round,
and store integers: here, this counts as executed on quantized tensors. A fallback to float is each call of a library's
kernel that takes floats.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.fx import symbolic_trace
from torch.fx.experimental import _config as symbolic

from fx_quant_conformance.backends import exporting
from fx_quant_conformance.backends.base import Capabilities, Execution
from fx_quant_conformance.backends.exporting import Compiled, ExportingBackend, Tensors, leave_nothing, owner_of
from fx_quant_conformance.refimpl import export_reference
from fx_quant_conformance.refimpl.config.native import DYNAMIC_U8_S8, U8, U8_S8, Table

TABLE: Table = {
    "conv": (U8_S8,),
    "linear": (U8_S8, DYNAMIC_U8_S8),
    **dict.fromkeys(("binary", "cat", "default", "fixed qparams", "share qparams"), (U8,)),
}
PATTERNS = (
    "nn.Conv[12]d*",
    "torch.conv[12]d*",
    "nni.Conv*[12]d",
    "nnqat.Conv[12]d",
    "nniqat.Conv*[12]d",
    "*.Linear*",
    "F.linear*",
    "nn.MaxPool[23]d",
    "F.max_pool[23]d",
    "torch.cat",
    "torch.flatten",
    "operator.add*",
    "operator.mul*",
    "torch.add*",
    "torch.mul*",
    "nn.ELU",
    "nn.Hardswish",
    "nn.LeakyReLU",
    "nn.Sigmoid",
    "nn.Tanh",
    "nn.Softmax",
    "nn.ReLU",
    "nn.ReLU6",
    "nn.AvgPool2d",
)
_CONVS = ("nn.Conv1d", "nn.Conv2d", "torch.conv1d", "torch.conv2d")
LIMITS = exporting.LIMITS | {op: exporting.LIMITS[op] | {"_uneven": (False,)} for op in _CONVS}
"""If one end is padded more than the other, torch pads before the call, in float."""
INDUCTOR: dict[str, Any] = {"freezing": True, "cpp.threads": 1, "compile_threads": 1, "fx_graph_cache": False}
_NODES = re.compile(r"# Topologically Sorted Source Nodes: \[(.*?)\]")
_KERNEL = re.compile(r"\b(?:cpp_fused_|torch\.ops\.(?!inductor)|extern_kernels\.)[\w.]*(?=\()")
_BUFFER = re.compile(r"\bbuf\d+\b")
_INTEGER = ("torch.ops.onednn.q", "torch.ops.quantized.")
_EDGES = re.compile(r"(de)?quantize_per_(tensor|channel)|choose_qparams(_tensor)?|cpp_fused|_|\d")
"""Parts of a loop's name other than the names of ops between dequantize and quantize."""


@contextmanager
def _apply_settings() -> Iterator[None]:
    """Set everything that a result may depend on. Only machine code is kept between runs, keyed by its source."""
    import torch._functorch.config as functorch
    import torch._inductor.config as inductor

    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        stack.enter_context(inductor.patch(INDUCTOR))
        stack.enter_context(functorch.patch(enable_autograd_cache=False))
        stack.enter_context(torch._dynamo.config.patch(automatic_dynamic_local_pgo=False, recompile_limit=64))
        stack.enter_context(symbolic.patch(backed_size_oblivious=True))  # type: ignore[attr-defined]
        yield


class Generated(Compiled):
    """A compiled model; ``code``: inductor's code for inputs like the examples.

    ``sources``: the reference model's node for each node of the program; functions keep their names. Inputs are made
    contiguous: each other layout would be compiled again, in some seconds.
    """

    def __init__(self, program: ExportedProgram, example_inputs: tuple[Any, ...]) -> None:
        super().__init__(program, self._run)
        from torch._inductor.graph import GraphLowering

        self.sources = _map_sources(program)
        ends = program.graph_signature.user_inputs
        self._shapes = [node.meta["val"].shape for node in program.graph.nodes if node.name in ends]
        self._compiled = torch.compile(program.module().forward, fullgraph=True)
        codes = list[str]()
        with _collect_origins() as origins, patch.object(GraphLowering, "save_output_code", codes.append):
            self(*example_inputs)  # save_output_code is a hook that exists to be replaced
        [code] = codes
        self.code = "\n".join(_add_origins(code.splitlines(), origins))

    def _run(self, inputs: Tensors) -> list[Tensor]:
        with _apply_settings():
            outputs = self._compiled(*map(_mark_dynamic, inputs, self._shapes))
        return [value for value in torch.utils._pytree.tree_leaves(outputs) if isinstance(value, Tensor)]


@contextmanager
def _collect_origins() -> Iterator[dict[str, list[str]]]:
    """Collect by its name, for each call of a loop, the comment that inductor writes before calls of other kernels."""
    from torch._inductor.codegen.cpp import CppScheduling
    from torch._inductor.utils import get_kernel_metadata
    from torch._inductor.virtualized import V

    origins = defaultdict[str, list[str]](list)
    define: Callable[..., str] = CppScheduling.define_kernel
    comment: Callable[..., tuple[str, str]] = get_kernel_metadata

    def define_and_note(self: Any, source: str, nodes: Any, *others: Any) -> str:
        name = define(self, source, nodes, *others)
        origins[name].append(comment(nodes, V.graph.wrapper_code)[0])
        return name

    with patch.object(CppScheduling, "define_kernel", define_and_note):
        yield origins


def _add_origins(lines: Sequence[str], origins: Mapping[str, list[str]]) -> Iterator[str]:
    """Yield the lines of code, with the comment on a loop before each call of it."""
    left = {name: iter(comments) for name, comments in origins.items()}
    for line in lines:
        match = _KERNEL.search(line)
        if match and match[0] in left and "cpp_pybinding" not in line:
            yield next(left[match[0]], "")
        yield line


def _map_sources(program: ExportedProgram) -> dict[str, str]:
    """Map the program's nodes to the reference model's; what quantizes an op's result, to the op."""
    sources = {node.name: owner_of(node) for node in program.graph.nodes}
    for node in program.graph.nodes:
        if node.op == "call_function" and not _EDGES.sub("", node.name) and node.args:
            made_by = node.args[0]
            if made_by.op == "call_function" and _EDGES.sub("", made_by.name):
                sources[node.name] = sources[made_by.name]
    return sources


def _mark_dynamic(value: Tensor, shape: torch.Size) -> Tensor:
    """Return a contiguous input whose axes are dynamic where they were exported so."""
    value = value.detach().contiguous()
    for axis, size in enumerate(shape):
        if isinstance(size, torch.SymInt):
            torch._dynamo.maybe_mark_dynamic(value, axis)
    return value


def _find_compiler() -> str:
    return os.environ.get("CXX", "g++")


class InductorBackend(ExportingBackend):
    """TorchInductor's CPU code generator, with its fusions for quantized models."""

    name = "inductor"
    packages: tuple[str, ...] = ()
    table, patterns = TABLE, PATTERNS
    settings = ", ".join(f"{name}={value}" for name, value in INDUCTOR.items())
    waivers = Path(__file__).with_name("inductor.waivers.toml")

    def unavailable_reason(self) -> str | None:
        """Report a missing C++ compiler."""
        compiler = _find_compiler()
        return None if shutil.which(compiler) else f"no C++ compiler {compiler!r} found: apt-get install g++"

    def capabilities(self) -> Capabilities:
        """Per-channel weights, for which the fusions look; sums of loops are in float32."""
        schemes = ("per_channel_symmetric",)
        return Capabilities(weight_schemes=schemes, float_accumulation=True, limits=LIMITS)

    def warm_up(self) -> None:
        """Import inductor and compile its headers, which takes ten seconds the first time."""
        example = (torch.zeros(2, 2),)
        self.lower(export_reference(symbolic_trace(nn.ReLU()), example), example)

    def versions(self) -> dict[str, str]:
        """Return also the version of the C++ compiler."""
        compiler = _find_compiler()
        output = subprocess.run([compiler, "--version"], capture_output=True, text=True, timeout=60, check=True).stdout
        return {compiler: output.partition("\n")[0]} | super().versions()

    def lower(self, program: ExportedProgram, example_inputs: tuple[Any, ...]) -> Callable[..., Any]:
        """Compile."""
        return Generated(program, example_inputs)

    def execution(self, lowered: Callable[..., Any]) -> Execution | None:
        """Read off the generated code which kernels it calls."""
        return read_execution(lowered.code, lowered.sources, lowered.ops) if isinstance(lowered, Generated) else None


def read_execution(code: str, sources: Mapping[str, str], ops: Iterable[str]) -> Execution:
    """Separate integer kernels, and loops that do more than quantize and dequantize, from float kernels.

    ``ops``: those of the reference model.
    """
    quantized, floating, nodes = list[str](), list[str](), list[str]()
    floats = set[str]()  # names of buffers of floats
    for line in code[code.index("def call(") :].splitlines():
        if comment := _NODES.search(line):
            names = map(str.strip, comment[1].split(","))
            owners = [(name, sources.get(name, name)) for name in names]
            nodes = list(dict.fromkeys(own for name, own in owners if own != name or _EDGES.sub("", name)))
            continue
        result, _, call = line.partition(" = ")
        takes_floats = not floats.isdisjoint(_BUFFER.findall(call or result))
        match = _KERNEL.search(line)
        kernel = match[0] if match else ""
        if not kernel:
            makes_floats = "torch.float32" in call or takes_floats  # allocated, or another name
        elif kernel.startswith("cpp_fused_"):
            makes_floats = False  # the buffer that it fills was allocated before
            quantized += _name_kernel(kernel, nodes) if _EDGES.sub("", kernel) else []
        elif kernel.startswith(_INTEGER) or not takes_floats:
            makes_floats = "torch.float32" in call
            quantized += _name_kernel(kernel, nodes)
        else:
            makes_floats = True
            floating += _name_kernel(kernel, nodes[-1:])
        floats.update(_BUFFER.findall(result) if makes_floats else ())
    if not quantized and not floating:
        quantized += leave_nothing(ops)
    return Execution(quantized_ops=tuple(quantized), float_fallbacks=tuple(dict.fromkeys(floating)))


def _name_kernel(kernel: str, nodes: Sequence[str]) -> list[str]:
    """Return a line for each node of the reference model that a kernel computes."""
    return [f"{node} ({kernel})" for node in nodes] or [kernel]
