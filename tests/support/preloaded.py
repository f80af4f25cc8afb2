"""What a fork of the server of `warm_python` has already: the suite's modules, and the report's templates compiled.

It is imported in no other process: each fork from there on loses the modules of the tests.
"""

import gc
import os
import sys

import pytest  # noqa: F401

import fx_quant_conformance.conformance.remote.server
import fx_quant_conformance.conformance.run.hooks
import fx_quant_conformance.conformance.run.judge  # noqa: F401
from fx_quant_conformance.reports.page import _make_environment

_TEMPLATES = _make_environment()
for _name in _TEMPLATES.list_templates(extensions=["j2"]):
    _TEMPLATES.get_template(_name)


def _leave_tests() -> None:
    """Take the modules of the tests away from a fork, in which they would be foreign code."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "tests"]:
        del sys.modules[name]


os.register_at_fork(after_in_child=_leave_tests)
gc.collect()
gc.freeze()
