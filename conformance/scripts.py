from __future__ import annotations
from dataclasses import dataclass
from typing import Any
class NoScriptError(Exception): pass
@dataclass
class Failure:
    model: Any; batch: Any; check: Any
def script_of(failure, bench, *, name, message): raise NoScriptError("todo")
def fails_alone(s): return True
