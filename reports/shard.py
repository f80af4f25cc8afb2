"""A part of a run that is divided over several machines."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """One part of a run that is divided in the same way on every machine."""

    place: int
    """Number of the part, from 1."""
    of: int
    """Number of parts."""

    def has(self, unit_id: str) -> bool:
        """Tell whether a claim or job is in this part, by the sha256 of its ID."""
        return int.from_bytes(hashlib.sha256(unit_id.encode()).digest()[:8], "big") % self.of == self.place - 1

    def __str__(self) -> str:
        return f"{self.place}/{self.of}"
