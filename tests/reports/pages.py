"""Pages as the tests ask about them: elements, tables, words; one that is not well-formed is refused."""

from __future__ import annotations

from html.parser import HTMLParser

VOID = frozenset({"meta", "link", "br", "wbr", "input"})


class Table:
    """A table on its way: its caption, and the words of its cells, row by row."""

    def __init__(self) -> None:
        self.caption = ""
        self.rows: list[list[str]] = []

    def take(self, data: str, where: list[str]) -> None:
        """Take text that stands in the caption or in the last cell."""
        if "caption" in where:
            self.caption += data
        elif self.rows and self.rows[-1]:
            self.rows[-1][-1] += data

    @property
    def cells(self) -> list[list[str]]:
        """The words of all cells, the row of headers first."""
        return [[" ".join(cell.split()) for cell in row] for row in self.rows]


class Page(HTMLParser):
    """A page as the tests ask about it; refuses elements that are not closed in order.

    ``tables``: caption → cells; the words of a table inside of a cell are the cell's too.
    """

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.tables: dict[str, list[list[str]]] = {}
        self._tables: list[Table] = []
        self._goes_on = False
        self.feed(html)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._goes_on = tag == "wbr"
        if tag not in VOID:
            self.open.append(tag)
        if tag == "table":
            self._tables.append(Table())
        elif tag == "tr":
            self._tables[-1].rows.append([])
        elif tag in ("td", "th"):
            self._tables[-1].rows[-1].append("")
        elif tag == "a" and self._tables:  # links in a cell stand apart
            self._tables[-1].take(" ", self.open)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag
        self._goes_on = False
        if tag == "table":
            table = self._tables.pop()
            self.tables[" ".join(table.caption.split())] = table.cells

    def handle_data(self, data: str) -> None:
        if {"style", "script"} & set(self.open):
            return
        if self._goes_on:
            self.words[-1] += data
        else:
            self.words.append(data)
        self._goes_on = False
        for table in self._tables[-1:]:
            table.take(data, self.open)
        for outer in self._tables[:-1]:
            outer.take(data, [])

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())

    def ids(self) -> list[str]:
        return [attrs["id"] or "" for _, attrs in self.tags if "id" in attrs]

    def links(self) -> list[str]:
        return [attrs["href"] or "" for tag, attrs in self.tags if tag == "a"]
