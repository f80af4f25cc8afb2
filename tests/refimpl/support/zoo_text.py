"""Float models for the parity tests, after networks for text and sequences: attention, recurrence, embeddings."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Attention(nn.Module):
    """Heads by view and transpose, with sizes from the tensor; matmul, softmax, matmul."""

    def __init__(self, width: int = 8, heads: int = 2) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.out, self.dropout, self.heads = nn.Linear(width, width), nn.Dropout(0.1), heads

    def split(self, x: Tensor) -> Tensor:
        return x.view(x.size(0), x.size(1), self.heads, -1).transpose(1, 2)

    def forward(self, x: Tensor) -> Any:
        query, key, value = self.split(self.query(x)), self.split(self.key(x)), self.split(self.value(x))
        scores = torch.matmul(query, key.transpose(-2, -1)) / math.sqrt(query.size(-1))
        mixed = torch.matmul(self.dropout(F.softmax(scores, dim=-1)), value)
        return self.out(mixed.transpose(1, 2).contiguous().view(x.size(0), -1, self.heads * 4))


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.norm1, self.norm2 = Attention(), nn.LayerNorm(8), nn.LayerNorm(8)
        self.feed = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8), nn.Dropout(0.1))

    def forward(self, x: Tensor) -> Any:
        x = x + self.attention(self.norm1(x))
        return x + self.feed(self.norm2(x))


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


class CrossAttention(nn.Module):
    """torch's own attention is a leaf that no config quantizes; its result is a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.before, self.after = (
            nn.MultiheadAttention(8, 2, batch_first=True),
            nn.Linear(8, 8),
            nn.Linear(8, 8),
        )

    def forward(self, x: Tensor, memory: Tensor) -> Any:
        found, weights = self.attention(self.before(x), memory, memory)
        return self.after(found), weights


class Mixer(nn.Module):
    """Mixing over positions and over channels by transposing."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 5))
        self.channels, self.norm = nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 8)), nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Any:
        x = x + self.tokens(self.norm(x).permute(0, 2, 1)).permute(0, 2, 1)
        return (x + self.channels(x)).mean(dim=1)


class Classifier(nn.Module):
    """An embedding bag and two linears."""

    def __init__(self) -> None:
        super().__init__()
        self.bag, self.fc1, self.fc2 = (
            nn.EmbeddingBag(10, 8, mode="sum", include_last_offset=True),
            nn.Linear(8, 8),
            nn.Linear(8, 3),
        )

    def forward(self, words: Tensor, offsets: Tensor) -> Any:
        return self.fc2(F.relu(self.fc1(self.bag(words, offsets))))


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


class LastState(nn.Module):
    """Embedding, LSTM with a given state, and the last position by index."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.lstm, self.fc = nn.Embedding(10, 8), nn.LSTM(8, 6, batch_first=True), nn.Linear(6, 3)

    def forward(self, words: Tensor, hidden: Tensor, cell: Tensor) -> Any:
        out, _ = self.lstm(self.table(words), (hidden, cell))
        return self.fc(out[:, -1, :])


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
