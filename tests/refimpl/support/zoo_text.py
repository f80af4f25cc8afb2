"""Float models for the parity tests, after networks for text and sequences: attention, recurrence, embeddings."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class PostNormTransformer(nn.Module):
    """Queries, keys and values from one linear by chunk; relu; norm after the sum."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out, self.norm1, self.norm2 = nn.Linear(8, 24), nn.Linear(8, 8), nn.LayerNorm(8), nn.LayerNorm(8)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor, mask: Tensor) -> Any:
        query, key, value = torch.chunk(self.qkv(x), 3, dim=-1)
        scores = torch.bmm(query, key.permute(0, 2, 1)).masked_fill(mask, -1e4)
        x = self.norm1(x + self.out(torch.bmm(scores.softmax(-1), value)))
        return self.norm2(x + self.down(F.relu(self.up(x))))


class TwoTables(nn.Module):
    """Embeddings of words and of positions, added; a table shared by two calls."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places, self.fc = nn.Embedding(10, 8), nn.Embedding(5, 8), nn.Linear(8, 4)

    def forward(self, words: Tensor, others: Tensor, places: Tensor) -> Any:
        return self.fc((self.words(words) + self.places(places)) * self.words(others))


class Recommender(nn.Module):
    """Dense features through a bottom net, sparse ones through bags; products of all; a top net. (DLRM-like)"""

    def __init__(self) -> None:
        super().__init__()
        self.bottom, self.top = (
            nn.Sequential(nn.Linear(8, 4), nn.ReLU()),
            nn.Sequential(nn.Linear(13, 4), nn.ReLU(), nn.Linear(4, 1)),
        )
        self.bags = nn.ModuleList([nn.EmbeddingBag(10, 4, mode="sum") for _ in range(2)])

    def forward(self, dense: Tensor, first: Tensor, second: Tensor) -> Any:
        rows = [self.bottom(dense), self.bags[0](first), self.bags[1](second)]
        stacked = torch.stack(rows, dim=1)
        products = torch.bmm(stacked, stacked.transpose(1, 2)).flatten(1)
        return torch.sigmoid(self.top(torch.cat([rows[0], products], dim=1)))


class Lstm(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 6, batch_first=True, **options)
        self.fc = nn.Linear(6 * (2 if self.lstm.bidirectional else 1), 3)

    def forward(self, x: Tensor) -> Any:
        out, (hidden, _) = self.lstm(x)
        return self.fc(out), hidden


class Gru(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.gru, self.fc = nn.Linear(8, 8), nn.GRU(8, 6, 2, batch_first=True), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Any:
        out, hidden = self.gru(self.before(x))
        return self.fc(out[:, 0]), hidden


class Cells(nn.Module):
    """All four cells, stepped over a sequence of fixed length."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.gru = nn.LSTMCell(8, 6), nn.GRUCell(6, 6)
        self.tanh, self.relu = nn.RNNCell(6, 6), nn.RNNCell(6, 6, nonlinearity="relu")
        self.fc = nn.Linear(6, 3)

    def forward(self, x: Tensor, state: Tensor) -> Any:
        hidden, cell, gru = state, state, state
        for step in range(2):
            hidden, cell = self.lstm(x[:, step], (hidden, cell))
            gru = self.gru(hidden, gru)
        return self.fc(self.relu(self.tanh(gru, state)))


class Pointer(nn.Module):
    """Indices: topk, gather, index by tensor, where with a mask, argmax."""

    def __init__(self) -> None:
        super().__init__()
        self.score, self.fc = nn.Linear(8, 1), nn.Linear(8, 8)

    def forward(self, x: Tensor, mask: Tensor) -> Any:
        scores = self.score(x).squeeze(-1)
        scores = torch.where(mask, scores, torch.zeros_like(scores))
        _, best = scores.topk(2, dim=1)
        picked = torch.gather(self.fc(x), 1, best.unsqueeze(-1).expand(-1, -1, 8))
        return picked, torch.argmax(scores, dim=1)


class Gated(nn.Module):
    """Highway layers: a sigmoid gate, its complement, two products and a sum."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.change = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Any:
        gate = torch.sigmoid(self.gate(x))
        return gate * F.relu(self.change(x)) + (1 - gate) * x
