"""Python runs this as it starts: it has a module change the suite's judge, as a package in site-packages could.

JUDGE_PATCH: the name of the module; its ``patch`` gets `conformance.run.judge` when that has been imported.
"""

from __future__ import annotations

import os
from importlib import import_module
from importlib.machinery import SourceFileLoader
from types import ModuleType

if "JUDGE_PATCH" in os.environ:
    run_module = SourceFileLoader.exec_module

    def run_and_patch(loader: SourceFileLoader, module: ModuleType) -> None:
        """Run a module's code; change the judge's."""
        run_module(loader, module)
        if module.__name__ == "fx_quant_conformance.conformance.run.judge":
            import_module(os.environ["JUDGE_PATCH"]).patch(module)

    SourceFileLoader.exec_module = run_and_patch  # type: ignore[assignment]
