"""Foreign code: what is none, and how each kind is called."""

from __future__ import annotations

import importlib
import sys
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

from fx_quant_conformance.conformance.machine import foreign
from fx_quant_conformance.conformance.machine.foreign import list_foreign_code

Make = Callable[..., ModuleType]


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Makes and imports a module below the working folder, by its name, with the folders of its packages."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    foreign._list_installed.cache_clear()
    made: list[str] = []

    def make(name: str, text: str = "") -> ModuleType:
        *packages, _ = name.split(".")
        path = tmp_path / f"{name.replace('.', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        for depth in range(1, len(packages) + 1):
            (tmp_path.joinpath(*packages[:depth]) / "__init__.py").touch()
        path.write_text(text)
        importlib.invalidate_caches()
        made.append(name.partition(".")[0])
        return importlib.import_module(name)

    yield make
    for name in [name for name in sys.modules if name.partition(".")[0] in made]:
        del sys.modules[name]
    foreign._list_installed.cache_clear()


def test_what_the_suite_is_and_needs_is_not_foreign() -> None:
    roots = {
        "torch",
        "numpy",
        "pytest",
        "_pytest",
        "xdist",
        "hypothesis",
        "jinja2",
        "markupsafe",
        "sympy",
        "conformance",
        "refimpl",
        "backends",
        "reports",
        "json",
        "encodings",
        "_distutils_hack",
    }
    assert list_foreign_code(name for name in sys.modules if name.partition(".")[0] in roots) == []


def test_of_a_package_its_outermost_module_is_named(make: Make) -> None:
    make("npu_tools.inner.deep")
    make("loose")
    names = [name for name in sys.modules if name.partition(".")[0] in ("npu_tools", "loose")]
    assert len(names) == 4
    assert list_foreign_code(names) == ["module loose (loose.py)", "module npu_tools (npu_tools/__init__.py)"]


def test_plugins_are_named_though_sys_modules_has_lost_them(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "conftest", raising=False)
    plugins = [make("conftest"), make("meddling", "class Plugin:\n    pass\n")]
    del sys.modules["conftest"]
    assert list_foreign_code([], [*plugins, plugins[1].Plugin(), object(), pytest]) == [
        f"conftest.py of {tmp_path}",
        "pytest plugin meddling (meddling.py)",
    ]


def test_what_is_installed_is_named_by_its_version_once(make: Make, tmp_path: Path) -> None:
    (tmp_path / "pytest_npu-1.2.dist-info").mkdir()
    (tmp_path / "pytest_npu-1.2.dist-info" / "METADATA").write_text("Name: pytest-npu\nVersion: 1.2\n")
    (tmp_path / "pytest_npu-1.2.dist-info" / "RECORD").write_text("npu_hooks/__init__.py,,\nnpu_hooks/plugin.py,,\n")
    plugin = make("npu_hooks.plugin")
    assert list_foreign_code(["npu_hooks"]) == ["pytest-npu 1.2"]
    assert list_foreign_code(["npu_hooks", "npu_hooks.plugin"], [plugin]) == ["pytest plugin pytest-npu 1.2"]


@pytest.mark.parametrize("name", ["sitecustomize", "usercustomize"])
def test_what_is_put_into_pythons_own_library_is_foreign(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType(name)
    module.__file__ = f"{sysconfig.get_path('stdlib')}/{name}.py"
    monkeypatch.setitem(sys.modules, name, module)
    assert list_foreign_code([name]) == [f"module {name} ({module.__file__})"]


@pytest.mark.parametrize("name", ["_virtualenv", "__editable___npu_1_2_finder"])
def test_what_installers_put_into_every_process_is_not_foreign(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType(name)
    module.__file__ = f"{sysconfig.get_path('purelib')}/{name}.py"
    monkeypatch.setitem(sys.modules, name, module)
    assert list_foreign_code([name]) == []


def test_the_backends_code_is_called_the_vendors(make: Make, tmp_path: Path) -> None:
    make("npu.kernels")
    make("npu_tools")
    names = ["npu", "npu.kernels", "npu_tools"]
    told = ["module npu_tools (npu_tools.py)", "the vendor's module npu (npu/__init__.py)"]
    assert list_foreign_code(names, vendors=[str(tmp_path / "npu")]) == told
