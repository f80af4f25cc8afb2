"""A torch whose ``torch.ao.quantization`` is removed: on PYTHONPATH, Python imports this at its start.

Torch's own front doors to it, the names in ``torch.quantization``, are gone with it.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Sequence
from importlib.abc import MetaPathFinder

REMOVED = "torch.ao.quantization"


class Removed(MetaPathFinder):
    """Finds no module of the removed package."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None) -> None:
        """Raise what an import of a missing module raises."""
        if fullname == REMOVED or fullname.startswith(f"{REMOVED}."):
            raise ModuleNotFoundError(f"No module named {fullname!r}", name=fullname)


sys.meta_path.insert(0, Removed())
sys.modules["torch.quantization"] = types.ModuleType("torch.quantization")
