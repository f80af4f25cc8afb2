"""prepare and convert of refimpl against torch.ao's: each row is a ratio of times measured in one run of one process.

The models are chains of linear-relu-linear-cat-add-mul-slice blocks, and one of three nodes. A stage is measured from
the same point for both sides: what torch's convert uses up is copied outside of the timed region. The best of several
repetitions counts. refimpl writes a model's Python code when it is first called; the row "prepare + call" has that in.
Each side brings its own observers, QConfigMapping and default backend config, as its user would.

    python benchmarks/flow.py                       # 3 to 3,200 nodes; torch at 12,800 takes minutes
    python benchmarks/flow.py --torch-cap 600       # measures torch wherever it is expected to finish within 600 s
    python benchmarks/flow.py --memory              # peak memory of both, each in its own process
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
from typing import Any

import torch
import torch.ao.quantization.quantize_fx as torch_fx
from tabulate import tabulate
from torch import Tensor, nn
from torch.ao.quantization import observer, qconfig, qconfig_mapping

import refimpl
from refimpl.histogram import HistogramObserver

NODES_PER_BLOCK = 8
STAGES = ("prepare", "prepare + call", "reference", "lowered")
GROWTH_FROM = 800  # the exponent is measured from here to the largest size
STACK = 1 << 29  # torch recurses along the chain: a thread with a large stack lets it finish
KINDS = ("minmax", "histogram")


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
    """One implementation: its front door, its observers by kind, its QConfig and QConfigMapping."""

    name: str
    prepare: Callable[..., Any]
    converts: Mapping[str, Callable[..., Any]]
    observers: Mapping[str, Any]
    qconfig: Callable[..., Any]
    mapping: Callable[[], Any]


_torchs: Any = observer
SIDES = (
    Side(
        name="torch",
        prepare=torch_fx.prepare_fx,
        converts={"reference": torch_fx.convert_to_reference_fx, "lowered": torch_fx.convert_fx},
        observers={"minmax": _torchs.MinMaxObserver, "histogram": _torchs.HistogramObserver},
        qconfig=qconfig.QConfig,
        mapping=qconfig_mapping.QConfigMapping,
    ),
    Side(
        name="refimpl",
        prepare=refimpl.prepare_fx,
        converts={"reference": refimpl.convert_to_reference_fx, "lowered": refimpl.convert_fx},
        observers={"minmax": refimpl.MinMaxObserver, "histogram": HistogramObserver},
        qconfig=refimpl.QConfig,
        mapping=refimpl.QConfigMapping,
    ),
)


def model_of(nodes: int) -> nn.Module:
    """Return a model whose traced graph has about so many nodes; 3 are an input, a linear and the output."""
    torch.manual_seed(0)
    if nodes < NODES_PER_BLOCK:
        return nn.Sequential(nn.Linear(4, 4)).eval()
    return nn.Sequential(*(Block() for _ in range(nodes // NODES_PER_BLOCK))).eval()


def measure(side: Side, nodes: int, kind: str, repeats: int) -> dict[str, float]:
    """Return the best seconds of each stage."""
    found = [_measure_once(side, nodes, kind) for _ in range(repeats)]
    return {stage: min(times[stage] for times in found) for stage in STAGES}


def _measure_once(side: Side, nodes: int, kind: str) -> dict[str, float]:
    model, inputs = model_of(nodes), (torch.rand(2, 4),)
    activation = side.observers[kind].with_args(dtype=torch.quint8)
    weight = side.observers["minmax"].with_args(dtype=torch.qint8, qscheme=torch.per_tensor_symmetric)
    mapping = side.mapping().set_global(side.qconfig(activation, weight))
    times = {}
    with torch.no_grad():
        prepared, times["prepare"] = timed(lambda: side.prepare(model, mapping, inputs))
        _, call = timed(lambda: prepared(*inputs))
        times["prepare + call"] = times["prepare"] + call
        for stage, convert in side.converts.items():
            consumed = copy.deepcopy(prepared)
            _, times[stage] = timed(partial(convert, consumed))
    return times


def timed(run: Callable[[], Any]) -> tuple[Any, float]:
    """Return a result and the seconds that it took."""
    gc.collect()
    started = time.perf_counter()
    result = run()
    return result, time.perf_counter() - started


def rows_of(sizes: Sequence[int], kinds: Sequence[str], torch_cap: float, small_repeats: int) -> list[dict[str, Any]]:
    """Measure both sides at every size; torch is left out where its growth says that it would take too long."""
    rows = []
    for kind in kinds:
        expected = 0.0
        for nodes in sorted(sizes):
            repeats = small_repeats if nodes <= 50 else 3 if nodes <= 800 else 1
            ours = measure(SIDES[1], nodes, kind, repeats)
            theirs = measure(SIDES[0], nodes, kind, repeats) if expected <= torch_cap else None
            if theirs is not None:  # a large model four times as large takes torch up to 16 times as long
                following = min((size for size in sizes if size > nodes), default=nodes)
                expected = sum(theirs.values()) * (following / nodes) ** (2 if nodes >= GROWTH_FROM else 1)
            rows += [_row(kind, nodes, stage, theirs, ours) for stage in STAGES]
    return rows


def _row(
    kind: str, nodes: int, stage: str, theirs: Mapping[str, float] | None, ours: Mapping[str, float]
) -> dict[str, Any]:
    row: dict[str, Any] = {"observer": kind, "nodes": nodes, "stage": stage, "refimpl s": ours[stage]}
    if theirs is None:
        return {**row, "torch s": None, "torch / refimpl": None}
    return {**row, "torch s": theirs[stage], "torch / refimpl": theirs[stage] / ours[stage]}


def growth(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return refimpl's growth exponent per observer and stage: 1 is linear in the number of nodes."""
    found = []
    for kind, stage in dict.fromkeys((row["observer"], row["stage"]) for row in rows):
        seconds = {row["nodes"]: row["refimpl s"] for row in rows if (row["observer"], row["stage"]) == (kind, stage)}
        first, last = min((n for n in seconds if n >= GROWTH_FROM), default=min(seconds)), max(seconds)
        if first < last:
            exponent = math.log(seconds[last] / seconds[first]) / math.log(last / first)
            found.append({"observer": kind, "stage": stage, "from": first, "to": last, "exponent": exponent})
    return found


def peak_memory(side: str, nodes: int) -> float:
    """Return the MiB by which one side's prepare and converts raise the peak of a fresh process."""
    command = [sys.executable, __file__, "--peak-of", side, "--nodes", str(nodes)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return float(json.loads(done.stdout.splitlines()[-1]))


def _peak_here(side: str, nodes: int) -> float:
    chosen = next(candidate for candidate in SIDES if candidate.name == side)
    _measure_once(chosen, 3, "minmax")  # imports and caches
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    _measure_once(chosen, nodes, "minmax")
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, nargs="+", default=[3, 50, 800, 3200, 12800])
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
            _measure_once(side, 50, "minmax")  # imports and caches
        rows = rows_of(options.nodes, options.observers, options.torch_cap, options.small_repeats)
        decimals = (".0f", ".0f", ".0f", ".4f", ".4f", ".1f")
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
