"""A pattern that is cut out is quantized as in the whole model: a backend on quantized tensors runs it so."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fx_quant_conformance.backends.discovery import find_backend
from fx_quant_conformance.backends.lowering import lower_reference
from fx_quant_conformance.conformance.whole_models.subgraphs import cut_subgraphs
from fx_quant_conformance.refimpl import (
    QConfigMapping,
    convert_to_reference_decomposed_fx,
    get_default_qconfig,
    prepare_fx,
)
from tests.conformance.support.dynamic_flows import FLOAT16, PER_CHANNEL, dynamic

X = torch.randn(5, 8, generator=torch.Generator().manual_seed(0))
QCONFIGS = {
    "static": get_default_qconfig("qnnpack"),
    "dynamic": dynamic(),
    "dynamic, per channel": PER_CHANNEL,
    "float16": FLOAT16,
}


class Functional(nn.Module):
    """Two layers, a module and a function."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.weight = nn.Linear(8, 8), nn.Parameter(torch.randn(8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(self.layer(x), self.weight)


class Unread(Functional):
    """A third layer, whose result nobody reads, as of the pooler of a transformer that is asked for its tokens."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        self.layer(y)
        return nn.functional.linear(y, self.weight)


@pytest.mark.rule("LOW-04")
@pytest.mark.parametrize("kind", QCONFIGS)
def test_each_part_runs_as_it_is_quantized(kind: str) -> None:
    torch.manual_seed(0)
    backend, qconfig = find_backend("fbgemm"), QCONFIGS[kind]
    prepared = prepare_fx(
        Functional().eval(), QConfigMapping().set_global(qconfig), (X,), backend_config=backend.backend_config()
    )
    prepared(X)
    parts = list(cut_subgraphs(convert_to_reference_decomposed_fx(prepared), [(X,)]))
    assert [part.node for part in parts] == ["layer", "linear"]
    for part in parts:
        execution = backend.execution(lower_reference(backend, part.model, part.batches[0]))
        assert execution is not None and execution.quantized_ops and not execution.float_fallbacks, execution


def test_a_layer_that_nobody_reads_is_no_part() -> None:
    """It was an internal error: KeyError."""
    prepared = prepare_fx(Unread().eval(), QConfigMapping().set_global(QCONFIGS["static"]), (X,))
    prepared(X)
    assert [part.node for part in cut_subgraphs(convert_to_reference_decomposed_fx(prepared), [(X,)])] == [
        "layer",
        "linear",
    ]
