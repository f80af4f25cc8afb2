"""TorchInductor on the CPU: torch.compile of the exported reference model, with freezing.

Inductor puts oneDNN's kernels of integers in the place of convolutions and linear layers between dequantize and
quantize, and torch's kernel in that of max pools. All else becomes loops of C++, which load integers, compute in
float32 in registers, round, and store integers: this counts as executed on quantized tensors, here. A fallback to float
is each call of a library's kernel that takes floats.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.fx import GraphModule, symbolic_trace
from torch.fx.experimental import _config as symbolic

from backends._export import LIMITS, NOTHING_LEFT, Compiled, ExportingBackend, Tensors, exported, owner_of
from backends.base import Capabilities, Execution, Taken
from refimpl.native import DYNAMIC_U8_S8, U8, U8_S8, Table

TABLE: Table = {
    "conv": (U8_S8,),
    "linear": (U8_S8, DYNAMIC_U8_S8),
    **dict.fromkeys(("binary", "cat", "default", "fixed qparams", "share qparams"), (U8,)),
}
PATTERNS = (
    "nn.Conv[12]d*", "torch.conv[12]d*", "nni.Conv*[12]d", "nnqat.Conv[12]d", "nniqat.Conv*[12]d",
    "*.Linear*", "F.linear*", "nn.MaxPool[23]d", "F.max_pool[23]d", "torch.cat", "torch.flatten",
    "operator.add*", "operator.mul*", "torch.add*", "torch.mul*",
    "nn.ELU", "nn.Hardswish", "nn.LeakyReLU", "nn.Sigmoid", "nn.Tanh", "nn.Softmax", "nn.ReLU", "nn.ReLU6",
    "nn.AvgPool2d",
)  # fmt: skip
_EVEN: dict[str, Taken] = {"_uneven": (False,)}
TAKEN = LIMITS | {op: LIMITS[op] | _EVEN for op in ("nn.Conv1d", "nn.Conv2d", "torch.conv1d", "torch.conv2d")}
"""Where more is padded at one end than at the other, torch pads before it calls, in float."""
INDUCTOR: dict[str, Any] = {"freezing": True, "cpp.threads": 1, "compile_threads": 1, "fx_graph_cache": False}


@contextmanager
def _settings() -> Iterator[None]:
    """All that a result may depend on. What is kept between runs is machine code, by the source that it is made of."""
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
    """A compiled model; ``code``: what inductor wrote for inputs like the examples; ``sources``: whose its nodes are.

    Inputs are made contiguous: other layouts would be compiled for anew, in some seconds each, when they come.
    """

    def __init__(self, program: ExportedProgram, reference_model: GraphModule, example_inputs: tuple[Any, ...]) -> None:
        super().__init__(reference_model, example_inputs, self._run)
        from torch._inductor.graph import GraphLowering

        self.sources = sources(program, self.modules)
        ends = program.graph_signature.user_inputs
        self._shapes = [node.meta["val"].shape for node in program.graph.nodes if node.name in ends]
        self._compiled = torch.compile(program.module().forward, fullgraph=True)
        written = list[str]()
        with patch.object(GraphLowering, "save_output_code", written.append):  # it is there to be replaced
            self(*example_inputs)
        [self.code] = written

    def _run(self, inputs: Tensors) -> list[Tensor]:
        with _settings():
            found = self._compiled(*map(_marked, inputs, self._shapes))
        return [value for value in torch.utils._pytree.tree_leaves(found) if isinstance(value, Tensor)]


def _marked(value: Tensor, shape: torch.Size) -> Tensor:
    """An input whose axes are dynamic where they were exported so."""
    value = value.detach().contiguous()
    for axis, size in enumerate(shape):
        if isinstance(size, torch.SymInt):
            torch._dynamo.maybe_mark_dynamic(value, axis)
    return value


def _compiler() -> str:
    return os.environ.get("CXX", "g++")


class InductorBackend(ExportingBackend):
    """TorchInductor's CPU code generator, with its fusions for quantized models."""

    name = "inductor"
    packages = ()
    table, patterns = TABLE, PATTERNS
    settings = ", ".join(f"{name}={value}" for name, value in INDUCTOR.items())
    waivers = Path(__file__).with_name("inductor.waivers.toml")

    def unavailable_reason(self) -> str | None:
        """Say that there is no compiler."""
        return None if shutil.which(_compiler()) else f"no C++ compiler {_compiler()!r} found: apt-get install g++"

    def capabilities(self) -> Capabilities:
        """Sums of loops are in float32; the fusions look for weights that are dequantized per channel."""
        return Capabilities(weight_schemes=("per_channel_symmetric",), float_accumulation=True, limits=TAKEN)

    def warm_up(self) -> None:
        """Have inductor imported, and its headers compiled, which takes ten seconds the first time."""
        x = torch.zeros(2, 2)
        self.lower(symbolic_trace(nn.ReLU()), (x,))

    def versions(self) -> dict[str, str]:
        """The C++ compiler too."""
        told = subprocess.run([_compiler(), "--version"], capture_output=True, text=True, check=True).stdout
        return {_compiler(): told.partition("\n")[0]} | super().versions()

    def lower(self, reference_model: GraphModule, example_inputs: tuple[Any, ...]) -> Callable[..., Any]:
        """Export and compile."""
        return Generated(exported(reference_model, example_inputs), reference_model, example_inputs)

    def execution(self, lowered: Callable[..., Any]) -> Execution | None:
        """Read off the generated code which kernels it calls."""
        return read_execution(lowered.code, lowered.sources) if isinstance(lowered, Generated) else None


