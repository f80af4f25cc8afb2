"""How the cost of prepare and convert grows with the model: time(16,000 nodes) / time(1,000 nodes), in one run.

The model is a chain of conv-bn-relu-add blocks, four nodes each. Cost that is linear in the number of nodes gives a
ratio of 16; the benchmark fails (exit status 1) above 20. Calibration, which is the model's own cost, is not measured.

    python benchmarks/linear_growth.py
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
import warnings

import torch
from tabulate import tabulate
from torch import Tensor, nn
from torch.fx import GraphModule

from backends.native_tables import native_config
from refimpl import MinMaxObserver, QConfig, QConfigMapping, convert_to_reference_fx, prepare_fx

NODES_PER_BLOCK = 4
BOUND = 20.0
REPEATS = 3  # the best counts: the first run of a size also pays for memory that the process does not have yet


class Block(nn.Module):
    """conv → bn → relu, plus the input."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 1, 1)
        self.bn = nn.BatchNorm2d(1)
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.relu(self.bn(self.conv(x))) + x
        return result


def measure(nodes: int) -> dict[str, float]:
    """Return the seconds of each stage for a model of that many nodes, after fusion a quarter fewer."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(nodes // NODES_PER_BLOCK))).eval()
    inputs = (torch.rand(1, 1, 2, 2),)
    weight = MinMaxObserver.with_args(dtype=torch.qint8, qscheme=torch.per_tensor_symmetric)
    qconfig = QConfig(MinMaxObserver.with_args(dtype=torch.quint8), weight)
    mapping = QConfigMapping().set_global(qconfig)
    gc.collect()
    started = time.perf_counter()
    prepared: GraphModule = prepare_fx(model, mapping, inputs, backend_config=native_config("qnnpack"))
    between = time.perf_counter()
    with torch.no_grad():
        prepared(*inputs)
    gc.collect()
    resumed = time.perf_counter()
    convert_to_reference_fx(prepared)
    ended = time.perf_counter()
    return {"prepare": between - started, "convert": ended - resumed}


def main() -> int:
    """Measure, print the table, and return 1 if the growth is more than linear."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, nargs="+", default=[1000, 4000, 16000])
    sizes = sorted(parser.parse_args().nodes)
    warnings.simplefilter("ignore")
    measure(200)  # imports and caches
    rows = []
    for nodes in sizes:
        times = min((measure(nodes) for _ in range(REPEATS)), key=lambda times: sum(times.values()))
        rows.append({"nodes": nodes, **times, "total": sum(times.values())})
    for row in rows:
        row["total / first"] = row["total"] / rows[0]["total"]
    print(tabulate(rows, headers="keys", floatfmt=".2f"))
    ratio = rows[-1]["total / first"]
    is_linear = ratio <= BOUND * sizes[-1] / sizes[0] / 16
    print(f"time({sizes[-1]} nodes) / time({sizes[0]} nodes) = {ratio:.1f}; {'linear' if is_linear else 'NOT linear'}")
    return 0 if is_linear else 1


if __name__ == "__main__":
    sys.exit(main())
