"""Counting multiply-accumulates: what share of a model's work is quantized."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.fx import GraphModule, Interpreter, Node
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from fx_quant_conformance.conformance.claims.inputs import Batch


def count_multiplications(model: GraphModule, batch: Batch) -> dict[str, int]:
    """Run a reference model; return the number of multiply-accumulates of each node that has any, by its name.

    Torch counts them: those of convolutions, matrix products and attention. A reference model does in float what its
    quantized patterns stand for, so that its counts are those of the float model.
    """
    counter = _Counter(model)
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), _without_fused_ops():
        counter.run(*(value.clone() for value in batch))
    return counter.counts


@contextmanager
def without_fast_path() -> Iterator[None]:
    """Have attention call the ops that it is written in, not a fused one that rounds in other places."""
    has_fast_path = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(has_fast_path)


@contextmanager
def _without_fused_ops() -> Iterator[None]:
    """Have attention and recurrent modules call ops that are counted: torch knows no count of the fused ones."""
    has_onednn = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        with without_fast_path():
            yield
    finally:
        torch._C._set_mkldnn_enabled(has_onednn)


class _Counter(Interpreter):
    def __init__(self, model: GraphModule) -> None:
        super().__init__(model)
        self.counts: dict[str, int] = {}

    def run_node(self, n: Node) -> Any:
        with FlopCounterMode(display=False) as counter:
            value = super().run_node(n)
        operations = int(counter.get_total_flops())
        if operations:
            self.counts[n.name] = operations // 2  # a multiplication and an addition are two
        return value
