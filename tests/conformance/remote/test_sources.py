"""The sources of a backend: a change of any file that its process may run code from changes their digest."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

from fx_quant_conformance import conformance
from fx_quant_conformance.conformance.remote.sources import SourcesError, digest_sources, list_sources

REPO = Path(conformance.__file__).parents[1]


@pytest.fixture
def vendor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with a package and, beside it, a module; the package is imported."""
    package = tmp_path / "made_up_vendor"
    (package / "kernels").mkdir(parents=True)
    for name in ("__init__.py", "backend.py", "kernels/late.py", "kernels/native.so"):
        (package / name).write_text("")
    (tmp_path / "made_up_single.py").write_text("")
    (tmp_path / "made_up_late.py").write_text("")
    (tmp_path / "notes.txt").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    __import__("made_up_vendor.backend")
    yield tmp_path
    for name in [name for name in sys.modules if name.startswith("made_up_")]:
        del sys.modules[name]


def test_of_a_package_all_files_count_and_nothing_of_the_suite_or_installed(vendor: Path) -> None:
    places = list_sources("made_up_vendor.backend", "made_up_vendor.backend")
    assert str(vendor / "made_up_vendor") in places
    for module in (torch, conformance, os):
        assert not any(str(module.__file__).startswith(place + os.sep) for place in places), places


def test_another_module_of_the_process_counts_and_so_does_what_lies_beside_a_single_one(vendor: Path) -> None:
    __import__("made_up_single")
    own = str(vendor / "made_up_single.py")
    assert own in list_sources("made_up_vendor", "made_up_vendor")
    alone = list_sources("made_up_single", "fx_quant_conformance.backends.base")
    assert {own, str(vendor / "made_up_late.py"), str(vendor / "made_up_vendor")} <= {*alone}
    assert str(vendor / "notes.txt") not in alone


def test_a_vendors_package_may_be_called_as_a_folder_of_the_suite_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "conformance").mkdir()
    module = ModuleType("conformance")
    module.__path__ = [str(tmp_path / "conformance")]
    monkeypatch.setitem(sys.modules, "conformance", module)
    assert str(tmp_path / "conformance") in list_sources("conformance.mine", "conformance.mine")


def test_a_module_whose_files_are_nowhere_is_an_error(vendor: Path) -> None:
    with pytest.raises(SourcesError, match="the files of its module 'made_up_nowhere' cannot be found"):
        list_sources("made_up_nowhere.backend", "fx_quant_conformance.backends.base")
    sys.modules["made_up_vendor"].__path__ = [str(vendor / "gone")]
    with pytest.raises(SourcesError, match="'made_up_vendor' cannot be found"):
        list_sources("made_up_vendor", "made_up_vendor")


def test_a_shipped_backend_is_of_the_suite() -> None:
    assert not any(
        place.startswith(str(REPO / "backends"))
        for place in list_sources(
            "fx_quant_conformance.backends.torch_engines.qnnpack", "fx_quant_conformance.backends.torch_engines.qnnpack"
        )
    )


CHANGES: dict[str, Callable[[Path], object]] = {
    "edited": lambda folder: (folder / "backend.py").write_text("x = 1\n"),
    "added": lambda folder: (folder / "kernels" / "table.bin").write_bytes(b""),
    "renamed": lambda folder: (folder / "backend.py").rename(folder / "backend2.py"),
    "removed": lambda folder: (folder / "kernels" / "late.py").unlink(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_of_any_file_changes_the_digest(vendor: Path, change: str) -> None:
    package = vendor / "made_up_vendor"
    before = digest_sources([package])
    CHANGES[change](package)
    assert digest_sources([package]) != before


def test_what_runs_no_code_or_is_left_out_does_not_count(vendor: Path) -> None:
    package = vendor / "made_up_vendor"
    before = digest_sources([package])
    for name in ("__pycache__/backend.pyc", ".git/HEAD", "cache/answers"):
        (package / name).parent.mkdir(exist_ok=True)
        (package / name).write_text("new")
    (package / "waivers.toml").write_text("new")
    assert digest_sources([package], [package / "cache", package / "waivers.toml"]) == before
    os.mkfifo(package / "a pipe")
    assert digest_sources([package], [package / "cache", package / "waivers.toml"]) == before


def test_a_copy_elsewhere_has_the_same_digest(vendor: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(vendor / "made_up_vendor", tmp_path / "elsewhere" / "made_up_vendor")
    assert digest_sources([copy]) == digest_sources([str(vendor / "made_up_vendor")])


def test_a_file_that_cannot_be_read_is_an_error(vendor: Path) -> None:
    (vendor / "made_up_vendor" / "link.py").symlink_to(vendor / "nowhere")
    with pytest.raises(SourcesError, match=r"link\.py cannot be read: No such file"):
        digest_sources([vendor / "made_up_vendor"])
