"""One bundle for the tests of vectors, with outputs that are right, and a word on what was executed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.conformance.vectors.bundles import answer_bundle, write_bundle


class Made(NamedTuple):
    """A bundle and outputs for it."""

    bundle: Path
    outputs: Path


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """Return a bundle whose outputs are right: not to be written to."""
    folder = tmp_path_factory.mktemp("vectors")
    made = Made(bundle=folder / "bundle", outputs=folder / "outputs")
    write_bundle(made.bundle)
    answer_bundle(made.bundle, made.outputs)
    for case in made.outputs.iterdir():
        text = json.dumps({"quantized_ops": ["op0", "add"], "float_fallbacks": []})
        (case / "execution.json").write_text(text, encoding="utf-8")
    return made
