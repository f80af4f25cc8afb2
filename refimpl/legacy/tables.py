"""Looking up rows of a table of embeddings, with a weight that takes the place of its own."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor


class LooksUp:
    """A table, whose rows are those of ``read_rows()``."""

    def forward(self, indices: Tensor) -> Tensor:
        """Return the rows of these indices, of shape (…, embedding_dim)."""
        own: Any = self
        options = (own.padding_idx, own.max_norm, own.norm_type, own.scale_grad_by_freq, own.sparse)
        return F.embedding(indices, own.read_rows(), *options)


class SumsBags:
    """A table whose rows are looked up and reduced, bag by bag; they are those of ``read_rows()``."""

    def forward(
        self, indices: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None
    ) -> Tensor:
        """Return a row for each bag, of shape (bags, embedding_dim)."""
        own: Any = self
        return F.embedding_bag(
            indices,
            own.read_rows(),
            offsets,
            own.max_norm,
            own.norm_type,
            own.scale_grad_by_freq,
            own.mode,
            own.sparse,
            per_sample_weights,
            own.include_last_offset,
            own.padding_idx,
        )
