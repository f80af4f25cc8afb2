"""Multiply-accumulates: counted by torch, compared with numbers by hand."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import GraphModule

from fx_quant_conformance.conformance.own_models.multiplications import count_multiplications
from fx_quant_conformance.refimpl.graph.tracer import trace


class Attention(nn.Module):
    """Attention as a module, then as a function, then a grouped convolution along the sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.conv = nn.MultiheadAttention(8, 2, batch_first=True), nn.Conv1d(8, 8, 3, groups=4)

    def forward(self, x: Tensor) -> Any:
        """Take sequences (N, 5, 8); give (N, 8, 3)."""
        x, _ = self.attention(x, x, x)
        x = F.scaled_dot_product_attention(x, x, x)
        return self.conv(F.relu(x).transpose(1, 2))


class Recurrent(nn.Module):
    """An LSTM, then a GRU."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.gru = nn.LSTM(8, 16, batch_first=True), nn.GRU(16, 4, batch_first=True)

    def forward(self, x: Tensor) -> Any:
        """Take sequences (N, 5, 8); give (N, 5, 4)."""
        states, _ = self.lstm(x)
        states, _ = self.gru(states)
        return states


def test_counts_of_recurrent_modules_are_those_by_hand() -> None:
    """Four gates, and three, of input and state, at each of five places of two sequences."""
    traced = trace(Recurrent().eval())
    counts = count_multiplications(GraphModule(traced, traced.graph), (torch.randn(2, 5, 8),))
    assert counts == {"lstm": 2 * 5 * 4 * 16 * (8 + 16), "gru": 2 * 5 * 3 * 4 * (16 + 4)}


def test_counts_are_those_by_hand_also_of_fused_attention() -> None:
    traced = trace(Attention().eval())
    enabled = torch.backends.mha.get_fastpath_enabled()
    counts = count_multiplications(GraphModule(traced, traced.graph), (torch.randn(2, 5, 8),))
    products = 2 * 2 * (5 * 5 * 8)  # queries by keys, and weights by values, of two sequences
    assert counts == {
        "attention": 2 * 5 * 8 * (3 * 8) + products + 2 * 5 * 8 * 8,
        "scaled_dot_product_attention": products,
        "conv": 2 * 3 * 8 * (2 * 3),
    }
    assert torch.backends.mha.get_fastpath_enabled() == enabled
