"""TOML, as the standard library reads it since Python 3.11, and its backport before.

PYTEST_DONT_REWRITE: what pytest caches of it is its own code, and can be compared with it.
"""

from __future__ import annotations

import sys
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

TomlError = tomllib.TOMLDecodeError
"""A text is no TOML."""


def parse_toml(text: str) -> dict[str, Any]:
    """Return the content of a TOML text. Raises TomlError."""
    try:
        return tomllib.loads(text)
    except RecursionError as error:
        raise TomlError("its arrays or tables are nested too deeply") from error
