"""A cache: what a backend's process has answered is kept, and the same question is not asked again.

`CachingBackend` takes the place of `RemoteBackend`. A model is lowered only when an answer is missing. What the
backend's code raised is not kept, and nothing of a piece of work in which its process died or hung.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from conformance.machine.messages import Tally
from conformance.remote.answers import Book, is_same, open_book, read_sources
from conformance.remote.client import RemoteBackend
from conformance.remote.description import Description
from conformance.remote.host import Host
from conformance.remote.sources import covers
from conformance.remote.wire import Frame
from conformance.remote.worker import Dialogue, count_runs


class CachingBackend(RemoteBackend):
    """A backend whose answers are kept in a folder, the name of which tells what all of them depend on."""

    def __init__(
        self, description: Description, host: Host | None, folder: Path, *, share: int, limit: float, text: str = ""
    ) -> None:
        super().__init__(description, host, share=share, limit=limit, text=text)
        self._folder = folder
        self._sources = read_sources(folder)
        self._book = open_book(folder, "")

    def described_as(self, description: Description) -> RemoteBackend:
        """Return the same backend under another description."""
        return CachingBackend(description, self.host, self._folder, share=self._share, limit=self._limit)

    def begin(self, work: str = "") -> None:
        """Begin a piece of work, with the answers that are kept of it. Raises OSError if they cannot be read."""
        super().begin(work)
        self._book = open_book(self._folder, work)

    def conclude(self) -> None:
        """Keep what was answered in a piece of work that came to its end. Raises OSError if it cannot be written.

        Nothing is kept if the process has imported code that the folder's name does not tell: it may change.
        """
        worker = self._worker
        if worker is not None and self._book.is_changed and covers(self._sources, worker.list_sources()):
            self._book.write()

    def _begin_dialogue(self) -> Dialogue:
        return CachedDialogue(self._book, self.tally, super()._begin_dialogue)


class CachedDialogue:
    """A dialogue that is held with a process from the first request on that the book does not answer.

    The process then gets all earlier requests too, so that its model is in the state in which it would be without a
    cache. Where it answers as the book did, these runs count as made, and not as cached. ``begin``: begins a dialogue
    with a process.
    """

    def __init__(self, book: Book, tally: Tally, begin: Callable[[], Dialogue]) -> None:
        self._book = book
        self._tally = tally
        self._begin = begin
        self._key = book.start
        self._answered: list[tuple[Frame, Frame]] = []
        self._process: Dialogue | None = None

    def ask(self, request: Frame) -> Frame:
        """Return the answer to a request. Raises what the backend's code raised, or LostProcess."""
        self._key = self._book.follow(self._key, request)
        known = self._book.answers.get(self._key) if self._process is None else None
        if known is not None:
            self._answered.append((request, known))
            self._tally.cached += count_runs(request, known)
            return known
        answer = self._find_process().ask(request)
        self._book.keep(self._key, answer)
        return answer

    def lose(self, message: str) -> NoReturn:
        """Give up a process whose answer cannot be read. Raises LostProcess."""
        self._find_process().lose(message)

    def _find_process(self) -> Dialogue:
        if self._process is None:
            self._process = self._begin()
            earlier, self._answered = self._answered, []
            for request, known in earlier:
                if is_same(self._process.ask(request), known):
                    self._tally.cached -= count_runs(request, known)
        return self._process
