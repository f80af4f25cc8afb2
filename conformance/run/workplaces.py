"""Where the units of a run are judged: in processes, beside which the backend's own runs, or after a device has run.

| process | holds | is asked by |
|---|---|---|
| judge | the suite | pytest's process |
| judge beside the vendor's code | also the vendor's classes and functions, for claims on these | pytest's process |
| judge of a model | also a user's model, and the vendor's code where needed; a new one for each | pytest's process |
| worker | the vendor's code | a judge, through pytest's process |

All but the first have a guard, for they run code of others.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from fx_quant_conformance.conformance.machine.child import Child, Ending, Recipe
from fx_quant_conformance.conformance.machine.frames import Frame
from fx_quant_conformance.conformance.machine.workplace import Workplace, WorkResult
from fx_quant_conformance.conformance.remote.worker import make_warm_workers
from fx_quant_conformance.conformance.run.outline import Place, Unit
from fx_quant_conformance.conformance.run.setup import Setup, make_reproducing_request, make_request
from fx_quant_conformance.reports.schema import Check, ClaimResult


@dataclass(slots=True)
class Openers:
    """The worker that has described the backend, and the judge that has opened the run: the first work is theirs too.

    Neither is new any more: what it does not complete is done again.
    """

    worker: Child | None = None
    judge: Child | None = None

    def take(self) -> tuple[Child | None, Child | None]:
        """Return the worker and the judge, which are from now on the caller's to end."""
        taken, self.worker, self.judge = (self.worker, self.judge), None, None
        return taken

    def close(self) -> None:
        """End those that nobody has taken."""
        for child in self.take():
            if child is not None:
                child.end()


MODEL_PATIENCE = 5
"""How many times the limit of a claim a user's model has: each of its patterns is lowered and judged alone."""


def make_judge_recipe(setup: Setup) -> Recipe:
    """Return how a judge is made that holds no code of others."""
    return Recipe(open="fx_quant_conformance.conformance.run.judge:open_judge", arguments=(setup,))


class Workplaces:
    """Has each unit of a run judged where it belongs. ``openers``: those of the same setup."""

    def __init__(self, setup: Setup, units: Iterable[Unit], openers: Openers | None = None) -> None:
        limit = setup.options.claim_timeout
        self._first = (openers or Openers()).take()
        first_worker, first_judge = self._first
        worker = None
        if setup.remake is None:
            worker = make_warm_workers(setup.options.backend, limit=limit, first=first_worker)
        judge = make_judge_recipe(setup)
        guarded = replace(judge, is_guarded=True)
        patience = limit * MODEL_PATIENCE
        of_model = replace(setup, options=replace(setup.options, claim_timeout=patience))

        def open_guarded(setup: Setup, holds: str, limit: float, *, keeps: bool) -> Workplace:
            return Workplace(replace(guarded, arguments=(setup,)), worker, limit=limit, holds=holds, keeps=keeps)

        self._place_of = {unit.id: unit.place for unit in units}
        self._places: dict[Place, Workplace] = {
            "plain": Workplace(judge, worker, limit=limit, first=first_judge),
            "beside": open_guarded(replace(setup, imports_vendor=True), "the vendor's code", limit, keeps=True),
            # what a user's model changes in its process, no other model finds
            "model": open_guarded(of_model, "the user's model", patience, keeps=False),
            "model beside": open_guarded(
                replace(of_model, imports_vendor=True), "the vendor's code and the user's model", patience, keeps=False
            ),
        }

    def run(self, name: str) -> WorkResult:
        """Run a claim or job by its ID."""
        return self._ask(name, make_request(name))

    def reproduce(self, result: ClaimResult, checks: Sequence[Check]) -> ClaimResult:
        """Return a failing claim's result with a script and graphs, as far as they can be had."""
        done = self._ask(result.claim, make_reproducing_request(result, checks))
        made = next((message for message in done.messages if isinstance(message, ClaimResult)), None)
        if made is not None:
            return made
        return result if done.ending is Ending.DONE else replace(result, script=f"# no script: {done.message}\n")

    def close(self) -> None:
        """End all processes."""
        for place in self._places.values():
            place.close()
        for child in self._first:  # no work may have needed it
            if child is not None:
                child.end()

    def _ask(self, name: str, request: Frame) -> WorkResult:
        return self._places[self._place_of[name]].run(request)
