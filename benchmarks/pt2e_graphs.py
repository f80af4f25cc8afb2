"""Graphs drawn from the claimed patterns of a config, through both flows: FX graph mode, and PT2E.

The generator is that of the suite's profile stress: Hypothesis makes its choices, and shrinks a graph that differs. The
comparison is that of benchmarks.pt2e_both. Post-training quantization only: docs/pt2e.md says what training cannot have
in common.

    python -m benchmarks.pt2e_graphs                # 500 graphs of native's patterns
    python -m benchmarks.pt2e_graphs --graphs 50 --config executorch --seed 3
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from random import Random
from typing import Any, NamedTuple

import hypothesis
import torch
from hypothesis import strategies
from torch import nn
from torch.utils._pytree import tree_leaves
from torchao.quantization.pt2e.quantize_pt2e import prepare_pt2e

from benchmarks.pt2e_both import convert_both, export_float, find_difference
from benchmarks.pt2e_flows import CONFIGS, name_backend
from fx_quant_conformance.backends.discovery import find_backend
from fx_quant_conformance.backends.names import format_error
from fx_quant_conformance.conformance.claims.build import build_model
from fx_quant_conformance.conformance.claims.claim import enumerate_claims
from fx_quant_conformance.conformance.claims.inputs import Batch, draw_calibration_inputs
from fx_quant_conformance.conformance.fuzz.graph import Drawing, DrawnGraph, patterns_of
from fx_quant_conformance.conformance.fuzz.search import make_chooser
from fx_quant_conformance.conformance.pt2e.remembered import remember_patterns
from fx_quant_conformance.conformance.whole_models.setups import EXTENTS, make_mapping, setups_of
from fx_quant_conformance.refimpl import BackendConfig, QConfigMapping
from fx_quant_conformance.refimpl.exported.exported import open_module
from fx_quant_conformance.refimpl.exported.pt2e import BackendConfigQuantizer

WITHOUT_OP = ("nn.Identity", ".contiguous")
"""Patterns for which export may write no op, so that PT2E has nothing to quantize."""


class Source:
    """Draws graphs of a config's patterns, and takes them through both flows. ``name``: the config's."""

    def __init__(self, name: str) -> None:
        backend = find_backend(name_backend(name))
        self._config, self._capabilities = backend.backend_config(), backend.capabilities()
        self._claims = enumerate_claims(self._config, self._capabilities)
        setups = setups_of(self._claims, self._capabilities, EXTENTS["stress"])
        self._setup = next(setup for setup in setups if setup.flow == "ptq")
        drawn = patterns_of(self._claims, self._setup)
        self._patterns = {name: ops for name, ops in drawn.items() if name not in WITHOUT_OP}

    def draw(self, choose: Callable[[Sequence[Any]], Any]) -> DrawnGraph:
        """Draw a graph; it may have no calls."""
        return Drawing(choose=choose, patterns=self._patterns, capabilities=self._capabilities).draw()

    def compare(self, graph: DrawnGraph) -> str:
        """Say how the two flows differ on a graph; "" if they give the same. Raises what they raise."""
        model, batches = _build(graph)
        mapping = make_mapping(self._claims, self._setup, model)
        return find_difference(convert_both(model, mapping, self._config, batches), batches)


def _build(graph: DrawnGraph) -> tuple[nn.Module, Sequence[Batch]]:
    torch.manual_seed(graph.seed)
    case = graph.to_case()
    return build_model(case), draw_calibration_inputs(case)


def _runs(graph: DrawnGraph) -> bool:
    """Tell whether the float model runs: torch's max_pool3d takes not every layout that an op before it may give."""
    try:
        _build(graph)
    except RuntimeError:
        return False
    return True


def is_broken_by_torchao(graph: DrawnGraph) -> bool:
    """Tell whether torchao's prepare makes another function of a graph by itself, when nothing is annotated.

    It folds the batch norm after a transposed convolution of several groups as if there were one.
    """
    model, batches = _build(graph)
    program = open_module(export_float(model, batches[0]))
    with torch.no_grad():
        expected = tree_leaves(model(*(each.clone() for each in batches[0])))
        try:
            prepared = prepare_pt2e(program, BackendConfigQuantizer(BackendConfig("nothing"), QConfigMapping()))
            found = tree_leaves(prepared(*(each.clone() for each in batches[0])))
        except RuntimeError:
            return True
    return not all(torch.allclose(*pair, rtol=1e-3, atol=1e-3) for pair in zip(found, expected, strict=True))


class GraphSearch(NamedTuple):
    """What a search has compared, and the smallest graph that differs, if there is one, with its difference.

    ``broken``: those compared that torchao's prepare breaks by itself; they do not count as different.
    """

    compared: Sequence[DrawnGraph]
    broken: Sequence[DrawnGraph]
    smallest: DrawnGraph | None
    difference: str


def search(source: Source, count: int, seed: int) -> GraphSearch:
    """Draw graphs with Hypothesis until so many different ones are compared, or one differs, which is shrunk."""
    differences: dict[str, str] = {}
    compared: list[DrawnGraph] = []
    broken: list[DrawnGraph] = []

    @strategies.composite
    def graphs(draw: Any) -> DrawnGraph:
        return source.draw(make_chooser(partial(draw, strategies.booleans())))

    def differs(graph: DrawnGraph) -> bool:
        text = graph.to_json()
        is_enough = len(compared) >= count and not any(differences.values())
        if text not in differences and graph.calls and not is_enough and _runs(graph):
            try:
                differences[text] = source.compare(graph)
            except Exception as error:
                differences[text] = format_error(error)
            compared.append(graph)
            if differences[text] and is_broken_by_torchao(graph):
                broken.append(graph)
                differences[text] = ""
        return bool(differences.get(text))

    settings = hypothesis.settings(
        database=None,
        deadline=None,
        print_blob=False,
        verbosity=hypothesis.Verbosity.quiet,
        phases=(hypothesis.Phase.generate, hypothesis.Phase.shrink),
        max_examples=2 * count,
    )
    smallest: DrawnGraph | None = None
    with contextlib.suppress(hypothesis.errors.NoSuchExample):
        smallest = hypothesis.find(graphs(), differs, settings=settings, random=Random(seed))
    return GraphSearch(compared, broken, smallest, "" if smallest is None else differences[smallest.to_json()])


def main(arguments: Sequence[str] | None = None) -> int:
    """Draw and compare graphs; print the smallest that differs. Status 1: one does."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--graphs", type=int, default=500, help="how many (default: 500)")
    parser.add_argument("--config", choices=CONFIGS, default="native", help="whose patterns (default: native)")
    parser.add_argument("--seed", type=int, default=0, help="of the draws (default: 0)")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    with remember_patterns():
        found = search(Source(options.config), options.graphs, options.seed)
    calls = dict(sorted(Counter(len(graph.calls) for graph in found.compared).items()))
    print(f"{options.config}: {len(found.compared)} different graphs compared, by number of calls {calls}")
    for graph in found.broken:
        print(f"prepare_pt2e alone breaks: {'; '.join(map(str, graph.calls))}")
    if found.smallest is None:
        print(
            f"{len(found.compared) - len(found.broken)} are the same in both flows; "
            f"torchao's prepare alone breaks {len(found.broken)}"
        )
        return 0
    print(f"one differs; the smallest:\n{found.smallest}\n{found.smallest.to_json()}\n{found.difference[:600]}")
    return 1


if __name__ == "__main__":
    sys.exit(main())
