"""prepare and convert of refimpl against torch.ao's: each row is a ratio of times measured in one run of one process.

The models are chains of linear-relu-linear-cat-add-mul-slice blocks, one of three nodes, and the real architectures of
benchmarks/architectures.py. A stage is measured from the same point for both sides: what torch's convert uses up is
copied outside of the timed region. The best of several repetitions counts. refimpl writes a model's Python code when it
is first called; the row "prepare + call" has that in. Each side brings its own observers, QConfigMapping and default
backend config, as its user would; "x86" is get_default_qconfig_mapping("x86"), with histogram observers.

    python -m benchmarks.flow                       # 3 to 3,200 nodes; torch at 12,800 takes minutes
    python -m benchmarks.flow --nodes 200 800 3200 --observers x86
    python -m benchmarks.flow --torch-cap 600       # measures torch wherever it is expected to finish within 600 s
    python -m benchmarks.flow --memory              # peak memory of both, each in its own process
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import math
import resource
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.ao.quantization.quantize_fx as torch_fx
from tabulate import tabulate
from torch import Tensor, nn
from torch.ao.quantization import observer, qconfig, qconfig_mapping
from torch.fx import symbolic_trace

from benchmarks.architectures import ARCHITECTURES
from fx_quant_conformance import refimpl
from fx_quant_conformance.refimpl.observers.histogram import HistogramObserver

NODES_PER_BLOCK = 8
STAGES = ("prepare", "prepare + call", "reference", "lowered")
ARCHITECTURE_REPEATS = 5
GROWTH_FROM = 800  # the exponent is measured from here to the largest size
STACK = 1 << 29  # torch recurses along the chain: a thread with a large stack lets it finish
KINDS = ("minmax", "histogram", "x86")


class Block(nn.Module):
    """linear → relu → linear, then sum and product with the input, cat and slice: 8 nodes with the observed ops."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.relu, self.b = nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Any:
        y = self.b(self.relu(self.a(x)))
        return torch.cat([x + y, x * y], -1)[:, :4].clamp(-8.0, 8.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One implementation: its front door, its observers by kind, its QConfig and QConfigMapping, its defaults."""

    name: str
    prepare: Callable[..., Any]
    converts: Mapping[str, Callable[..., Any]]
    observers: Mapping[str, Any]
    qconfig: Callable[..., Any]
    mapping: Callable[[], Any]
    defaults: Callable[[str], Any]

    def mapping_of(self, kind: str) -> Any:
        """Return the mapping of a kind: the defaults of an engine, or one observer for all activations."""
        if kind not in self.observers:
            return self.defaults(kind)
        activation = self.observers[kind].with_args(dtype=torch.quint8)
        weight = self.observers["minmax"].with_args(dtype=torch.qint8, qscheme=torch.per_tensor_symmetric)
        return self.mapping().set_global(self.qconfig(activation, weight))


_torchs: Any = observer
SIDES = (
    Side(
        name="torch",
        prepare=torch_fx.prepare_fx,
        converts={"reference": torch_fx.convert_to_reference_fx, "lowered": torch_fx.convert_fx},
        observers={"minmax": _torchs.MinMaxObserver, "histogram": _torchs.HistogramObserver},
        qconfig=qconfig.QConfig,
        mapping=qconfig_mapping.QConfigMapping,
        defaults=qconfig_mapping.get_default_qconfig_mapping,
    ),
    Side(
        name="refimpl",
        prepare=refimpl.prepare_fx,
        converts={"reference": refimpl.convert_to_reference_fx, "lowered": refimpl.convert_fx},
        observers={"minmax": refimpl.MinMaxObserver, "histogram": HistogramObserver},
        qconfig=refimpl.QConfig,
        mapping=refimpl.QConfigMapping,
        defaults=refimpl.get_default_qconfig_mapping,
    ),
)


def model_of(nodes: int) -> nn.Module:
    """Return a model whose traced graph has about so many nodes; 3 are an input, a linear and the output."""
    torch.manual_seed(0)
    if nodes < NODES_PER_BLOCK:
        return nn.Sequential(nn.Linear(4, 4)).eval()
    return nn.Sequential(*(Block() for _ in range(nodes // NODES_PER_BLOCK))).eval()


def chain_inputs() -> tuple[Tensor]:
    """Return inputs of as many values as a histogram may be counted of: torch's search is slow where they are few."""
    return (torch.rand(256, 4),)


def architecture_of(name: str) -> tuple[nn.Module, tuple[Tensor]]:
    """Return a real architecture, and its inputs."""
    make, shape = ARCHITECTURES[name]
    torch.manual_seed(0)
    return make().eval(), (torch.rand(shape),)


def measure(side: Side, model: nn.Module, inputs: tuple[Any, ...], kind: str, repeats: int) -> dict[str, float]:
    """Return the best seconds of each stage."""
    found = [_measure_once(side, model, inputs, kind) for _ in range(repeats)]
    return {stage: min(times[stage] for times in found) for stage in STAGES}


def _measure_once(side: Side, model: nn.Module, inputs: tuple[Any, ...], kind: str) -> dict[str, float]:
    mapping, times = side.mapping_of(kind), {}
    with torch.no_grad():
        prepared, times["prepare"] = timed(lambda: side.prepare(model, mapping, inputs))
        _, call = timed(lambda: prepared(*inputs))
        times["prepare + call"] = times["prepare"] + call
        for stage, convert in side.converts.items():
            consumed = copy.deepcopy(prepared)
            _, times[stage] = timed(partial(convert, consumed))
    return times


def timed(run: Callable[[], Any]) -> tuple[Any, float]:
    """Return a result and the seconds of CPU that it took: what else runs on the machine is not counted."""
    gc.collect()
    started = time.process_time()
    result = run()
    return result, time.process_time() - started


def rows_of(sizes: Sequence[int], kinds: Sequence[str], torch_cap: float, small_repeats: int) -> list[dict[str, Any]]:
    """Measure both sides at every size; torch is left out where its growth says that it would take too long."""
    rows = []
    for kind in kinds:
        expected = 0.0
        for nodes in sorted(sizes):
            repeats = small_repeats if nodes <= 50 else 3 if nodes <= 800 else 1
            sides = SIDES if expected <= torch_cap else SIDES[1:]
            found = {side.name: measure(side, model_of(nodes), chain_inputs(), kind, repeats) for side in sides}
            if theirs := found.get("torch"):  # a large model four times as large takes torch up to 16 times as long
                following = min((size for size in sizes if size > nodes), default=nodes)
                expected = sum(theirs.values()) * (following / nodes) ** (2 if nodes >= GROWTH_FROM else 1)
            rows += [_row({"model": "chain", "observer": kind, "nodes": nodes}, stage, found) for stage in STAGES]
    return rows


def architecture_rows(names: Sequence[str], repeats: int) -> list[dict[str, Any]]:
    """Measure both sides on real architectures, under the default mapping of x86."""
    rows = []
    for name in names:
        model, inputs = architecture_of(name)
        found = {side.name: measure(side, model, inputs, "x86", repeats) for side in SIDES}
        about = {"model": name, "observer": "x86", "nodes": len(symbolic_trace(model).graph.nodes)}
        rows += [_row(about, stage, found) for stage in STAGES]
    return rows


def _row(about: dict[str, Any], stage: str, found: Mapping[str, Mapping[str, float]]) -> dict[str, Any]:
    ours, theirs = (found[name][stage] if name in found else None for name in ("refimpl", "torch"))
    ratio = theirs / ours if theirs and ours else None
    return {**about, "stage": stage, "refimpl s": ours, "torch s": theirs, "torch / refimpl": ratio}


def growth(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return refimpl's growth exponent per observer and stage: 1 is linear in the number of nodes."""
    found = []
    chains = [row for row in rows if row["model"] == "chain"]
    for kind, stage in dict.fromkeys((row["observer"], row["stage"]) for row in chains):
        seconds = {row["nodes"]: row["refimpl s"] for row in chains if (row["observer"], row["stage"]) == (kind, stage)}
        first, last = min((n for n in seconds if n >= GROWTH_FROM), default=min(seconds)), max(seconds)
        if first < last:
            exponent = math.log(seconds[last] / seconds[first]) / math.log(last / first)
            found.append({"observer": kind, "stage": stage, "from": first, "to": last, "exponent": exponent})
    return found


def peak_memory(side: str, nodes: int) -> float:
    """Return the MiB by which one side's prepare and converts raise the peak of a fresh process."""
    command = [sys.executable, "-m", "benchmarks.flow", "--peak-of", side, "--nodes", str(nodes)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=Path(__file__).parents[1])
    return float(json.loads(done.stdout.splitlines()[-1]))


def _peak_here(side: str, nodes: int) -> float:
    chosen = next(candidate for candidate in SIDES if candidate.name == side)
    _measure_once(chosen, model_of(3), chain_inputs(), "minmax")  # imports and caches
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    _measure_once(chosen, model_of(nodes), chain_inputs(), "minmax")
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, nargs="+", default=[3, 50, 200, 800, 3200, 12800])
    parser.add_argument("--models", nargs="*", choices=tuple(ARCHITECTURES), default=tuple(ARCHITECTURES))
    parser.add_argument("--observers", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--torch-cap", type=float, default=120.0, help="leave torch out where it would take longer (s)")
    parser.add_argument("--small-repeats", type=int, default=20, help="repetitions of the sizes up to 50 nodes")
    parser.add_argument("--memory", action="store_true", help="print the peak memory of both instead, per size")
    parser.add_argument("--peak-of", choices=[side.name for side in SIDES], help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, on one thread, and print the tables."""
    options = parsed(arguments)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)  # the flow is one thread's work; starting a team for every small weight is noise
    if options.peak_of:
        print(json.dumps(_peak_here(options.peak_of, options.nodes[0])))
    elif options.memory:
        peaks = [
            {"nodes": n, **{f"{side.name} MiB": peak_memory(side.name, n) for side in SIDES}} for n in options.nodes
        ]
        print(tabulate(peaks, headers="keys", floatfmt=".1f"))
    else:
        for side in SIDES:
            _measure_once(side, model_of(50), chain_inputs(), "x86")  # imports and caches
        rows = rows_of(options.nodes, options.observers, options.torch_cap, options.small_repeats)
        rows += architecture_rows(options.models, ARCHITECTURE_REPEATS)
        decimals = (".0f", ".0f", ".0f", ".0f", ".4f", ".4f", ".1f")
        print(tabulate(rows, headers="keys", floatfmt=decimals, missingval="not measured"))
        print("\n" + tabulate(growth(rows), headers="keys", floatfmt=".2f"))


def with_deep_stack(run: Callable[[], None]) -> None:
    """Run where recursion along a chain of ten thousand nodes does not end in an error."""
    failed: list[BaseException] = []

    def guarded() -> None:
        try:
            run()
        except BaseException as error:
            failed.append(error)

    limit, stack = sys.getrecursionlimit(), threading.stack_size(STACK)
    sys.setrecursionlimit(1_000_000)
    try:
        thread = threading.Thread(target=guarded)
        thread.start()
        thread.join()
    finally:
        sys.setrecursionlimit(limit)
        threading.stack_size(stack)
    if failed:
        raise failed[0]


if __name__ == "__main__":
    with_deep_stack(main)
