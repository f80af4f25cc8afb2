"""A place where work is done: a judge's process and, where the backend runs here, the worker that it asks.

Both are kept from work to work while all goes well. Work that a used process does not complete is done again in a new
one, and only that counts: no claim is blamed for a death that another caused. The judge reaches the worker through its
parent, which alone makes processes, watches over limits, and ends what is left.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from fx_quant_conformance.backends.names import format_error
from fx_quant_conformance.conformance.machine.child import Answer, Child, ChildLost, Ending, Parent, Recipe, StartError
from fx_quant_conformance.conformance.machine.fault import Fault
from fx_quant_conformance.conformance.machine.frames import Frame, NoAnswer
from fx_quant_conformance.conformance.machine.guard import guard
from fx_quant_conformance.conformance.machine.messages import Begin, from_line, to_line
from fx_quant_conformance.conformance.machine.process import own_peak_mib
from fx_quant_conformance.reports.codec import Message
from fx_quant_conformance.reports.verdicts import Verdict

Serve: TypeAlias = Callable[[Frame], Iterable[Message]]
"""Does what a request says: yields messages."""
GRACE = 5.0
"""Seconds after the limit in which the judge itself says that the worker has passed it."""
BEGINS, LOST, _WITHIN = "begins", "lost", "within"
"""Keys: whether a request to the worker begins work; how it ended, in the place of its answer; the seconds it has."""
_VERDICTS = {
    Ending.DIED: (Verdict.CRASHED, "printed"),
    Ending.TIMEOUT: (Verdict.TIMEOUT, "printed"),
    Ending.LOST: (Verdict.UNEXERCISED, "printed"),
    Ending.ERROR: (Verdict.UNEXERCISED, "traceback"),
}
"""Verdict of lost work, and the name of its text in the evidence."""


class LostProcess(BaseException):
    """Ends a piece of work whose backend's process died or hung: no fault of the code that waits for it.

    ``text``: its last output. ``is_alone``: the process had done no other work, so that another try shows no more.
    """

    def __init__(self, ending: Ending, message: str, *, text: str = "", is_alone: bool = False) -> None:
        super().__init__(message)
        self.ending = ending
        self.text = text
        self.is_alone = is_alone


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkResult:
    """The messages of a piece of work, and how it ended."""

    messages: tuple[Message, ...] = ()
    ending: Ending
    seconds: float = 0.0
    peak_mib: float = 0.0
    """The largest resident size of a process that did the work."""
    message: str = ""
    """Says why it is not DONE."""
    text: str = ""
    """The traceback of an ERROR, or the last output of a process that died or was killed at the limit."""
    is_final: bool = False
    """Whether another try would show no more."""


@guard("isolation")
def fault_of_lost_work(result: WorkResult) -> Fault:
    """Return the fault of work that did not end well."""
    verdict, name = _VERDICTS[result.ending]
    origin = "internal error of the suite: " if verdict is Verdict.UNEXERCISED else ""
    shown = {name: result.text} if result.text else {}
    return Fault(rule="", verdict=verdict, message=origin + result.message, evidence=shown)


# -- in the judge -----------------------------------------------------------------------------------------------------


def make_answer(parent: Parent, serve: Serve) -> Answer:
    """Return what answers by doing work: its messages go to the parent one by one, and how it ended is the answer."""

    def answer(request: Frame) -> Frame:
        try:
            for message in serve(request):
                parent.tell(to_line(message))
        except LostProcess as lost:
            return _make_end(lost.ending, str(lost), lost.text, is_final=lost.is_alone)
        except Exception as error:
            return _make_end(Ending.ERROR, format_error(error), "".join(traceback.format_exception(error)))
        return _make_end(Ending.DONE)

    return answer


def _make_end(ending: Ending, message: str = "", text: str = "", *, is_final: bool = False) -> Frame:
    head = {"ending": ending.value, "message": message, "text": text, "is_final": is_final, "peak_mib": own_peak_mib()}
    return Frame(head=head)


def ask_worker(parent: Parent, request: Frame, limit: float) -> Frame:
    """Return the worker's answer, which has to come within ``limit`` seconds; `LOST` in its head: there is none.

    Raises NoAnswer for what cannot be sent.
    """
    return parent.call(Frame(head={**request.head, _WITHIN: limit}, pieces=request.pieces))


# -- in the parent ----------------------------------------------------------------------------------------------------


class KeptWorker:
    """A worker: made when it is needed, and made anew after it was lost. ``make`` raises StartError."""

    def __init__(self, make: Callable[[], Child]) -> None:
        self._make = make
        self._child: Child | None = None

    @property
    def child(self) -> Child | None:
        """The process that there is now."""
        return self._child

    def start(self) -> Child:
        """Return the present process, or a new one. Raises StartError."""
        self._child = self._child or self._make()
        return self._child

    def ask(self, request: Frame, limit: float) -> Frame:
        """Return the answer to a request, as `ask_worker` does in a judge."""
        return self.answer(Frame(head={**request.head, _WITHIN: limit}, pieces=request.pieces))

    def answer(self, call: Frame) -> Frame:
        """Answer a judge's call: by the worker's answer, or by how that ended."""
        try:
            child = self.start()
        except StartError as error:
            return _make_lost(Ending.DIED, str(error), "", is_alone=True)
        limit = float(call.head.pop(_WITHIN))
        if call.head.pop(BEGINS):
            child.begin()
        try:
            return child.ask(call, limit=limit)
        except NoAnswer as error:
            return Frame(head={"unread": str(error)})
        except ChildLost as lost:
            self.close()
            return _make_lost(lost.ending, f"the process {lost}", lost.text, is_alone=child.served <= 1)

    def close(self) -> None:
        """End the process that is left, if any."""
        child, self._child = self._child, None
        if child is not None:
            child.end()


class Workplace:
    """Does one piece of work at a time.

    ``recipe``: of the judge, a child that answers by `make_answer`. ``make_worker``: makes a worker, which is ready to
    be asked, and raises StartError; None: the judge asks none. ``limit``: seconds for one piece of work. ``holds``:
    whose code runs in the judge beside the suite's; "": nobody's. ``keeps``: whether processes do more than one.
    ``first``: a judge by that recipe, to begin with.
    """

    def __init__(
        self,
        recipe: Recipe,
        make_worker: Callable[[], Child] | None = None,
        *,
        limit: float,
        holds: str = "",
        keeps: bool = True,
        first: Child | None = None,
    ) -> None:
        self._recipe = recipe
        self._worker = None if make_worker is None else KeptWorker(make_worker)
        self._limit = limit
        self._holds = holds
        self._keeps = keeps
        self._judge = first

    def run(self, request: Frame) -> WorkResult:
        """Do a piece of work; once more in new processes if used ones do not complete it, or the judge was lost."""
        result, is_used = self._try(request)
        is_complete, is_lost = result.ending is Ending.DONE or result.is_final, result.ending is Ending.LOST
        if is_lost or (is_used and not is_complete):
            result, _ = self._try(request)
        if not self._keeps:
            self.close()
        return result

    def close(self) -> None:
        """End the processes that are left, if any."""
        judge, self._judge = self._judge, None
        if judge is not None:
            judge.end()
        if self._worker is not None:
            self._worker.close()

    def _try(self, request: Frame) -> tuple[WorkResult, bool]:
        """Do the work in the present processes, or in new ones; those that did not do it are left no more.

        Return how it ended, and whether one of them had done other work before.
        """
        started, messages = time.monotonic(), list[Message]()
        try:
            worker = None if self._worker is None else self._worker.start()
            judge = self._judge = self._judge or Child(self._recipe)
        except StartError as error:
            return WorkResult(ending=Ending.DIED, message=str(error), is_final=True), False
        is_used = judge.served > 0 or (worker is not None and worker.served > 0)
        judge.begin()
        grace, goes_on = 0.0 if worker is None else GRACE, False
        try:
            end = judge.ask(
                request,
                limit=self._limit + grace,
                take=lambda line: messages.append(from_line(line)),
                answer=None if self._worker is None else self._worker.answer,
            ).head
            result = WorkResult(
                ending=Ending(end["ending"]),
                message=str(end["message"]),
                text=str(end["text"]),
                is_final=bool(end["is_final"]),
            )
            goes_on = result.ending is not Ending.ERROR
            if result.ending is not Ending.DONE and self._worker is not None:
                self._worker.close()
        except ChildLost as lost:
            result = self._describe_loss(lost, messages)
        except (ValueError, RecursionError, KeyError, TypeError, AttributeError, NoAnswer) as error:
            text = f"the process sent a line that is no message: {error}"
            result = WorkResult(ending=Ending.ERROR, message=text)
        finally:
            if not goes_on or judge.is_large or (worker is not None and worker.is_large):
                self.close()
        peaks = [each.peak_mib for each in (judge, worker) if each is not None]
        seconds = time.monotonic() - started
        return replace(result, messages=tuple(messages), seconds=seconds, peak_mib=max(peaks)), is_used

    def _describe_loss(self, lost: ChildLost, messages: Sequence[Message]) -> WorkResult:
        """Return how work ended whose judge was lost: that of a judge which holds nobody's code is the suite's own."""
        if lost.ending is Ending.ERROR:
            return WorkResult(ending=Ending.ERROR, message=f"the process {lost}", text=lost.text)
        step = next((f" (in {each.stage})" for each in reversed(messages) if isinstance(each, Begin)), "")
        name = f"the process that holds both the suite and {self._holds}" if self._holds else "the judge's process"
        limit = f"did not end within {self._limit:g} s (--claim-timeout)"
        said = limit if lost.ending is Ending.TIMEOUT else str(lost)
        ending = lost.ending if self._holds else Ending.LOST
        return WorkResult(ending=ending, message=f"{name}{step} {said}", text=lost.text)


def _make_lost(ending: Ending, message: str, text: str, *, is_alone: bool) -> Frame:
    return Frame(head={LOST: ending.value, "message": message, "text": text, "is_alone": is_alone})
