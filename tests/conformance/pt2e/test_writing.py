"""The module that is written constructs the derived config again, is formatted, and reads in order."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn

from fx_quant_conformance.conformance.ops.table import RECORDS
from fx_quant_conformance.conformance.pt2e.candidates import copy_entry, list_compositions, list_entries
from fx_quant_conformance.conformance.pt2e.derive import ProbeRow
from fx_quant_conformance.conformance.pt2e.writing import render_module, render_table
from fx_quant_conformance.conformance.remote.config_data import config_to_data
from fx_quant_conformance.refimpl import BackendConfig, BackendPatternConfig, DTypeConfig, DTypeWithConstraints
from fx_quant_conformance.refimpl.config.native import U8, U8_S8

BOUNDED = DTypeConfig(
    DTypeWithConstraints(torch.qint8, -100, 100, scale_min_lower_bound=2**-12),
    torch.float32,
    DTypeWithConstraints(torch.qint8, -127, 127, scale_min_lower_bound=0.001),
    torch.float32,
    is_dynamic=True,
)
SIGMOID = DTypeWithConstraints(torch.quint8, scale_exact_match=1 / 256, zero_point_exact_match=0)
FIXED = DTypeConfig(SIGMOID, SIGMOID)


def import_module(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def make_config(dtypes: DTypeConfig, entries: list[BackendPatternConfig]) -> tuple[BackendConfig, list[ProbeRow]]:
    config, rows = BackendConfig("my_npu"), list[ProbeRow]()
    for entry in entries:
        config.set_backend_pattern_config(copy_entry(entry, is_qat=True).add_dtype_config(dtypes))
        rows.append(ProbeRow(pattern="p", dtypes="d", schemes=("per_channel_symmetric",), notes=("a note",)))
    return config, rows


@pytest.fixture(scope="module")
def every_entry(tmp_path_factory: pytest.TempPathFactory) -> tuple[BackendConfig, Path, list[ProbeRow]]:
    """A config of everything that could be claimed, the module written of it, and its rows."""
    config, rows = make_config(U8_S8, [*list_entries(), *list_compositions(set(RECORDS))])
    rows[0] = replace(rows[0], notes=("a note that is longer than a line, " * 4,))
    for number, dtypes in enumerate((BOUNDED, FIXED, U8)):
        config.configs[number].set_dtype_configs([dtypes])
    path = tmp_path_factory.mktemp("written") / "written.py"
    path.write_text(render_module(config, rows, ["Quantizer: a " + "long " * 30 + "line"]), encoding="utf-8")
    return config, path, rows


@pytest.mark.slow
def test_the_module_constructs_an_equal_config(every_entry: tuple[BackendConfig, Path, list[ProbeRow]]) -> None:
    config, path, _ = every_entry
    written = import_module(path)
    assert len(config.configs) > 800
    assert config_to_data(written.backend_config()) == config_to_data(config)
    assert written.WEIGHT_SCHEMES == ("per_channel_symmetric",)


@pytest.mark.parametrize("width", [88, 120])
def test_the_module_is_formatted(
    every_entry: tuple[BackendConfig, Path, list[ProbeRow]], tmp_path: Path, width: int
) -> None:
    pytest.importorskip("ruff", reason="needs ruff")
    path = tmp_path / "written.py"
    path.write_text(render_module(every_entry[0], every_entry[2], ["Quantizer: mine"], width=width), encoding="utf-8")
    for command in (
        ("format", "--check", f"--line-length={width}"),
        ("check", f"--line-length={width}", "--select=E,F,W,I"),
    ):
        words = [sys.executable, "-m", "ruff", *command, "--isolated", "--no-cache", str(path)]
        done = subprocess.run(words, capture_output=True, text=True, cwd=path.parent)
        assert done.returncode == 0, done.stdout[-2000:]


def test_the_module_reads_in_order() -> None:
    config, rows = make_config(BOUNDED, [entry for entry in list_entries() if entry.normal_pattern is nn.Linear])
    text = render_module(config, rows, ["Quantizer: mine"])
    head, entry = text.partition("ENTRIES = [")[::2]
    assert "Quantizer: mine" in head
    assert "DYNAMIC_S8_S8 = DTypeConfig(" in head
    assert "scale_min_lower_bound=2**-12" in head
    assert entry.split("]")[0].strip().split("\n") == [
        "# a note",
        "    _entry(",
        "        nn.Linear,",
        "        DYNAMIC_S8_S8,",
        "        root=nn.Linear,",
        "        qat=nnqat.Linear,",
        "        reference=nnqr.Linear,",
        "    ),",
    ]
    assert "    _entry(nn.Linear, DYNAMIC_S8_S8, root=nn.Linear," in render_module(config, rows, [], width=100)


def test_the_table_has_a_row_for_each_pattern() -> None:
    claimed = ProbeRow(pattern="nn.Linear", dtypes="static", schemes=("per_tensor_symmetric",), notes=("a note",))
    lines = render_table([claimed, ProbeRow(pattern="nn.ReLU", reason="not annotated")]).split("\n")
    assert [line.split("  ")[0].strip() for line in lines] == [
        "pattern",
        lines[1].split("  ")[0],
        "nn.Linear",
        "nn.ReLU",
    ]
    assert lines[2].endswith("per_tensor_symmetric; a note")
    assert lines[3].endswith("not annotated")