def sources(program: ExportedProgram, modules: Mapping[str, str]) -> dict[str, str]:
    """Name the nodes of the reference model by those of the program; of functions the names are the same."""
    return {node.name: owner_of(node, modules) for node in program.graph.nodes}


_NODES = re.compile(r"# Topologically Sorted Source Nodes: \[(.*?)\]")
_KERNEL = re.compile(r"\b(?:cpp_fused_|torch\.ops\.(?!inductor)|extern_kernels\.)[\w.]*(?=\()")
_BUFFER = re.compile(r"\bbuf\d+\b")
_INTEGER = ("torch.ops.onednn.q", "torch.ops.quantized.")
_EDGES = re.compile(r"(de)?quantize_per_(tensor|channel)|choose_qparams(_tensor)?|cpp_fused|_|\d")
"""What a name of a loop holds besides the names of ops between dequantize and quantize."""


def read_execution(code: str, sources: Mapping[str, str]) -> Execution:
    """Tell kernels of integers, and loops that do more than to quantize and dequantize, from kernels of floats."""
    quantized, floating, nodes = list[str](), list[str](), list[str]()
    floats = set[str]()  # the buffers of floats
    for line in code[code.index("def call(") :].splitlines():
        if told := _NODES.search(line):
            nodes = [each.strip() for each in told[1].split(",") if _EDGES.sub("", each)]
            continue
        result, _, call = line.partition(" = ")
        takes_floats = not floats.isdisjoint(_BUFFER.findall(call or result))
        if not (found := _KERNEL.search(line)):
            makes_floats = "torch.float32" in call or takes_floats  # allocated, or another name
        elif found[0].startswith("cpp_fused_"):
            makes_floats = False  # what it fills was allocated before
            quantized += [found[0]] if _EDGES.sub("", found[0]) else []
        elif found[0].startswith(_INTEGER) or not takes_floats:
            makes_floats = "torch.float32" in call
            quantized.append(found[0])
        else:
            makes_floats = True
            floating.append(f"{sources.get(nodes[-1], nodes[-1]) if nodes else found[0]} ({found[0]})")
        floats.update(_BUFFER.findall(result) if makes_floats else ())
    is_empty = not quantized and not floating
    return Execution(
        quantized_ops=(NOTHING_LEFT,) if is_empty else tuple(quantized), float_fallbacks=tuple(dict.fromkeys(floating))
    )
