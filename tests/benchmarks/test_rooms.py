"""The rooms of the packages, and that no modules import each other in a circle."""

from __future__ import annotations

import pytest

grimp = pytest.importorskip("grimp", reason="import-linter is not installed: pip install -e '.[test]'")

from benchmarks import rooms  # noqa: E402


def test_no_module_imports_itself_through_others() -> None:
    assert rooms.circles(grimp.build_graph(*rooms.PACKAGES)) == set()


def test_a_circle_is_found_once() -> None:
    graph = grimp.ImportGraph()
    for importer, imported in (("a.x", "a.y"), ("a.y", "a.z"), ("a.z", "a.x"), ("a.z", "a.w")):
        graph.add_import(importer=importer, imported=imported)
    assert rooms.circles(graph) == {frozenset({"a.x", "a.y", "a.z"})}


def test_a_room_is_a_sub_package_or_a_flat_package() -> None:
    graph = grimp.ImportGraph()
    for module in ("a", "a.b", "a.b.c", "a.d", "e", "e.f"):
        graph.add_module(module)
    graph.add_import(importer="a.d", imported="a.b.c")
    graph.add_import(importer="a.b.c", imported="e.f")
    assert rooms.rooms(graph) == {"a": (1, ["a.b"]), "a.b": (1, ["e"]), "e": (1, [])}


def test_the_script_prints_the_number_of_circles(capsys: pytest.CaptureFixture[str]) -> None:
    rooms.main()
    assert capsys.readouterr().out.rstrip().endswith("import circles: 0")
