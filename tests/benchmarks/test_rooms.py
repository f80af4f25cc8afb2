"""The rooms of the packages, and that no modules import each other in a circle."""

from __future__ import annotations

import pytest

grimp = pytest.importorskip("grimp", reason="import-linter is not installed: pip install -e '.[test]'")

from benchmarks import rooms  # noqa: E402


def test_no_module_imports_itself_through_others() -> None:
    assert rooms.circles(grimp.build_graph(rooms.PACKAGE)) == set()


def test_a_circle_is_found_once() -> None:
    graph = grimp.ImportGraph()
    for importer, imported in (("a.x", "a.y"), ("a.y", "a.z"), ("a.z", "a.x"), ("a.z", "a.w")):
        graph.add_import(importer=importer, imported=imported)
    assert rooms.circles(graph) == {frozenset({"a.x", "a.y", "a.z"})}
