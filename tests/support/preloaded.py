"""What a fork of the server of `warm_python` has already: the suite's modules, and the report's templates compiled."""

import gc

import pytest  # noqa: F401

import refimpl  # noqa: F401
from reports.page import _make_environment

_TEMPLATES = _make_environment()
for _name in _TEMPLATES.list_templates(extensions=["j2"]):
    _TEMPLATES.get_template(_name)
gc.collect()
gc.freeze()
