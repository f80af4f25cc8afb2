"""How many modules each room has, what it imports, and the import circles: python -m benchmarks.rooms

A room is a sub-package of conformance, or a package that is flat. A circle is a set of modules each of which imports
all of the others, directly or through others; imports inside of functions count.
"""

from __future__ import annotations

from collections import defaultdict

import grimp
from tabulate import tabulate

PACKAGE = "fx_quant_conformance"


def circles(graph: grimp.ImportGraph) -> set[frozenset[str]]:
    """Find the import circles."""
    knots = (
        graph.find_upstream_modules(module) & graph.find_downstream_modules(module) | {module}
        for module in graph.modules
    )
    return {frozenset(knot) for knot in knots if len(knot) > 1}


def room_of(module: str, packages: set[str]) -> str:
    """Name the room of a module; of one that lies beside the rooms, its package."""
    _, first, *rest = *module.split("."), ""
    return f"{first}.{rest[0]}" if rest and f"{PACKAGE}.{first}.{rest[0]}" in packages else first


def rooms(graph: grimp.ImportGraph) -> dict[str, tuple[int, list[str]]]:
    """Return, for each room, its number of modules, and the other rooms that these import."""
    packages = {module.rpartition(".")[0] for module in graph.modules}
    modules: defaultdict[str, int] = defaultdict(int)
    imports: defaultdict[str, set[str]] = defaultdict(set)
    for module in graph.modules:
        if module not in packages:
            room = room_of(module, packages)
            modules[room] += 1
            found = graph.find_modules_directly_imported_by(module)
            imports[room] |= {room_of(other, packages) for other in found} - {room}
    return {room: (count, sorted(imports[room])) for room, count in sorted(modules.items())}


def main() -> None:
    """Print a row for each room, and the circles."""
    graph = grimp.build_graph(PACKAGE)
    rows = [[room, count, ", ".join(others)] for room, (count, others) in rooms(graph).items()]
    print(tabulate(rows, headers=["room", "modules", "imports"]))
    found = circles(graph)
    print(f"\nimport circles: {len(found)}", *(f"  {', '.join(sorted(circle))}" for circle in found), sep="\n")


if __name__ == "__main__":
    main()
