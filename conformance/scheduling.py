"""How claims are shared out over pytest-xdist's workers: one worker takes all stages of a claim, in order.

Imported only when xdist distributes the tests.
"""

from __future__ import annotations

from xdist.scheduler.loadscope import LoadScopeScheduling  # type: ignore[import-untyped]
from xdist.workermanage import WorkerController  # type: ignore[import-untyped]


class ClaimScheduling(LoadScopeScheduling):  # type: ignore[misc]  # xdist has no types
    """Sends whole claims to workers, and survives workers that die.

    The base class would run a test that killed its worker again and again, and waits for tests that are done
    already; here a claim that killed its worker is given up, and only what was not run is handed to others.
    """

    def _split_scope(self, nodeid: str) -> str:
        return nodeid.rpartition("-")[0]

    def schedule(self) -> None:
        """Share out the work; a worker starts only when it has more than one test, so ask for a second claim."""
        super().schedule()
        if self.collection:
            super().schedule()

    def remove_node(self, node: WorkerController) -> str | None:
        """Take back a dead worker's claims; return the test that it died in."""
        workload: dict[str, dict[str, bool]] = self.assigned_work[node]
        for scope in [scope for scope, unit in workload.items() if all(unit.values())]:
            del workload[scope]
        if not workload:
            super().remove_node(node)
            return None
        scope, unit = next(iter(workload.items()))
        del workload[scope]
        super().remove_node(node)
        return next(nodeid for nodeid, done in unit.items() if not done)
