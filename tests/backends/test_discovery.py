"""Finding a backend by name, entry point or module:attribute; each way to fail says what to change."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from fx_quant_conformance.backends.base import Backend, Capabilities, Execution
from fx_quant_conformance.backends.discovery import find_backend
from fx_quant_conformance.backends.names import ENTRY_POINT_GROUP, SHIPPED, BackendNotFound

FAKES = Path(__file__).resolve().parents[1] / "conformance" / "support" / "fake_backends"


@pytest.fixture(autouse=True)
def vendor_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand in the vendor's folder, as a vendor does; undo what discovery does to sys.path."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(FAKES)


def refusal(spec: str) -> str:
    with pytest.raises(BackendNotFound) as caught:
        find_backend(spec)
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize("attribute", ["Good", "INSTANCE"])
def test_module_and_attribute_is_a_class_or_an_instance(attribute: str) -> None:
    backend = find_backend(f"fakes:{attribute}")
    assert isinstance(backend, Backend) and backend.name == "good"


def test_defaults_suit_a_minimal_backend() -> None:
    backend = find_backend("fakes:INSTANCE")
    assert backend.unavailable_reason() is None
    assert Backend.execution(backend, lambda: None) is None
    assert backend.waivers is None and backend.engine == ""
    assert Backend.versions(backend) == {} and Backend.capabilities(backend) == Capabilities()
    assert Execution(quantized_ops=("linear",), float_fallbacks=()).kernels == ()


def test_unknown_name_lists_the_choices_and_the_nearest() -> None:
    message = refusal("qnpack")
    assert "unknown backend 'qnpack'" in message and "did you mean 'qnnpack'?" in message
    assert all(name in message for name in SHIPPED) and "module:attribute" in message


@pytest.mark.parametrize(
    ("spec", "parts"),
    [
        ("no_such_module:Npu", ["'no_such_module' does not import", "ModuleNotFoundError", str(FAKES)]),
        ("broken_import:Npu", ["'broken_import' does not import", "ImportError: libnpu.so"]),
        ("exiting_import:Npu", ["'exiting_import' does not import", "SystemExit: this is a script"]),
        ("fakes:Godo", ["module 'fakes' has no attribute 'Godo'", "its backends:", "LowerRaises"]),
        ("fakes:", ["'fakes:' is not of the form module:attribute"]),
        (":Good", ["':Good' is not of the form module:attribute"]),
        ("fakes:NotABackend", ["the class NotABackend", "without representation, backend_config, lower"]),
        ("fakes:INT8", ["an object of type DTypeConfig", "give a subclass or an instance"]),
        ("fakes:Incomplete", ["fakes:Incomplete does not implement lower"]),
        ("fakes:ConstructorRaises", ["ConstructorRaises() raised OSError: driver not loaded"]),
        ("fakes:Nameless", ["attribute 'name' is ''", "short name"]),
        ("fakes:Formless", ["attribute 'representation' is 'QUANTIZED'", "Representation.DECOMPOSED"]),
    ],
)
def test_each_failure_says_what_it_found(spec: str, parts: list[str]) -> None:
    message = refusal(spec)
    assert [part for part in parts if part not in message] == []


def test_backends_base_itself_is_not_offered() -> None:
    assert "Backend," not in refusal("fakes:Godo")


def install(site: Path, package: str, *points: str) -> None:
    """Write what an installed package leaves behind: its metadata with entry points."""
    info = site / f"{package}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("\n".join([f"[{ENTRY_POINT_GROUP}]", *points]))
    sys.path.insert(0, str(site))


def test_entry_points_are_found_and_listed(tmp_path: Path) -> None:
    install(tmp_path, "acme", "acme_npu = fakes:Good")
    sys.path.insert(0, str(FAKES))
    assert find_backend("acme_npu").name == "good"
    assert "acme_npu, " in refusal("acme")


def test_a_shipped_name_cannot_be_taken_over(tmp_path: Path) -> None:
    install(tmp_path, "acme", "qnnpack = fakes:Good")
    sys.path.insert(0, str(FAKES))
    try:
        found = find_backend("qnnpack").name
    except BackendNotFound as error:
        found = str(error)
    assert found != "good"


def test_an_entry_point_that_does_not_load_is_named(tmp_path: Path) -> None:
    install(tmp_path, "acme", "acme_npu = broken_import:Npu")
    sys.path.insert(0, str(FAKES))
    message = refusal("acme_npu")
    assert "entry point 'acme_npu'" in message and "ImportError: libnpu.so" in message


def test_two_packages_with_one_name_are_refused(tmp_path: Path) -> None:
    install(tmp_path / "a", "acme", "npu = fakes:Good")
    install(tmp_path / "b", "bcme", "npu = other:Npu")
    message = refusal("npu")
    assert "several installed packages" in message and "fakes:Good, other:Npu" in message


def test_the_working_directory_is_first_on_the_path() -> None:
    for _ in range(2):
        find_backend("fakes:Good")
        assert sys.path[0] == str(FAKES) and sys.path.count(str(FAKES)) == 1


@pytest.mark.parametrize(
    ("line", "name"),
    [("from conformance.vendor import register", "conformance.vendor"), ("import refimpl", "refimpl")],
)
def test_what_release_0_2_0_called_otherwise_is_told_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, name: str
) -> None:
    """From a wheel, where nothing has the old names, and from a checkout, whose folders still have them."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "old_npu.py").write_text(f"{line}\n")
    for path in (sys.path, [each for each in sys.path if not Path(each, "refimpl").is_dir()]):
        monkeypatch.setattr(sys, "path", list(path))
        sys.modules.pop("old_npu", None)
        package = f"fx_quant_conformance.{name.partition('.')[0]}"
        advice = f"{name} is gone: its package is {package} now; Backend, Capabilities, Representation and register"
        assert refusal("old_npu:Npu").count("\n") == 0 and advice in refusal("old_npu:Npu")
